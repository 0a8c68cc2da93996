"""`overspill bench`, `ab`, `tune` and `verify`. Standard output carries only the report or JSON."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from overspill.cli.flags import (
    OF_MODELS_AND_COMMANDS,
    PLANNING,
    Model,
    failing,
    flag,
    launch_of,
    to_stderr,
    with_flags,
    with_settings,
)


def _failing() -> contextlib.AbstractContextManager[None]:
    from overspill.errors import CannotServe
    from overspill.launch.reference import NoRegistry
    from overspill.measure import CannotMeasure
    from overspill.registry import CannotNow

    return failing(CannotMeasure, CannotNow, CannotServe, NoRegistry)


@with_flags("given", [
    flag("workload", typer.Option(help="overhead, multi-turn (the default), shared-prefix, long-context, offline, "
         "edit or write; options follow a colon: multi-turn:conversations=8,turns=4.")),
    flag("prompts", typer.Option(help="A file of conversations in ShareGPT's format, to send instead; its options go "
         "in --workload file:turns=3.")),
    flag("goodput", typer.Option(help="Count requests within these limits, in milliseconds: ttft:500,tpot:50.")),
    flag("model", typer.Option(help="The model's name on the server; needed if it serves several.")),
    flag("api_key", typer.Option(help="The server's key, if it has one.", envvar="OVERSPILL_API_KEY")),
    flag("seed", typer.Option(help="Random seed of the prompts; 0 if not given."), int | None),
    flag("expect", typer.Option(help="offload or spill: exit with 1 if that tier served nothing.")),
    flag("label", typer.Option(help="A name for this configuration, to compare results by.")),
    flag("experiment", typer.Option(help="A name that compared results have in common.")),
    flag("resume", typer.Option(help="Resume an incomplete result, by its number."), int | None),
])  # fmt: skip
def bench(
    given: dict[str, Any],
    url: Annotated[
        str | None,
        typer.Argument(
            help="The server: any that speaks OpenAI's API; with --resume, that of the result.",
            show_default="http://127.0.0.1:8000",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every request's times.")] = False,
) -> None:
    """Send a workload to a server and measure it: throughput, latencies, memory, and which tier served the tokens."""
    from overspill.measure.bench import read_request, run_bench
    from overspill.measure.progress import ProgressPrinter
    from overspill.measure.trial import stopped_by_signals

    printer = ProgressPrinter(sys.stderr)
    with _failing(), contextlib.ExitStack() as ending:
        ending.callback(printer.end)
        request = read_request(url=url, **given)
        with stopped_by_signals() as stop:
            found = run_bench(request, say=to_stderr, on_progress=printer, stop=stop)
    print(json.dumps(found.as_json(), indent=2) if as_json else found.as_text())
    if found.result_id is not None and not as_json:
        print(f"saved as result {found.result_id}")
    for sentence in found.errors():
        to_stderr(f"error: {sentence}")
    raise typer.Exit(found.exit_code)


@with_flags("given", [
    flag("a", typer.Option(metavar="TEXT", help="The configuration that others are compared with: flags of overspill "
         "serve, `vllm` and its flags, or a peer (`none`, `native:8GiB`, `simple-lazy:8GiB`, …). `LABEL = …` names "
         "it.")),
    flag("b", typer.Option(metavar="TEXT", help="A configuration to compare with it.")),
    *(flag(key, typer.Option(metavar="TEXT", help="Another configuration.")) for key in "cdef"),
    flag("common", typer.Option(metavar="FLAGS", help="Flags that all configurations have.")),
    flag("workload", typer.Option(help="Workload: `multi-turn` (the default), or any other that overspill bench "
         "accepts.")),
    flag("repeats", typer.Option(help="How often each configuration is measured; 3 if not given."), int | None),
    flag("seed", typer.Option(help="Random seed of the requests; 0 if not given."), int | None),
    flag("keeps_engines", typer.Option("--keep", help="Start each engine once, and empty its caches between repeats."),
         bool | None),
    flag("expects", typer.Option("--expect", help="`offload` or `spill`: exit with 1 if engines that have it did not "
         "use it.")),
])  # fmt: skip
def ab(
    given: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(help="A folder, a repository of Hugging Face's cache or hub, or a registry's name.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT", help="Run the missing parts of an experiment.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for the report as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="A file for the report as a page.")] = None,
) -> None:
    """Measure configurations of a model in turn, and compare them. Exits with 1 if something is missing."""
    from overspill.measure.ab import run
    from overspill.measure.experiment import KEYS, read_definition
    from overspill.measure.report.file import require_writable, write_text
    from overspill.measure.trial import stopped_by_signals
    from overspill.registry import open_registry

    for file in (json_file, html_file):
        if file is not None:
            require_writable(file)
    with _failing(), open_registry() as registry, stopped_by_signals() as stop:
        configurations = [given.pop(key) for key in KEYS]
        definition = read_definition(registry, resume, model=model, configurations=configurations, **given)
        report = run(definition, registry, to_stderr, resume=resume, stop=stop)
        print(report.as_text(), flush=True)
        if json_file is not None:
            write_text(json_file, json.dumps(report.as_json(), indent=2) + "\n")
        if html_file is not None:
            write_text(html_file, report.as_html())
    for sentence in report.failures:
        to_stderr(f"error: {sentence}")
    raise typer.Exit(report.exit_code)


# Settings given here are not varied, and are kept as the model's.
@with_settings(OF_MODELS_AND_COMMANDS | {"device"})
@with_flags("how", [
    flag("goal", typer.Option(help="throughput (the default), ttft (time to the first token) or context (the longest "
         "one).")),
    flag("workload", typer.Option(help="Workload, as for overspill bench; without it, the goal's own.")),
    flag("repeats", typer.Option(help="How often the best configurations are measured; 3 if not given."), int | None),
    flag("seed", typer.Option(help="Random seed of the requests; 0 if not given."), int | None),
    flag("most", typer.Option("--candidates", min=1, help="Try at most this many configurations, the plan's own choice "
         "first."), int | None),
    flag("allow_fp8", typer.Option("--allow-fp8", help="Try KV in fp8 too, which rounds it and so may change answers."),
         bool | None),
    flag("name", typer.Option(help="Name under which to add the model to the registry, if it is not there yet.")),
])  # fmt: skip
def tune(
    given: dict[str, Any],
    how: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(help="A folder, a model of the registry, or a repository of Hugging Face's.")
    ] = None,
    budget: Annotated[str, typer.Option(help="How long tuning may take: `90s`, `10m`, `2h`.")] = "30m",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and leave the model's settings alone.")] = False,
    keeps: Annotated[
        bool, typer.Option("--keep", help="Keep the best even if the runs do not show that it is better.")
    ] = False,
    resume: Annotated[str | None, typer.Option(metavar="EXPERIMENT", help="Resume an interrupted tuning run.")] = None,
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
            how["device"] = given.pop("device")  # not a model's setting, so it is not kept
            definition, subject = prepare(registry, resume, model=model, given=given, **how)
            report = run(definition, subject, registry, to_stderr, resume=resume, budget_s=budget_s, stop=stop)
            if not as_json:
                print(report.as_text(), flush=True)
            kept, winner = None, report.winner
            doubt = None if keeps else report.doubt
            if winner is not None and not report.is_interrupted and not dry_run and doubt is None:
                kept = keep(registry, subject, winner, definition.given)
    if as_json:
        print(json.dumps({**report.as_json(), "kept": kept.as_json() if kept is not None else None}, indent=2))
    elif kept is not None:
        print("\n".join(kept.as_text()))
    elif winner is not None:
        print(f"Nothing was kept{'' if doubt is None or dry_run else f': {doubt}; --keep keeps the best'}.")
    raise typer.Exit(0 if winner is not None and not report.is_interrupted else 1)


@with_settings(PLANNING, hidden={"gpu"})
@with_flags("how", [
    flag("quick", typer.Option("--quick", help="Every scenario once; the default."), bool, False),
    flag("soak", typer.Option("--soak", help="Repeat the scenarios, with other lengths and orders."), bool, False),
    flag("minutes", typer.Option(metavar="<int>", help="With --soak: how long to repeat them; 30 if not given.")),
    flag("seed", typer.Option(metavar="<int>", help="Random seed of prompts and orders; 0 if not given.")),
    flag("load_format", typer.Option(help="`dummy` for random weights instead of the model's, so that no weight "
         "files are needed.")),
    flag("prompts", typer.Option(metavar="<int>", help="Number of prompts of shared-attention; 8 if not given.")),
    flag("scenarios", typer.Option("--scenario", help="Only this scenario; may be given several times."),
         list[str], []),
])  # fmt: skip
def verify(
    given: dict[str, Any],
    how: dict[str, Any],
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything that was counted.")] = False,
) -> None:
    """Prove that KV in RAM changes no token of this model on this machine. Exits with 1 if something differs."""
    from overspill.verify import CannotVerify
    from overspill.verify.run import DEFAULTS, prove
    from overspill.verify.scenarios import read_request

    request = read_request(**how)
    launch = launch_of(model, given, defaults=DEFAULTS)
    if launch.vllm_args:
        to_stderr(f"not used here: the registry's vLLM flags ({' '.join(launch.vllm_args)})")
    with failing(CannotVerify):
        proof = prove(launch, request, to_stderr)
    print(json.dumps(proof.as_json(), indent=2) if as_json else proof.as_text())
    raise typer.Exit(proof.exit_code)
