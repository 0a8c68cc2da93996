"""The guard process between `overspill serve` and vLLM: ends all of vLLM once serve or vLLM's engine core is gone.

`python -m overspill.serve.guard COMMAND…` runs the command until it ends or standard input is closed, which the kernel
does when serve is killed; a byte written there says that the server is ready. A death signal (PR_SET_PDEATHSIG) alone
would not do: only the server receives it, while vLLM's engine, a child of the server, survives and keeps the GPU. The
guard is a subreaper, so orphans below it become its children and can be found.

vLLM's server may outlive its engine core: a starting server waits for the core for ever, and a serving one ends as if
all were well. So the guard watches the core's process and writes into vLLM's log how it ended.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

from overspill.kv.ram import num_oom_kills
from overspill.processes import below, exit_code_of, kill, read_process, signal_name, title_of, wait_until_none

# vLLM ends within a second or two, unless a worker is inside a kernel. A worker that is still starting has nothing to
# save, and its server waits for it in vain.
PATIENCE_S, PATIENCE_WHILE_STARTING_S = 20.0, 3.0
# With a disk, a stopping engine writes out its KV in RAM; slightly longer than `overspill.kv.plugin.StopTimeout`.
PATIENCE_WITH_DISK_S = 45.0
READY = b"r"
# A server whose core died still answers its clients and may end by itself; else it is terminated, and then killed.
_FAREWELL_S, _PATIENCE_WITHOUT_CORE_S = 1.0, 2.0
_LOOK_S = 0.5
# The kernel counts OOM kills but does not say when: those this long before the core's end are attributed to it.
_OOM_LOOK_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def main(command: Sequence[str]) -> int:
    """Run the command; return its exit code or its failed engine core's, or 128 plus a signal's number."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for sign in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(sign, lambda *_: None)  # the wakeup pipe records it
    # A terminal's Ctrl-C is for serve, which then closes our standard input.
    for sign in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    # preexec_fn is unsafe with threads; the guard has none.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_in_server)  # noqa: PLW1509
    patience, cores = PATIENCE_WHILE_STARTING_S, _Cores()
    while server.poll() is None:
        wait_s = _LOOK_S if patience == PATIENCE_WHILE_STARTING_S else _OOM_LOOK_S
        ready, _, _ = select.select([0, woken, *cores.handles], [], [], wait_s)
        if dead := cores.handles.keys() & set(ready):
            return _without_core(server, cores.write_end(dead.pop()))
        if woken in ready and signal.SIGTERM in os.read(woken, 512):
            break
        if 0 in ready:
            if not (message := os.read(0, 512)):
                break
            patience = patience_with(command) if READY in message else patience
        cores.look(is_starting=patience == PATIENCE_WHILE_STARTING_S or 0 in ready)
    return stop(server, patience)


def patience_with(command: Sequence[str]) -> float:
    """Seconds that a server started by the command may take to end."""
    return PATIENCE_WITH_DISK_S if any('"disk_bytes"' in word for word in command) else PATIENCE_S


class _Cores:
    """vLLM's engine cores below this process: one, or several with data parallelism."""

    def __init__(self) -> None:
        self.handles: dict[int, int] = {}  # PID by pidfd, which becomes readable when the process ends
        self._oom_kills = deque([num_oom_kills()], maxlen=2)
        self._counted_at = time.monotonic()

    def look(self, *, is_starting: bool) -> None:
        if time.monotonic() - self._counted_at >= _OOM_LOOK_S:
            self._oom_kills.append(num_oom_kills())
            self._counted_at = time.monotonic()
        if not is_starting:
            return
        for pid in _left():
            if pid not in self.handles.values() and _is_core(pid):
                try:
                    self.handles[os.pidfd_open(pid)] = pid
                except ProcessLookupError:  # gone already; vLLM notices a core that ends this early
                    continue

    def write_end(self, handle: int) -> int | None:
        """Log how a core ended, in words that overspill.serve.log parses; return its exit code, or None if unknown."""
        pid = self.handles[handle]
        code, before, now = exit_code_of(pid, handle), self._oom_kills[0], num_oom_kills()
        how = "is gone" if code is None else f"ended with exit code {code}" if code else "ended without an error"
        if code is not None and code < 0:
            how = f"was killed by {signal_name(-code)}"
        kills = "unknown" if before is None or now is None else now - before
        os.write(1, f"overspill: the engine core (process {pid}) {how}; OOM kills meanwhile: {kills}\n".encode())
        return code


def _is_core(pid: int) -> bool:
    """Whether vLLM gave the process a core's title, with any VLLM_PROCESS_NAME_PREFIX; a process forked by a core has
    that core's title until it gets its own."""
    process = read_process(pid)
    return process is not None and "::EngineCore" in title_of(pid) and "::EngineCore" not in title_of(process.parent)


def _without_core(server: subprocess.Popen[bytes], code: int | None) -> int:
    wait_until_none(lambda: [server.pid] if server.poll() is None else [], _FAREWELL_S)
    ended = stop(server, _PATIENCE_WITHOUT_CORE_S)
    return 128 - code if code is not None and code < 0 else code or ended


def stop(server: subprocess.Popen[bytes], patience: float) -> int:
    """End the server and every process below the guard; return the exit code. vLLM's server ends its engine cleanly if
    it alone gets the signal; a signal to the whole group would take the engine from under it."""
    if server.poll() is None:
        server.terminate()
    else:
        kill(_left(), signal.SIGTERM)
    wait_until_none(_left, patience)
    while left := _left():
        kill(left)
        wait_until_none(_left, 1.0)
    code = server.wait()
    return code if code >= 0 else 128 - code


def _left() -> list[int]:
    return below(os.getpid())


def _in_server() -> None:
    """Prepare the child before exec: should the guard be killed, at least the server gets a signal and ends itself."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for sign in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
