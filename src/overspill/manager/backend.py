"""Processes of engines: started as sessions that outlive the manager or by systemd, recognised, signalled and ended."""

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from overspill.address import free_port
from overspill.kv.errors import OverspillError
from overspill.manager.errors import StartFailed
from overspill.processes import family, identity, kill, processes
from overspill.service.installation import installed, units_of
from overspill.service.units import Mode, unit_name

HOST = "127.0.0.1"
_POLL_S = 0.1
_UNIT_START_S = 30.0
# Not for engines: systemd's notices would come from the wrong process, and a key of vLLM's would shut out the gateway.
_LEFT_OUT = ("NOTIFY_SOCKET", "VLLM_API_KEY")
# Polled by the manager: vLLM's log would have a line for each.
_POLLED = "/health,/metrics"


@dataclass(frozen=True, slots=True)
class Identity:
    """Numbers of processes are used again; with boot and start time they name one for ever, as the registry does."""

    pid: int
    process: str

    @property
    def is_alive(self) -> bool:
        return identify(self.pid) == self

    def signal(self, sign: signal.Signals) -> None:
        """Nothing if it has ended. With the handle open, its number cannot become another process's meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.is_alive:
                    signal.pidfd_send_signal(handle, sign)
            finally:
                os.close(handle)


def identify(pid: int) -> Identity | None:
    """None if there is no such process, or only a zombie."""
    process = identity(pid)
    return None if process is None else Identity(pid, process)


@dataclass(slots=True)
class EngineProcess:
    """`overspill serve`, and all processes below it or in a session that one of them began."""

    root: Identity
    sessions: set[int] = field(default_factory=set)
    """Noted while the root lives: processes that it leaves behind are known by them."""

    def living(self) -> list[int]:
        """All processes that are left. Reads the whole of /proc: not for the event loop."""
        every = list(processes())
        ours: set[int] = set()
        if self.root.is_alive:
            ours = set(family(self.root.pid, every))
            # Only sessions of their own: one that a terminal began holds a shell that is not ours to kill.
            self.sessions |= {one.session for one in every if one.pid in ours and one.session in ours}
        left = [one for one in every if one.is_alive and (one.pid in ours or one.session in self.sessions)]
        # A number that no process has any more may begin a stranger's session later.
        self.sessions &= {one.session for one in left}
        return [one.pid for one in left]

    async def gone(self, within: float) -> bool:
        deadline = time.monotonic() + within
        while await asyncio.to_thread(self.living):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def end(self, patience_s: float) -> bool:
        """SIGTERM, patience, SIGKILL; False if it had to be killed."""
        await asyncio.to_thread(self.living)  # so that its sessions are known when it is gone
        self.root.signal(signal.SIGTERM)
        if await self.gone(patience_s):
            return True
        await self.kill()
        return False

    async def kill(self) -> None:
        """Until none is left: a process that is just being started may be missed the first time."""
        while left := await asyncio.to_thread(self.living):
            kill(left)
            await self.gone(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    identity: Identity
    child: "subprocess.Popen[bytes] | None" = None
    """For its exit code; None for a process that is not ours."""
    url: str | None = None
    unit: str | None = None
    journal: str | None = None
    """The command that shows the unit's log."""


class Backend(Protocol):
    def launch(self, name: str, log_file: Path, folder: Path) -> Launched:
        """Returns when there is a process. Blocks. The folder that it works in must be empty: vLLM, and Overspill,
        prefer a folder to a repository of the same name."""

    def stop_unit(self, unit: str) -> None:
        """Stops it where it was started, so that it is not started again. Blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProcesses:
    """`overspill serve` in a session of its own, without a terminal: neither a Ctrl-C nor the manager's end ends it."""

    program: tuple[str, ...] = (sys.executable, "-P", "-m", "overspill", "serve")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def launch(self, name: str, log_file: Path, folder: Path) -> Launched:
        port = free_port()
        command = [
            *self.program, name, "--host", HOST, "--port", str(port), "--quiet", "--log-file", str(log_file),
            "--disable-access-log-for-endpoints", _POLLED, "--enable-prompt-tokens-details",
        ]  # fmt: skip
        environment = {name: value for name, value in self.environment.items() if name not in _LEFT_OUT}
        try:
            for needed in (log_file.parent, folder):
                needed.mkdir(mode=0o700, parents=True, exist_ok=True)
            with log_file.open("ab") as log:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    env=environment, cwd=folder,
                )  # fmt: skip
        except OSError as error:
            raise StartFailed(f"{name} could not be started: {error}") from error
        if (who := identify(child.pid)) is None:
            raise StartFailed(f"{name} ended at once, with exit code {child.wait()}")
        return Launched(identity=who, child=child, url=f"http://{HOST}:{port}")

    def stop_unit(self, unit: str) -> None:
        raise StartFailed(f"{unit} was started by systemd, which this manager does not use")


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Units of systemd, for models that `overspill service install` was run for; own processes for the rest."""

    systemctl: tuple[str, ...]
    folder: Path
    """Where units are installed."""
    otherwise: OwnProcesses = field(default_factory=OwnProcesses)

    def launch(self, name: str, log_file: Path, folder: Path) -> Launched:
        """The unit decides where the engine listens and where it logs; the engine's status has both."""
        unit = unit_name(name)
        if unit not in installed(self.folder):
            return self.otherwise.launch(name, log_file, folder)
        journal = journal_of(unit, is_user="--user" in self.systemctl)
        # A start ends when the engine is ready; the engine's own task waits for that.
        self._run("start", "--no-block", unit)
        deadline = time.monotonic() + _UNIT_START_S
        while time.monotonic() < deadline:
            pid = self._run("show", "--property=MainPID", "--value", unit).strip()
            if pid.isdigit() and (who := identify(int(pid))) is not None:
                return Launched(identity=who, unit=unit, journal=journal)
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


def backend_here(environ: Mapping[str, str] = os.environ) -> Backend:
    """systemd's where this user has one that runs."""
    units = units_of(Mode.USER, environment=environ)
    return OwnProcesses() if units.systemctl is None else Units(systemctl=units.systemctl, folder=units.folder)


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
    """Overspill's unit in which a process runs; systemd may have started it again with another number. Blocks."""
    try:
        return unit_in(Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:  # it has ended
        return None


def unit_in(cgroup: str) -> Unit | None:
    """From the text of /proc/PID/cgroup."""
    for line in cgroup.splitlines():
        parts = line.partition(":")[2].partition(":")[2].split("/")
        for part in parts:
            if part.startswith("overspill@") and part.endswith(".service"):
                return Unit(part, any(one.startswith("user@") for one in parts))
    return None
