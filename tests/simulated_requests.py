"""A scheduler that does what vLLM's does to blocks and positions, for the simulation of spill's window.

Prefixes are found before they are written, windows leave blocks behind, requests are preempted, and steps are planned
before it is known which drafts the last ones took.
"""

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import Span, SpillStep, group_step
from overspill.kv.spill.window import Layer

NULL_BLOCK = 0
MOST_TOKENS = 28  # of a request
MOST_RUNNING = 4


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
