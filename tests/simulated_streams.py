"""Streams and memory made of bookkeeping: no bytes move, and operations that race are found.

Every operation knows which operations of the other streams come before it for sure (a vector clock); two that touch
the same page, one of them writing, must be ordered, or a GPU may do them in the other order some day. Where no two
race, what a page holds does not depend on when copies run, and playing them in the order in which they are asked for
shows all that can happen.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from overspill.kv.speeds import Mark, WallMark
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import Runs
from overspill.kv.spill.streams import Event, Streams
from tests.simulated_copies import Violation

SLOTS_PER_PAGE = 4
OPERATIONS_SHOWN = 40


class Stream(IntEnum):
    COMPUTE = 0
    WAY_IN = 1
    WAY_OUT = 2

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


# For each stream, how many of its operations are over for sure.
Clock = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    stream: Stream
    clock: Clock  # when it is over: its own stream's count includes it
    what: str

    def comes_after(self, other: "Operation") -> bool:
        return self.clock[other.stream] >= other.clock[other.stream]

    def __str__(self) -> str:
        return f"{self.what} ({self.stream})"


class Place(NamedTuple):
    """Memory of one page. Regions of the same parity have one window half between them."""

    memory: str
    number: int
    block: int

    def __str__(self) -> str:
        return f"{self.memory} {self.number}, block {self.block}"


# (group, region, token) whose KV the slot holds; None is anything.
Slot = tuple[int, int, int] | None
Page = list[Slot]


@dataclass(slots=True)
class History:
    """Who touched a page last: a later operation that comes after these comes after all before them, too."""

    written: Operation | None = None
    read: dict[Stream, Operation] = field(default_factory=dict)  # since then


class Memory:
    """All pages. To touch one, an operation must be ordered behind whoever touched it before."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._num_resident = geometry.num_resident
        self._pages: dict[Place, Page] = {}
        self._histories: dict[Place, History] = {}

    def on_gpu(self, region: int, block: int) -> Place:
        """What a kernel finds at a block's address."""
        if block < self._num_resident:
            return Place("GPU region", region, block)
        return Place("window half", self._geometry.half_of(region), block - self._num_resident)

    def read(self, place: Place, by: Operation) -> Page:
        history = self._history(place)
        _require_order(place, by, "reads", history.written, "wrote")
        history.read[by.stream] = by
        return self._pages[place]

    def write(self, place: Place, by: Operation) -> Page:
        """The page, to be changed."""
        history = self._history(place)
        _require_order(place, by, "writes", history.written, "wrote")
        for reader in history.read.values():
            _require_order(place, by, "writes", reader, "read")
        history.written = by
        history.read.clear()
        return self._pages[place]

    def _history(self, place: Place) -> History:
        if place not in self._histories:
            self._histories[place] = History()
            self._pages[place] = [None] * SLOTS_PER_PAGE
        return self._histories[place]


def _require_order(place: Place, by: Operation, does: str, other: Operation | None, did: str) -> None:
    if other is not None and not by.comes_after(other):
        raise Violation(f"race in {place}: {by} {does} it, and need not wait for {other}, which {did} it")


class SimulatedStreams(Streams):
    """Copies happen at once; what they may rely on having happened before is what the waits say, and no more."""

    def __init__(self, geometry: Geometry, memory: Memory) -> None:
        super().__init__(geometry.page_bytes)
        self._geometry, self._memory = geometry, memory
        self._clocks = [[0] * len(Stream) for _ in Stream]
        self.now = ""  # what is going on, for messages
        self.log: deque[str] = deque(maxlen=OPERATIONS_SHOWN)

    def start(self, stream: Stream, what: str) -> Operation:
        self._clocks[stream][stream] += 1
        operation = Operation(stream, tuple(self._clocks[stream]), f"{self.now}: {what}")
        self.log.append(f"{operation} at {operation.clock}")
        return operation

    def _fill(self, region: int, runs: Runs) -> None:
        operation = self.start(Stream.WAY_IN, f"fill of region {region} with {runs}")
        for arena, window in self._pairs(region, runs):
            self._memory.write(window, operation)[:] = self._memory.read(arena, operation)

    def _save(self, region: int, runs: Runs) -> None:
        operation = self.start(Stream.WAY_OUT, f"save of region {region}, {runs}")
        for arena, window in self._pairs(region, runs):
            self._memory.write(arena, operation)[:] = self._memory.read(window, operation)

    def _pairs(self, region: int, runs: Runs) -> Iterator[tuple[Place, Place]]:
        """Places in the arena and in the window."""
        half = self._geometry.half_of(region)
        for start, end in runs:
            for block in range(start, end):
                yield Place("arena region", region, block), Place("window half", half, block)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        raise NotImplementedError("no simulated step copies blocks")

    def fill_event(self) -> Event:
        return tuple(self._clocks[Stream.WAY_IN])

    def save_event(self) -> Event:
        return tuple(self._clocks[Stream.WAY_OUT])

    def compute_event(self) -> Event:
        return tuple(self._clocks[Stream.COMPUTE])

    def fill_after(self, event: Event) -> None:
        self._wait(Stream.WAY_IN, event)

    def save_after(self, event: Event) -> None:
        self._wait(Stream.WAY_OUT, event)

    def compute_after(self, event: Event) -> None:
        self._wait(Stream.COMPUTE, event)

    def _wait(self, stream: Stream, event: Clock) -> None:
        self._clocks[stream] = [max(mine, other) for mine, other in zip(self._clocks[stream], event, strict=True)]
        self.log.append(f"{self.now}: {stream} waits for {event}")

    def mark(self) -> Mark:
        return WallMark()

    def wait(self, event: Event) -> None:
        """No other thread takes part."""

    def close(self) -> None:
        """No copy is under way."""
