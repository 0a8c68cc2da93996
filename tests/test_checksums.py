"""A checksum per stored block, found wrong when a bit has flipped."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from overspill.kv.host_memory import SAMPLE_EVERY, Checksums, HostMemory
from overspill.kv.options import Verify

SLOTS = 3 * SAMPLE_EVERY


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(SLOTS, 5000)
    memory.slots[:] = np.random.default_rng(0).integers(0, 256, memory.slots.shape, np.uint8)
    yield memory
    memory.close()


def corrupt(memory: HostMemory, verify: Verify, *flipped: int) -> tuple[int, set[int]]:
    """Store everything, flip a bit in some slots, check everything."""
    checksums = Checksums(memory, verify)
    checksums.record(range(SLOTS))
    assert checksums.check(range(SLOTS)).corrupt_slots() == []
    for slot in flipped:
        memory.slots[slot, -1] ^= 1
    verdict = checksums.check(range(SLOTS))
    found = set(verdict.corrupt_slots())
    assert verdict.done()
    checksums.close()
    return verdict.num_checked, found


def test_all_finds_every_flipped_bit(memory: HostMemory) -> None:
    assert corrupt(memory, "all", 0, 5, SLOTS - 1) == (SLOTS, {0, 5, SLOTS - 1})


def test_sample_finds_those_in_the_sample_and_checks_no_others(memory: HostMemory) -> None:
    assert corrupt(memory, "sample", SAMPLE_EVERY, SAMPLE_EVERY + 1) == (3, {SAMPLE_EVERY})


def test_off_checks_nothing(memory: HostMemory) -> None:
    assert corrupt(memory, "off", 0, 1, 2) == (0, set())


def test_a_slot_that_is_stored_anew_is_judged_by_its_new_content(memory: HostMemory) -> None:
    checksums = Checksums(memory, "all")
    checksums.record([3])
    memory.slots[3] = 9
    assert checksums.check([3]).corrupt_slots() == [3]
    checksums.record([3])
    assert checksums.check([3]).corrupt_slots() == []
    checksums.close()


def test_a_check_waits_for_pending_checksums(memory: HostMemory) -> None:
    checksums = Checksums(memory, "all", threads=1)
    for _ in range(20):
        memory.slots[:] += 1
        checksums.record(range(SLOTS))
        assert checksums.check(range(SLOTS)).corrupt_slots() == []
    checksums.close()


def test_a_second_check_waits_for_pending_checksums(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    checksums = Checksums(memory, "all", threads=3)
    gate, record = threading.Event(), checksums._record

    def wait(slots: list[int]) -> None:
        gate.wait(30)
        record(slots)

    monkeypatch.setattr(checksums, "_record", wait)
    checksums.record([3])
    first, second = checksums.check([3]), checksums.check([3])
    with pytest.raises(TimeoutError):
        second.parts[0].result(0.1)
    gate.set()
    assert first.corrupt_slots() == second.corrupt_slots() == []
    checksums.close()


def test_a_check_of_nothing_is_over_at_once(memory: HostMemory) -> None:
    checksums = Checksums(memory, "all")
    verdict = checksums.check([])
    assert verdict.done() and verdict.corrupt_slots() == [] and verdict.num_checked == 0
    checksums.close()
