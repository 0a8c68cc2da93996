"""Child processes in groups of their own: started, waited for, and surely gone afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# The error of a life that ended because the script was asked to.
STOPPED = "stopped"


def start(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a new process group, its output in `log`.

    A group and not a session: where a command is ended by ending its session, the engine must go with it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        return subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            process_group=0, env={**os.environ, **(env or {})},
        )  # fmt: skip


class Forked:
    """A function running in a fork of this process, as the leader of a new process group.

    What is imported here need not be imported there: vLLM takes twenty seconds.
    """

    def __init__(self, run: Callable[[], None], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = multiprocessing.get_context("fork").Process(target=_run_in_group, args=(run, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._process.exitcode


def _run_in_group(run: Callable[[], None], log: Path) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(sink, stream)
    run()


def run_to_end(name: str, work: Callable[[], None], log: Path, seconds: float) -> dict[str, Any]:
    """One engine life from start to end, whatever becomes of it: how long it took, and what went wrong if anything."""
    began = time.monotonic()
    child = Forked(work, log)
    error = None
    try:
        code = child.wait(timeout=seconds)
        error = f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        error = f"killed after {seconds:.0f} s"
    except SystemExit:
        # This process was asked to end; what the life has measured is kept all the same.
        error = STOPPED
    left = stop(child)
    outcome: dict[str, Any] = {"seconds": time.monotonic() - began, "error": error}
    if left:
        outcome["processes_left"] = left
    if error:
        outcome["log_tail"] = tail(log)
        print(f"{name}: {error}; last lines of {log}:", *outcome["log_tail"][-15:], sep="\n", flush=True)
    return outcome


def exit_on_sigterm() -> None:
    """Let `finally` clauses run, and so stop the children, when this process is asked to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def stop(child: subprocess.Popen[bytes] | Forked, patience: float = 20.0) -> list[int]:
    """End the child's whole group; returns the pids that were left even after SIGKILL.

    vLLM's engine core is a child of the child: killing only the leader would leave it holding the GPU.
    """
    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        if not members(child.pid):
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        _wait_until_empty(child, seconds)
    child.wait(timeout=10)
    return members(child.pid)


def members(group: int) -> list[int]:
    """Living (not zombie) processes of a process group."""
    return [pid for pid, state, member_of in _processes() if member_of == group and state not in "ZX"]


def resident_bytes(group: int) -> int:
    """RSS of a whole group; shared pages are counted in each process that maps them."""
    total = 0
    for pid in members(group):
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def tail(log: Path, lines: int = 40) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []


def _wait_until_empty(child: subprocess.Popen[bytes] | Forked, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        child.poll()  # reaps the leader, which would otherwise stay as a zombie
        if not members(child.pid):
            return
        time.sleep(0.1)


def _processes() -> Iterator[tuple[int, str, int]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            # The command name is in brackets and may hold spaces, so count fields from the last bracket.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            yield int(entry.name), fields[0], int(fields[2])
