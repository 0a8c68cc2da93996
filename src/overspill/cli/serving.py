"""`overspill serve`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from overspill.cli.flags import SERVING, Model, with_settings
from overspill.cli.naming import find_named
from overspill.kv.errors import OverspillError
from overspill.settings import Value

# vLLM's own flags are not known here; they follow the model, and are passed on.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@with_settings(SERVING)
def serve(
    values: dict[str, Value],
    context: typer.Context,
    model: Model,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command that would run, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="vLLM's log to a file only.")] = False,
    log_file: Annotated[Path | None, typer.Option(help="A file for vLLM's log.")] = None,
) -> None:
    """Plan, then run vLLM's server with these flags. Flags of vLLM's own follow the model, and win."""
    from overspill.hardware.machine import read_machine
    from overspill.planning.host_ram import require_available
    from overspill.planning.installed import installed_vllm
    from overspill.planning.machine import plan_for
    from overspill.planning.text import plan_as_text
    from overspill.serve.adopted import adopt
    from overspill.serve.errors import CannotServe
    from overspill.serve.flags import read_flags
    from overspill.serve.log import open_log
    from overspill.serve.prepared import prepare, require_this_machine
    from overspill.serve.secret_flags import into_environment
    from overspill.serve.server import run_server

    if model.startswith("-"):
        raise OverspillError(f"the model comes first, before vLLM's own flags; {model} is a flag")
    if as_json and not dry_run:
        raise OverspillError("--json is for --dry-run: a server prints its log; leave it out, or add --dry-run")
    named, values = find_named(model, values)
    adopted = adopt(values, context.args, registered=named.vllm_args)
    settings = adopted.settings
    try:
        plan = plan_for(named.source, settings)
        _tell(plan_as_text(plan))
        prepared = prepare(
            named.source, plan, settings, adopted.vllm_args, vllm=installed_vllm(),
            name=named.name if named.is_registered else None,
        )  # fmt: skip
        for warning in prepared.warnings:
            _tell(f"warning: {warning}")
        if dry_run:
            print(json.dumps(prepared.as_json(), indent=2) if as_json else prepared.line)
            return
        require_this_machine(prepared)
        if not settings["force"]:
            require_available(read_machine(), plan)
        for variable in into_environment(read_flags(context.args))[1]:
            _tell(
                "warning: every user of this machine can read a secret in this command's arguments while it runs; set "
                f"{variable} in the environment instead"
            )
        if quiet or log_file is not None:
            log_file = open_log(log_file, prepared.address.port)
            _tell(f"vLLM's log: {log_file}")
        run_server(prepared, force=bool(settings["force"]), quiet=quiet, log_file=log_file)
    except CannotServe as error:
        _tell(f"error: {error}")
        raise typer.Exit(1) from None


def _tell(text: str) -> None:
    """Standard output is for the command that --dry-run prints, and for the address once there is one."""
    print(text, file=sys.stderr, flush=True)
