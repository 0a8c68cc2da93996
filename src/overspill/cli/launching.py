"""`overspill plan`, `overspill serve` and `overspill config`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.flags import PLANNING, SERVING, Model, failing, launch_of, passed_on, to_stderr, with_settings
from overspill.kv.errors import OverspillError
from overspill.settings import GivenBy, config_path, origins, resolve

if TYPE_CHECKING:
    from overspill.launch.launch import Launch, Prepared

# vLLM's own flags are unknown here; they follow the model, and are passed on.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@with_settings(PLANNING)
def plan(
    given: dict[str, Any],
    context: typer.Context,
    model: Model,
    cards: Annotated[bool, typer.Option("--cards", help="Which cards would serve this context, and how fast.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; bytes are integers.")] = False,
) -> None:
    """Show what fits, what goes to RAM, and how fast it will be. vLLM's own flags follow the model, as with serve.
    Exits with 1 if serve would refuse it."""
    from overspill.planning.report import cards_as_json, cards_as_text, plan_as_json, plan_as_text

    launch = launch_of(model, given, *passed_on(context), cards=cards, is_server=True)
    is_elsewhere = launch.plan.gpu.is_stated and not launch.plan.platform.is_cpu
    if cards and is_elsewhere and launch.values["gpu"].value is None:
        print(json.dumps(cards_as_json(launch.plan), indent=2) if as_json else cards_as_text(launch.plan))
        return
    if as_json:
        set_here = {name: one for name, one in launch.values.items() if one.origin is not GivenBy.DEFAULT}
        told = {**plan_as_json(launch.plan), "too_long": launch.too_long, "settings": origins(set_here)}
        print(json.dumps({**told, "fits": told["fits"] and launch.too_long is None}, indent=2))
    else:
        print(plan_as_text(launch.plan))
    if launch.too_long is not None:
        to_stderr(f"error: {launch.too_long}")
    if launch.plan.chosen is None or launch.too_long is not None:
        raise typer.Exit(1)


@with_settings(SERVING)
def serve(
    given: dict[str, Any],
    context: typer.Context,
    model: Model,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command that would run, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="vLLM's log to a file only.")] = False,
    log_file: Annotated[Path | None, typer.Option(help="A file for vLLM's log.")] = None,
) -> None:
    """Plan, then run vLLM's server with the planned flags. vLLM's own flags follow the model, and win."""
    from overspill.errors import CannotServe
    from overspill.planning.report import plan_as_text
    from overspill.serve.log import open_log
    from overspill.serve.run import run_server

    if as_json and not dry_run:
        raise OverspillError("--json is for --dry-run: a server prints its log; leave it out, or add --dry-run")
    with failing(CannotServe):
        launch = launch_of(model, given, *passed_on(context), is_server=True)
        if launch.plan.chosen is not None:  # otherwise the refusal includes all of it
            to_stderr(plan_as_text(launch.plan))
        prepared = launch.prepared()
        for warning in prepared.warnings:
            to_stderr(f"warning: {warning}")
        if dry_run:
            print(json.dumps(prepared.as_json(), indent=2) if as_json else prepared.line)
            return
        require_startable(launch, prepared, context.args)
        if quiet or log_file is not None:
            log_file = open_log(log_file, prepared.address.port)
            to_stderr(f"vLLM's log: {log_file}")
        run_server(prepared, force=bool(launch.settings["force"]), quiet=quiet, log_file=log_file)


def require_startable(launch: "Launch", prepared: "Prepared", typed: Sequence[str]) -> None:
    """Raise if the server cannot start here and now; warn of secrets among `typed`, the command's vLLM flags."""
    from overspill.flags import into_environment, read_flags
    from overspill.hardware.machine import read_machine
    from overspill.launch.launch import require_this_machine
    from overspill.launch.machine import require_available

    require_this_machine(prepared)
    if not launch.settings["force"]:
        require_available(read_machine(), launch.plan)
    for variable in into_environment(read_flags(typed))[1]:
        to_stderr(
            "warning: every user of this machine can read a secret in this command's arguments while it runs; set "
            f"{variable} in the environment instead"
        )


def config(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show every setting, its value, and whether a flag, the environment, the file or the default gave it."""
    values = resolve({}, file=config_path())
    if as_json:
        print(json.dumps(origins(values), indent=2))
        return
    width = max(len(name) for name in values)
    for name, value in values.items():
        shown = "-" if value.value is None else str(value.value)
        print(f"{name:{width}}{shown:>16}   {value.place or value.origin}")
    print(f"file: {config_path() or 'none, as this user has no home folder; OVERSPILL_CONFIG can name one'}")
