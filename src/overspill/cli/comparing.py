"""`overspill ab`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

Text = Annotated[str | None, typer.Option(metavar="TEXT", help="Another configuration.")]


def ab(
    model: Annotated[
        str | None, typer.Argument(help="A folder, a repository of Hugging Face's cache or hub, or a registry's name.")
    ] = None,
    a: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The configuration that others are compared with: flags of overspill serve, `vllm` and its flags, or "
            "a peer (`none`, `native:8GiB`, `simple-lazy:8GiB`, …). `LABEL = …` names it.",
        ),
    ] = None,
    b: Annotated[str | None, typer.Option(metavar="TEXT", help="What it is compared with.")] = None,
    c: Text = None,
    d: Text = None,
    e: Text = None,
    f: Text = None,
    common: Annotated[str | None, typer.Option(metavar="FLAGS", help="Flags that all configurations have.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="What is sent: `multi-turn` (the default), or as overspill bench takes it.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="How often each is measured; 3 if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="What requests are drawn from; 0 if not given.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Start each engine once, and empty its caches between repeats.")
    ] = False,
    expect: Annotated[
        str | None, typer.Option(help="`offload` or `spill`: exit with 1 if engines that have it did not use it.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT", help="Do what is missing of an experiment.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for the report as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="A file for the report as a page.")] = None,
) -> None:
    """Measure configurations of a model in turn, and compare them. Exits with 1 if something is missing."""
    from overspill.bench import CannotBench
    from overspill.errors import CannotServe
    from overspill.experiment.asked import read_definition
    from overspill.experiment.errors import CannotCompare
    from overspill.experiment.files import require_writable, write_text
    from overspill.experiment.run import run
    from overspill.launch.reference import NoRegistry
    from overspill.registry import CannotNow, open_registry

    files = [file for file in (json_file, html_file) if file is not None]
    for file in files:
        require_writable(file)
    try:
        with open_registry() as registry:
            definition = read_definition(
                registry, resume, model=model, configurations=(a, b, c, d, e, f), common=common, workload=workload,
                repeats=repeats, seed=seed, keeps_engines=keep or None, expects=expect,
            )  # fmt: skip
            report = run(definition, registry, _tell, resume=resume)
            print(report.as_text(), flush=True)
            if json_file is not None:
                write_text(json_file, json.dumps(report.as_json(), indent=2) + "\n")
            if html_file is not None:
                write_text(html_file, report.as_html())
    except (CannotBench, CannotCompare, CannotNow, CannotServe, NoRegistry) as error:
        _tell(f"error: {error}")
        raise typer.Exit(1) from None
    raise typer.Exit(report.exit_code)


def _tell(text: str) -> None:
    """Standard output is for the report."""
    print(text, file=sys.stderr, flush=True)
