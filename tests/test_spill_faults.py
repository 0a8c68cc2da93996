"""Each wait and each copy of spill is needed: taken away, tokens or logprobs change under one schedule or the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overspill.kv.spill import scheduler as spill_scheduler
from overspill.kv.spill import worker as spill_worker
from overspill.kv.spill.steps import GroupStep, SpillStep
from overspill.kv.spill.streams import HostStreams
from overspill.kv.spill.window import Window
from tests.engine import Answer, Engine, engine, random_prompt, spilling
from tests.late_streams import LateStreams

Patch = pytest.MonkeyPatch


def no_wait_before_reading(patch: Patch) -> None:
    patch.setattr(Window, "before_read", lambda self, layer: None)


def no_wait_before_writing(patch: Patch) -> None:
    """A partly filled block then arrives after the step has written to it."""
    patch.setattr(Window, "_allow_writes", lambda self: None)


def no_wait_for_a_free_half(patch: Patch) -> None:
    """The next layer's KV then lands on what was not brought back yet."""
    patch.setattr(LateStreams, "fill_after", lambda self, event: None)


def no_write_back(patch: Patch) -> None:
    patch.setattr(HostStreams, "_save", lambda self, region, runs: None)


def filled_while_it_is_read(patch: Patch) -> None:
    """The half is given to the next layer before this one has attended."""
    before, after = Window.before_read, Window.after_read

    def before_read(self: Window, layer: str) -> None:
        before(self, layer)
        if self.is_active:
            index = self._accesses[self._at].next_in_half
            if index is not None and self._step is not None:
                self._fill(index, self._step.groups[0])

    patch.setattr(Window, "before_read", before_read)
    patch.setattr(Window, "after_read", after)


def changed_steps(change: Callable[[GroupStep], GroupStep]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        plan = spill_scheduler.SpillScheduler._streamed

        def streamed(self: Any, output: Any) -> SpillStep | None:
            step = plan(self, output)
            return step and SpillStep({group: change(part) for group, part in step.groups.items()})

        patch.setattr(spill_scheduler.SpillScheduler, "_streamed", streamed)

    return plant


FAULTS: list[tuple[str, str, Callable[[Patch], None]]] = [
    ("no wait before reading", "late", no_wait_before_reading),
    ("no wait before writing", "late", no_wait_before_writing),
    ("no wait for a free half", "late", no_wait_for_a_free_half),
    ("no write-back", "eager", no_write_back),
    ("filled while it is read", "eager", filled_while_it_is_read),
    ("no partly filled block", "eager", changed_steps(lambda s: GroupStep(s.reads, [], s.writes))),
    ("a block left out", "eager", changed_steps(lambda s: GroupStep(s.reads[1:] + _but_first(s), s.partial, s.writes))),
    (
        "a partly filled block with the full ones",
        "late",
        changed_steps(lambda s: GroupStep(sorted(s.reads + s.partial), [], s.writes)),
    ),
]


def _but_first(step: GroupStep) -> list[tuple[int, int]]:
    return [(start + 1, end) for start, end in step.reads[:1] if end > start + 1]


def conversation(asked: Engine) -> list[Answer]:
    """A long request beside a short one, and what comes after it."""
    history = random_prompt(1, 800)
    first = asked.ask([history, random_prompt(2, 60)], 40)
    return [*first, asked.ask_one(history + list(first[0].tokens) + random_prompt(3, 70), 20)]


@pytest.fixture(scope="module")
def right(models: Callable[[str], Path]) -> list[Answer]:
    with engine(models("llama"), blocks=400) as plain:
        return conversation(plain)


@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_without_a_fault_it_is_right(llama: Path, right: list[Answer], monkeypatch: Patch, schedule: str) -> None:
    monkeypatch.setattr(spill_worker, "HostStreams", HostStreams if schedule == "eager" else LateStreams)
    with engine(llama, spilling()) as spills:
        assert all(not mine.differs_from(theirs) for mine, theirs in zip(conversation(spills), right, strict=True))


@pytest.mark.parametrize(("name", "schedule", "plant"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_a_fault_changes_the_answer(
    llama: Path, right: list[Answer], monkeypatch: Patch, name: str, schedule: str, plant: Callable[[Patch], None]
) -> None:
    monkeypatch.setattr(spill_worker, "HostStreams", HostStreams if schedule == "eager" else LateStreams)
    plant(monkeypatch)
    with engine(llama, spilling()) as spills:
        assert any(mine.differs_from(theirs) for mine, theirs in zip(conversation(spills), right, strict=True))


def test_streaming_a_block_being_written_changes_the_answer(llama: Path, monkeypatch: Patch) -> None:
    """The fault: a block is streamed because a request reads it, even while another writes it."""

    def streamed_anyway(step: GroupStep) -> GroupStep:
        return GroupStep(sorted([*step.reads, *step.writes]), step.partial, step.writes)

    prompt = random_prompt(4, 600)
    with engine(llama, spilling()) as spills:
        right = spills.ask_one(prompt)
    changed_steps(streamed_anyway)(monkeypatch)
    monkeypatch.setattr(spill_worker, "HostStreams", LateStreams)
    with engine(llama, spilling()) as spills:
        assert spills.ask_one(prompt).differs_from(right)


def test_a_damaged_spilled_block_changes_the_answer(llama: Path, right: list[Answer]) -> None:
    """What is in RAM is really read, and the model is sensitive to it."""
    with engine(llama, spilling()) as spills:
        history = random_prompt(1, 800)
        name = spills.add(history, 40)
        for _ in range(5):
            spills.step()
        arena = spills.spill_worker.arena
        assert arena is not None
        arena.slots[2, 3 * spills.spill.geometry.page_bytes :][:256] ^= 0x08
        assert spills.run()[name].differs_from(right[0])


def test_a_step_whose_layers_do_not_call_is_an_error(llama: Path, monkeypatch: Patch) -> None:
    """As when a FULL CUDA graph is replayed: nothing would stream, and nothing would say so."""
    monkeypatch.setattr(spill_worker.SpillWorker, "before_layer", lambda self, name: None)
    monkeypatch.setattr(spill_worker.SpillWorker, "after_layer", lambda self, name: None)
    with engine(llama, spilling()) as spills, pytest.raises(Exception, match="ran 0 of its 4 attention layers"):
        spills.ask_one(random_prompt(1, 800))


def test_layers_in_another_order_are_an_error(llama: Path, monkeypatch: Patch) -> None:
    """Should the model change its order after the start, where it is recorded."""
    from overspill.kv.spill import vllm_worker, window

    in_order = window.attention_layers
    monkeypatch.setattr(vllm_worker, "check_order", lambda *recorded: None)

    def reversed_layers(*args: Any) -> Any:
        return list(reversed(in_order(*args)))

    monkeypatch.setattr(spill_worker, "attention_layers", reversed_layers)
    with (
        engine(llama, spilling()) as spills,
        pytest.raises(Exception, match="in an order that Overspill does not know"),
    ):
        spills.ask_one(random_prompt(1, 800))
