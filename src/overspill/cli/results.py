"""`overspill results`: stored measurements, shown, compared and exported."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from overspill.cli.flags import failing, group, opened_registry

results = group("What was measured: list, show, compare, export.")

# More than a registry holds, and a number that every database takes.
_MOST_LISTED = 1_000_000_000

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes.")]
Names = Annotated[list[str], typer.Argument(metavar="ID…", help="Numbers of results, or an experiment's name.")]


class Format(StrEnum):
    JSON = "json"
    CSV = "csv"
    HTML = "html"


@results.command("list", epilog="Example: overspill results list --model qwen --json")
def list_all(
    model: Annotated[
        str | None, typer.Option(help="Only results of this model, as it was named when it was measured.")
    ] = None,
    benchmark: Annotated[str | None, typer.Option(help="Only results of this workload, such as multi-turn.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Only results of this experiment.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, max=_MOST_LISTED, help="Only this many, the newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """List all results, the newest first."""
    from overspill.measure.report.text import results_as_text
    from overspill.registry import list_results

    with opened_registry() as registry:
        found = list_results(registry, benchmark=benchmark, model=model, experiment=experiment, limit=limit)
    if as_json:
        print(json.dumps({"results": [each.as_json() for each in found]}, indent=2))
    else:
        print(results_as_text(found, is_filtered=any((model, benchmark, experiment))))


@results.command(epilog="Example: overspill results show 12")
def show(
    result_id: Annotated[str, typer.Argument(metavar="ID", help="The number of a result.")], as_json: AsJson = False
) -> None:
    """Show one result: its numbers, and everything needed to repeat it."""
    from overspill.measure.experiment import find_result
    from overspill.measure.report.text import result_as_text

    with opened_registry() as registry:
        found = find_result(registry, result_id)
    print(json.dumps(found.as_json(), indent=2) if as_json else result_as_text(found))


@results.command(epilog="Example: overspill results compare 12 13")
def compare(ids: Names, as_json: AsJson = False) -> None:
    """Show results, or the configurations of an experiment, side by side; each is compared with the first."""
    from overspill.measure.report import Report

    with opened_registry() as registry:
        report = Report.of_names(registry, ids)
    print(json.dumps(report.as_json(), indent=2) if as_json else report.as_text())


@results.command(epilog="Example: overspill results export ab-20261115-120000-3f2a --format html --out report.html")
def export(
    ids: Names,
    form: Annotated[Format, typer.Option("--format", help="Format to write.")] = Format.JSON,
    out: Annotated[Path | None, typer.Option(help="The file; without it, standard output.")] = None,
) -> None:
    """Export results, with everything that is known of them, to a file or standard output."""
    from overspill.measure import CannotMeasure
    from overspill.measure.report import Report
    from overspill.measure.report.file import require_writable, write_text

    if out is not None:
        require_writable(out)
    with opened_registry() as registry:
        report = Report.of_names(registry, ids)
    made = {
        Format.JSON: lambda: json.dumps(report.as_json(), indent=2) + "\n",
        Format.CSV: report.as_csv,
        Format.HTML: report.as_html,
    }
    text = made[form]()
    if out is None:
        sys.stdout.write(text)
        return
    with failing(CannotMeasure):
        write_text(out, text)
    print(f"wrote {out}")
