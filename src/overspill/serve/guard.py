"""The process between `overspill serve` and vLLM: when serve is gone, however it went, vLLM goes too.

`python -m overspill.serve.guard COMMAND…` runs the command until it ends, or until standard input is closed, which the
kernel does for a process that was killed; what is written there says that the server is ready. A death signal
(PR_SET_PDEATHSIG) alone would not do: it reaches the server only, and vLLM's engine, a child of the server, survives it
and keeps the GPU. The guard is a subreaper: what is orphaned below it becomes its child, and is found.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

from overspill.processes import below, kill, wait_until_none

# vLLM ends within a second or two; a worker inside a kernel may not. One that is still starting has nothing to save,
# and its server waits for it in vain.
PATIENCE_S, PATIENCE_WHILE_STARTING_S = 20.0, 3.0
READY = b"r"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def main(command: Sequence[str]) -> int:
    """Exit code of the command; 128 and the signal's number if it was killed."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for sign in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(sign, lambda *_: None)  # noted in the pipe
    # A terminal's Ctrl-C is for serve, which then closes our standard input.
    for sign in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    # preexec_fn is unsafe beside threads, of which there are none.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_in_server)  # noqa: PLW1509
    patience = PATIENCE_WHILE_STARTING_S
    while server.poll() is None:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready and signal.SIGTERM in os.read(woken, 512):
            break
        if 0 in ready:
            if not (told := os.read(0, 512)):
                break
            patience = PATIENCE_S if READY in told else patience
    return stop(server, patience)


def stop(server: subprocess.Popen[bytes], patience: float) -> int:
    """End the server and everything below us. vLLM's server ends its engine itself, and cleanly, if it is asked alone;
    a signal to the whole group would take the engine from under it."""
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
    """In the child, before it becomes the command: should the guard be killed, the server at least ends itself."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for sign in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
