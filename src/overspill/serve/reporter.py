"""Reports of a server's life to the terminal, to systemd, to other processes (by status file), and to the registry.

A report never stops a server: a failing one is a single warning.
"""

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from overspill.launch.launch import Prepared
from overspill.launch.reference import NoRegistry, using_registry
from overspill.planning.report import plan_as_json
from overspill.processes import identity
from overspill.serve import status as statuses
from overspill.serve.engine_report import Phase, Report
from overspill.serve.status import Reached, Start, Status

if TYPE_CHECKING:
    from overspill.registry import Registry

# The engine is starting: a database that does not answer must not delay it.
_WAIT_S = 5.0
_KEPT_LINES = 100
# Keeps any silence below 15 s: waiting loops check every 2 s or so.
HEARTBEAT_S = 10.0


class Reporter:
    def __init__(self, prepared: Prepared, *, log_file: Path | None, can_park: bool = False) -> None:
        self._prepared = prepared
        self._began = self._said = time.monotonic()
        self._earlier_s = statuses.last_start(prepared.name).seconds
        self._folder = statuses.folder_of()
        self._status = Status(
            pid=os.getpid(),
            process=identity(os.getpid()),
            host=platform.node(),
            model=prepared.name,
            source=prepared.model,
            served_name=prepared.served_name,
            url=prepared.address.url,
            lines=tuple(f"warning: {warning}" for warning in prepared.warnings),
            log_file=str(log_file.absolute()) if log_file is not None else None,
            plan=plan_as_json(prepared.plan),
            can_park=can_park,
            started_at=_now(),
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str, *, keep: bool = False) -> None:
        """Print to standard error; with `keep`, also add the line to the status file."""
        self._said = time.monotonic()
        print(f"overspill: {self.seconds:6.1f} s  {text}", file=sys.stderr, flush=True)
        if keep:
            self._change(lines=(*self._status.lines, text)[-_KEPT_LINES:])

    def starts(self, session: int) -> None:
        """Report that the engine's processes exist."""
        if self._folder is not None:
            statuses.forget_ended(self._status, statuses.read_statuses(), self._folder)
        self._change(session=session)
        self.reaches(Phase.STARTING)
        self._change(run_id=self._recorded_start())

    def reaches(self, phase: Phase) -> None:
        self.say(phase)
        at = _now()
        ready = {"ready_at": at} if phase is Phase.READY else {}
        if phase is Phase.READY:
            self._earlier_s = None
            try:
                statuses.keep_start(self._status.model, Start(round(self.seconds, 1), self._status.log_file))
            except OSError as error:
                self.say(f"warning: the duration of this start could not be saved ({error})")
        self._change(phase=phase, phases=(*self._status.phases, Reached(phase=phase, at=at)), **ready)
        if phase is not Phase.STARTING:
            notify(f"STATUS={phase}")

    def waits(self, what: str) -> None:
        """Print a sign of life if nothing was printed for a while."""
        if time.monotonic() - self._said < HEARTBEAT_S:
            return
        left = self._earlier_s - self.seconds if self._earlier_s is not None else 0.0
        self.say(f"still {what}" + (f"; about {left:.0f} s left, judging by the last start" if left >= 1 else ""))

    def measures(self, reports: list[Report]) -> None:
        if (memory := statuses.memory_of(reports)) != self._status.memory:
            self._change(memory=memory)

    def is_ready(self, line: str) -> None:
        print(line, flush=True)
        notify("READY=1", f"STATUS={line}")

    def stops(self) -> None:
        """Report a requested stop, with the reason if the stopping process left one."""
        why = ""
        try:
            why = statuses.take_reason(self._status.pid, self._status.process)
        except OSError as error:
            self.say(f"warning: the reason for the stop could not be read ({error})")
        self.say(f"stopped: {why}" if why else "stopped")
        self._recorded_end("stopped", exit_code=0, detail=why or None)
        if self._folder is not None:
            try:
                statuses.remove_status(self._status, self._folder)
            except OSError as error:
                self.say(f"warning: the status file could not be removed ({error})")

    def fails(self, why: str, exit_code: int | None) -> None:
        """Report that the server ended by itself or had to be stopped; the status file stays, with the reason."""
        self._change(error=why, ended_at=_now())
        was_killed = exit_code is not None and exit_code > 128
        self._recorded_end("killed" if was_killed else "failed", exit_code=exit_code, detail=why.splitlines()[0])

    def _change(self, **changes: object) -> None:
        self._status = replace(self._status, **changes)  # type: ignore[arg-type]
        if self._folder is None:
            return
        try:
            statuses.write_status(self._status, self._folder)
        except OSError as error:
            folder, self._folder = self._folder, None
            self.say(f"warning: other programs cannot see this server's state: {folder}: {error.strerror}")

    def _recorded_start(self) -> int | None:
        prepared = self._prepared
        try:
            with using_registry():
                from overspill.registry import end_lost_runs, open_registry, start_run

                with open_registry(wait_seconds=_WAIT_S) as registry:
                    end_lost_runs(registry)
                    name = _registered_name(registry, prepared)
                    command = prepared.command
                    run = start_run(registry, name, command, pid=os.getpid(), log_file=self._status.log_file)
                    return run.id
        except NoRegistry as error:
            self.say(f"warning: this run is not recorded: {error}")
            return None

    def _recorded_end(self, end: str, *, exit_code: int | None, detail: str | None = None) -> None:
        if (run_id := self._status.run_id) is None:
            return
        try:
            with using_registry():
                from overspill.registry import RunEnd, end_run, open_registry

                kind: RunEnd = RunEnd(end)
                with open_registry(wait_seconds=_WAIT_S) as registry:
                    end_run(registry, run_id, kind, exit_code=exit_code, detail=detail)
        except NoRegistry as error:
            self.say(f"warning: how this run ended is not recorded: {error}")


def _registered_name(registry: "Registry", prepared: Prepared) -> str:
    """Name for the run's record: a service names a model by its source, yet serves it under its registry name."""
    from overspill.registry import UnknownModel, get_model

    try:
        model = get_model(registry, prepared.served_name)
    except UnknownModel:
        return prepared.name
    return model.name if model.settings.source == prepared.model else prepared.name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def notify(*lines: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send notices to systemd (sd_notify): a service counts as started when the server answers, not when it begins to
    load. No-op without a service manager; only a warning if it no longer listens."""
    path = environment.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notices:
            # "@" stands for the zero byte that begins an abstract name.
            notices.sendto("\n".join(lines).encode(), f"\0{path[1:]}" if path[0] == "@" else path)
    except OSError as error:
        print(f"overspill: warning: systemd could not be notified ({error})", file=sys.stderr, flush=True)
