"""One process for each experiment: two would start an engine each for the same repeat, and share a log."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from overspill.experiment.errors import CannotCompare


@contextlib.contextmanager
def locked(folder: Path, experiment: str) -> Iterator[None]:
    """Raises if another process has it. Whatever ends this one, the kernel gives the lock back."""
    path = folder / f"{experiment}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CannotCompare(
            f"{path} cannot be written: {error.strerror}. It keeps two processes from measuring the same experiment; "
            "make the folder writable, or name another with XDG_STATE_HOME"
        ) from error
    try:
        _lock(handle, path, experiment)
        # Who has it, for those that are refused. The file stays: removed and made anew, it could be locked twice.
        os.truncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, path: Path, experiment: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(handle, 20, 0).decode(errors="replace").strip()
        who = f"process {pid}" if pid else "another process"
        raise CannotCompare(
            f"experiment {experiment} is being measured by {who}; wait until it ends, or stop it with Ctrl-C or "
            "SIGTERM, and resume then"
        ) from None
    except OSError as error:
        raise CannotCompare(
            f"{path} cannot be locked: {error.strerror}; name a folder on a disk of this machine with XDG_STATE_HOME"
        ) from error
