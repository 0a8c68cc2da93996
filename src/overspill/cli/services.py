"""`overspill service`: systemd units for models and for the manager."""

import getpass
import json
import os
import pwd
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.flags import SERVING, Model, failing, group, launch_of, opened_registry, to_stderr, with_settings
from overspill.cli.managing import of_the_manager
from overspill.kv.errors import OverspillError

if TYPE_CHECKING:
    from overspill.manager.web.setup import Setup
    from overspill.service.installation import Units
    from overspill.service.units import Mode, ModelService, Service

service = group("systemd units that serve models: print, install or remove them.")
manager = group("The manager's own unit: print, install or remove it.")
service.add_typer(manager, name="manager")

VllmArgs = Annotated[list[str] | None, typer.Argument(help="vLLM's own flags, after `--`.")]
IsSystem = Annotated[bool, typer.Option("--system/--user", help="For the whole machine, or for this user.")]
Name = Annotated[str | None, typer.Option(help="Name of the service; without it, the model's.")]
RunAs = Annotated[
    str | None, typer.Option(help="User that a system service runs as; without it, the user who installs it.")
]
Folder = Annotated[
    Path | None, typer.Option(help="Folder for units, instead of systemd's own; systemd is then not reloaded.")
]
Now = Annotated[bool, typer.Option("--now", help="Start the service now and whenever the machine starts.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite units that Overspill did not write.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; bytes are integers.")]
# A service is for the GPU of this machine, and `--force` here overwrites files.
_SETTINGS = SERVING - {"gpu", "force"}
_SYSTEMCTL = {"system": "systemctl", "user": "systemctl --user"}


