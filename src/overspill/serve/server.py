"""One vLLM server: started behind a guard, awaited, explained when it ends, and always terminated."""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from overspill.address import Address
from overspill.errors import CannotServe
from overspill.launch import vllm as plugins
from overspill.processes import in_session, kill, wait_until_none
from overspill.serve.engine_report import VARIABLE, Phase, Report, earliest, read
from overspill.serve.guard import READY, patience_with
from overspill.serve.log import Log, epitaph

_POLL_S = 0.2
_SLACK_S = 15.0


class Server:
    """Processes of one server and reports of its workers; leaving the context ends every process it started."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        address: Address,
        *,
        log_file: Path | None = None,
        show_log: bool = False,
        is_planned: bool = True,
    ) -> None:
        """Start the server. Without a plan `is_planned` is false, and advice on a failure names vLLM's own flags."""
        self.address, self.log_file, self.is_planned = address, log_file, is_planned
        self.phase = Phase.STARTING
        self.was_asked_to_stop = False
        self._patience_s = patience_with(command)
        self._began = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="overspill-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        environment = {**environment, VARIABLE: str(folder)}
        # Only serve notifies systemd: vLLM's processes are not the service's main process.
        environment.pop("NOTIFY_SOCKET", None)
        if not plugins.are_found():
            plugins.write_metadata(folder / "plugins")
            environment = plugins.with_path(environment, folder / "plugins")
        # A session of its own: Ctrl-C reaches only serve, and the session identifies the server's processes.
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "overspill.serve.guard", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment,
        )  # fmt: skip
        assert self._guard.stdin is not None and self._guard.stdout is not None
        self._life_line = self._guard.stdin
        self._log = Log(self._guard.stdout, sys.stderr.buffer if show_log else None, log_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def session(self) -> int:
        """Session ID of all processes of the server."""
        return self._guard.pid

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def reports(self) -> list[Report]:
        return read(Path(self._folder.name))

    def starting(self) -> Iterator[list[Report]]:
        """Yield the workers' reports repeatedly until the server answers or is asked to stop; raise if it ends."""
        while not self.was_asked_to_stop:
            self.require_alive()
            reports = self.reports
            self.phase = earliest(reports)
            yield reports
            answer = self.address.get("/health")
            if answer is not None and answer[0] == 200:
                self.phase = Phase.READY
                # From now on a stop may have requests to finish.
                with contextlib.suppress(OSError, ValueError):
                    self._life_line.write(READY)
                    self._life_line.flush()
                return
            time.sleep(_POLL_S)

    def pinning(self) -> Iterator[list[Report]]:
        """Yield reports while RAM is filled and pinned, also after the server answers; the last one shows its end."""
        while self.poll() is None and not self.was_asked_to_stop:
            reports = self.reports
            yield reports
            if all(report.is_prepared for report in reports):
                return
            self.wait(_POLL_S)

    def poll(self) -> int | None:
        """Exit code of the server; None while it lives."""
        return self._guard.poll()

    def wait(self, timeout: float) -> int | None:
        """Wait up to `timeout` seconds for the server's end; return its exit code, or None if it still lives."""
        if self.poll() is not None:
            return self.poll()
        handle = os.pidfd_open(self._guard.pid)  # subprocess would poll 20 times a second
        try:
            select.select([handle], [], [], timeout)
        finally:
            os.close(handle)
        return self.poll()

    def require_alive(self) -> None:
        if self.poll() is not None:
            raise CannotServe(self.epitaph())

    def epitaph(self) -> str:
        """Why the server ended, with the last lines of its log."""
        during = f"after {self.seconds:.0f} s" + (f" while {self.phase}" if self.phase is not Phase.READY else "")
        log = "its log" if self.log_file is None else str(self.log_file)
        return epitaph(self.poll(), self._log.lines(), during=during, log=log, is_planned=self.is_planned)

    def ask_to_stop(self) -> None:
        """Request a stop without waiting; safe in a signal handler."""
        self.was_asked_to_stop = True
        with contextlib.suppress(OSError, ValueError):
            self._life_line.close()

    def stop(self) -> None:
        """Stop the server and wait until no process is left, whether the guard is alive or not."""
        self.ask_to_stop()
        self.wait(self._patience_s + _SLACK_S)
        while left := in_session(self.session):
            kill(left)
            wait_until_none(lambda: in_session(self.session), 1.0)
        self._guard.wait()
        self._folder.cleanup()
