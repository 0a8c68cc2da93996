"""A load that fails, or brings something else than was stored, is recomputed; the request never notices."""

from pathlib import Path

import pytest

from overspill.kv.copies import PlainCopier
from tests.engine import Engine, assert_same, engine, overspill, random_prompt

PROMPT = random_prompt(1, 600)
CACHED = 576


def damage(running: Engine, slot: int) -> None:
    assert running.worker.memory is not None and running.worker.checksums is not None
    running.worker.checksums.check([slot]).corrupt_slots()  # waits until the checksum is that of the whole content
    running.worker.memory.slots[slot] ^= 0x11


@pytest.mark.parametrize("slot", [0, 7, 17])
def test_a_corrupt_block_changes_the_answer_without_checksums(llama: Path, slot: int) -> None:
    with engine(llama, overspill(verify="off")) as spilling:
        before = spilling.ask_one(PROMPT)
        spilling.forget_gpu()
        damage(spilling, slot)
        after = spilling.ask_one(PROMPT)
        assert after.num_cached == CACHED
        assert after.differs_from(before), "the model does not notice a damaged block, so it proves nothing"


@pytest.mark.parametrize("slot", [0, 7, 17])
def test_a_corrupt_block_is_caught_dropped_and_recomputed(
    llama: Path, slot: int, log: pytest.LogCaptureFixture
) -> None:
    with engine(llama, overspill(verify="all")) as spilling:
        before = spilling.ask_one(PROMPT)
        spilling.forget_gpu()
        damage(spilling, slot)
        after = spilling.ask_one(PROMPT)
        assert_same([after], [before])
        assert spilling.metric("corrupt_blocks") == 1
        assert spilling.metric("load_failures") == 1
        assert any("no longer held what was stored" in record.message for record in log.records)
        # The bad block is gone, and its replacement is good: the next lookup neither finds it nor fails again.
        spilling.forget_gpu()
        assert_same([spilling.ask_one(PROMPT)], [before])
        assert spilling.metric("corrupt_blocks") == 1
        spilling.assert_nothing_is_held()


def test_sampled_checks_cover_one_block_in_sixteen(llama: Path) -> None:
    with engine(llama, overspill(verify="sample")) as spilling:
        before = spilling.ask_one(PROMPT)
        spilling.forget_gpu()
        damage(spilling, 16)
        assert_same([spilling.ask_one(PROMPT)], [before])
        assert spilling.metric("corrupt_blocks") == 1
        assert spilling.metric("verified_blocks") >= 2  # of the eighteen loaded, slots 0 and 16


def test_a_load_that_raises_is_recomputed(
    llama: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    with engine(llama, overspill()) as spilling:
        before = spilling.ask_one(PROMPT)
        spilling.forget_gpu()
        memory = spilling.worker.memory
        copier = spilling.worker._copier
        assert memory is not None and isinstance(copier, PlainCopier)
        # The copier reads a pool that is gone.
        monkeypatch.setattr(copier, "_memory", type("Gone", (), {"slot_bytes": memory.slot_bytes})())
        after = spilling.ask_one(PROMPT, max_tokens=24)
        monkeypatch.undo()
        assert_same([after], [before])
        assert spilling.metric("load_failures") >= 1
        assert spilling.metric("store_failures") >= 1
        assert any("it is recomputed" in record.message for record in log.records)
        spilling.assert_nothing_is_held()


def test_other_requests_go_on_while_one_load_fails(llama: Path) -> None:
    others = [random_prompt(i, 200) for i in range(2, 5)]
    with engine(llama, blocks=80) as plain:
        expected = plain.ask([PROMPT, *others])
    with engine(llama, overspill(verify="all"), blocks=80) as spilling:
        spilling.ask_one(PROMPT)
        spilling.forget_gpu()
        damage(spilling, 5)
        assert_same(spilling.ask([PROMPT, *others]), expected)
        assert spilling.metric("corrupt_blocks") == 1
        spilling.assert_nothing_is_held()
