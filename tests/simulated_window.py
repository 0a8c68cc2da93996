"""The real window and the real plan of a step's spilled blocks; streams, scheduler and model made of bookkeeping.

Nothing is computed and no bytes move. A KV slot names the layer and the token whose KV it holds, so that what attention
reads can be compared with what it should read. Every operation knows which operations of the other streams come
before it for sure (a vector clock); two that touch the same page, one of them writing, must be ordered, or a GPU may
do them in the other order some day. Where no two race, what a page holds does not depend on when copies run, and
playing them in the order in which they are asked for shows all that can happen.

The scheduler does what vLLM's does to blocks and positions: prefixes are found before they are written, windows leave
blocks behind, requests are preempted, and steps are planned before it is known which drafts the last ones took.
"""

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import Runs, Span, SpillStep, group_step
from overspill.kv.spill.streams import Point, Streams
from overspill.kv.spill.window import Layer, Window, plan_accesses
from overspill.kv.timing import Mark, WallMark
from tests.simulated_copies import Violation

NULL_BLOCK = 0
SLOTS_PER_PAGE = 4
MOST_TOKENS = 28  # of a request
MOST_RUNNING = 4
STEPS = 30
OPERATIONS_SHOWN = 40


# What is simulated.


@dataclass(frozen=True)
class Group:
    """A cache group. With a window, a token's attention reaches that many tokens back, itself included."""

    block_size: int
    window: int | None

    def first_read(self, position: int) -> int:
        """Where the attention of the token at `position` begins."""
        return max(0, position - self.window + 1) if self.window else 0

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class Setup:
    seed: int
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]
    geometry: Geometry
    num_drafts: int  # at most, for each request and step
    steps_in_flight: int  # whose outcome is not known when the next one is planned
    drafts_at_risk: int


