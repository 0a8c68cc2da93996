"""`overspill bench`."""

import json
import sys
from typing import Annotated

import typer


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
    from overspill.bench.errors import CannotBench
    from overspill.bench.progress import ProgressPrinter
    from overspill.bench.session import read_request, run_session, stopped_by_signals
    from overspill.registry import CannotNow

    printer = ProgressPrinter(sys.stderr)
    try:
        request = read_request(
            url=url, workload=workload, seed=seed, model=model, api_key=api_key, expect=expect, label=label,
            experiment=experiment, resume=resume,
        )  # fmt: skip
        with stopped_by_signals() as stop:
            session = run_session(request, say=_tell, on_progress=printer, stop=stop)
    except (CannotBench, CannotNow) as error:
        printer.end()
        _tell(f"error: {error}")
        raise typer.Exit(1) from None
    printer.end()
    print(json.dumps(session.as_json(), indent=2) if as_json else session.as_text())
    if session.result_id is not None and not as_json:
        print(f"saved as result {session.result_id}")
    for sentence in session.errors():
        _tell(f"error: {sentence}")
    raise typer.Exit(session.exit_code)


def _tell(text: str) -> None:
    """Standard output is for the table, or JSON."""
    print(text, file=sys.stderr, flush=True)
