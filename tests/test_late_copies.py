"""Loads that land as late as the order of streams allows: only when someone waits for them.

On a GPU a load may be announced while its bytes are still on the way, and everything queued later must wait for it.
Here its bytes are moved at that wait and not before, so whatever reads them earlier reads something else.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from overspill.kv.copies import Ids, PlainCopier, Transfer
from tests.engine import Answer, Engine, assert_same, engine, overspill, random_prompt, stock
from tests.test_hybrids import NAMES, NUM_TOKENS, settings


class LateTransfer(Transfer):
    """Queued at once, done when compute is ordered behind it, or, if nothing ever is, much later."""

    fences = 0

    def __init__(self, num_bytes: int, copy: Callable[[], None]) -> None:
        super().__init__(num_bytes)
        self._copy = copy
        self._latest = time.monotonic() + 30
        self._queued.set()

    def fence(self) -> None:
        if not self._done.is_set():
            LateTransfer.fences += 1
            self._land()

    def done(self) -> bool:
        if not self._done.is_set() and time.monotonic() > self._latest:
            self._land()
        return self._done.is_set()

    def _land(self) -> None:
        self._copy()
        self.settle()


@pytest.fixture
def late_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: PlainCopier, slots: Ids, blocks: Ids) -> Transfer:
        def copy() -> None:
            for region, part in self._pairs:
                region[blocks] = self._memory.slots[slots, part]

        return LateTransfer(len(slots) * self._memory.slot_bytes, copy)

    monkeypatch.setattr(PlainCopier, "load", load)
    monkeypatch.setattr(LateTransfer, "fences", 0)


@pytest.mark.parametrize("name", ["llama", *NAMES])
def test_a_request_announced_early_reads_what_was_loaded(
    models: Callable[[str], Path], late_loads: None, name: str
) -> None:
    """vLLM copies recurrent states before it binds a step's metadata: a wait there came too late for them."""
    arguments = {"blocks": 150} if name == "llama" else settings(name)
    prompts = [random_prompt(seed, 600) for seed in range(3)]
    expected = stock(models(name), prompts, NUM_TOKENS, **arguments)
    with engine(models(name), overspill(), **arguments) as spilling:
        for prompt in prompts:
            spilling.ask_one(prompt, NUM_TOKENS)
        spilling.forget_gpu()
        # Where the copies will be over in time, the request is scheduled before they are.
        spilling.worker.load_bytes_per_s = 1e12
        assert_same([spilling.ask_one(p, NUM_TOKENS) for p in prompts], expected)
        assert LateTransfer.fences == 3, "the loads were not announced early"
        spilling.assert_nothing_is_held()
        spilling.forget_gpu()
        assert_same(ask_beside_another(spilling, prompts[:2]), expected[:2])
        assert LateTransfer.fences == 5, "the loads were not announced before they were over"
        spilling.assert_nothing_is_held()


def ask_beside_another(spilling: Engine, prompts: Sequence[list[int]]) -> list[Answer]:
    other = spilling.add(random_prompt(9, 40), 60)
    for _ in range(3):
        spilling.step()
    answers: dict[str, Answer] = {}
    names = [spilling.add(p, NUM_TOKENS) for p in prompts]
    while len(answers) < len(names):
        done = spilling.step()
        assert other not in done, "it was to run all the time"
        answers |= done
    spilling.llm.llm_engine.abort_request([other])
    spilling.step()
    return [answers[name] for name in names]


def test_without_the_wait_the_answers_are_wrong(
    models: Callable[[str], Path], late_loads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateTransfer, "fence", lambda self: None)
    prompt = random_prompt(1, 600)
    with engine(models("llama"), overspill(), blocks=150) as spilling:
        before = spilling.ask_one(prompt)
        spilling.forget_gpu()
        spilling.worker.load_bytes_per_s = 1e12
        assert spilling.ask_one(prompt).differs_from(before)
