"""What only a GPU can show: DMA, stream order, vLLM's CUDA runner. Run with `pytest -m gpu`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import BLOCK, Answer, assert_identical, engine, overspill, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

NUM_BLOCKS, BLOCK_BYTES, LAYERS = 64, 1 << 20, 4


class Rig:
    """A KV buffer, a pool and a copier."""

    def __init__(self, *, layers_outermost: bool, pinned_slots: int | None) -> None:
        from overspill.kv.buffer import Region
        from overspill.kv.copies import CudaCopier
        from overspill.kv.cuda import PinnedRanges
        from overspill.kv.host_memory import HostMemory

        self.buffer = torch.randint(0, 255, (NUM_BLOCKS * BLOCK_BYTES,), dtype=torch.uint8, device="cuda")
        page = BLOCK_BYTES // LAYERS
        if layers_outermost:
            self.regions = [Region(layer * NUM_BLOCKS * page, page) for layer in range(LAYERS)]
        else:
            self.regions = [Region(0, BLOCK_BYTES)]
        self.memory = HostMemory(NUM_BLOCKS, BLOCK_BYTES)
        self.pinned = PinnedRanges(self.buffer.device)
        self.memory.prepare(self.pinned)
        self.memory.wait_until_prepared()
        assert self.memory.pinned_bytes == self.memory.num_bytes
        if pinned_slots is not None:
            self.memory.pinned_bytes = pinned_slots * self.memory.slot_stride
        self.copier = CudaCopier(self.buffer, self.regions, self.memory)

    def block(self, index: int) -> np.ndarray:
        parts = [self.buffer[r.offset + index * r.block_bytes :][: r.block_bytes] for r in self.regions]
        return torch.cat(parts).cpu().numpy()

    def close(self) -> None:
        self.copier.close()
        self.memory.close()


@pytest.fixture(params=[False, True], ids=["block-outermost", "layer-outermost"])
def layers_outermost(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[None, 0, 20], ids=["pinned", "pageable", "half-pinned"])
def rig(request: pytest.FixtureRequest, layers_outermost: bool) -> Iterator[Rig]:
    made = Rig(layers_outermost=layers_outermost, pinned_slots=request.param)
    yield made
    made.close()


def finish(transfer) -> None:  # type: ignore[no-untyped-def]
    assert transfer._queued.wait(30)
    torch.cuda.synchronize()
    assert transfer.done() and transfer.error is None, transfer.error


def test_a_stored_block_comes_back_bit_for_bit(rig: Rig) -> None:
    blocks = np.random.default_rng(0).permutation(NUM_BLOCKS)[:40]
    slots = np.random.default_rng(1).permutation(NUM_BLOCKS)[:40]
    before = [rig.block(b) for b in blocks]
    finish(rig.copier.store(blocks, slots))
    for slot, expected in zip(slots, before, strict=True):
        assert np.array_equal(rig.memory.slots[slot], expected)
    rig.buffer.zero_()
    targets = np.random.default_rng(2).permutation(NUM_BLOCKS)[:40]
    finish(rig.copier.load(slots, targets))
    for target, expected in zip(targets, before, strict=True):
        assert np.array_equal(rig.block(target), expected)


def test_neighbouring_blocks_across_registered_pieces_are_copied(layers_outermost: bool, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("overspill.kv.host_memory.PIECE_BYTES", 8 * BLOCK_BYTES)
    rig = Rig(layers_outermost=layers_outermost, pinned_slots=None)
    everything = np.arange(NUM_BLOCKS)
    before = [rig.block(b) for b in everything]
    finish(rig.copier.store(everything, everything))
    rig.buffer.zero_()
    finish(rig.copier.load(everything, everything))
    assert all(np.array_equal(rig.block(b), expected) for b, expected in zip(everything, before, strict=True))
    rig.close()


def test_a_store_waits_for_the_compute_before_it(rig: Rig) -> None:
    blocks = np.arange(8)
    torch.cuda._sleep(200_000_000)
    rig.buffer.fill_(5)
    transfer = rig.copier.store(blocks, blocks)
    finish(transfer)
    assert (rig.memory.slots[blocks] == 5).all()


def test_loads_wait_for_prior_compute_and_compute_for_the_fence(rig: Rig) -> None:
    rig.memory.slots[:] = 9
    torch.cuda._sleep(200_000_000)
    rig.buffer.fill_(5)  # still writes the blocks when the load is asked for
    rig.copier.end_step()
    blocks = np.arange(NUM_BLOCKS)
    transfer = rig.copier.load(blocks, blocks)
    assert transfer._queued.wait(30)
    transfer.fence()
    seen = rig.buffer.clone()  # queued while the copies may still run
    finish(transfer)
    assert bool((seen == 9).all())


def test_a_load_reports_its_remaining_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.kv.copies._MARK_BYTES", 8 * BLOCK_BYTES)
    torch.cuda._sleep(200_000_000)
    rig.copier.end_step()
    blocks = np.arange(NUM_BLOCKS)
    transfer = rig.copier.load(blocks, blocks)
    assert transfer._queued.wait(30)
    seen = [transfer.remaining_bytes()]
    if rig.memory.pinned_bytes == rig.memory.num_bytes:
        assert seen[0] == transfer.num_bytes, "it waits for the compute before it"
    while not transfer.done():
        seen.append(transfer.remaining_bytes())
    assert seen == sorted(seen, reverse=True) and transfer.remaining_bytes() == 0
    assert (
        transfer._queued_bytes == transfer.num_bytes and transfer._marked_bytes >= transfer.num_bytes - 8 * BLOCK_BYTES
    )


def slow_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies begin a tenth of a second late, and count as there in time."""
    from overspill.kv.copies import CudaCopier

    copy = CudaCopier._copy

    def late(self: CudaCopier, lane: Any, *args: Any, to_gpu: bool) -> None:
        if to_gpu:
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(200_000_000)
        copy(self, lane, *args, to_gpu=to_gpu)

    monkeypatch.setattr(CudaCopier, "_copy", late)
    monkeypatch.setattr("overspill.kv.worker._ANNOUNCE_AHEAD_S", 1e9)


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "not fenced"])
def test_a_request_run_before_its_load_ends_waits_at_the_fence(
    llama: Path, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    from overspill.kv.copies import _CudaTransfer

    fence, under_way = _CudaTransfer.fence, []

    def counted(self: _CudaTransfer) -> None:
        under_way.append(not self.done())
        if fenced:
            fence(self)

    prompt, other = random_prompt(1, 600), random_prompt(2, 40)
    with engine(llama, overspill()) as spilling:
        before = spilling.ask_one(prompt)
        spilling.forget_gpu()
        assert not spilling.ask_one(prompt).differs_from(before)  # and measures the link
        spilling.forget_gpu()
        slow_loads(monkeypatch)
        monkeypatch.setattr(_CudaTransfer, "fence", counted)
        running = spilling.add(other, 300)
        for _ in range(5):
            spilling.step()
        name = spilling.add(prompt)
        done: dict[str, Answer] = {}
        while name not in done:
            done |= spilling.step()
        assert running not in done and any(under_way), "it was to be announced while another ran"
        assert bool(done[name].differs_from(before)) == (not fenced)
        spilling.llm.llm_engine.abort_request([running])
        spilling.drain()


@pytest.mark.parametrize("extra", [{}, {"store": "lazy"}, {"verify": "all"}, {"pin": False}], ids=str)
def test_tokens_from_ram_equal_computed_ones(llama: Path, extra: dict[str, object]) -> None:
    prompts = [random_prompt(seed, 600) for seed in range(4)]
    with engine(llama, blocks=100) as plain:
        expected = [plain.ask_one(p) for p in prompts]
        from_cache = [plain.ask_one(p) for p in prompts]
    with engine(llama, overspill(**extra)) as spilling:
        first = [spilling.ask_one(p) for p in prompts]
        again = [spilling.ask_one(p) for p in prompts]
        spilling.forget_gpu()
        wiped = [spilling.ask_one(p) for p in prompts]
        assert_identical(first, expected)
        # The same computation as after a hit on the GPU.
        assert_identical(again, from_cache)
        assert_identical(wiped, from_cache)
        assert all(a.num_cached == 600 // BLOCK * BLOCK for a in wiped)
        assert spilling.metric("hit_tokens") >= 4 * 576
        assert len(spilling.worker.buffer.shape) == 1
        spilling.assert_nothing_is_held()


def test_only_checksums_catch_a_corrupt_block(llama: Path) -> None:
    prompt = random_prompt(1, 600)
    for verify, caught in (("off", False), ("all", True)):
        with engine(llama, overspill(verify=verify)) as spilling:
            before = spilling.ask_one(prompt)
            spilling.forget_gpu()
            # The lowest bit of the exponent of every other number: other values, none of them infinite.
            spilling.worker.memory.slots[3, 1::4] ^= 0x01
            after = spilling.ask_one(prompt)
            assert bool(after.differs_from(before)) is not caught
            assert spilling.metric("corrupt_blocks") == caught
