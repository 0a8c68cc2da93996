"""Copier for offload with spill: a spilled block's content is in the arena, not at its GPU address."""

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from overspill.kv.copies import Copier, Ids, Transfer
from overspill.kv.host_memory import HostMemory
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.streams import Streams

_THREADS = 4  # a single core copies slower than the link


class JoinedTransfer(Transfer):
    """One job's copies, some over the link and some within RAM."""

    def __init__(self, parts: Sequence[Transfer]) -> None:
        super().__init__(sum(part.num_bytes for part in parts))
        self._parts = parts

    @property
    def queued(self) -> bool:
        """Whether all parts are queued and none failed: a request must not run before a failed load is known."""
        return all(part.queued and part.error is None for part in self._parts)

    def done(self) -> bool:
        if not all(part.done() for part in self._parts):
            return False
        self.seconds = max(part.seconds for part in self._parts)
        self.error = next((part.error for part in self._parts if part.error is not None), None)
        return True

    def remaining_bytes(self) -> int:
        return sum(part.remaining_bytes() for part in self._parts)

    def fence(self) -> None:
        for part in self._parts:
            part.fence()


class ArenaCopier(Copier):
    """Copies resident blocks with `gpu`, and spilled blocks within RAM, between arena and pool."""

    def __init__(self, gpu: Copier, geometry: Geometry, arena: HostMemory, pool: HostMemory, streams: Streams) -> None:
        self._gpu = gpu
        self._geometry = geometry
        self._arena, self._pool = arena, pool
        self._streams = streams
        self._jobs = ThreadPoolExecutor(1, "overspill-arena")
        self._threads = ThreadPoolExecutor(_THREADS, "overspill-arena-copy")

    def load(self, slots: Ids, blocks: Ids) -> Transfer:
        return self._split(slots, blocks, to_arena=True)

    def store(self, blocks: Ids, slots: Ids) -> Transfer:
        return self._split(slots, blocks, to_arena=False)

    def _split(self, slots: Ids, blocks: Ids, *, to_arena: bool) -> Transfer:
        spilled = blocks >= self._geometry.num_resident
        parts = [self._within_ram(slots[spilled], blocks[spilled], to_arena=to_arena)] if spilled.any() else []
        if not spilled.all():
            slots, blocks = slots[~spilled], blocks[~spilled]
            parts.append(self._gpu.load(slots, blocks) if to_arena else self._gpu.store(blocks, slots))
        return JoinedTransfer(parts) if spilled.any() else parts[0]

    def _within_ram(self, slots: Ids, blocks: Ids, *, to_arena: bool) -> Transfer:
        transfer = Transfer(len(slots) * self._pool.slot_bytes)
        # A store reads the arena: the step that wrote its blocks, and the saves of that step, are already queued.
        # A load overwrites blocks that were free, but a step still in flight may have been their last user.
        after = self._streams.fill_event(), self._streams.save_event()

        def run() -> None:
            try:
                for event in after:
                    self._streams.wait(event)
                began = time.perf_counter()
                self._copy(slots, blocks, to_arena=to_arena)
                transfer.seconds = time.perf_counter() - began
            except Exception as error:
                transfer.settle(error)
            else:
                transfer.settle()

        self._jobs.submit(run)
        return transfer

    def _copy(self, slots: Ids, blocks: Ids, *, to_arena: bool) -> None:
        """Copy in several threads: ctypes releases the interpreter lock during memmove."""
        page = self._geometry.page_bytes
        places = blocks - self._geometry.num_resident

        def copy(part: Ids) -> None:
            for region in range(self._geometry.num_regions):
                arena = self._arena.address + region * self._arena.slot_stride
                pool = self._pool.address + region * page
                for i in part:
                    a = arena + int(places[i]) * page
                    b = pool + int(slots[i]) * self._pool.slot_stride
                    ctypes.memmove(a, b, page) if to_arena else ctypes.memmove(b, a, page)

        for done in [self._threads.submit(copy, part) for part in np.array_split(np.arange(len(slots)), _THREADS)]:
            done.result()

    def end_step(self) -> None:
        self._gpu.end_step()

    def close(self) -> None:
        self._jobs.shutdown()
        self._threads.shutdown()
        self._gpu.close()
