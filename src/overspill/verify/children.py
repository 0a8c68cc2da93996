"""Child processes for engines: forked from one that loaded vLLM once, and always terminated with what they started."""

import importlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from overspill.planning.arguments import CONTRADICTING_VARIABLES
from overspill.processes import in_session, kill, wait_until_none

# A GPU's engine may compile for minutes before it answers, so this limit is for hung engines and not for slow ones.
_SILENCE_S = 1800.0
_LAST_LINES = 3
# For a killed engine's processes to be gone.
_GRACE_S = 10
_SHARED_MEMORY = "/dev/shm/"
# Queues of multiprocessing.shared_memory, and collectives of vLLM's CPU platform; none of them are Overspill's.
_BETWEEN_RANKS = ("psm_", "vllm_dist_")


Hear = Callable[[Any], None]


class ChildDied(Exception):
    """The work could not be done, and why: its own error, or the last lines of its log if it ended without one."""


class Children:
    """Runs functions of `module`, which the process that is forked has loaded, one at a time, each in a child.

    A function gets `say` after its arguments: what it says reaches the parent at once, the result in the end.
    """

    def __init__(self, module: str, environment: Mapping[str, str], *, have_children: bool = False) -> None:
        self._module, self._have_children = module, have_children
        self._folder = tempfile.TemporaryDirectory(prefix="overspill-children-")
        self.log = Path(self._folder.name) / "log"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([module])
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

    def run(self, work: str, *args: Any, hear: Hear = lambda said: None, seconds: float = _SILENCE_S) -> Any:
        """The function's result; `hear` gets what it says meanwhile."""
        with self._started(work, args) as (_, pipe):
            return self._result(pipe, hear, time.monotonic() + seconds)

    def kill_under_way(self, work: str, *args: Any) -> str:
        """Kill the child as soon as it says something. What outlived it; empty if nothing did."""
        with self._started(work, args) as (process, pipe):
            kind, _ = self._next(pipe, time.monotonic() + _SILENCE_S)
            if kind == "done":
                raise ChildDied("it ended before it was killed")
            leader = process.pid or 0
            files = {path for pid in in_session(leader) for path in _shared_memory(pid)}
            process.kill()
            # A killed process gives back its memory first, and its own children are notified of its end.
            wait_until_none(lambda: in_session(leader), _GRACE_S)
            process.join(_GRACE_S)
            if process.exitcode not in (None, -signal.SIGKILL):
                # It crashed in the moment before: whatever is left or not, the kill did not do that.
                self._result(pipe, lambda said: None, time.monotonic() + _GRACE_S)
                raise ChildDied("it ended before it was killed")
            left = [f"process {pid}" for pid in in_session(leader)]
            # What vLLM leaves behind when ranks are killed, whoever runs beside it.
            for path in (path for path in files if path.name.startswith(_BETWEEN_RANKS)):
                path.unlink(missing_ok=True)
            left += [str(path) for path in sorted(files) if path.exists()]
            return f"after the kill: {', '.join(left)}" if left else ""

    @contextmanager
    def _started(self, work: str, args: tuple[Any, ...]) -> Iterator[tuple[BaseProcess, Connection]]:
        self.log.write_text("")
        ours, theirs = self._context.Pipe()
        given = (self._module, work, args, theirs, self.log)
        # A daemon is ended even if this process is interrupted while it starts; it may not have children, though.
        process = self._context.Process(target=_live, args=given, daemon=not self._have_children)
        process.start()
        theirs.close()
        assert process.pid is not None
        try:
            yield process, ours
        finally:
            ours.close()
            process.join(timeout=1)
            process.kill()
            kill(in_session(process.pid))
            process.join()

    def _result(self, pipe: Connection, hear: Hear, deadline: float) -> Any:
        while True:
            kind, said = self._next(pipe, deadline)
            if kind == "done":
                return said
            hear(said)

    def _next(self, pipe: Connection, deadline: float) -> tuple[str, Any]:
        """What it says next, or what its log says where it ended without a word, as for want of memory."""
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise ChildDied("it did not end in time, and was killed")
        try:
            kind, said = pipe.recv()
        except (EOFError, OSError):  # an OSError where it ended in the middle of a word
            raise ChildDied(f"its process ended; the last it wrote: {self._last_lines()}") from None
        if kind == "died":
            raise ChildDied(said)
        return kind, said

    def _last_lines(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LAST_LINES:]) or "nothing"


def _live(module: str, work: str, args: tuple[Any, ...], pipe: Connection, log: Path) -> None:
    """Entry point of the child."""
    os.setsid()  # what it starts is found, and ended, with it; and a Ctrl-C is the parent's to handle
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    try:
        result = getattr(importlib.import_module(module), work)(*args, lambda said: pipe.send(("event", said)))
        pipe.send(("done", result))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("died", _reason(error)))
    # An engine's threads must not keep the process: all is said.
    os._exit(0)


def _end_with_parent(pipe: Connection) -> None:
    """Nobody waits for an answer, and an engine holds a GPU's memory."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)


def _reason(error: BaseException) -> str:
    """The first line of the cause: vLLM wraps its reasons."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
