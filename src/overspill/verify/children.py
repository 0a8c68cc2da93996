"""Child processes for engines: forked from a process that loaded vLLM once, and always killed with descendants."""

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

# An engine on a GPU may compile for minutes before it answers, so this limit is for hung engines, not slow ones.
_SILENCE_S = 1800.0
_LAST_LINES = 3
# Time for a killed engine's processes to disappear.
_GRACE_S = 10
_SHARED_MEMORY = "/dev/shm/"
# Files of multiprocessing.shared_memory's queues and of vLLM's collectives on CPUs; none of them are Overspill's.
_BETWEEN_RANKS = ("psm_", "vllm_dist_")


Hear = Callable[[Any], None]


class ChildDied(Exception):
    """A child failed; the message is its own error, or the last lines of its log if it ended without one."""


class Children:
    """Runs functions of `module`, one at a time, each in a child forked from a process that has imported it.

    A function gets `say` after its arguments: its messages reach the parent at once, its result at the end.
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
        # The fork server has no public stop, and the next one needs its own environment. Kill it: it would wait for a
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
        """Call a function in a child and return its result; `hear` gets its messages meanwhile."""
        with self._started(work, args) as (_, pipe):
            return self._result(pipe, hear, time.monotonic() + seconds)

    def kill_under_way(self, work: str, *args: Any) -> str:
        """Kill the child at its first message, and describe what outlived it; empty if nothing did."""
        with self._started(work, args) as (process, pipe):
            kind, _ = self._next(pipe, time.monotonic() + _SILENCE_S)
            if kind == "done":
                raise ChildDied("it ended before it was killed")
            leader = process.pid or 0
            files = {path for pid in in_session(leader) for path in _shared_memory(pid)}
            process.kill()
            # A killed process first frees its memory; only then do its own children learn of its end.
            wait_until_none(lambda: in_session(leader), _GRACE_S)
            process.join(_GRACE_S)
            if process.exitcode not in (None, -signal.SIGKILL):
                # The child crashed just before, so the kill does not account for whatever is left.
                self._result(pipe, lambda said: None, time.monotonic() + _GRACE_S)
                raise ChildDied("it ended before it was killed")
            left = [f"process {pid}" for pid in in_session(leader)]
            # vLLM leaves these behind when ranks are killed, with or without Overspill.
            for path in (path for path in files if path.name.startswith(_BETWEEN_RANKS)):
                path.unlink(missing_ok=True)
            left += [str(path) for path in sorted(files) if path.exists()]
            return f"after the kill: {', '.join(left)}" if left else ""

    @contextmanager
    def _started(self, work: str, args: tuple[Any, ...]) -> Iterator[tuple[BaseProcess, Connection]]:
        self.log.write_text("")
        ours, theirs = self._context.Pipe()
        given = (self._module, work, args, theirs, self.log)
        # A daemon is terminated even if this process is interrupted while starting it, but may not have children.
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
        """The child's next message; raises with the end of its log if it died without one, as when out of memory."""
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise ChildDied("it did not end in time, and was killed")
        try:
            kind, said = pipe.recv()
        except (EOFError, OSError):  # OSError if the child died in the middle of a message
            raise ChildDied(f"its process ended; its last output: {self._last_lines()}") from None
        if kind == "died":
            raise ChildDied(said)
        return kind, said

    def _last_lines(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LAST_LINES:]) or "nothing"


def _live(module: str, work: str, args: tuple[Any, ...], pipe: Connection, log: Path) -> None:
    """Entry point of the child."""
    os.setsid()  # descendants are found and killed by session; Ctrl-C is left to the parent
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
    # The result is sent; an engine's threads must not keep the process alive.
    os._exit(0)


def _end_with_parent(pipe: Connection) -> None:
    """Exit when the parent is gone: nobody waits for an answer, and an engine holds a GPU's memory."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)


def _reason(error: BaseException) -> str:
    """First line of the root cause: vLLM wraps its errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _shared_memory(pid: int) -> set[Path]:
    """Shared-memory files that a process has mapped: they outlive it unless somebody removes them."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {Path(line[line.index(_SHARED_MEMORY) :]) for line in lines if _SHARED_MEMORY in line}
    return set()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the process that children are forked from; vLLM reads them when imported."""
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
    """Send output to the log while vLLM loads, so that it does not end up in the table."""
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
