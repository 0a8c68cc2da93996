"""Engine processes: started as sessions that outlive the manager or by systemd, recognised, signalled and ended."""

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
# Removed for engines: sd_notify would come from the wrong process, and a vLLM key would shut out the gateway.
_LEFT_OUT = ("NOTIFY_SOCKET", "VLLM_API_KEY")
# The manager polls these paths; vLLM's access log would have a line for every poll.
_POLLED = "/health,/metrics"


@dataclass(frozen=True, slots=True)
class Identity:
    """A pid with boot and start time, unique although pids are reused; the registry identifies processes likewise."""

    pid: int
    process: str

    @property
    def is_alive(self) -> bool:
        return identify(self.pid) == self

    def signal(self, sign: signal.Signals) -> None:
        """Signal the process unless it has ended; through the pidfd no later process with the same pid can be hit."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.is_alive:
                    signal.pidfd_send_signal(handle, sign)
            finally:
                os.close(handle)


def identify(pid: int) -> Identity | None:
    """Identity of a process; None if it does not exist or is only a zombie."""
    process = identity(pid)
    return None if process is None else Identity(pid, process)


@dataclass(slots=True)
class EngineProcess:
    """An `overspill serve` process, its descendants, and all processes in sessions that any of them began."""

    root: Identity
    sessions: set[int] = field(default_factory=set)
    """Sessions the engine began, noted while the root lives, to recognise processes it leaves behind."""

    def living(self) -> list[int]:
        """Pids of all processes that still have threads. Reads all of /proc: not for the event loop."""
        every = list(processes())
        ours: set[int] = set()
        if identity(self.root.pid, or_zombie=True) == self.root.process:
            ours = set(family(self.root.pid, every))
            # Only sessions begun by the engine: a terminal's session holds a shell that is not ours to kill.
            self.sessions |= {one.session for one in every if one.pid in ours and one.session in ours}
        left = [one for one in every if one.has_threads and (one.pid in ours or one.session in self.sessions)]
        # The id of an empty session may be reused for a stranger's.
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
        """Send SIGTERM, and SIGKILL after `patience_s`; False if SIGKILL was needed."""
        await asyncio.to_thread(self.living)  # note the sessions before the root is gone
        self.root.signal(signal.SIGTERM)
        if await self.gone(patience_s):
            return True
        await self.kill()
        return False

    async def kill(self) -> None:
        """Kill until no process is left: the first pass may miss a process that is just starting."""
        while left := await asyncio.to_thread(self.living):
            kill(left)
            await self.gone(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    identity: Identity
    child: "subprocess.Popen[bytes] | None" = None
    """Handle for reading the exit code; None for a process that is not our child."""
    url: str | None = None
    unit: str | None = None
    journal: str | None = None
    """Command that shows the unit's log."""


class Backend(Protocol):
    def launch(self, name: str, log_file: Path, folder: Path) -> Launched:
        """Start an engine, and return once it has a process. Blocks. `folder`, its working directory, must be empty:
        vLLM and Overspill prefer a folder to a repository of the same name."""

    def stop_unit(self, unit: str) -> None:
        """Stop the unit through systemd, which would otherwise restart the engine. Blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProcesses:
    """Starts `overspill serve` in its own session without a terminal; it survives Ctrl-C and the manager's end."""

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
        process = identity(child.pid, or_zombie=True)  # it may have ended already; its log says why
        assert process is not None, "nothing reaps a child before it is polled"
        return Launched(identity=Identity(child.pid, process), child=child, url=f"http://{HOST}:{port}")

    def stop_unit(self, unit: str) -> None:
        raise StartFailed(f"{unit} was started by systemd, which this manager does not use")


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Starts systemd units for models that `overspill service install` was run for, and own processes for the rest."""

    systemctl: tuple[str, ...]
    folder: Path
    """Folder of installed units."""
    otherwise: OwnProcesses = field(default_factory=OwnProcesses)

    def launch(self, name: str, log_file: Path, folder: Path) -> Launched:
        """Start the model's unit; the unit sets the address and the log, and the engine's status reports both."""
        unit = unit_name(name)
        if unit not in installed(self.folder):
            return self.otherwise.launch(name, log_file, folder)
        journal = journal_of(unit, is_user="--user" in self.systemctl)
        # Without --no-block, systemctl returns when the engine is ready; the engine's own task waits for that.
        self._run("start", "--no-block", unit)
        deadline = time.monotonic() + _UNIT_START_S
        while time.monotonic() < deadline:
            pid = self._run("show", "--property=MainPID", "--value", unit).strip()
            if pid.isdigit() and (who := identify(int(pid))) is not None:
                return Launched(identity=who, unit=unit, journal=journal)
            time.sleep(0.1)
        raise StartFailed(f"systemd did not start {unit}; see: {journal}")

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
    """The backend for this machine: systemd where the user's instance runs, else own processes."""
    units = units_of(Mode.USER, environment=environ)
    return OwnProcesses() if units.systemctl is None else Units(systemctl=units.systemctl, folder=units.folder)


def journal_of(unit: str, *, is_user: bool) -> str:
    """Command that shows a unit's log."""
    return shlex.join(["journalctl", *(["--user"] if is_user else []), "-u", unit])


@dataclass(frozen=True, slots=True)
class Unit:
    name: str
    is_user: bool
    """Whether the unit belongs to a user's systemd, not to the machine's."""

    def is_of(self, model: str) -> bool:
        try:
            return unit_name(model) == self.name
        except OverspillError:  # a name that is not valid for a unit
            return False


def unit_of(pid: int) -> Unit | None:
    """Overspill's unit in which a process runs, found by pid since systemd may have restarted the unit. Blocks."""
    try:
        return unit_in(Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:  # the process has ended
        return None


def unit_in(cgroup: str) -> Unit | None:
    """Overspill's unit named in the text of /proc/PID/cgroup, if any."""
    for line in cgroup.splitlines():
        parts = line.partition(":")[2].partition(":")[2].split("/")
        for part in parts:
            if part.startswith("overspill@") and part.endswith(".service"):
                return Unit(part, any(one.startswith("user@") for one in parts))
    return None
