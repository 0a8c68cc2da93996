"""The real window and the real plan of a step's spilled blocks; streams, scheduler and model made of bookkeeping.

Nothing is computed. A KV slot names the layer and the token whose KV it holds, so that what attention reads can be
compared with what it should read; `simulated_streams` finds operations that race, and `simulated_requests` plans steps.
"""

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from overspill.kv.spill.window import Layer, Window, plan_accesses
from tests.simulated_copies import Violation
from tests.simulated_requests import NULL_BLOCK, Outcome, Part, Scheduler, Setup, Step, draw_setup
from tests.simulated_streams import Memory, Page, SimulatedStreams, Stream

STEPS = 30


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
