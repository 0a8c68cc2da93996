"""Processes for engines: forked from one that has loaded vLLM once, and gone with everything they started."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from overspill.planning.arguments import CONTRADICTING_VARIABLES
from overspill.processes import in_session, kill, wait_until_none
from overspill.verify.life import Died, Event, Job, Played, Reference, live

# A GPU's engine may compile for minutes before it answers, so this is no limit for slow ones but for hung ones.
_SILENCE_S = 1800
_LAST_LINES = 3
# For a killed engine's processes to be gone.
_GRACE_S = 10
_SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True, slots=True)
class Killed:
    """It was under way, and we ended it."""

    left_behind: str
    """What outlived it; empty if nothing did."""


class Children:
    """Starts one life at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="overspill-verify-")
        self.log = Path(self._folder.name) / "log"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["overspill.verify.engine"])
        with _environment(environment), _redirected(self.log):
            forkserver.ensure_running()

    def close(self) -> None:
        # No public way ends it, and the next must have its own environment. It is killed, since it would wait for a
        # child that was being started when this process was interrupted, and that child for this process.
        server: Any = forkserver._forkserver
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
        self._folder.cleanup()

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: Job) -> Reference | Played | Died:
        """A whole life."""
        with self._started(job) as (_, _, pipe):
            return self._result(pipe)

    def kill_under_way(self, job: Job) -> Killed | Died:
        """A life that is ended as soon as it says that it is under way."""
        with self._started(job) as (process, leader, pipe):
            told = self._next(pipe)
            if not isinstance(told, Event):
                return told if isinstance(told, Died) else Died("it ended before it was killed")
            files = {path for pid in in_session(leader) for path in _shared_memory(pid)}
            process.kill()
            # What is killed gives back its memory first, and a process that it started is told of its end.
            wait_until_none(lambda: in_session(leader), _GRACE_S)
            process.join(_GRACE_S)
            if process.exitcode not in (None, -signal.SIGKILL):
                # It crashed in the moment before: whatever is left or not, the kill did not do that.
                ended = self._result(pipe)
                return ended if isinstance(ended, Died) else Died("it ended before it was killed")
            left = [f"process {pid}" for pid in in_session(leader)]
            left += [str(path) for path in sorted(files) if path.exists()]
            return Killed(f"after the kill: {', '.join(left)}" if left else "")

    @contextmanager
    def _started(self, job: Job) -> Iterator[tuple[BaseProcess, int, Connection]]:
        self.log.write_text("")
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=live, args=(job, theirs, self.log), daemon=True)
        process.start()
        theirs.close()
        assert process.pid is not None
        try:
            yield process, process.pid, ours
        finally:
            ours.close()
            process.join(timeout=1)
            process.kill()
            kill(in_session(process.pid))
            process.join()

    def _result(self, pipe: Connection) -> Reference | Played | Died:
        while isinstance(told := self._next(pipe), Event):
            pass
        return told

    def _next(self, pipe: Connection) -> Reference | Played | Died | Event:
        """What it says next, or what its log says where it ended without a word, as for want of memory."""
        if not pipe.poll(_SILENCE_S):
            return Died(f"nothing was heard of it for {_SILENCE_S // 60} minutes")
        try:
            told: Reference | Played | Died | Event = pipe.recv()
        except (EOFError, OSError):  # an OSError where it ended in the middle of a word
            return Died(f"its process ended; the last it wrote: {self._last_lines()}")
        return told

    def _last_lines(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LAST_LINES:]) or "nothing"


def _shared_memory(pid: int) -> set[Path]:
    """Files in shared memory that a process has mapped: they outlive it unless somebody removes them."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {Path(line[line.index(_SHARED_MEMORY) :]) for line in lines if _SHARED_MEMORY in line}
    return set()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Of the process that children are forked from; it is read when vLLM is loaded."""
    before = dict(os.environ)
    os.environ.update(variables)
    for name in CONTRADICTING_VARIABLES:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _redirected(log: Path) -> Iterator[None]:
    """What vLLM says while it is loaded goes to the log, not into the table."""
    kept = [os.dup(1), os.dup(2)]
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
