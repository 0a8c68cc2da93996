"""The pool's memory: mapped at once, filled and pinned piece by piece behind the server's back."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from overspill.kv import host_memory
from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import HostMemory, Mapping, num_host_slots, slot_stride
from overspill.kv.options import Options
from overspill.kv.ram import numa_cpus

PAGE = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 2 * PAGE)


class Driver:
    """Registers ranges as a CUDA driver would, until it has enough."""

    def __init__(self, refuses_after: int | None = None) -> None:
        self.refuses_after = refuses_after
        self.ranges: dict[int, int] = {}
        self.asked: list[int] = []

    def register(self, address: int, length: int) -> str | None:
        self.asked.append(address)
        if self.refuses_after is not None and len(self.ranges) >= self.refuses_after:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        self.ranges[address] = length
        return None

    def unregister(self, address: int) -> None:
        del self.ranges[address]


def test_slots_keep_what_is_written_and_do_not_touch_each_other() -> None:
    memory = HostMemory(7, 1000)
    memory.prepare(None)
    for slot in range(7):
        memory.slots[slot] = slot + 1
    assert memory.wait_until_prepared(30)
    for slot in range(7):
        assert (memory.slots[slot] == slot + 1).all()
    memory.close()


def test_filling_pages_does_not_wipe_what_was_stored_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 5.14 cannot fill pages by madvise; the pool is in use while it is being filled."""
    memory = HostMemory(4, PAGE)
    memory.slots[:] = 7
    monkeypatch.setattr(host_memory, "_libc", SimpleNamespace(madvise=lambda *_: -1, munmap=host_memory._libc.munmap))
    memory.prepare(None)
    assert memory.wait_until_prepared(30)
    assert (memory.slots == 7).all()
    memory.close()


def test_pages_are_really_taken() -> None:
    memory = Mapping(4 * 2**20)
    before = _resident_bytes()
    memory.populate(0, memory.num_bytes)
    assert _resident_bytes() - before >= 3 * 2**20
    memory.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_slots_are_pinned_in_order_in_pieces_of_whole_slots() -> None:
    driver, memory = Driver(), HostMemory(5, PAGE)
    memory.prepare(driver)
    assert memory.wait_until_prepared(30)
    assert driver.asked == [memory.address + start for start in (0, 2 * PAGE, 4 * PAGE)]
    assert list(driver.ranges.values()) == [2 * PAGE, 2 * PAGE, PAGE]
    assert memory.pinned_bytes == memory.num_bytes
    assert memory.pinned_slots == 5
    assert not memory.pinning_refused
    memory.close()


def test_a_slot_never_lies_across_two_registered_pieces() -> None:
    driver, memory = Driver(), HostMemory(5, PAGE + 1)  # two pages each
    memory.prepare(driver)
    assert memory.wait_until_prepared(30)
    for slot in range(5):
        first = memory.slots[slot].ctypes.data
        assert (
            sum(start <= first and first + PAGE + 1 <= start + length for start, length in driver.ranges.items()) == 1
        )
    memory.close()


def test_only_registered_slots_count_as_pinned_during_pinning() -> None:
    reached, goes_on, memory = threading.Event(), threading.Event(), HostMemory(6, PAGE)

    class SlowDriver(Driver):
        def register(self, address: int, length: int) -> str | None:
            if self.ranges:
                reached.set()
                goes_on.wait(120)
            return super().register(address, length)

    memory.prepare(SlowDriver())
    assert reached.wait(60) and not memory.wait_until_prepared(0.05)
    assert memory.pinned_slots == 2
    goes_on.set()
    assert memory.wait_until_prepared(30)
    assert memory.pinned_slots == 6
    memory.close()


def test_a_refused_pin_is_logged_and_leaves_slots_usable(log: pytest.LogCaptureFixture) -> None:
    driver, memory = Driver(refuses_after=1), HostMemory(8, PAGE)
    with log.at_level(logging.WARNING, logger="vllm"):
        memory.prepare(driver)
        assert memory.wait_until_prepared(30)
    assert len(driver.asked) == 2, "after a refusal nothing more is asked for"
    assert memory.pinned_slots == 2
    assert memory.pinning_refused == "CUDA_ERROR_OUT_OF_MEMORY"
    (record,) = [r for r in log.records if "refused" in r.getMessage()]
    for part in ("8 KiB of 32 KiB", "CUDA_ERROR_OUT_OF_MEMORY", "ulimit -l"):
        assert part in record.getMessage()
    memory.slots[7] = 5
    assert (memory.slots[7] == 5).all()
    memory.close()


def test_closing_gives_every_registered_range_back_even_half_way() -> None:
    driver, memory = Driver(), HostMemory(64, PAGE)
    memory.prepare(driver)
    memory.close()
    assert driver.ranges == {}
    assert len(memory.slots) == 0
    assert memory.pinned_bytes == 0


def test_an_impossible_mapping_advises_a_lower_host_bytes() -> None:
    with pytest.raises(OverspillError, match=r"cannot map .* for host_bytes: .*lower host_bytes"):
        Mapping(2**56)


def test_scheduler_and_workers_agree_on_the_number_of_slots() -> None:
    options = Options(host_bytes=10 * PAGE)
    assert slot_stride(1) == slot_stride(PAGE) == PAGE
    assert slot_stride(PAGE + 1) == 2 * PAGE
    assert num_host_slots(options, 1, PAGE) == 10
    assert num_host_slots(options, 2, PAGE + 1) == 2
    assert num_host_slots(options, 4, 3 * PAGE) == 0


def test_the_cpus_of_a_numa_node_are_read_from_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / "devices/system/node/node1"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text("0-2,8,10-11\n")
    assert numa_cpus(1, tmp_path) == {0, 1, 2, 8, 10, 11}
    assert numa_cpus(0, tmp_path) == numa_cpus(None) == numa_cpus(-1) == set()


def test_the_array_is_the_mapping_itself() -> None:
    memory = HostMemory(2, PAGE)
    assert memory.slots.ctypes.data == memory.address
    assert memory.slots.dtype == np.uint8
    assert memory.address % (2 * 2**20) == 0, "huge pages need an aligned start"
    memory.close()


def test_an_error_while_pinning_is_a_refusal_and_not_the_end(log: pytest.LogCaptureFixture) -> None:
    class BrokenDriver(Driver):
        def register(self, address: int, length: int) -> str | None:
            raise RuntimeError("the driver is gone")

    memory = HostMemory(8, PAGE)
    memory.prepare(BrokenDriver())
    assert memory.wait_until_prepared(30)
    assert "the driver is gone" in memory.pinning_refused
    assert any("refused" in r.getMessage() for r in log.records)
    memory.close()
