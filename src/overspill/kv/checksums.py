"""One xxh3 checksum per stored block, computed and checked on threads of its own."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import xxhash

from overspill.kv.host_memory import HostMemory
from overspill.kv.options import Verify

SAMPLE_EVERY = 16


@dataclass(slots=True)
class Verdict:
    """The check of a load, under way beside its copies."""

    parts: list[Future[list[int]]] = field(default_factory=list)
    num_checked: int = 0

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def wait(self, timeout: float) -> None:
        wait(self.parts, timeout)

    def error(self) -> BaseException | None:
        """Why the check itself failed; waits for it."""
        return next((error for part in self.parts if (error := part.exception()) is not None), None)

    def corrupt_slots(self) -> list[int]:
        """Slots that do not hold what was stored; waits for the check."""
        return [slot for part in self.parts if part.exception() is None for slot in part.result()]


class Checksums:
    """Checksums by host slot. xxhash releases the interpreter lock while it works."""

    def __init__(self, memory: HostMemory, verify: Verify, threads: int | None = None) -> None:
        self._memory = memory
        self._verify = verify
        self._digests = np.zeros(memory.num_slots, np.uint64)
        self._recording: dict[int, Future[None]] = {}
        self._threads = threads or max(2, min(8, (os.cpu_count() or 2) // 2))
        self._pool = ThreadPoolExecutor(self._threads, "overspill-checksum") if verify != "off" else None

    def covers(self, slot: int) -> bool:
        """Whether the slot's content carries a checksum: the same answer at store and at load."""
        return self._verify == "all" or (self._verify == "sample" and slot % SAMPLE_EVERY == 0)

    def record(self, slots: Sequence[int]) -> None:
        """Compute checksums of what was just stored. Checks of these slots wait for them."""
        if self._pool is None:
            return
        for part in self._split(slots):
            future = self._pool.submit(self._record, part)
            self._recording.update(dict.fromkeys(part, future))

    def check(self, slots: Sequence[int]) -> Verdict:
        """Begin to check what is about to be loaded."""
        verdict = Verdict()
        if self._pool is None:
            return verdict
        for part in self._split(slots):
            # Futures of the same pool, begun earlier: waiting for them in a later task cannot lock up.
            recording = {f for slot in part if (f := self._recording.pop(slot, None)) and not f.done()}
            verdict.parts.append(self._pool.submit(self._check, part, recording))
            verdict.num_checked += len(part)
        return verdict

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _split(self, slots: Sequence[int]) -> list[list[int]]:
        covered = [slot for slot in slots if self.covers(slot)]
        return [covered[i :: self._threads] for i in range(min(self._threads, len(covered)))]

    def _digest(self, slot: int) -> int:
        return xxhash.xxh3_64_intdigest(self._memory.slots[slot])

    def _record(self, slots: list[int]) -> None:
        for slot in slots:
            self._digests[slot] = self._digest(slot)

    def _check(self, slots: list[int], recording: set[Future[None]]) -> list[int]:
        for future in recording:
            future.result()
        return [slot for slot in slots if int(self._digests[slot]) != self._digest(slot)]
