"""`overspill bench`, `overspill ab` and `overspill tune`. Standard output is for the report, or JSON."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from overspill.cli.flags import OF_MODELS_AND_COMMANDS, failing, to_stderr, with_settings

Text = Annotated[str | None, typer.Option(metavar="TEXT", help="Another configuration.")]


def _failing() -> contextlib.AbstractContextManager[None]:
    from overspill.errors import CannotServe
    from overspill.launch.reference import NoRegistry
    from overspill.measure import CannotMeasure
    from overspill.registry import CannotNow

    return failing(CannotMeasure, CannotNow, CannotServe, NoRegistry)


def bench(
    url: Annotated[
        str | None,
        typer.Argument(
            help="The server: any that speaks OpenAI's API; with --resume, that of the result.",
            show_default="http://127.0.0.1:8000",
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="overhead, multi-turn (the default), shared-prefix, long-context or offline; then what is not to be "
            "the default: multi-turn:conversations=8,turns=4."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name there; needed if there are several.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The server's key, if it has one.", envvar="OVERSPILL_API_KEY")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="What prompts are drawn from; 0 if not given.")] = None,
    expect: Annotated[
        str | None, typer.Option(help="offload or spill: exit with 1 if that tier served nothing.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="A name for this configuration, to compare results by.")] = None,
    experiment: Annotated[str | None, typer.Option(help="A name that compared results have in common.")] = None,
    resume: Annotated[int | None, typer.Option(help="Go on with an incomplete result, by its number.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every request's times.")] = False,
) -> None:
    """Send a workload to a server and measure it: throughput, latencies, memory, and which tier served the tokens."""
    from overspill.measure.bench import read_request, run_bench
    from overspill.measure.progress import ProgressPrinter
    from overspill.measure.trial import stopped_by_signals

    printer = ProgressPrinter(sys.stderr)
    with _failing(), contextlib.ExitStack() as ending:
        ending.callback(printer.end)
        request = read_request(
            url=url, workload=workload, seed=seed, model=model, api_key=api_key, expect=expect, label=label,
            experiment=experiment, resume=resume,
        )  # fmt: skip
        with stopped_by_signals() as stop:
            found = run_bench(request, say=to_stderr, on_progress=printer, stop=stop)
    print(json.dumps(found.as_json(), indent=2) if as_json else found.as_text())
    if found.result_id is not None and not as_json:
        print(f"saved as result {found.result_id}")
    for sentence in found.errors():
        to_stderr(f"error: {sentence}")
    raise typer.Exit(found.exit_code)


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
    from overspill.measure.ab import run
    from overspill.measure.experiment import read_definition
    from overspill.measure.report.file import require_writable, write_text
    from overspill.measure.trial import stopped_by_signals
    from overspill.registry import open_registry

    for file in (json_file, html_file):
        if file is not None:
            require_writable(file)
    with _failing(), open_registry() as registry, stopped_by_signals() as stop:
        definition = read_definition(
            registry, resume, model=model, configurations=(a, b, c, d, e, f), common=common, workload=workload,
            repeats=repeats, seed=seed, keeps_engines=keep or None, expects=expect,
        )  # fmt: skip
        report = run(definition, registry, to_stderr, resume=resume, stop=stop)
        print(report.as_text(), flush=True)
        if json_file is not None:
            write_text(json_file, json.dumps(report.as_json(), indent=2) + "\n")
        if html_file is not None:
            write_text(html_file, report.as_html())
    raise typer.Exit(report.exit_code)


# Given here, settings are not varied, and kept.
@with_settings(OF_MODELS_AND_COMMANDS)
def tune(
    given: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(help="A folder, a model of the registry, or a repository of Hugging Face's.")
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(help="throughput (the default), ttft (time to the first token) or context (the longest one)."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="What is sent, as overspill bench takes it; without it, the goal's own.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="How often the best ones are measured; 3 if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="What requests are drawn from; 0 if not given.")] = None,
    budget: Annotated[str, typer.Option(help="How long it may take: `90s`, `10m`, `2h`.")] = "30m",
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Try at most so many, the plan's own choice first.")
    ] = None,
    allow_fp8: Annotated[
        bool, typer.Option("--allow-fp8", help="Try KV in fp8 too, which rounds it and so may change answers.")
    ] = False,
    least_tokens_per_s: Annotated[
        float | None, typer.Option(min=0, help="With --goal context: how fast an answer must be at that length.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What the model is called in the registry, if it is not there yet.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and leave the model's settings alone.")] = False,
    resume: Annotated[str | None, typer.Option(metavar="EXPERIMENT", help="Go on with one that was ended.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes.")] = False,
) -> None:
    """Try settings in short runs, and keep the best as the model's. Exits with 1 if none was found."""
    from overspill.measure.subject import keep
    from overspill.measure.trial import stopped_by_signals
    from overspill.measure.tune import run
    from overspill.measure.tuning import parse_budget, prepare
    from overspill.registry import open_registry

    with _failing():
        budget_s = parse_budget(budget)
        with open_registry() as registry, stopped_by_signals() as stop:
            definition, subject = prepare(
                registry, resume, model=model, name=name, goal=goal, given=given, workload=workload, seed=seed,
                repeats=repeats, allow_fp8=allow_fp8 or None, least_tokens_per_s=least_tokens_per_s, most=candidates,
            )  # fmt: skip
            report = run(definition, subject, registry, to_stderr, resume=resume, budget_s=budget_s, stop=stop)
            if not as_json:
                print(report.as_text(), flush=True)
            kept, winner = None, report.winner
            if winner is not None and not report.is_interrupted and not dry_run:
                kept = keep(registry, subject, winner, definition.given)
    if as_json:
        print(json.dumps({**report.as_json(), "kept": kept.as_json() if kept is not None else None}, indent=2))
    elif kept is not None:
        print("\n".join(kept.as_text()))
    elif winner is not None:
        print("Nothing was kept.")
    raise typer.Exit(0 if winner is not None and not report.is_interrupted else 1)
