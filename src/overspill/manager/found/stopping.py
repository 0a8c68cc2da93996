"""Stopping a vLLM server that Overspill did not start: only the very process that was shown, and only by its name."""

import os
import select
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack

from overspill.manager.errors import ManagerError
from overspill.manager.found.servers import owner_of, program_of, user_of
from overspill.manager.found.vllm_argv import is_titled, is_vllm, served_name
from overspill.manager.watching.procfs import children_of_all, read_argv, tree
from overspill.processes import identity

PATIENCE_S = 20.0


def stop_found(
    pid: int, expected: str, confirm_name: str, *, ours: Collection[int] = (), patience_s: float = PATIENCE_S
) -> bool:
    """Ends it and all below it, and says whether some had to be killed. Blocks for up to `patience_s` and a little.

    Refuses anything but a process of vLLM's that is still the one that was shown, is named by its name, is not one of
    `ours`, and is not the engine of a program that runs: what is asked for over the web must not become a way to end
    any process.
    """
    with ExitStack() as stack:
        handle = _handle(pid, stack)
        # With the handle open, the number cannot become another process's between this look and the signal.
        if handle is None or identity(pid) != expected:
            raise ManagerError(f"process {pid} has ended, or is another one by now; nothing was stopped. Look again")
        argv = read_argv(pid)
        children = children_of_all()
        if pid == os.getpid() or any(pid in tree(one, children) for one in ours) or not is_vllm(argv):
            raise ManagerError(f"process {pid} is no vLLM server that was found; nothing was stopped")
        if is_titled(argv) and (owner := owner_of(pid)) is not None:
            raise ManagerError(
                f"process {pid} is the engine of {program_of(owner)}, which is running; nothing was stopped. To "
                "end it, end that program"
            )
        if confirm_name != (name := served_name(argv)):
            raise ManagerError(
                f"to stop process {pid}, confirm with its name, {name!r}; {confirm_name!r:.100} is another. Nothing "
                "was stopped"
            )
        handles = {pid: handle}
        for below in tree(pid, children)[1:]:
            if (opened := _handle(below, stack)) is not None:
                handles[below] = opened
        return _end(handles, pid, patience_s)


def _handle(pid: int, stack: ExitStack) -> int | None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise ManagerError(f"process {pid} cannot be reached: {error.strerror}; nothing was stopped") from error
    stack.callback(os.close, handle)
    return handle


def _end(handles: Mapping[int, int], server: int, patience_s: float) -> bool:
    """vLLM's server ends its engine itself, and cleanly, if it is asked alone; what is left after that is killed."""
    _signal(server, handles[server], signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while alive := [pid for pid, handle in handles.items() if not _has_ended(handle)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    for pid in alive:
        _signal(pid, handles[pid], signal.SIGKILL)
    for pid in alive:
        if not _has_ended(handles[pid], 5.0):
            raise ManagerError(f"process {pid} was killed and has not ended: it hangs in the kernel, maybe in a driver")
    return bool(alive)


def _signal(pid: int, handle: int, sign: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(handle, sign)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ManagerError(
            f"process {pid} belongs to {user_of(pid) or 'another user'}, and may not be stopped by this one; stop it "
            "as that user"
        ) from error


def _has_ended(handle: int, wait_s: float = 0.0) -> bool:
    """The kernel makes a process's handle readable when it ends, also while nobody has waited for it yet."""
    waiting = select.poll()  # select() takes no number above 1023, and a busy manager has more files open
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(1000 * wait_s))
