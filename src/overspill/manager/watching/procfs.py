"""Files of /proc, read cheaply: kept open where they are read every second."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_ENOUGH = 1 << 16
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class OpenFile:
    """A file of the kernel's that is read again and again.

    One that is kept open costs a third of one that is opened anew. And one of a process never becomes that of another
    process with the same number: reading it fails once its process is gone.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        return os.pread(self._descriptor, _ENOUGH, 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Stat(NamedTuple):
    """Of /proc/PID/stat."""

    state: str
    parent: int
    session: int
    cpu_ticks: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        return self.state not in "ZX"


def parse_stat(text: bytes) -> Stat:
    # The name is in brackets and may hold spaces and brackets, so fields are counted from the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    cpu_ticks = int(fields[11]) + int(fields[12])
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), cpu_ticks, int(fields[19]))


def read_stat(pid: int) -> Stat | None:
    """None for a process that is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return parse_stat(file.read())
    return None


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_argv(pid: int) -> list[str]:
    """Empty for one that is gone, or of the kernel's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return [word.decode(errors="replace") for word in file.read(1 << 16).rstrip(b"\0").split(b"\0") if word]
    return []


def children_of_all() -> dict[int, list[int]]:
    """Parent to children, of every process."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is not None and stat.is_alive:
            children.setdefault(stat.parent, []).append(pid)
    return children


def tree(pid: int, children: dict[int, list[int]]) -> list[int]:
    """The process, and all below it."""
    found = [pid]
    for one in found:  # grows meanwhile
        found += children.get(one, ())
    return found


def kilobytes(text: bytes, names: Iterable[bytes]) -> dict[bytes, int]:
    """Bytes of lines such as `VmRSS:	  1234 kB`; what is not there is missing."""
    return {name: num_bytes for name in names for num_bytes in _line(text, name)}


def _line(text: bytes, name: bytes) -> Iterator[int]:
    at = 0 if text.startswith(name + b":") else text.find(b"\n" + name + b":")
    if at >= 0:
        yield int(text[text.index(b":", at) + 1 :].split(None, 1)[0]) * 1024
