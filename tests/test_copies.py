"""Plain copies between a KV buffer and the pool."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from overspill.kv import copies
from overspill.kv.buffer import Region
from overspill.kv.copies import CudaCopier, PlainCopier, Transfer, batches, merge_runs
from overspill.kv.host_memory import HostMemory
from tests.simulated_copies import Setup
from tests.simulated_engine import Engine

BLOCKS, SLOTS = 6, 8
LAYOUTS = {
    "block outermost": [Region(0, 96)],
    "layer outermost": [Region(0, 32), Region(32 * BLOCKS, 64)],
}


class Rig:
    def __init__(self, regions: list[Region]) -> None:
        self.memory = HostMemory(SLOTS, sum(region.block_bytes for region in regions))
        self.buffer = torch.zeros(96 * BLOCKS, dtype=torch.uint8)
        self.copier = PlainCopier(self.buffer, regions, BLOCKS, self.memory)
        self.regions = regions

    def block(self, index: int) -> bytes:
        parts = ((r.offset + index * r.block_bytes, r.block_bytes) for r in self.regions)
        return b"".join(bytes(self.buffer[start : start + size].tolist()) for start, size in parts)

    def fill(self) -> None:
        self.buffer.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, self.buffer.numel(), np.uint8)))


@pytest.fixture(params=LAYOUTS)
def rig(request: pytest.FixtureRequest, open_gate: None) -> Iterator[Rig]:
    rig = Rig(LAYOUTS[request.param])
    yield rig
    PlainCopier.gate.set()
    rig.copier.close()
    rig.memory.close()


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def wait(transfer: Transfer) -> Transfer:
    deadline = time.monotonic() + 30
    while not transfer.done():
        assert time.monotonic() < deadline, "the copy never ended"
        time.sleep(0.001)
    return transfer


def test_blocks_come_back_as_they_were_stored_into_other_blocks(rig: Rig) -> None:
    rig.fill()
    kept = [rig.block(i) for i in range(BLOCKS)]
    stored = rig.copier.store(ids(1, 4, 2), ids(7, 0, 3))
    assert stored.done() and stored.error is None
    assert rig.memory.slots[7].tobytes() == kept[1]
    rig.buffer.zero_()
    loaded = wait(rig.copier.load(ids(7, 0, 3), ids(0, 3, 5)))
    assert loaded.error is None and loaded.queued
    assert [rig.block(i) for i in (0, 3, 5)] == [kept[1], kept[4], kept[2]]
    for untouched in (1, 2, 4):
        assert not any(rig.block(untouched))


def test_a_transfer_knows_its_bytes_and_seconds(rig: Rig) -> None:
    transfer = rig.copier.store(ids(0, 1), ids(0, 1))
    assert transfer.num_bytes == 2 * 96
    assert transfer.seconds > 0


def test_a_closed_gate_keeps_copies_in_flight(rig: Rig) -> None:
    rig.fill()
    rig.copier.store(ids(1), ids(1))
    before = rig.block(2)
    PlainCopier.gate.clear()
    load, store = rig.copier.load(ids(1), ids(2)), rig.copier.store(ids(3), ids(4))
    assert not load._queued.wait(0.05)
    assert not load.done() and not store.done()
    assert rig.block(2) == before
    PlainCopier.gate.set()
    assert wait(load).error is None and wait(store).error is None
    assert rig.block(2) == rig.block(1)
    assert rig.memory.slots[4].tobytes() == rig.block(3)


def test_copies_happen_in_the_order_in_which_they_were_asked_for(rig: Rig) -> None:
    rig.fill()
    first, second = rig.block(1), rig.block(2)
    PlainCopier.gate.clear()
    rig.copier.store(ids(1), ids(0))
    load = rig.copier.load(ids(0), ids(5))
    rig.copier.store(ids(2), ids(0))
    PlainCopier.gate.set()
    rig.copier.close()
    assert load.done()
    assert rig.block(5) == first
    assert rig.memory.slots[0].tobytes() == second


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_copy_that_fails_is_over_and_says_why(rig: Rig, direction: str) -> None:
    bad, good = ids(SLOTS + 5), ids(0)
    transfer = rig.copier.load(bad, good) if direction == "load" else rig.copier.store(good, bad)
    assert isinstance(wait(transfer).error, IndexError)
    assert wait(rig.copier.load(ids(0), ids(0))).error is None, "the next copy is not affected"


# What the driver is asked for on a GPU, which needs none to be worked out.


def merged(dst: list[int], src: list[int], size: int, pieces: list[int] | None = None) -> list[tuple[int, int, int]]:
    columns = merge_runs(
        np.array(dst, np.uint64), np.array(src, np.uint64), size, np.array(pieces or [0] * len(dst), np.int64)
    )
    return [(int(d), int(s), int(n)) for d, s, n in zip(*columns, strict=True)]


def test_neighbours_on_both_sides_and_in_one_piece_are_one_copy() -> None:
    assert merged([0, 10, 20], [50, 60, 70], 10) == [(0, 50, 30)]
    assert merged([0, 10, 30], [50, 60, 70], 10) == [(0, 50, 20), (30, 70, 10)]
    assert merged([0, 10, 20], [50, 70, 80], 10) == [(0, 50, 10), (10, 70, 20)]
    assert merged([0, 10, 20], [50, 60, 70], 10, [0, 0, 1]) == [(0, 50, 20), (20, 70, 10)]
    assert merged([5], [7], 10) == [(5, 7, 10)] and merged([], [], 10) == []


def test_copies_are_not_merged_past_a_progress_check() -> None:
    size = 48 << 20  # two of them, not three
    places = [i * size for i in range(5)]
    assert [n // size for _, _, n in merged(places, places, size)] == [2, 2, 1]
    larger = 200 << 20
    assert [n // larger for _, _, n in merged([0, larger], [0, larger], larger)] == [1, 1]


def test_batches_cover_all_copies_and_end_at_progress_checks() -> None:
    def lengths(*sizes: int) -> list[int]:
        found = list(batches(np.array(sizes, np.uint64)))
        assert [i for part in found for i in range(len(sizes))[part]] == list(range(len(sizes)))
        return [part.stop - part.start for part in found]

    assert lengths() == [] and lengths(1) == [1]
    assert lengths(*[1] * 1100) == [512, 512, 76]
    assert lengths(*[2 << 20] * 200) == [64, 64, 64, 8]
    assert lengths(128 << 20, 128 << 20, 1) == [1, 1, 1]


@pytest.mark.parametrize("zeroes", [False, True], ids=["plain", "zeroing"])
def test_load_waits_for_zeroes_that_are_still_queued(monkeypatch: pytest.MonkeyPatch, zeroes: bool) -> None:
    """They are queued for whoever was given the block first, and a load that overtook them lost what it had brought.
    The events are names here, in the order of the compute stream."""
    stream = iter(f"end of step {n}" for n in range(9))
    waits_for: list[str] = []
    monkeypatch.setattr(copies, "_compute_so_far", lambda: next(stream))
    monkeypatch.setattr(copies, "_CudaTransfer", lambda num_bytes, after: SimpleNamespace(after=after))
    monkeypatch.setattr(copies, "BatchCopy", lambda: None)

    class Lane:
        def __init__(self, *_: Any) -> None: ...

        def submit(self, transfer: Any, copy: Any) -> None:
            waits_for.append(transfer.after)

    monkeypatch.setattr(copies, "_Lane", Lane)
    rig = Rig(LAYOUTS["block outermost"])
    copier = CudaCopier(rig.buffer, rig.regions, rig.memory, 2, zeroes_new_blocks=zeroes)
    for _ in range(3):
        copier.end_step()
    copier.load(np.array([0]), np.array([1]))
    assert waits_for == ["end of step 3" if zeroes else "end of step 1"]


@pytest.mark.parametrize("zeroes", [False, True])
def test_worker_says_whether_new_blocks_are_zeroed(monkeypatch: pytest.MonkeyPatch, zeroes: bool) -> None:
    worker = Engine(Setup()).workers[0]
    worker._config = SimpleNamespace(needs_kv_cache_zeroing=zeroes)  # type: ignore[assignment]
    said: dict[str, bool] = {}
    monkeypatch.setattr("overspill.kv.worker.CudaCopier", lambda *_, **settings: said.update(settings))
    monkeypatch.setattr("overspill.kv.worker.PinnedRanges", lambda device: None)
    monkeypatch.setattr("overspill.kv.worker.gpu_numa_node", lambda device: None)
    worker._use_cuda(torch.zeros(96 * BLOCKS, dtype=torch.uint8), SLOTS, 96, LAYOUTS["block outermost"])
    assert said == {"zeroes_new_blocks": zeroes}
    worker._copier = None
    worker.shutdown()


@pytest.mark.parametrize("pinned_slots", [0, 2, SLOTS])
def test_pageable_slots_are_copied_while_the_lane_waits(monkeypatch: pytest.MonkeyPatch, pinned_slots: int) -> None:
    """Events do not order such copies: compute before them has completed, and so have they when they count as
    queued."""
    happened: list[str] = []

    class Lane:
        stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: happened.append("wait"))

        def __init__(self, *_: Any) -> None: ...

        def submit(self, transfer: Any, copy: Any) -> None:
            copy()
            happened.append("queued")

    def batch(dst: np.ndarray, src: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        first = (int(src[0]) - rig.memory.address) // rig.memory.slot_stride
        happened.append("pinned" if first < pinned_slots else "pageable")

    monkeypatch.setattr(copies, "_compute_so_far", lambda: None)
    monkeypatch.setattr(copies, "_CudaTransfer", lambda *_: SimpleNamespace(mark=lambda *_: None))
    monkeypatch.setattr(copies, "BatchCopy", lambda: batch)
    monkeypatch.setattr(copies, "_Lane", Lane)
    rig = Rig(LAYOUTS["block outermost"])
    rig.memory.pinned_bytes = pinned_slots * rig.memory.slot_stride
    copier = CudaCopier(rig.buffer, rig.regions, rig.memory)
    copier.load(ids(0, 5), ids(1, 2))
    pinned = ["pinned"] if pinned_slots else []
    pageable = ["wait", "pageable", "wait"] if pinned_slots < SLOTS else []
    assert happened == [*pinned, *pageable, "queued"]
