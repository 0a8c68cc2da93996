"""`overspill service`."""

import getpass
import json
import os
import pwd
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overspill.cli.flags import SERVING, Model, with_settings
from overspill.cli.naming import find_named
from overspill.kv.errors import OverspillError
from overspill.settings import Value, plain

if TYPE_CHECKING:
    from overspill.service.units import Service

service = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="systemd units that serve models: print, install or remove them."
)

VllmArgs = Annotated[list[str] | None, typer.Argument(help="vLLM's own flags, after `--`.")]
IsSystem = Annotated[bool, typer.Option("--system/--user", help="For the whole machine, or for this user.")]
Name = Annotated[str | None, typer.Option(help="What to call the service, if not as the model.")]
RunAs = Annotated[str | None, typer.Option(help="The user of a system service, if not the one who asks for it.")]
Folder = Annotated[
    Path | None, typer.Option(help="Where units are, instead of systemd's own folder; systemd is then not told.")
]
# A service is for the GPU that is here, and `--force` is about files.
_SETTINGS = SERVING - {"gpu", "force"}


@service.command("print", epilog="Example: overspill service print Qwen/Qwen3-8B --max-model-len 128k --ram 64GiB")
@with_settings(_SETTINGS)
def print_units(
    values: dict[str, Value],
    model: Model,
    vllm_args: VllmArgs = None,
    is_system: IsSystem = False,
    name: Name = None,
    run_as: RunAs = None,
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; bytes are integers.")] = False,
) -> None:
    """The units that `install` would write. Nothing is written. Exits with 1 if the model does not fit."""
    from overspill.service.installation import units_of
    from overspill.service.units import unit_files

    planned = _planned(model, values, vllm_args or [], is_system=is_system, name=name, run_as=run_as)
    where = units_of(planned.mode, folder).folder
    files = {str(where / file.path): file.text for file in unit_files(planned)}
    if as_json:
        told = {"unit": planned.unit, "command": planned.command, "memory_max_bytes": planned.memory_max_bytes}
        print(json.dumps({**told, "files": files}, indent=2))
    else:
        print("\n".join(f"# {path}\n{text}" for path, text in files.items()), end="")


@service.command(epilog="Example: overspill service install Qwen/Qwen3-8B --max-model-len 128k --ram 64GiB --now")
@with_settings(_SETTINGS)
def install(
    values: dict[str, Value],
    model: Model,
    vllm_args: VllmArgs = None,
    is_system: IsSystem = False,
    name: Name = None,
    run_as: RunAs = None,
    folder: Folder = None,
    now: Annotated[bool, typer.Option("--now", help="Start it, now and whenever the machine starts.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite units that Overspill did not write.")] = False,
) -> None:
    """Plans, and writes the units. Nothing is started unless asked for. Exits with 1 if the model does not fit."""
    from overspill.service import installation

    planned = _planned(model, values, vllm_args or [], is_system=is_system, name=name, run_as=run_as)
    units = installation.units_of(planned.mode, folder)
    if now and units.systemctl is None:
        raise OverspillError(_not_running("--now", is_system=is_system, folder=folder))
    if others := installation.on_port(units.folder, planned):
        print(
            f"warning: port {planned.port} is also that of {' and '.join(others)}: the one that is started later "
            "fails. Give another --port",
            file=sys.stderr,
        )
    for path in installation.install(units, planned, force=force, now=now):
        print(f"wrote {path}")
    systemctl = "systemctl" if is_system else "systemctl --user"
    if units.systemctl is None:
        print(f"systemd was not told; where it runs: {systemctl} daemon-reload")
    if not now:
        print(f"to start it, now and whenever the machine starts: {systemctl} enable --now {shlex.quote(planned.unit)}")
    print(f"its log: journalctl {'' if is_system else '--user '}-u {shlex.quote(planned.unit)}")
    if not is_system:
        print("to keep it when you log out: loginctl enable-linger")


@service.command(epilog="Example: overspill service remove Qwen/Qwen3-8B")
def remove(model: Model, is_system: IsSystem = False, name: Name = None, folder: Folder = None) -> None:
    """Stops a service and removes what `install` wrote for it."""
    from overspill.service import installation
    from overspill.service.planned import absolute
    from overspill.service.units import Mode

    units = installation.units_of(Mode.SYSTEM if is_system else Mode.USER, folder)
    for path in installation.remove(units, name or absolute(model)):
        print(f"removed {path}")
    if units.systemctl is None:
        print(f"systemd was not told; where it runs: {'systemctl' if is_system else 'systemctl --user'} daemon-reload")


def _planned(
    model: str, values: dict[str, Value], vllm_args: list[str], *, is_system: bool, name: str | None,
    run_as: str | None,
) -> "Service":  # fmt: skip
    from overspill.planning.installed import installed_vllm
    from overspill.planning.machine import plan_for
    from overspill.serve.errors import CannotServe
    from overspill.serve.prepared import prepare, require_this_machine
    from overspill.service.planned import kept_environment, other_users_settings, planned_service
    from overspill.service.units import Mode

    user = _user(run_as, is_system=is_system)
    for warning in other_users_settings(user, getpass.getuser()):
        print(f"warning: {warning}", file=sys.stderr)
    named, values = find_named(model, values)
    settings = plain(values)
    environment = kept_environment(sys.executable, os.environ)
    flags = [*named.vllm_args, *vllm_args]
    registered = named.name if named.is_registered else None
    try:
        plan = plan_for(named.source, settings)
        # What would end the server when it starts ends this now.
        prepared = prepare(
            named.source, plan, settings, flags, vllm=installed_vllm(), environment=environment, name=registered
        )
        require_this_machine(prepared)
    except CannotServe as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    for warning in prepared.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    # A service's plan is fixed: the unit names what the registry says now, and needs no registry of its user's.
    served = ["--served-model-name", prepared.served_name, named.source] if registered is not None else []
    if any(flag.name == "--served-model-name" for flag in prepared.combined.given):
        served = []
    return planned_service(
        named.source, values, plan, [*served, *flags], mode=Mode.SYSTEM if is_system else Mode.USER,
        name=name or registered, run_as=user, program=sys.executable, environment=environment,
    )  # fmt: skip


def _user(run_as: str | None, *, is_system: bool) -> str | None:
    if not is_system:
        if run_as is not None:
            raise OverspillError("--run-as is for --system: a user's service runs as that user")
        return None
    user = run_as or os.environ.get("SUDO_USER") or getpass.getuser()
    try:
        return pwd.getpwnam(user).pw_name
    except KeyError:
        raise OverspillError(f"--run-as: there is no user {user!r} here; make one, or name another") from None


def _not_running(flag: str, *, is_system: bool, folder: Path | None) -> str:
    if folder is not None:
        return f"{flag} needs systemd, which does not read --folder {folder}; leave one of the two out"
    which = "systemd does not run here" if is_system else "this user has no systemd here"
    return f"{flag} needs systemd, and {which}; leave {flag} out, and start the service where it runs"
