"""Engines as units of systemd, for models that `overspill service install` was run for; the rest as own processes."""

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
        # A start ends when the engine is ready; that is looked at here.
        self._run("start", "--no-block", unit)
        deadline = time.monotonic() + _TOLD_WITHIN_S
        while time.monotonic() < deadline:
            pid = self._run("show", "--property=MainPID", "--value", unit).strip()
            if pid.isdigit() and (identity := identify(int(pid))) is not None:
                return Launched(identity=identity, unit=unit)
            time.sleep(0.1)
        raise StartFailed(f"systemd was asked to start {unit}, and has not; see: journalctl --user -u {unit}")

    def stop_unit(self, unit: str) -> None:
        self._run("stop", "--no-block", unit)

    def _run(self, *arguments: str) -> str:
        command = [*self.systemctl, *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if answer.returncode:
            said = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
            raise StartFailed(f"{' '.join(command)} failed: {said}")
        return answer.stdout


def backend_here(environ: Mapping[str, str] = os.environ) -> Backend:
    """systemd's where this user has one that runs."""
    units = units_of(Mode.USER, environment=environ)
    if units.systemctl is None:
        return OwnProcesses()
    return Units(systemctl=units.systemctl, folder=units.folder)
