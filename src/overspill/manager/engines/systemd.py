"""Engines as units of systemd, for models that `overspill service install` was run for; the rest as own processes."""

import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from overspill.kv.errors import OverspillError
from overspill.manager.engines.launch import Backend, Launched, Order, OwnProcesses
from overspill.manager.engines.process import identify
from overspill.manager.errors import StartFailed
from overspill.service.installation import installed, units_of
from overspill.service.units import Mode, unit_name

_TOLD_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    systemctl: tuple[str, ...]
    folder: Path
    """Where units are installed."""
    otherwise: OwnProcesses = field(default_factory=OwnProcesses)

    def launch(self, order: Order) -> Launched:
        """The unit decides where the engine listens and where it logs; the engine's status tells."""
        unit = unit_name(order.name)
        if unit not in installed(self.folder):
            return self.otherwise.launch(order)
        journal = journal_of(unit, is_user="--user" in self.systemctl)
        # A start ends when the engine is ready; that is looked at here.
        self._run("start", "--no-block", unit)
        deadline = time.monotonic() + _TOLD_WITHIN_S
        while time.monotonic() < deadline:
            pid = self._run("show", "--property=MainPID", "--value", unit).strip()
            if pid.isdigit() and (identity := identify(int(pid))) is not None:
                return Launched(identity=identity, unit=unit, journal=journal)
            time.sleep(0.1)
        raise StartFailed(f"systemd was asked to start {unit}, and has not; see: {journal}")

    def stop_unit(self, unit: str) -> None:
        self._run("stop", "--no-block", unit)

    def _run(self, *arguments: str) -> str:
        command = [*self.systemctl, *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if answer.returncode:
            said = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
            raise StartFailed(f"{' '.join(command)} failed: {said}")
        return answer.stdout


def journal_of(unit: str, *, is_user: bool) -> str:
    """The command that shows its log."""
    return shlex.join(["journalctl", *(["--user"] if is_user else []), "-u", unit])


@dataclass(frozen=True, slots=True)
class Unit:
    name: str
    is_user: bool
    """Of a user's systemd, not of the machine's."""

    def is_of(self, model: str) -> bool:
        try:
            return unit_name(model) == self.name
        except OverspillError:  # a name that no unit can have
            return False


def unit_of(pid: int) -> Unit | None:
    """Of ours, in which a process runs; systemd may have started it again with another number. Blocks."""
    try:
        return unit_in(Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:  # it has ended
        return None


def unit_in(cgroup: str) -> Unit | None:
    """As /proc/PID/cgroup tells it."""
    for line in cgroup.splitlines():
        parts = line.partition(":")[2].partition(":")[2].split("/")
        for part in parts:
            if part.startswith("overspill@") and part.endswith(".service"):
                return Unit(part, any(one.startswith("user@") for one in parts))
    return None


def backend_here(environ: Mapping[str, str] = os.environ) -> Backend:
    """systemd's where this user has one that runs."""
    units = units_of(Mode.USER, environment=environ)
    if units.systemctl is None:
        return OwnProcesses()
    return Units(systemctl=units.systemctl, folder=units.folder)
