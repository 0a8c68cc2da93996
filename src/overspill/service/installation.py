"""Unit files on disk and their activation; nothing outside the folder of units is written or removed."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from overspill.files import replace_file
from overspill.kv.errors import OverspillError
from overspill.service.units import (
    MANAGER_UNIT,
    MARKER,
    TEMPLATE,
    Mode,
    ModelService,
    Service,
    UnitFile,
    drop_in_path,
    port_of,
    secrets_path,
    unit_name,
)


class ServiceError(OverspillError):
    """A unit cannot be written or removed; the message names the file and what to do about it."""


class SystemctlFailed(ServiceError):
    """systemctl failed; the message quotes its own."""


@dataclass(frozen=True, slots=True)
class Units:
    """A folder of units and the systemd that reads it."""

    mode: Mode
    folder: Path
    systemctl: tuple[str, ...] | None
    """Command to control systemd; None where it does not run or does not read this folder."""

    def run(self, *arguments: str) -> None:
        """Run a systemctl command; no-op without systemd."""
        if self.systemctl is None:
            return
        command = [*self.systemctl, *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            said = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
            raise SystemctlFailed(f"{' '.join(command)} failed: {said}. The units are in place; run it again")


def units_of(mode: Mode, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Units:
    environment = os.environ if environment is None else environment
    if folder is not None:
        return Units(mode, folder, None)
    return Units(mode, _usual_folder(mode, environment), _systemctl(mode, environment))


def install(units: Units, service: Service, *, force: bool = False, now: bool = False) -> list[Path]:
    """Write a service's files and reload systemd; return the paths, new or replaced. With `now` the service runs as
    written, so one that ran otherwise is restarted."""
    files = [(units.folder / file.path, file) for file in service.files]
    for path, _ in files:
        _refuse_others(units.folder, path, force=force)
    is_other = any(_text(path) != file.text for path, file in files)
    for path, file in files:
        _write(path, file)
    if isinstance(service, ModelService) and not service.secrets:
        _remove_secrets(units, service.name)
    units.run("daemon-reload")
    if now:
        units.run("enable", service.unit)
        units.run("restart" if is_other else "start", service.unit)
    return [path for path, _ in files]


def remove(units: Units, name: str) -> list[Path]:
    """Remove a model's service and return the removed files; the template goes with the last model."""
    drop_in = units.folder / drop_in_path(name)
    if not drop_in.is_file():
        there = installed(units.folder)
        what = f"installed: {', '.join(there)}" if there else "nothing is installed there"
        raise ServiceError(f"{drop_in} does not exist; {what}")
    _refuse_others(units.folder, drop_in, force=False)
    units.run("disable", "--now", unit_name(name))
    removed = [*_remove_secrets(units, name), drop_in]
    template = units.folder / TEMPLATE
    with _explained(drop_in):
        drop_in.unlink()
        # Files put there by somebody else stay.
        with suppress(OSError):
            drop_in.parent.rmdir()
        if not installed(units.folder) and _is_ours(template):
            template.unlink()
            removed.append(template)
    units.run("daemon-reload")
    return removed


def _remove_secrets(units: Units, name: str) -> list[Path]:
    secrets = units.folder / secrets_path(name)
    if not _is_ours(secrets):
        return []
    with _explained(secrets):
        secrets.unlink()
    return [secrets]


def remove_manager(units: Units) -> list[Path]:
    """Remove the manager's unit; engines that it started end with it, as at every proper stop."""
    unit = units.folder / MANAGER_UNIT
    if not os.path.lexists(unit):
        raise ServiceError(f"{unit} does not exist; the manager is not installed there")
    _refuse_others(units.folder, unit, force=False)
    units.run("disable", "--now", MANAGER_UNIT)
    with _explained(unit):
        unit.unlink()
    units.run("daemon-reload")
    return [unit]


def has(units: Units, name: str) -> bool:
    """Whether a model's service is installed under this name."""
    return (units.folder / drop_in_path(name)).is_file()


def installed(folder: Path) -> list[str]:
    """Units whose drop-in was written by Overspill."""
    found = folder.glob("overspill@*.service.d/overspill.conf")
    return sorted(path.parent.name.removesuffix(".d") for path in found if _is_ours(path))


def on_port(folder: Path, service: ModelService) -> list[str]:
    """Other Overspill units that listen on the service's port."""
    found = []
    for unit in installed(folder):
        lines = (folder / f"{unit}.d/overspill.conf").read_text().splitlines()
        commands = [line.removeprefix("ExecStart=").split() for line in lines if line.startswith("ExecStart=")]
        if unit != service.unit and any(words and port_of(words) == service.port for words in commands):
            found.append(unit)
    return found


def _usual_folder(mode: Mode, environment: Mapping[str, str]) -> Path:
    if mode is Mode.SYSTEM:
        return Path("/etc/systemd/system")
    base = environment.get("XDG_CONFIG_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "systemd/user"
    try:
        return Path.home() / ".config/systemd/user"
    except RuntimeError as error:
        raise ServiceError("this user has no home folder for units; name one with --folder, or use --system") from error


def _systemctl(mode: Mode, environment: Mapping[str, str]) -> tuple[str, ...] | None:
    program = shutil.which("systemctl", path=environment.get("PATH"))
    # As in sd_booted(3); a user's systemd has a socket of its own.
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    sign = Path("/run/systemd/system") if mode is Mode.SYSTEM else Path(runtime) / "systemd/private"
    if program is None or not sign.is_absolute() or not sign.exists():
        return None
    return (program, "--user") if mode is Mode.USER else (program,)


def _refuse_others(folder: Path, path: Path, *, force: bool) -> None:
    if path.parent != folder and path.parent.is_symlink():
        raise ServiceError(f"{path.parent} is a link, and a unit would be written outside {folder}; remove the link")
    if not force and os.path.lexists(path) and not _is_ours(path):
        raise ServiceError(
            f"{path} was not written by Overspill; move it away, overwrite it with --force, or use --name or --folder"
        )


def _is_ours(path: Path) -> bool:
    return not path.is_symlink() and _text(path).startswith(MARKER)


def _text(path: Path) -> str:
    """Text of a file; empty if there is none that this user can read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: Path, file: UnitFile) -> None:
    """Write a file whole or not at all: systemd may read it at any moment."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, file.text, mode=file.mode, sync=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a sentence."""
    try:
        yield
    except PermissionError as error:
        raise ServiceError(f"{path} may not be written by this user; use sudo for --system, or --user") from error
    except OSError as error:
        raise ServiceError(f"{path} cannot be written: {error.strerror}; name another --folder") from error
