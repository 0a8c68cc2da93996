"""`overspill verify`."""

import json
from typing import Annotated, Any

import typer

from overspill.cli.flags import PLANNING, Model, failing, launch_of, to_stderr, with_settings


@with_settings(PLANNING)
def verify(
    given: dict[str, Any],
    model: Model,
    quick: Annotated[bool, typer.Option("--quick", help="Every scenario once; so without --soak.")] = False,
    soak: Annotated[bool, typer.Option("--soak", help="Again and again, with other lengths and orders.")] = False,
    minutes: Annotated[str | None, typer.Option(help="With --soak: how long; 30 if not given.")] = None,
    seed: Annotated[str | None, typer.Option(help="What prompts and orders are drawn from; 0 if not given.")] = None,
    load_format: Annotated[
        str | None, typer.Option(help="`dummy` for random weights in place of the model's; none are needed then.")
    ] = None,
    scenario: Annotated[list[str] | None, typer.Option(help="Only this one; may be given several times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything that was counted.")] = False,
) -> None:
    """Prove that KV in RAM changes no token of this model on this machine. Exits with 1 if something differs."""
    from overspill.verify import CannotVerify
    from overspill.verify.run import DEFAULTS, prove
    from overspill.verify.scenarios import read_request

    request = read_request(
        quick=quick, soak=soak, minutes=minutes, seed=seed, scenarios=scenario or [], load_format=load_format
    )
    launch = launch_of(model, given, defaults=DEFAULTS)
    if launch.vllm_args:
        to_stderr(f"not used here: vLLM's own flags of the registry ({' '.join(launch.vllm_args)})")
    with failing(CannotVerify):
        proof = prove(launch, request, to_stderr)
    print(json.dumps(proof.as_json(), indent=2) if as_json else proof.as_text())
    raise typer.Exit(proof.exit_code)
