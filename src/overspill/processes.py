"""Living processes, as /proc tells of them: those of a session, those below a process, and which is which.

Standard library only: the guard is one of the processes of every server, and should stay small.
"""

import contextlib
import fcntl
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

# How /proc says that a process is gone, or not for us to see. Another error, as that no more files can be opened, says
# nothing about it.
_GONE = (FileNotFoundError, NotADirectoryError, PermissionError, ProcessLookupError)
# Of a handle (linux/pidfd.h): the mask, 13 fields that are not asked for, and the wait status.
_PIDFD_INFO = struct.Struct("QQ11Ii")
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC000FF0B | _PIDFD_INFO.size << 16, 1 << 3


class Process(NamedTuple):
    pid: int
    state: str
    parent: int
    session: int


def processes() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(*_GONE, IndexError):
            # The name is in brackets and may hold spaces and brackets, so fields are counted from the last one.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            yield Process(int(entry.name), fields[0], int(fields[1]), int(fields[3]))


def identity(pid: int) -> str | None:
    """Boot and start time of a living process: numbers of processes are used again."""
    with contextlib.suppress(*_GONE, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else f"{boot()}:{fields[19]}"
    return None


@cache
def boot() -> str:
    """The machine's, since which it runs."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def in_session(session: int) -> list[int]:
    return [one.pid for one in processes() if one.session == session and one.state not in "ZX"]


def below(pid: int) -> list[int]:
    """Children, and theirs."""
    children: dict[int, list[Process]] = {}
    for one in processes():
        children.setdefault(one.parent, []).append(one)
    found, level = [], [pid]
    while level:
        next_level = [one for parent in level for one in children.get(parent, ())]
        found += [one.pid for one in next_level if one.state not in "ZX"]
        level = [one.pid for one in next_level]
    return found


def title_of(pid: int) -> str:
    """First word of its command line, which a process may have replaced by a name; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    return ""


def exit_code_of(pid: int, handle: int) -> int | None:
    """Of a process that has ended and is another one's child, by its number and pidfd; negative is a signal's number.

    /proc knows until the parent has asked for it, and Linux 6.15 afterwards too; None where neither does.
    """
    with contextlib.suppress(*_GONE, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[49]))
    with contextlib.suppress(OSError):
        asked = _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13)
        mask, *_, status = _PIDFD_INFO.unpack(fcntl.ioctl(handle, _PIDFD_GET_INFO, asked))
        if mask & _PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(status)
    return None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def kill(pids: list[int], sign: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def wait_until_none(living: Callable[[], list[int]], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while living():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
