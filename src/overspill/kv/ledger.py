"""The ledger of a GPU: which engine has how much of its memory under KV, has been granted, and would use.

A small file that every engine of the GPU and the manager map. Each number has one writer: the manager writes grants,
an engine its own row. So no lock is held while anything runs; only taking a row needs one. Numbers are 8 bytes at
multiples of 8, which are written and read whole.
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
_MAGIC = 0x6F7673_6C6564_01  # and the version of the format
_FIELDS = ("pid", "started", "granted", "held", "used", "wanted", "floor", "most", "weight")
_ROW = 16  # numbers: room for more fields
_HEADER = 16
_BYTES = 8 * (_HEADER + NUM_ROWS * _ROW)


class Account(NamedTuple):
    """An engine's row. Sizes are bytes."""

    pid: int
    started: int
    """When, in the kernel's ticks: numbers of processes are used again."""
    granted: int
    """By the manager; 0 if none has granted anything yet."""
    held: int
    """Memory under the engine's KV, which it never raises above what was granted."""
    used: int
    """Of this, KV of running requests."""
    wanted: int
    """What running and waiting requests would use."""
    floor: int
    """Without this much the engine could not answer its longest request."""
    most: int
    weight: int
    """Memory that nobody needs is divided by these."""


class Ledger:
    """The file, mapped; made if there is none."""

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
        """Of engines that live, by row."""
        found = {row: self.read(row) for row in range(NUM_ROWS)}
        return {row: one for row, one in found.items() if one.pid and started_at(one.pid) == one.started}

    def read(self, row: int) -> Account:
        start = _HEADER + row * _ROW
        return Account(*self._numbers[start : start + len(_FIELDS)])

    def write(self, row: int, **numbers: int) -> None:
        for name, number in numbers.items():
            self._numbers[_HEADER + row * _ROW + _FIELDS.index(name)] = number

    def take(self, pid: int, *, held: int, floor: int, most: int, weight: int) -> int:
        """A row for an engine. Rows of dead engines are free."""
        with self._locked():
            living = self.accounts()
            free = next((row for row in range(NUM_ROWS) if row not in living), None)
            if free is None:
                raise OverspillError(f"{self.path} has rows for {NUM_ROWS} engines of a GPU, and all are taken")
            self.write(free, pid=0, granted=0, used=0, held=held, wanted=held, floor=floor, most=most, weight=weight)
            # Last: with these it counts.
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
    """When a process began; None for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None
