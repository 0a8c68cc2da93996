"""vLLM's server as a child: started behind a guard, watched, and surely gone afterwards."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from overspill.launch import vllm as plugins
from overspill.processes import in_session, kill, wait_until_none
from overspill.serve.guard import PATIENCE_S, READY
from overspill.serve.log import Log

_SLACK_S = 15.0


class Engine:
    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, quiet: bool, log_file: Path | None
    ) -> None:
        self._plugins: tempfile.TemporaryDirectory[str] | None = None
        if not plugins.are_found():
            self._plugins = tempfile.TemporaryDirectory(prefix="overspill-plugins-")
            plugins.write_metadata(Path(self._plugins.name))
            environment = plugins.with_path(environment, Path(self._plugins.name))
        # A session of its own: a Ctrl-C is for us, and what belongs to the engine is known by it.
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "overspill.serve.guard", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=dict(environment),
        )  # fmt: skip
        assert self._guard.stdin is not None and self._guard.stdout is not None
        self._life_line = self._guard.stdin
        self.log = Log(self._guard.stdout, None if quiet else sys.stderr.buffer, log_file)
        self.was_asked_to_stop = False

    @property
    def session(self) -> int:
        return self._guard.pid

    def poll(self) -> int | None:
        """Exit code of the server; None while it lives."""
        return self._guard.poll()

    def ready(self) -> None:
        """From now on there may be requests to end well."""
        with contextlib.suppress(OSError, ValueError):
            self._life_line.write(READY)
            self._life_line.flush()

    def ask_to_stop(self) -> None:
        """May be called from a signal's handler."""
        self.was_asked_to_stop = True
        with contextlib.suppress(OSError, ValueError):
            self._life_line.close()

    def wait(self, timeout: float | None = None) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._guard.wait(timeout)
        return None

    def stop(self) -> None:
        """Until no process is left, the guard being alive or not."""
        self.ask_to_stop()
        self.wait(PATIENCE_S + _SLACK_S)
        while left := in_session(self.session):
            kill(left)
            wait_until_none(lambda: in_session(self.session), 1.0)
        self._guard.wait()
        if self._plugins is not None:
            self._plugins.cleanup()