def draw_setup(seed: int) -> Setup:
    draw = random.Random(seed)
    groups = tuple(
        Group(draw.choice([2, 4]), draw.choice([None, None, 3, 6])) for _ in range(draw.choice([1, 1, 2, 2, 3]))
    )
    num_regions = draw.randint(1, 5)
    # One request of the greatest length must fit; several of them often do not.
    least = sum(group.num_blocks(MOST_TOKENS + 4) for group in groups)
    num_blocks = 1 + least + draw.randint(0, 2 * least)
    num_drafts, steps_in_flight = draw.choice([0, 0, 2, 3]), draw.choice([0, 1, 1, 2])
    return Setup(
        seed=seed,
        groups=groups,
        layers=tuple(_draw_layers(draw, len(groups), num_regions)),
        geometry=Geometry(
            num_blocks=num_blocks,
            num_spilled=num_blocks - draw.randint(2, num_blocks // 2),
            num_regions=num_regions,
            page_bytes=4096,
        ),
        num_drafts=num_drafts,
        steps_in_flight=steps_in_flight,
        # vLLM says how many steps there are in all, one more than are in flight when the next is planned.
        drafts_at_risk=num_drafts * draw.choice([steps_in_flight, steps_in_flight + 1]) if steps_in_flight else 0,
    )


def _draw_layers(draw: random.Random, num_groups: int, num_regions: int) -> list[Layer]:
    """Groups take turns at random, and any earlier layer's KV may be read again by layers that have none."""
    regions = [list(range(num_regions))]
    regions += [list(range(draw.randint(1, num_regions))) for _ in range(num_groups - 1)]
    for in_group in regions:
        draw.shuffle(in_group)
    turns = [group for group, in_group in enumerate(regions) for _ in in_group]
    draw.shuffle(turns)
    layers: list[Layer] = []
    for group in turns:
        layers.append(Layer(f"layer{len(layers)}", group, regions[group].pop()))
        while draw.random() < 0.3:
            owner = draw.choice([layer for layer in layers if layer.is_owner])
            layers.append(Layer(f"layer{len(layers)}", owner.group, owner.region, is_owner=False))
    return layers


# Streams and memory.


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

    def move(self, pairs: list[tuple[int, int]]) -> None:
        raise NotImplementedError("no simulated step moves blocks")

    def filled(self) -> Point:
        return tuple(self._clocks[Stream.WAY_IN])

    def saved(self) -> Point:
        return tuple(self._clocks[Stream.WAY_OUT])

    def computed(self) -> Point:
        return tuple(self._clocks[Stream.COMPUTE])

    def fill_after(self, point: Point) -> None:
        self._wait(Stream.WAY_IN, point)

    def save_after(self, point: Point) -> None:
        self._wait(Stream.WAY_OUT, point)

    def compute_after(self, point: Point) -> None:
        self._wait(Stream.COMPUTE, point)

    def _wait(self, stream: Stream, point: Clock) -> None:
        self._clocks[stream] = [max(mine, other) for mine, other in zip(self._clocks[stream], point, strict=True)]
        self.log.append(f"{self.now}: {stream} waits for {point}")

    def mark(self) -> Mark:
        return WallMark()

    def wait(self, point: Point) -> None:
        """No other thread takes part."""

    def close(self) -> None:
        """No copy is under way."""


# The scheduler: what it knows, and what it gives to the worker.


@dataclass(frozen=True)
class Part:
    """One request's part of a step, as it was planned."""

    name: int
    attempt: int  # how often the request was preempted before
    tables: tuple[tuple[int, ...], ...]  # by group
    computed: int  # optimistic: as if all drafts in flight were taken
    num_tokens: int  # drafts included
    num_drafts: int
    tokens: tuple[int, ...] | None  # of a request that starts, or starts again, at `computed`


@dataclass(frozen=True)
class Step:
    number: int
    parts: list[Part]
    spill: SpillStep | None


@dataclass(frozen=True)
class Outcome:
    """What the worker tells of a part."""

    tokens: list[int]  # drafts that were taken, and the one that was sampled; none while the prompt is computed
    num_rejected: int


@dataclass(eq=False)
class Request:
    name: int
    tokens: list[int]  # the prompt, and what outcomes brought
    most_tokens: int
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    num_placeholders: int = 0  # tokens that steps in flight may bring, drafts included
    num_in_flight: int = 0  # tokens that steps in flight compute
    attempt: int = 0

    @property
    def num_expected(self) -> int:
        """Tokens if all drafts in flight are taken."""
        return len(self.tokens) + self.num_placeholders


class Blocks:
    """vLLM's block pool: blocks that several may use, and free ones that are still found by what they hold.

    Tokens are numbered without repeats, so the last token in a block says what comes before it.
    """

    def __init__(self, num_blocks: int, draw: random.Random) -> None:
        self._draw = draw
        self._resident_first = draw.random() < 0.5
        self._num_users = [0] * num_blocks
        self._found: dict[tuple[int, int], int] = {}  # (group, last token) -> block
        self._keys: dict[int, tuple[int, int]] = {}
        self._last_group: dict[int, int] = {}
        self.free = [block for block in range(num_blocks) if block != NULL_BLOCK]
        self.num_group_changes = 0

    def allocate(self, group: int) -> int:
        """Resident ones first, which makes for plain steps, or any, which lets more blocks change hands."""
        block = min(self.free) if self._resident_first else self._draw.choice(self.free)
        self.free.remove(block)
        self._num_users[block] = 1
        if block in self._keys:
            del self._found[self._keys.pop(block)]
        self.num_group_changes += self._last_group.get(block, group) != group
        self._last_group[block] = group
        return block

    def share(self, block: int) -> None:
        if not self._num_users[block]:
            self.free.remove(block)
        self._num_users[block] += 1

    def release(self, block: int) -> None:
        self._num_users[block] -= 1
        if not self._num_users[block]:
            self.free.append(block)

    def remember(self, group: int, last_token: int, block: int) -> None:
        if (group, last_token) not in self._found:
            self._found[group, last_token] = block
            self._keys[block] = group, last_token

    def find(self, group: int, last_token: int) -> int | None:
        return self._found.get((group, last_token))


class Scheduler:
    """Plans steps as vLLM does. Of the worker it knows only the outcomes."""

    def __init__(self, setup: Setup, draw: random.Random, new_token: Iterator[int], tally: Counter[str]) -> None:
        self._setup, self._draw, self._new_token, self._tally = setup, draw, new_token, tally
        self._blocks = Blocks(setup.geometry.num_blocks, draw)
        self._names = itertools.count()
        self._requests: dict[int, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._conversations: deque[list[int]] = deque(maxlen=6)  # whose beginnings come again
        self._parts: dict[int, Part] = {}  # of the step being planned

    def plan(self, number: int) -> Step:
        self._parts = {}
        self._abort_some()
        self._preempt_some()
        for request in list(self._running):
            # Requests with much KV in RAM are held back in many steps.
            if request in self._running and self._draw.random() < 0.8:
                self._continue(request)
        self._arrive()
        for request in list(self._waiting):
            # What its steps in flight sampled has to be known first.
            if not request.num_in_flight and len(self._running) < MOST_RUNNING:
                self._start(request)
        parts = list(self._parts.values())
        self._tally["group changes"] = self._blocks.num_group_changes
        return Step(number, parts, self._spilled(parts))

    def update(self, step: Step, outcomes: dict[int, Outcome]) -> None:
        for part in step.parts:
            request, outcome = self._requests.get(part.name), outcomes[part.name]
            if request is None:
                continue  # it ended while the step was in flight
            request.num_in_flight -= part.num_tokens
            request.tokens += outcome.tokens
            if part.attempt == request.attempt:
                request.num_placeholders -= len(outcome.tokens) + outcome.num_rejected
                request.computed -= outcome.num_rejected
                self._remember(request, min(request.computed, len(request.tokens) - 1))
            if len(request.tokens) >= request.most_tokens:
                self._end(request)

    def _spilled(self, parts: Sequence[Part]) -> SpillStep | None:
        """As Overspill's scheduler does it."""
        step = SpillStep()
        for index, group in enumerate(self._setup.groups):
            spans = [
                Span(
                    part.tables[index],
                    max(0, part.computed - self._setup.drafts_at_risk),
                    part.computed,
                    part.computed + part.num_tokens,
                )
                for part in parts
            ]
            found = group_step(spans, block_size=group.block_size, num_resident=self._setup.geometry.num_resident)
            if found is not None:
                step.groups[index] = found
        self._tally["spilled steps" if step.groups else "plain steps"] += bool(parts)
        return step if step.groups else None

    # Requests come and go.

    def _arrive(self) -> None:
        """Often with a beginning that was seen before, sometimes twice: two samples of one prompt."""
        if len(self._waiting) > 2 or self._draw.random() < 0.4:
            return
        prompt: list[int] = []
        if self._conversations and self._draw.random() < 0.7:
            known = self._draw.choice(self._conversations)
            prompt = known[: self._draw.randint(0, min(len(known), MOST_TOKENS - 10))]
        prompt = prompt + [next(self._new_token) for _ in range(self._draw.choice([1, 3, 9, 9]))]
        for _ in range(self._draw.choice([1, 1, 2])):
            most_tokens = self._draw.randint(len(prompt) + 1, MOST_TOKENS)
            request = Request(next(self._names), list(prompt), most_tokens)
            self._requests[request.name] = request
            self._waiting.append(request)
            self._conversations.append(request.tokens)

    def _abort_some(self) -> None:
        for request in list(self._requests.values()):
            if self._draw.random() < 0.02:
                self._end(request)

    def _end(self, request: Request) -> None:
        self._release(request)
        del self._requests[request.name]
        (self._running if request in self._running else self._waiting).remove(request)

    def _preempt_some(self) -> None:
        if self._running and self._draw.random() < 0.08:
            self._preempt(self._draw.choice(self._running))

    def _preempt(self, request: Request) -> None:
        self._tally["preemptions"] += 1
        self._tally["preemptions in flight"] += request.num_in_flight > 0
        self._release(request)
        request.computed = request.num_placeholders = 0
        request.attempt += 1
        self._running.remove(request)
        self._waiting.insert(0, request)

    def _release(self, request: Request) -> None:
        for table in request.tables:
            for block in table:
                if block != NULL_BLOCK:
                    self._blocks.release(block)
        request.tables = []

    # Parts of a step.

    def _start(self, request: Request) -> None:
        """With the longest prefix that is found; with nothing if there is no room."""
        request.computed, request.tables = self._longest_hit(request.tokens)
        for table in request.tables:
            for block in table:
                if block != NULL_BLOCK:
                    self._blocks.share(block)
        num_tokens = self._chunk(request)
        if not self._grow(request, num_tokens):
            self._release(request)
            request.computed = 0
            return
        self._tally_hits(request)
        self._waiting.remove(request)
        self._running.append(request)
        self._add_part(request, num_tokens, num_drafts=0, tokens=tuple(request.tokens))

    def _continue(self, request: Request) -> None:
        if request.num_expected > request.most_tokens:
            return  # it ends with what is in flight, or goes on when drafts were rejected
        is_decode = request.num_expected - request.computed == 1
        num_drafts = self._draw.randint(0, self._setup.num_drafts) if is_decode else 0
        num_tokens = self._chunk(request) + num_drafts
        self._leave_behind(request)
        while not self._grow(request, num_tokens):
            victim = [other for other in self._running if other.name not in self._parts][-1]
            self._preempt(victim)
            if victim is request:
                return
        self._add_part(request, num_tokens, num_drafts, tokens=None)

    def _chunk(self, request: Request) -> int:
        return min(request.num_expected - request.computed, self._draw.choice([1, 2, 5, 8, 16]))

    def _add_part(self, request: Request, num_tokens: int, num_drafts: int, tokens: tuple[int, ...] | None) -> None:
        tables = tuple(tuple(table) for table in request.tables)
        self._parts[request.name] = Part(
            request.name, request.attempt, tables, request.computed, num_tokens, num_drafts, tokens
        )
        request.computed += num_tokens
        request.num_in_flight += num_tokens
        if request.computed - num_drafts == request.num_expected:
            request.num_placeholders += 1 + num_drafts
        # From now on others find blocks that this very step writes.
        self._remember(request, min(request.computed, len(request.tokens)))

    def _grow(self, request: Request, num_tokens: int) -> bool:
        end = request.computed + num_tokens
        missing = [
            group.num_blocks(end) - len(table) for group, table in zip(self._setup.groups, request.tables, strict=True)
        ]
        if sum(missing) > len(self._blocks.free):
            return False
        for index, table in enumerate(request.tables):
            table += [self._blocks.allocate(index) for _ in range(missing[index])]
        return True

    def _leave_behind(self, request: Request) -> None:
        """Free what no token to come attends to, even if all that is in flight were computed again."""
        processed = max(0, request.computed - request.num_in_flight)
        for group, table in zip(self._setup.groups, request.tables, strict=True):
            for i in range(min(len(table), group.first_read(processed) // group.block_size)):
                if table[i] != NULL_BLOCK:
                    self._tally["blocks left behind by windows"] += 1
                    self._blocks.release(table[i])
                    table[i] = NULL_BLOCK

    # Prefixes.

    def _remember(self, request: Request, num_tokens: int) -> None:
        for index, (group, table) in enumerate(zip(self._setup.groups, request.tables, strict=True)):
            for i in range(num_tokens // group.block_size):
                if table[i] != NULL_BLOCK:
                    self._blocks.remember(index, request.tokens[(i + 1) * group.block_size - 1], table[i])

    def _longest_hit(self, tokens: list[int]) -> tuple[int, list[list[int]]]:
        """At least one token is left to compute, and all groups hit the same length."""
        alignment = max(group.block_size for group in self._setup.groups)
        for length in range((len(tokens) - 1) // alignment * alignment, 0, -alignment):
            tables = [self._hit(index, tokens[:length]) for index in range(len(self._setup.groups))]
            found = [table for table in tables if table is not None]
            if len(found) == len(tables):
                return length, found
        return 0, [[] for _ in self._setup.groups]

    def _hit(self, index: int, tokens: list[int]) -> list[int] | None:
        """The blocks that the next token attends to, if all of them are found."""
        group = self._setup.groups[index]
        first = group.first_read(len(tokens)) // group.block_size
        table = [NULL_BLOCK] * first
        for last_token in tokens[group.block_size - 1 :: group.block_size][first:]:
            block = self._blocks.find(index, last_token)
            if block is None:
                return None
            table.append(block)
        return table

    def _tally_hits(self, request: Request) -> None:
        self._tally["hits"] += request.computed > 0
        self._tally["resumptions"] += request.attempt > 0
        for index, group in enumerate(self._setup.groups):
            written = {
                block
                for part in self._parts.values()
                for block in part.tables[index][part.computed // group.block_size :]
                if block >= self._setup.geometry.num_resident
            }
            hit = request.tables[index][: request.computed // group.block_size]
            self._tally["hits on what the step writes"] += bool(written.intersection(hit))


# The worker: where the tokens really are.


@dataclass
class Progress:
    """A request, as the worker knows it: before the scheduler, and without what was rejected."""

    tokens: list[int]
    position: int


@dataclass(frozen=True)
class Rows:
    """What a part computes, now that it runs: positions `start` to `end` of `tokens`."""

    part: Part
    tokens: list[int]
    start: int
    end: int

    def contents(self, layer: Layer, first: int, last: int) -> Page:
        return [(layer.group, layer.region, token) for token in self.tokens[first:last]]


class Worker:
    """Runs the model's layers, with the window's hooks where vLLM calls them."""

    def __init__(self, setup: Setup, draw: random.Random, new_token: Iterator[int], tally: Counter[str]) -> None:
        self._setup, self._draw, self._new_token, self._tally = setup, draw, new_token, tally
        self._memory = Memory(setup.geometry)
        self.streams = SimulatedStreams(setup.geometry, self._memory)
        self._window = Window(plan_accesses(setup.layers, setup.geometry), self.streams)
        self._progress: dict[int, Progress] = {}

    def run(self, step: Step) -> dict[int, Outcome]:
        rows = [self._rows(part) for part in step.parts]
        self.streams.now = f"step {step.number}, start"
        if step.spill is not None:
            self._window.begin(step.spill)
        for layer in self._setup.layers:
            self.streams.now = f"step {step.number}, {layer.name}"
            if layer.is_owner:
                self._write(layer, rows)
            self._window.before_read(layer.name)
            self._attend(layer, rows)
            self._window.after_read(layer.name)
        self._window.end()
        return {row.part.name: self._sample(row) for row in rows}

    def _rows(self, part: Part) -> Rows:
        if part.tokens is not None:
            self._progress[part.name] = Progress(list(part.tokens), part.computed)
        progress = self._progress[part.name]
        behind = part.computed - progress.position
        assert 0 <= behind <= self._setup.drafts_at_risk, "the simulated scheduler miscounts"
        self._tally["parts behind their plan"] += behind > 0
        tokens = progress.tokens + [next(self._new_token) for _ in range(part.num_drafts)]
        return Rows(part, tokens, progress.position, progress.position + part.num_tokens)

    def _sample(self, rows: Rows) -> Outcome:
        part, progress = rows.part, self._progress[rows.part.name]
        if rows.end < len(rows.tokens):
            progress.position = rows.end
            return Outcome([], 0)
        num_taken = self._draw.randint(0, part.num_drafts)
        num_rejected = part.num_drafts - num_taken
        self._tally["rejected drafts"] += num_rejected
        new = [*rows.tokens[len(progress.tokens) :][:num_taken], next(self._new_token)]
        progress.tokens += new
        progress.position = rows.end - num_rejected
        return Outcome(new, num_rejected)

    def _write(self, layer: Layer, rows: Sequence[Rows]) -> None:
        """vLLM writes new KV before it asks for the layer to be loaded."""
        operation = self.streams.start(Stream.COMPUTE, "new KV")
        for row in rows:
            for block, first, last in self._pieces(layer, row, row.start, row.end):
                page = self._memory.write(self._memory.on_gpu(layer.region, block), operation)
                offset = first % self._setup.groups[layer.group].block_size
                page[offset : offset + last - first] = row.contents(layer, first, last)

    def _attend(self, layer: Layer, rows: Sequence[Rows]) -> None:
        operation = self.streams.start(Stream.COMPUTE, "attention")
        group = self._setup.groups[layer.group]
        for row in rows:
            for block, first, last in self._pieces(layer, row, group.first_read(row.start), row.end):
                page = self._memory.read(self._memory.on_gpu(layer.region, block), operation)
                offset = first % group.block_size
                held, expected = page[offset : offset + last - first], row.contents(layer, first, last)
                if held != expected:
                    raise Violation(
                        f"wrong KV: {operation} finds {held} in block {block}, for positions {first} to {last - 1} of "
                        f"request {row.part.name}, and not {expected}"
                    )

    def _pieces(self, layer: Layer, rows: Rows, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(block, first position, last position + 1) of each block from `start` to `end`."""
        block_size = self._setup.groups[layer.group].block_size
        for i in range(start // block_size, self._setup.groups[layer.group].num_blocks(end)):
            block = rows.part.tables[layer.group][i]
            assert block != NULL_BLOCK, "the simulated window left a block too early"
            yield block, max(start, i * block_size), min(end, (i + 1) * block_size)


# The whole.


def simulate(seed: int) -> Counter[str]:
    """What happened, by count; a violation says how to see it again."""
    setup = draw_setup(seed)
    draw, new_token = random.Random(seed), itertools.count()
    tally: Counter[str] = Counter()
    scheduler, worker = Scheduler(setup, draw, new_token, tally), Worker(setup, draw, new_token, tally)
    in_flight: deque[tuple[Step, dict[int, Outcome]]] = deque()
    step: Step | None = None
    try:
        for number in range(STEPS):
            step = scheduler.plan(number)
            in_flight.append((step, worker.run(step)))
            if len(in_flight) > setup.steps_in_flight:
                scheduler.update(*in_flight.popleft())
    except Exception as error:
        error.add_note(_report(setup, step, worker.streams.log))
        raise
    tally["bytes in"], tally["bytes out"] = worker.streams.bytes_in, worker.streams.bytes_out
    return tally


def _report(setup: Setup, step: Step | None, log: Sequence[str]) -> str:
    return "\n".join(
        [
            f"seed {setup.seed}; to see it again: tests.simulated_window.simulate({setup.seed})",
            f"groups: {setup.groups}",
            f"layers: {[(layer.name, layer.group, layer.region, layer.is_owner) for layer in setup.layers]}",
            f"{setup.geometry}, {setup.num_drafts} drafts, {setup.steps_in_flight} steps in flight, "
            f"{setup.drafts_at_risk} drafts at risk",
            *([f"step {step.number}: {step.spill}", *map(str, step.parts)] if step is not None else []),
            f"the last {len(log)} operations and waits, with clocks of compute, the way in and the way out:",
            *log,
        ]
    )
