"""The loan: GPU blocks use the window's memory while the window does not need it.

The window must hold two layers of every spilled block in use, and usually few are in use. The window and the last GPU
blocks are divided into units. Units move when a request does not fit the present division: to GPU blocks if the request
is alone and then needs less RAM or none; to the window if the request is too long otherwise. If running requests block
such a move for a while, they are preempted, and memory is divided as at the start. Blocks without memory are held out
of vLLM's free queue.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overspill.kv.held_out import HeldOut
from overspill.kv.spill.geometry import LentUnits, mapped_units
from overspill.kv.vllm_api import BlockPool, KVCacheBlock

if TYPE_CHECKING:
    from overspill.kv.spill.placement import TieredQueue

# One in this many spilled blocks is left to later requests.
_HEADROOM = 8
# Requests keep their blocks in the window's memory for this long after another request began to wait for it.
_PATIENCE_S = 2.0
# A waiting request that has not asked again for this long is gone, or has found room.
_FORGOTTEN_S = 1.0


@dataclass(frozen=True, slots=True)
class Room:
    """Free blocks under the present division, and the units of the window that must stay."""

    num_window: int
    free_resident: int
    free_spilled: int
    least_window: int = 0
    """Units of the window in use."""


def choose_window(units: LentUnits, room: Room, *, need: int, spare: int, may_lower: bool) -> int:
    """Units of the window with which `need` blocks are free; all units if no number suffices. With `may_lower`, the
    number may also fall: as few blocks as possible are then spilled, and `spare` more stay free for later."""

    def resident(num_window: int) -> int:
        more = units.beside(num_window) - units.beside(room.num_window)
        return room.free_resident + more * units.num_blocks

    def both(num_window: int) -> int:
        return resident(num_window) + room.free_spilled + units.covered(num_window) - units.covered(room.num_window)

    now, most = room.num_window, units.window_count
    if not may_lower:
        return next((number for number in range(now, most + 1) if both(number) >= need), most)
    kept = min(now, -(-units.geometry.num_spilled // _HEADROOM // units.num_spilled))
    lowest = max(room.least_window, kept)
    for number in range(now, lowest - 1, -1):  # the smallest change with which all of it fits on the GPU
        if resident(number) >= need + spare:
            return number
    spare += units.geometry.num_spilled // _HEADROOM
    return next((number for number in range(lowest, most + 1) if both(number) >= need + spare), most)


class Loan:
    """Scheduler's side of the loan: decides which units have memory."""

    def __init__(self, units: LentUnits, pool: BlockPool, queue: "TieredQueue") -> None:
        self.units, self._pool, self._queue = units, pool, queue
        # An engine starts with nothing lent: the window has all of its memory.
        self._window = set(range(units.window_count))
        self._resident: set[int] = set()
        self._out = HeldOut(pool)
        self._leaving: set[int] = set()  # GPU units whose free blocks are held out until all their blocks are free
        self.is_taking_back = False  # reclaiming everything lent: units leave as their blocks become free
        self._asked_at, self._waited_since = -_FORGOTTEN_S, 0.0  # last and first request for memory in use
        self._is_changed = False
        for unit in range(units.count):
            self._out.take(self._blocks(units.blocks(unit)))

    @property
    def num_resident(self) -> int:
        """GPU blocks that have memory."""
        return self.units.num_fixed + len(self._resident) * self.units.num_blocks

    @property
    def num_spilled(self) -> int:
        """Spilled blocks for which the window has memory."""
        return sum(len(self.units.spilled(unit)) for unit in self._window)

    @property
    def window_bytes(self) -> int:
        return self.units.geometry.num_halves * self.num_spilled * self.units.geometry.page_bytes

    def has_memory(self, block_id: int) -> bool:
        return block_id not in self._out.ids

    def take_change(self) -> frozenset[int] | None:
        """Units that have memory from the next step on; None if unchanged since the last call."""
        is_changed, self._is_changed = self._is_changed, False
        return mapped_units(self.units, self._resident, self._window) if is_changed else None

    def make_room(
        self, need: int, spare: int, hits: Sequence[KVCacheBlock], kept: Collection[int], *, may_lower: bool,
        is_idle: bool,
    ) -> None:  # fmt: skip
        """Move units for a request that needs `need` blocks and finds too few on the GPU. `hits` are cached blocks that
        the request is about to use; blocks in `kept`, and blocks in use, keep their memory. `is_idle`: nothing runs."""
        if self.is_taking_back:
            return
        self._stay()
        idle = [block.block_id for block in hits if not block.ref_cnt and not block.is_null]
        num_resident = self.units.geometry.num_resident
        resident_hits = sum(number < num_resident for number in idle)
        # Scan the spilled blocks only for a request that may shrink the window, not in each pass while one waits.
        in_use = [unit for unit in self._window if may_lower and self._num_used(self.units.spilled(unit), kept)]
        room = Room(
            len(self._window), self._queue.num_free_resident - resident_hits,
            self._queue.num_free_spilled - (len(idle) - resident_hits), len(in_use),
        )  # fmt: skip
        used = self.num_resident + self.num_spilled - room.free_resident - room.free_spilled
        number = choose_window(self.units, room, need=need, spare=spare, may_lower=may_lower)
        if number < len(self._window):
            self._shrink_window(len(self._window) - number, in_use)
            self._grow_resident()
        elif number > len(self._window):
            self._shrink_resident(len(self._resident) - self.units.beside(number), kept)
            self._grow_window(number)
            # Worth waiting only if the request fits beside the running ones once memory is divided as at the start. If
            # none runs, nothing but the request's own hits can keep the window small, and they are given up then.
            fits = self.units.num_fixed + self.units.geometry.num_spilled - used >= need
            if (fits or is_idle) and len(self._window) < number:
                self._wait()

    def _wait(self) -> None:
        now = time.monotonic()
        if now - self._asked_at >= _FORGOTTEN_S:
            self._waited_since = now
        self._asked_at = now

    @property
    def is_overdue(self) -> bool:
        """Whether a request has waited too long for lent memory."""
        is_waiting = time.monotonic() - self._asked_at < _FORGOTTEN_S
        return is_waiting and self._asked_at - self._waited_since >= _PATIENCE_S

    @property
    def lent(self) -> set[int]:
        """GPU blocks in memory lent by the window."""
        return {number for unit in self._resident for number in self.units.blocks(unit)}

    def take_back(self, kept: Collection[int]) -> None:
        """Reclaim all lent memory; units with blocks in use or in `kept` follow in later passes. Lent blocks lose their
        hashes at once, so nothing in them is hit again."""
        self._stay()
        self._out.forget(self._blocks(self.lent))
        self._asked_at, most = -_FORGOTTEN_S, self.units.window_count
        self._shrink_resident(len(self._resident) - self.units.beside(most), kept)
        self._grow_window(most)
        self.is_taking_back = len(self._window) < most

    def _shrink_window(self, count: int, in_use: Collection[int]) -> None:
        idle = self._window.difference(in_use)
        for unit in sorted(idle, key=lambda unit: (self._num_cached(self.units.spilled(unit)), -unit))[:count]:
            self._out.take(self._blocks(self.units.spilled(unit)))
            self._window.remove(unit)
            self._is_changed = True

    def _grow_resident(self) -> None:
        more = self.units.beside(len(self._window)) - len(self._resident)
        added = sorted(set(range(self.units.count)) - self._resident)[: max(0, more)]
        if added:
            # Behind empty blocks that always have memory, so that units stay unused, and can be taken back, for longer.
            with self._queue.empty_ones_first():
                self._out.give(number for unit in added for number in self.units.blocks(unit))
            self._resident.update(added)
            self._is_changed = True

    def _shrink_resident(self, count: int, kept: Collection[int]) -> None:
        """Release up to `count` units; a unit in use leaves once its blocks are free and the request asks again."""

        def cost(unit: int) -> tuple[int, int, int]:
            blocks = self.units.blocks(unit)
            return self._num_used(blocks, kept), self._num_cached(blocks), -unit

        for unit in sorted(self._resident, key=cost)[: max(0, count)]:
            blocks = self._blocks(self.units.blocks(unit))
            free = [block for block in blocks if not block.ref_cnt and block.block_id not in kept]
            self._out.take(free)
            if len(free) < len(blocks):
                self._leaving.add(unit)
            else:
                self._resident.remove(unit)
                self._is_changed = True

    def _grow_window(self, most: int) -> None:
        for unit in sorted(set(range(self.units.window_count)) - self._window):
            if len(self._window) == most or self.units.beside(len(self._window) + 1) < len(self._resident):
                return
            self._out.give(self.units.spilled(unit))
            self._window.add(unit)
            self._is_changed = True

    def _stay(self) -> None:
        for unit in self._leaving:
            self._out.give(self.units.blocks(unit))
        self._leaving.clear()

    def _blocks(self, numbers: Iterable[int]) -> list[KVCacheBlock]:
        return [self._pool.blocks[number] for number in numbers]

    def _num_used(self, numbers: Iterable[int], kept: Collection[int]) -> int:
        return sum(self._pool.blocks[number].ref_cnt > 0 or number in kept for number in numbers)

    def _num_cached(self, numbers: Iterable[int]) -> int:
        return sum(self._pool.blocks[number].block_hash is not None for number in numbers)
