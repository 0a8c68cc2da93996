"""A step's copies beside a graph, in a model of both: every interleaving ends, and layers read their own KV."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.program import (
    Fill,
    Flag,
    Operation,
    Raise,
    Save,
    Wait,
    after_attention,
    before_attention,
    before_writes,
    is_graphable,
    step_operations,
)
from overspill.kv.spill.steps import GroupStep, Runs, SpillStep
from overspill.kv.spill.window import Access, Layer, plan_accesses

Schedule = Callable[[list[str]], str]


def ids(runs: Runs) -> list[int]:
    return [block for start, end in runs for block in range(start, end)]


class Machine:
    """Arena, window and flags; two sides that run when nothing keeps them waiting."""

    def __init__(self, accesses: Sequence[Access], num_regions: int) -> None:
        self.accesses = accesses
        self.arena = {(region, block): f"{region}.{block}" for region in range(num_regions) for block in range(9)}
        self.window: dict[tuple[int, int], str] = {}
        self.up: set[Flag] = set()
        self.seen: list[list[str]] = []

    def graph(self, step: SpillStep, name: str) -> Iterator[Operation]:
        yield from before_writes(0, len(self.accesses))
        for index, access in enumerate(self.accesses):
            group = step.groups.get(access.layer.group)
            for block in ids(group.writes) if group else ():
                place = access.half, block
                is_partial = group is not None and block in ids(group.partial)
                self.window[place] = (self.window.get(place, "?") if is_partial else "") + f"+{name}{access.layer.name}"
            yield from before_attention(index)
            if group is not None:
                blocks = sorted({*ids(group.reads), *ids(group.writes)})
                self.seen.append([self.window.get((access.half, block), "?") for block in blocks])
            yield from after_attention(index)
            yield from before_writes(index + 1, len(self.accesses))

    def run(self, graph: Iterator[Operation], copies: Iterator[Operation], schedule: Schedule) -> None:
        sides, at = {"graph": graph, "copies": copies}, {"graph": next(graph, None), "copies": next(copies, None)}
        while any(at.values()):
            ready = [side for side, operation in at.items() if operation is not None and self._can(operation)]
            assert ready, f"both sides wait: {at}"
            side = schedule(ready)
            self._do(at[side])
            at[side] = next(sides[side], None)
        assert not self.up

    def _can(self, operation: Operation) -> bool:
        return not isinstance(operation, Wait) or operation.flag in self.up

    def _do(self, operation: Operation | None) -> None:
        if isinstance(operation, Wait):
            self.up.remove(operation.flag)
        elif isinstance(operation, Raise):
            assert not self.up & set(operation.flags)
            self.up |= set(operation.flags)
        elif isinstance(operation, Fill | Save):
            half = next(access.half for access in self.accesses if access.layer.region == operation.region)
            for block in ids(operation.runs):
                if isinstance(operation, Fill):
                    self.window[half, block] = self.arena[operation.region, block]
                else:
                    self.arena[operation.region, block] = self.window[half, block]


def expected(
    accesses: Sequence[Access], steps: Sequence[SpillStep], machine: Machine
) -> tuple[list[list[str]], object]:
    """What layers see, and the arena afterwards, where each layer has memory of its own."""
    memory, seen = dict(machine.arena), []
    for number, step in enumerate(steps):
        for access in accesses:
            group, region = step.groups.get(access.layer.group), access.layer.region
            if group is None:
                continue
            for block in ids(group.writes):
                before = memory[region, block] if block in ids(group.partial) else ""
                memory[region, block] = f"{before}+{number}{access.layer.name}"
            seen.append([memory[region, block] for block in sorted({*ids(group.reads), *ids(group.writes)})])
    return seen, memory


def simulate(
    accesses: Sequence[Access], steps: Sequence[SpillStep], programs: Sequence[list[Operation]], schedule: Schedule
) -> None:
    machine = Machine(accesses, num_regions=8)
    seen, memory = expected(accesses, steps, machine)
    graph = (each for number, step in enumerate(steps) for each in machine.graph(step, str(number)))
    machine.run(graph, (each for program in programs for each in program), schedule)
    assert machine.seen == seen
    assert machine.arena == memory


EAGER: Schedule = max  # the graph as far as it gets, then the copies
LAZY: Schedule = min


@st.composite
def layouts(draw: st.DrawFn) -> list[Access]:
    """Groups take turns; the n-th layer of each lies in region n."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    geometry = Geometry(num_blocks=20, num_spilled=9, num_regions=max(sizes), page_bytes=1)
    places = [(region, group) for group, size in enumerate(sizes) for region in range(size)]
    layers = [Layer(f"l{group}.{region}", group, region) for region, group in sorted(places)]
    return plan_accesses(layers, geometry)


@st.composite
def steps_of(draw: st.DrawFn, groups: Sequence[int]) -> SpillStep:
    """A block belongs to one group."""
    step = SpillStep()
    for group in groups:
        mine = range(group * 4, group * 4 + 4)
        reads, writes = (draw(st.sets(st.sampled_from(mine), max_size=2)) for _ in range(2))
        partial = draw(st.sets(st.sampled_from(sorted(writes)))) if writes else set()
        if reads - writes or writes:
            parts = [[(block, block + 1) for block in sorted(part)] for part in (reads - writes, partial, writes)]
            step.groups[group] = GroupStep(*parts)
    return step


@settings(deadline=None)
@given(st.data())
def test_layers_read_their_own_kv_in_every_order(data: st.DataObject) -> None:
    accesses = data.draw(layouts())
    groups = sorted({access.layer.group for access in accesses})
    steps = data.draw(st.lists(steps_of(groups), min_size=1, max_size=3))
    programs = [step_operations(accesses, step) for step in steps]
    order = random.Random(data.draw(st.integers(0, 2**16)))
    for schedule in (EAGER, LAZY, order.choice):
        simulate(accesses, steps, programs, schedule)


STEP = SpillStep({0: GroupStep(reads=[(0, 2)], partial=[(3, 4)], writes=[(3, 5)])})
ACCESSES = plan_accesses(
    [Layer(f"l{region}", 0, region) for region in range(5)],
    Geometry(num_blocks=20, num_spilled=9, num_regions=5, page_bytes=1),
)


@pytest.mark.parametrize("missing", range(len(step_operations(ACCESSES, STEP))))
def test_every_operation_is_needed(missing: int) -> None:
    program = step_operations(ACCESSES, STEP)
    simulate(ACCESSES, [STEP, STEP], [program, program], EAGER)
    if program[missing] == Raise([]):
        return
    damaged = [*program[:missing], *program[missing + 1 :]]
    for schedule in (EAGER, LAZY):
        try:
            simulate(ACCESSES, [STEP, STEP], [damaged, program], schedule)
        except (AssertionError, KeyError):
            return
    pytest.fail(f"nothing shows that {program[missing]} is missing")


def test_a_step_that_writes_nothing_lets_layers_write_at_once() -> None:
    first, *rest = step_operations(ACCESSES, SpillStep({0: GroupStep(reads=[(0, 2)], partial=[], writes=[])}))
    assert isinstance(first, Raise) and len(first.flags) == len(ACCESSES)
    assert not any(isinstance(operation, Save) for operation in rest)


def test_layers_that_read_anothers_kv_stay_in_pieces() -> None:
    assert is_graphable(ACCESSES)
    shared = Access(Layer("reader", 0, 3, is_owner=False), 1, True, None)
    assert not is_graphable([*ACCESSES, shared])
