"""No copy races with compute, and attention reads its own tokens: random models and steps, and planted faults.

`simulated_window` says what is checked. Real engines under two schedules (`test_spill_faults`) see the races that one
of the two turns into wrong tokens; here every order that a GPU may choose counts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import GroupStep, Runs, Span, SpillStep, group_step
from overspill.kv.spill.window import Access, Layer, Window, plan_accesses
from tests import simulated_requests, simulated_window
from tests.simulated_copies import Violation
from tests.simulated_requests import Part, Scheduler
from tests.simulated_streams import SimulatedStreams
from tests.simulated_window import simulate

Patch = pytest.MonkeyPatch

SEEDS = 200
HAPPENINGS = (
    "bytes in", "bytes out", "spilled steps", "plain steps", "hits", "hits on what the step writes",
    "preemptions", "preemptions in flight", "resumptions", "blocks left behind by windows", "group changes",
    "rejected drafts", "parts behind their plan",
)  # fmt: skip


def simulate_all(seeds: Iterable[int]) -> None:
    """Where something never happened, that it went well proves nothing."""
    tally: Counter[str] = Counter()
    for seed in seeds:
        tally.update(simulate(seed))
    for what in HAPPENINGS:
        assert tally[what] > 0, f"no seed had any {what}"


def test_copies_never_race_compute_and_attention_reads_its_kv() -> None:
    simulate_all(range(SEEDS))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_copies_never_race_compute_under_many_seeds() -> None:
    simulate_all(range(SEEDS, 20_000))


def test_a_seed_always_gives_the_same_steps() -> None:
    assert simulate(1) == simulate(1)


# Each of these faults is planted, and found.


def no_wait_of_fills(patch: Patch) -> None:
    patch.setattr(SimulatedStreams, "fill_after", lambda self, event: None)


def no_wait_of_saves(patch: Patch) -> None:
    patch.setattr(SimulatedStreams, "save_after", lambda self, event: None)


def no_wait_before_writing(patch: Patch) -> None:
    patch.setattr(Window, "_allow_writes", lambda self: None)


def no_wait_before_reading(patch: Patch) -> None:
    patch.setattr(Window, "before_read", lambda self, layer: None)


def no_wait_for_other_groups(patch: Patch) -> None:
    """A step's first fills then wait for the same group's last access only."""

    class OwnOnly(dict[Any, Any]):
        def items(self) -> Any:
            """`Window.begin` looks at all of them; `_fill` asks for its own."""
            return ()

    start = Window.__init__

    def start_with_own_only(self: Window, *args: Any) -> None:
        start(self, *args)
        self._free = OwnOnly()

    patch.setattr(Window, "__init__", start_with_own_only)


def no_write_back(patch: Patch) -> None:
    patch.setattr(SimulatedStreams, "_save", lambda self, region, runs: None)


def no_wait_for_saves(patch: Patch) -> None:
    """A half is then free once it was attended to, while what was written is still on its way out."""
    patch.setattr(SimulatedStreams, "save_event", SimulatedStreams.compute_event)


def changed_steps(change: Callable[[GroupStep], GroupStep]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def changed(spans: Sequence[Span], **sizes: int) -> GroupStep | None:
            step = group_step(spans, **sizes)
            return step and change(step)

        patch.setattr(simulated_requests, "group_step", changed)

    return plant


def no_regard_for_writers(patch: Patch) -> None:
    """What a request reads is streamed although another one writes it in the same step."""

    def each_alone(spans: Sequence[Span], **sizes: int) -> GroupStep | None:
        step = group_step(spans, **sizes)
        alone = [found for span in spans if (found := group_step([span], **sizes)) is not None]
        return step and replace(step, reads=union(found.reads for found in alone))

    patch.setattr(simulated_requests, "group_step", each_alone)


def union(parts: Iterable[Runs]) -> Runs:
    """As runs of one block each."""
    return [(block, block + 1) for block in sorted({b for runs in parts for run in runs for b in range(*run)})]


def changed_certainty(certain: Callable[[Span], int]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def changed(spans: Sequence[Span], **sizes: int) -> GroupStep | None:
            return group_step([replace(span, certain=certain(span)) for span in spans], **sizes)

        patch.setattr(simulated_requests, "group_step", changed)

    return plant


def tables_as_appended(patch: Patch) -> None:
    """A resumed request then has its old blocks, and a window leaves none behind."""
    spilled = Scheduler._spilled
    appended: dict[tuple[Scheduler, int, int], list[int]] = {}

    def spilled_as_appended(self: Scheduler, parts: Sequence[Part]) -> SpillStep | None:
        for part in parts:
            for group, table in enumerate(part.tables):
                known = appended.setdefault((self, part.name, group), [])
                known += table[len(known) :]
        tables = [tuple(tuple(appended[self, part.name, group]) for group in range(len(part.tables))) for part in parts]
        return spilled(self, [replace(part, tables=table) for part, table in zip(parts, tables, strict=True)])

    patch.setattr(Scheduler, "_spilled", spilled_as_appended)


def changed_accesses(change: Callable[[list[Access], Access], Access]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def changed(layers: Sequence[Layer], geometry: Geometry) -> list[Access]:
            accesses = plan_accesses(layers, geometry)
            return [change(accesses, access) for access in accesses]

        patch.setattr(simulated_window, "plan_accesses", changed)

    return plant


def not_refilled(accesses: list[Access], access: Access) -> Access:
    return replace(access, is_filled=access.is_filled and access.layer.is_owner)


def freed_by_its_owner(accesses: list[Access], access: Access) -> Access:
    """The half is filled for the layer after the next, though the next one reads what is there."""
    follower = access.next_in_half
    while follower is not None and not accesses[follower].is_filled:
        follower = accesses[follower].next_in_half
    return replace(access, next_in_half=follower)


def sharers_without_new_kv(patch: Patch) -> None:
    fill = Window._fill

    def fill_without_writes(self: Window, index: int, group: GroupStep) -> None:
        fill(self, index, group if self._accesses[index].layer.is_owner else replace(group, writes=[]))

    patch.setattr(Window, "_fill", fill_without_writes)


RACE, WRONG = "race in", "wrong KV"
FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "fills wait for nothing": (no_wait_of_fills, RACE),
    "saves wait for nothing": (no_wait_of_saves, RACE),
    "compute does not wait before it writes": (no_wait_before_writing, RACE),
    "compute does not wait before it reads": (no_wait_before_reading, RACE),
    "fills do not wait for other groups": (no_wait_for_other_groups, RACE),
    "a half is free before it is written back": (no_wait_for_saves, RACE),
    "partial blocks come with the full ones": (
        changed_steps(lambda step: replace(step, reads=union([step.reads, step.partial]), partial=[])), RACE,
    ),
    "partial blocks do not come": (changed_steps(lambda step: replace(step, partial=[])), WRONG),
    "blocks that the step writes are streamed for those who read them": (no_regard_for_writers, RACE),
    "optimistic positions are taken for certain": (changed_certainty(lambda span: span.computed), f"{RACE}|{WRONG}"),
    "one draft more is taken for certain": (
        changed_certainty(lambda span: min(span.certain + 1, span.computed)), f"{RACE}|{WRONG}",
    ),
    "tables are what was appended to them": (tables_as_appended, f"{RACE}|{WRONG}"),
    "nothing is written back": (no_write_back, WRONG),
    "a layer that shares KV finds another's": (changed_accesses(not_refilled), WRONG),
    "a layer that shares KV does not get what its owner wrote": (sharers_without_new_kv, WRONG),
    "a half is filled before the last layer that shares KV": (changed_accesses(freed_by_its_owner), RACE),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: Patch) -> None:
    plant, what = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(Violation, match=what):
        for seed in range(SEEDS):
            simulate(seed)
