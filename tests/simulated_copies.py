"""Copies that move content, not bytes, and take as long as a seed says.

A copy touches memory at the beginning, in the middle or at the end of its flight, and sometimes fails.
"""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from overspill.kv.copies import Copier, Transfer
from overspill.kv.host_memory import Verdict

BLOCK_BYTES = 4096
GARBAGE = -1


class Violation(AssertionError):
    """Something that must hold does not."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(frozen=True)
class Setup:
    gpu_blocks: int = 24
    host_slots: int = 12
    groups: tuple[tuple[int, int], ...] = ((4, 0),)  # (block size, window; 0 is full attention)
    store: str = "eager"
    eviction: str = "lru"
    load: str = "always"
    batched_tokens: int = 16
    chunk_tokens: int = 0  # of a prompt, in one step; 0 leaves it to batched_tokens
    max_seqs: int = 4
    ranks: int = 1
    asynchronous: bool = False
    policy: str = "fcfs"
    longest_flight: int = 3  # steps
    keep_on_reset: bool = False
    ahead: bool = False  # whether loads that are queued count as there in time
    fault_rate: float = 0.0
    seed: int = 0


class ScriptedTransfer(Transfer):
    """Is queued and done when its script says so; the copy happens at one of three moments, or when it is fenced."""

    def __init__(self, copier: "ScriptedCopier", blocks: Sequence[int], slots: Sequence[int], *, loads: bool) -> None:
        super().__init__(len(slots) * BLOCK_BYTES)
        draw, longest = copier.random, copier.longest_flight
        self.blocks, self.slots = list(map(int, blocks)), list(map(int, slots))
        self.loads, self._copier = loads, copier
        self._steps_to_queued = draw.randint(0, longest)
        self._steps_to_done = draw.randint(self._steps_to_queued, longest)
        self._copies_when_queued = draw.random() < 0.5
        self._faulty = draw.random() < copier.fault_rate or any(slot in copier.unreadable for slot in self.slots)
        self._copied = False
        if draw.random() < 0.3:
            self._steps_to_queued = 0
            self._queue()

    def tick(self) -> None:
        if self._steps_to_queued <= 0 and not self._queued.is_set():
            self._queue()
        if self._steps_to_done <= 0 and not self._done.is_set():
            self._copy()
            self.settle()
        self._steps_to_queued -= 1
        self._steps_to_done -= 1

    def fence(self) -> None:
        require(self._queued.is_set(), "compute was ordered behind copies that are not queued")
        self._copy()

    def _queue(self) -> None:
        if self._faulty:
            self._scribble()
            self.settle(OSError("the copy broke off"))
        else:
            self._queued.set()
            if self._copies_when_queued:
                self._copy()

    def _copy(self) -> None:
        if self._copied:
            return
        self._copied = True
        gpu, host = self._copier.gpu, self._copier.host
        for block, slot in zip(self.blocks, self.slots, strict=True):
            if self.loads:
                gpu[block] = list(host[slot])
            else:
                host[slot] = list(gpu[block])
                self._copier.damaged.discard(slot)

    def _scribble(self) -> None:
        """What a copy that broke off leaves behind."""
        side, ids = (self._copier.gpu, self.blocks) if self.loads else (self._copier.host, self.slots)
        ids = ids[: len(ids) // 2 + 1]
        for index in ids:
            side[index] = [GARBAGE] * len(side[index])


class ScriptedCopier(Copier):
    """One rank's memories, by content. It is also that rank's checksums: damage is found when it is looked for."""

    def __init__(self, setup: Setup, rank: int) -> None:
        width = max(size for size, _ in setup.groups)
        self.gpu = [[GARBAGE] * width for _ in range(setup.gpu_blocks)]
        self.host = [[GARBAGE] * width for _ in range(setup.host_slots)]
        self.random = random.Random(setup.seed * 7 + rank)
        self.longest_flight, self.fault_rate = setup.longest_flight, setup.fault_rate
        self.damaged: set[int] = set()
        self.unreadable: set[int] = set()
        self.under_way: list[ScriptedTransfer] = []
        self._verdicts: list[tuple[Future[list[int]], list[int]]] = []

    def _start(self, transfer: ScriptedTransfer) -> ScriptedTransfer:
        self.under_way.append(transfer)
        return transfer

    def load(self, slots: Any, blocks: Any) -> Transfer:
        return self._start(ScriptedTransfer(self, blocks, slots, loads=True))

    def store(self, blocks: Any, slots: Any) -> Transfer:
        return self._start(ScriptedTransfer(self, blocks, slots, loads=False))

    def tick(self) -> None:
        for transfer in self.under_way:
            transfer.tick()
        for verdict, corrupt in self._verdicts:
            if self.random.random() < 0.6:
                verdict.set_result(corrupt)
        self._verdicts = [(verdict, corrupt) for verdict, corrupt in self._verdicts if not verdict.done()]
        self.under_way = [transfer for transfer in self.under_way if not transfer.done()]

    def damage(self, slot: int) -> None:
        self.damaged.add(slot)
        self.host[slot] = [GARBAGE] * len(self.host[slot])

    def check(self, slots: Sequence[int]) -> Verdict:
        verdict: Future[list[int]] = Future()
        self._verdicts.append((verdict, [slot for slot in slots if slot in self.damaged]))
        return Verdict([verdict], len(slots))

    def record(self, slots: Sequence[int]) -> None:
        """Checksums are always up to date here."""

    def end_step(self) -> None: ...

    def close(self) -> None:
        """Nothing to give back."""
