"""The ledger of a GPU: how much memory each engine holds under its KV, has been granted, and would use.

A small file that the manager and every engine of the GPU map. Each number has one writer: the manager writes grants,
an engine the rest of its row. So only taking a row needs a lock. Numbers are 8 bytes at multiples of 8, so reads and
writes are atomic.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from overspill.kv.errors import OverspillError

NUM_ROWS = 64
_MAGIC = 0x6F7673_6C6564_01  # includes the version of the format
_FIELDS = ("pid", "started", "granted", "held", "used", "wanted", "floor", "most", "weight")
_ROW = 16  # numbers in a row, with room for more fields
_HEADER = 16
_BYTES = 8 * (_HEADER + NUM_ROWS * _ROW)


class Account(NamedTuple):
    """An engine's row; sizes are in bytes."""

    pid: int
    started: int
    """Start time of the process in the kernel's ticks, which tells reused pids apart."""
    granted: int
    """Memory granted by the manager; 0 until the first grant."""
    held: int
    """Memory under the engine's KV; the engine never grows it beyond the grant."""
    used: int
    """The part of `held` that running requests use."""
    wanted: int
    """Memory that running and waiting requests would use."""
    floor: int
    """Least memory with which the engine can answer its longest request."""
    most: int
    weight: int
    """Memory that no engine needs is divided in proportion to these."""


class Ledger:
    """The mapped ledger file, created if missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._locked():
                if os.fstat(self._file).st_size < _BYTES:
                    os.ftruncate(self._file, _BYTES)
                self._memory = mmap.mmap(self._file, _BYTES)
                self._numbers = memoryview(self._memory).cast("Q")
                if self._numbers[0] == 0:
                    self._numbers[0] = _MAGIC
        except BaseException:
            os.close(self._file)
            raise
        if self._numbers[0] != _MAGIC:
            self.close()
            raise OverspillError(
                f"{path} is not a ledger of this version of Overspill: remove it, or name another file"
            )

    def accounts(self) -> dict[int, Account]:
        """Accounts of live engines, by row."""
        found = {row: self.read(row) for row in range(NUM_ROWS)}
        return {row: one for row, one in found.items() if one.pid and started_at(one.pid) == one.started}

    def read(self, row: int) -> Account:
        start = _HEADER + row * _ROW
        return Account(*self._numbers[start : start + len(_FIELDS)])

    def write(self, row: int, **numbers: int) -> None:
        for name, number in numbers.items():
            self._numbers[_HEADER + row * _ROW + _FIELDS.index(name)] = number

    def take(self, pid: int, *, held: int, floor: int, most: int, weight: int) -> int:
        """Take a row that no live engine has, and return its number."""
        with self._locked():
            living = self.accounts()
            free = next((row for row in range(NUM_ROWS) if row not in living), None)
            if free is None:
                raise OverspillError(f"{self.path} has rows for {NUM_ROWS} engines of a GPU, all taken; stop one first")
            self.write(free, pid=0, granted=0, used=0, held=held, wanted=held, floor=floor, most=most, weight=weight)
            # Last: readers ignore a row until its pid and start time match a live process.
            self.write(free, started=started_at(pid) or 0)
            self.write(free, pid=pid)
        return free

    def leave(self, row: int) -> None:
        self.write(row, pid=0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._numbers.release()
        self._memory.close()
        os.close(self._file)


def started_at(pid: int) -> int | None:
    """Start time of a process in the kernel's ticks; None if it has ended, zombies included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None