@service.command("print", epilog="Example: overspill service print Qwen/Qwen3-8B --max-model-len 32k --ram 64GiB")
@with_settings(_SETTINGS)
def print_units(
    given: dict[str, Any],
    model: Model,
    vllm_args: VllmArgs = None,
    is_system: IsSystem = False,
    name: Name = None,
    run_as: RunAs = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Print the units that `install` would write. Nothing is written. Exits with 1 if the model does not fit."""
    planned = _planned(model, given, vllm_args or [], is_system=is_system, name=name, run_as=run_as, folder=folder)
    described = {"unit": planned.unit, "command": planned.command, "memory_max_bytes": planned.memory_max_bytes}
    _print(planned, folder, described if as_json else None)


@service.command(epilog="Example: overspill service install Qwen/Qwen3-8B --max-model-len 32k --ram 64GiB --now")
@with_settings(_SETTINGS)
def install(
    given: dict[str, Any],
    model: Model,
    vllm_args: VllmArgs = None,
    is_system: IsSystem = False,
    name: Name = None,
    run_as: RunAs = None,
    folder: Folder = None,
    now: Now = False,
    force: Force = False,
) -> None:
    """Plan, and write the units. Nothing is started without --now. Exits with 1 if the model does not fit."""
    from overspill.service.installation import on_port, units_of

    planned = _planned(model, given, vllm_args or [], is_system=is_system, name=name, run_as=run_as, folder=folder)
    if others := on_port(units_of(planned.mode, folder).folder, planned):
        to_stderr(
            f"warning: port {planned.port} is also used by {' and '.join(others)}: whichever starts later fails. Give "
            "another --port"
        )
    _install(planned, folder, force=force, now=now)


@service.command(epilog="Example: overspill service remove Qwen/Qwen3-8B")
def remove(model: Model, is_system: IsSystem = False, name: Name = None, folder: Folder = None) -> None:
    """Stop a service and remove what `install` wrote for it."""
    from overspill.service import installation
    from overspill.service.definition import absolute

    units = installation.units_of(_mode(is_system=is_system), folder)
    # A registered model may have the name of a folder here.
    there = name or (model if installation.has(units, model) else absolute(model))
    _print_changed("removed", units, installation.remove(units, there))


@manager.command("print", epilog="Example: overspill service manager print --models-folder /models")
@of_the_manager
def print_manager(
    given: dict[str, Any],
    is_system: IsSystem = False,
    run_as: RunAs = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Print the unit that `install` would write. Nothing is written."""
    made = _manager(given, is_system=is_system, run_as=run_as)
    _print(made, folder, {"unit": made.unit, "command": made.command} if as_json else None)


@manager.command("install", epilog="Example: overspill service manager install --models-folder /models --now")
@of_the_manager
def install_manager(
    given: dict[str, Any],
    is_system: IsSystem = False,
    run_as: RunAs = None,
    folder: Folder = None,
    now: Now = False,
    force: Force = False,
) -> None:
    """Write the manager's unit. Nothing is started without --now."""
    _install(_manager(given, is_system=is_system, run_as=run_as), folder, force=force, now=now)


@manager.command("remove", epilog="Example: overspill service manager remove")
def remove_manager(is_system: IsSystem = False, folder: Folder = None) -> None:
    """Stop the manager, which ends its engines, and remove its unit."""
    from overspill.service import installation

    units = installation.units_of(_mode(is_system=is_system), folder)
    _print_changed("removed", units, installation.remove_manager(units))


def _mode(*, is_system: bool) -> "Mode":
    from overspill.service.units import Mode

    return Mode.SYSTEM if is_system else Mode.USER


def _print(made: "Service", folder: Path | None, described: dict[str, Any] | None) -> None:
    """Print the files as text, or as JSON together with `described`."""
    from overspill.service.installation import units_of

    where = units_of(made.mode, folder).folder
    files = {str(where / file.path): file.shown or file.text for file in made.files}
    if described is not None:
        print(json.dumps({**described, "files": files}, indent=2))
    else:
        print("\n".join(f"# {path}\n{text}" for path, text in files.items()), end="")


def _install(made: "Service", folder: Path | None, *, force: bool, now: bool) -> None:
    from overspill.service import installation
    from overspill.service.units import Mode

    units, is_system = installation.units_of(made.mode, folder), made.mode is Mode.SYSTEM
    if now and units.systemctl is None:
        why = "systemd does not run here" if is_system else "this user has no systemd here"
        why += "; leave --now out, and start the service where it runs"
        if folder is not None:
            why = f"systemd does not read --folder {folder}; leave one of the two out"
        raise OverspillError(f"--now needs systemd, and {why}")
    _print_changed("wrote", units, installation.install(units, made, force=force, now=now))
    if not now:
        control, unit = _SYSTEMCTL[units.mode], shlex.quote(made.unit)
        print(f"to start the service now and whenever the machine starts: {control} enable --now {unit}")
        print(f"if it runs already, this takes effect with: {control} restart {unit}")
    print(f"its log: journalctl {'' if is_system else '--user '}-u {shlex.quote(made.unit)}")
    if not is_system:
        print("to keep it running when you log out: loginctl enable-linger")


def _print_changed(verb: str, units: "Units", paths: list[Path]) -> None:
    for path in paths:
        print(f"{verb} {path}")
    if units.systemctl is None:
        print(f"systemd was not reloaded; where it runs, use: {_SYSTEMCTL[units.mode]} daemon-reload")


def _manager(given: dict[str, Any], *, is_system: bool, run_as: str | None) -> "Service":
    """The manager's service; a mistake that would end the manager when it starts is an error now."""
    from overspill.manager.web.setup import make_setup
    from overspill.service.definition import left_out, manager_environment, manager_service, other_users_registry

    user = _user(run_as, is_system=is_system)
    for_oneself = _is_oneself(user)
    setup = make_setup(**given)
    given = {**given, "models_folder": setup.models_folders}
    if for_oneself:
        _require_protection(setup)
    for warning in [*other_users_registry(user, _own_name()), *left_out(os.environ, for_oneself=for_oneself)]:
        to_stderr(f"warning: {warning}")
    return manager_service(
        given, mode=_mode(is_system=is_system), run_as=user, program=sys.executable,
        environment=manager_environment(sys.executable, os.environ, for_oneself=for_oneself),
    )  # fmt: skip


def _require_protection(setup: "Setup") -> None:
    from overspill.manager.web.setup import require_protection
    from overspill.registry.access import list_keys, password_hash

    if setup.is_local:
        return
    with opened_registry() as registry:
        is_protected = bool(list_keys(registry)) or password_hash(registry) is not None
    require_protection(setup, is_protected=is_protected)


def _planned(
    model: str, given: dict[str, Any], vllm_args: list[str], *, is_system: bool, name: str | None,
    run_as: str | None, folder: Path | None,
) -> "ModelService":  # fmt: skip
    from overspill.errors import CannotServe
    from overspill.launch.launch import require_this_machine
    from overspill.launch.traps import require_tokenizer
    from overspill.service.definition import kept_environment, other_users_settings, planned_service
    from overspill.service.installation import units_of

    mode = _mode(is_system=is_system)
    user = _user(run_as, is_system=is_system)
    for warning in other_users_settings(user, _own_name()):
        to_stderr(f"warning: {warning}")
    environment = kept_environment(sys.executable, os.environ, for_oneself=_is_oneself(user))
    with failing(CannotServe):
        launch = launch_of(model, given, vllm_args, is_server=True)
        # A mistake that would end the server when it starts is an error now, also with --force, which is about files.
        prepared = launch.prepared(environment=environment, can_force=False)
        require_this_machine(prepared)
        require_tokenizer(prepared.model, prepared.plan, prepared.combined)
    for warning in prepared.warnings:
        to_stderr(f"warning: {warning}")
    # A service's plan is fixed: the unit contains the registry's current settings, so its user needs no registry.
    ref = launch.ref
    served = ["--served-model-name", prepared.served_name, ref.source] if ref.is_registered else []
    if any(flag.name == "--served-model-name" for flag in prepared.combined.given):
        served = []
    return planned_service(
        ref.source, launch.values, launch.plan, [*served, *launch.serve_args],
        mode=mode, name=name or (ref.name if ref.is_registered else None), run_as=user, program=sys.executable,
        environment=environment, folder=units_of(mode, folder).folder,
    )  # fmt: skip


def _user(run_as: str | None, *, is_system: bool) -> str | None:
    if not is_system:
        if run_as is not None:
            raise OverspillError("--run-as is for --system: a user's service runs as that user")
        return None
    user = run_as or os.environ.get("SUDO_USER") or _own_name()
    try:
        return pwd.getpwnam(user).pw_name
    except KeyError:
        raise OverspillError(f"--run-as: there is no user {user!r} here; make one, or name another") from None


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        raise OverspillError("this user has no name here, and a unit needs one; set USER, or use --run-as") from None


def _is_oneself(user: str | None) -> bool:
    return user is None or user == _own_name()
