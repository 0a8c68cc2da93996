"""The process between serve and vLLM: whatever ends serve ends all that was started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill.processes import below, in_session

GUARD = [sys.executable, "-P", "-m", "overspill.serve.guard"]
# Starts a child of its own, which leaves its session, and ends or not when asked to.
FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; print("up", flush=True); time.sleep(99)'],
                         start_new_session=True, stdout=subprocess.PIPE)
if sys.argv[1] == 'stubborn':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(child.stdout.readline().decode(), end='', flush=True)
if sys.argv[1] != 'dies':
    time.sleep(99)
time.sleep(1)
sys.exit(3)
"""


def guarded(kind: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    guard = subprocess.Popen(
        [*GUARD, sys.executable, "-c", FAMILY, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert guard.stdout is not None and guard.stdout.readline() == b"up\n"
    return guard, below(guard.pid)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(_lives(pid) for pid in pids):
        time.sleep(0.05)
    assert not [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["obedient", "stubborn"])
def test_closing_the_lifeline_ends_children_in_other_sessions(kind: str) -> None:
    guard, family = guarded(kind)
    assert len(family) == 2
    assert guard.stdin is not None and guard.stdout is not None
    guard.stdin.close()
    code = guard.wait(timeout=60)
    assert code == 128 + (signal.SIGTERM if kind == "obedient" else signal.SIGKILL)
    assert_gone(family)
    guard.stdout.close()


def test_the_guard_exits_with_the_servers_code_and_ends_orphans() -> None:
    guard, family = guarded("dies")
    assert guard.wait(timeout=60) == 3
    assert_gone(family)
    assert guard.stdin is not None and guard.stdout is not None
    guard.stdin.close()
    guard.stdout.close()


def test_a_guard_that_is_killed_takes_the_server_with_it() -> None:
    guard, family = guarded("obedient")
    server = next(pid for pid in family if pid in in_session(guard.pid))
    guard.kill()
    guard.wait()
    assert guard.stdin is not None and guard.stdout is not None
    guard.stdin.close()
    guard.stdout.close()
    assert_gone([server])
    for pid in set(family) - {server}:  # beyond the guard's reach: it was in no session of ours
        os.kill(pid, signal.SIGKILL)


# A server with an engine core as vLLM names it, which ends as it is told to; the server hangs, as vLLM's may.
WITH_CORE = """
import os, signal, subprocess, sys, time
core = subprocess.Popen(['VLLM::EngineCore', '-c', 'import sys, time; print("up", flush=True); time.sleep(1); '
                         + sys.argv[1] + '; time.sleep(99)'], executable=sys.executable)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(99)
"""
ENDS = {
    "killed": ("import os; os.kill(os.getpid(), 9)", 128 + 9, "was killed by SIGKILL"),
    "crashed": ("import os; os.kill(os.getpid(), 11)", 128 + 11, "was killed by SIGSEGV"),
    "failed": ("sys.exit(3)", 3, "ended with exit code 3"),
    # A process that the core forks bears its name until it gets one of its own.
    "forked": (
        "import os; os.fork() or os._exit(time.sleep(1) or 0); time.sleep(3); sys.exit(3)",
        3,
        "ended with exit code 3",
    ),
    # The server is killed then, as it does not end when it is asked to.
    "asked to end": ("sys.exit(0)", 128 + 9, "ended without an error"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_dead_core_ends_a_server_that_hangs_and_says_how(name: str) -> None:
    statement, code, how = ENDS[name]
    guard = subprocess.Popen(
        [*GUARD, sys.executable, "-c", WITH_CORE, statement], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True, text=True,
    )  # fmt: skip
    assert guard.stdout is not None and guard.stdout.readline() == "up\n"
    family = below(guard.pid)
    assert guard.stdin is not None
    with guard.stdin, guard.stdout:
        told = guard.stdout.read()  # until all have ended that could write there
        assert guard.wait(timeout=60) == code and len(family) == 2
    (core,) = [pid for pid in family if f"process {pid})" in told]
    assert told == f"overspill: the engine core (process {core}) {how}; OOM kills meanwhile: 0\n"
    assert_gone(family)


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """With 200 MiB of RAM."""
    base = Path("/sys/fs/cgroup/memory")
    folder, limit = base / f"overspill-{os.getpid()}", "memory.limit_in_bytes"
    if not base.exists():
        folder, limit = Path("/sys/fs/cgroup") / folder.name, "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(200 << 20))
    except OSError as error:
        pytest.skip(f"a cgroup with less RAM cannot be made here: {error}")
    else:
        yield folder
    finally:
        if folder.exists():
            folder.rmdir()


def test_the_kernels_oom_killer_is_told_from_others(small_cgroup: Path) -> None:
    grows = "taken = [bytearray(1 << 20) for _ in range(1000)]"
    guard = subprocess.Popen(
        ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', small_cgroup, *GUARD, sys.executable, "-c", WITH_CORE,
         grows], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    assert guard.stdin is not None and guard.stdout is not None
    with guard.stdin, guard.stdout:
        assert "was killed by SIGKILL; OOM kills meanwhile: 1\n" in guard.stdout.read()
        assert guard.wait(timeout=60) == 128 + signal.SIGKILL
