"""`overspill tune`."""

import json
import sys
from typing import Annotated, Any

import typer

from overspill.cli.flags import OF_MODELS_AND_COMMANDS, with_settings


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
    from overspill.bench import CannotBench
    from overspill.bench.session import stopped_by_signals
    from overspill.errors import CannotServe
    from overspill.experiment.errors import CannotCompare
    from overspill.registry import CannotNow, open_registry
    from overspill.tune.asked import parse_budget, prepare
    from overspill.tune.errors import CannotTune
    from overspill.tune.keeping import keep
    from overspill.tune.run import run

    try:
        budget_s = parse_budget(budget)
        with open_registry() as registry, stopped_by_signals() as stop:
            definition, subject = prepare(
                registry, resume, model=model, name=name, goal=goal, given=given, workload=workload, seed=seed,
                repeats=repeats, allow_fp8=allow_fp8 or None, least_tokens_per_s=least_tokens_per_s, most=candidates,
            )  # fmt: skip
            report = run(definition, subject, registry, _tell, resume=resume, budget_s=budget_s, stop=stop)
            if not as_json:
                print(report.as_text(), flush=True)
            kept = None
            if report.winner is not None and not report.is_interrupted and not dry_run:
                kept = keep(registry, subject, report.winner, definition.given)
    except (CannotBench, CannotCompare, CannotNow, CannotServe, CannotTune) as error:
        _tell(f"error: {error}")
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps({**report.as_json(), "kept": kept.as_json() if kept is not None else None}, indent=2))
    elif kept is not None:
        print("\n".join(kept.as_text()))
    elif report.winner is not None:
        print("Nothing was kept.")
    raise typer.Exit(0 if report.winner is not None and not report.is_interrupted else 1)


def _tell(text: str) -> None:
    """Standard output is for the table, or JSON."""
    print(text, file=sys.stderr, flush=True)
