"""Offload and spill together: a spilled block is stored from RAM and loaded into RAM, not through its GPU address."""

from pathlib import Path
from typing import Any

import pytest

from overspill.kv.copies import PlainCopier, Transfer
from overspill.kv.host_memory import HostMemory
from overspill.kv.ram import Ram
from overspill.kv.spill import arena_copier
from overspill.kv.spill import worker as spill_worker
from overspill.kv.spill.arena_copier import JoinedTransfer
from tests.engine import BLOCK, PAGE, assert_same, engine, random_prompt, spilling
from tests.late_streams import LateStreams

OFFLOAD = {"host_bytes": "64MiB", "load": "always", "verify": "all"}


@pytest.fixture(params=["eager", "late"], autouse=True)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "late":
        monkeypatch.setattr(spill_worker, "HostStreams", LateStreams)


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a_long_conversation_comes_back_from_the_pool(llama: Path, store: str) -> None:
    prompts = [random_prompt(seed, length) for seed, length in enumerate((900, 700, 100))]
    with engine(llama, blocks=400) as plain:
        expected = [plain.ask_one(p) for p in prompts]
    with engine(llama, spilling(**OFFLOAD, store=store)) as spills:
        assert_same([spills.ask_one(p) for p in prompts], expected)
        if store == "lazy":
            for seed in range(6):
                spills.ask_one(random_prompt(50 + seed, 900))
        spills.forget_gpu()
        streamed = spills.metric("spill_in_bytes")
        again = [spills.ask_one(p) for p in prompts]
        assert_same(again, expected)
        assert again[0].num_cached >= 20 * BLOCK and spills.metric("hit_tokens") >= 20 * BLOCK
        assert spills.metric("spill_in_bytes") > streamed
        assert spills.metric("corrupt_blocks") == 0 and spills.metric("load_failures") == 0
        spills.assert_nothing_is_held()


def test_a_filled_arena_is_not_missing_for_the_pool(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asked for its RAM when it was mapped: the pool's part was refused, or not, by how far the arena was."""
    needed = 60 * 4 * PAGE + (64 << 20)
    prepared: list[HostMemory] = []
    monkeypatch.setattr(
        "overspill.kv.ram.available_ram", lambda: Ram(needed - (needed - 1) * bool(prepared), "a small machine")
    )
    prepare = HostMemory.prepare
    monkeypatch.setattr(HostMemory, "prepare", lambda self, pinning: (prepared.append(self), prepare(self, pinning)))
    with engine(llama, spilling(**OFFLOAD)) as spills:
        spills.ask_one(random_prompt(1, 900))
    assert [memory.num_bytes for memory in prepared] == [60 * 4 * PAGE, 64 << 20]
    monkeypatch.setattr("overspill.kv.ram.available_ram", lambda: Ram(needed - 1, "a smaller machine"))
    with pytest.raises(ValueError, match=r"host_bytes \+ spill_bytes needs"), engine(llama, spilling(**OFFLOAD)):
        pass


@pytest.mark.parametrize("direction", ["store", "load"])
def test_through_the_gpu_address_the_tokens_would_be_wrong(
    llama: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    monkeypatch.setattr(arena_copier.ArenaCopier, direction, _through_the_gpu(direction))
    prompt = random_prompt(1, 900)
    with engine(llama, spilling(**OFFLOAD)) as spills:
        before = spills.ask_one(prompt)
        spills.forget_gpu()
        assert spills.ask_one(prompt).differs_from(before)


def _through_the_gpu(direction: str):  # type: ignore[no-untyped-def]
    def copy(self: arena_copier.ArenaCopier, first, second):  # type: ignore[no-untyped-def]
        assert isinstance(self._gpu, PlainCopier)
        return getattr(self._gpu, direction)(first, second)

    return copy


def test_a_damaged_block_in_the_pool_is_computed_again(llama: Path) -> None:
    prompt = random_prompt(1, 900)
    with engine(llama, spilling(**OFFLOAD)) as spills:
        before = spills.ask_one(prompt)
        spills.forget_gpu()
        memory = spills.worker.memory
        assert memory is not None
        memory.slots[:8] ^= 0x41
        assert_same([spills.ask_one(prompt)], [before])
        assert spills.metric("corrupt_blocks") > 0 and spills.metric("load_failures") > 0
        spills.assert_nothing_is_held()


def test_a_copy_within_ram_that_fails_is_computed_again(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that failed counted as queued, and its request was let run on what it had not got."""
    prompt = random_prompt(1, 900)
    with engine(llama, spilling(**OFFLOAD)) as spills:
        before = spills.ask_one(prompt)
        spills.forget_gpu()
        copy = arena_copier.ArenaCopier._copy

        def fail(self: arena_copier.ArenaCopier, slots: Any, blocks: Any, *, to_arena: bool) -> None:
            if to_arena:
                raise OSError("the RAM is gone")
            copy(self, slots, blocks, to_arena=to_arena)

        monkeypatch.setattr(arena_copier.ArenaCopier, "_copy", fail)
        assert_same([spills.ask_one(prompt)], [before])
        assert spills.metric("load_failures") > 0
        spills.assert_nothing_is_held()


def test_joined_copies_are_queued_if_all_are_and_none_failed() -> None:
    gpu, ram = Transfer(10), Transfer(20)
    both = JoinedTransfer([ram, gpu])
    assert both.num_bytes == both.remaining_bytes() == 30 and not both.queued and not both.done()
    gpu._queued.set()
    ram.settle(OSError("the RAM is gone"))
    assert not both.queued, "it must not be announced: one of its parts will never be there"
    assert not both.done() and both.remaining_bytes() == 10
    gpu.seconds = 2.0
    gpu.settle()
    assert both.done() and isinstance(both.error, OSError) and both.seconds == 2.0


def test_lazy_stores_see_spilled_blocks_that_are_about_to_go(llama: Path) -> None:
    """They leave from a head of their own; a walk that began with the GPU's blocks never came to them."""
    first, second = random_prompt(1, 1100), random_prompt(2, 1100)
    with engine(llama, blocks=400) as plain:
        expected = plain.ask_one(first)
    with engine(llama, spilling(resident=20, spilled=40, **OFFLOAD, store="lazy"), max_num_batched_tokens=96) as spills:
        spills.ask_one(first)
        spills.ask_one(second)
        spills.ask_one(random_prompt(3, 1100))
        answer = spills.ask_one(first)
        assert_same([answer], [expected])
        assert answer.num_cached >= 25 * BLOCK, "what was pushed out of RAM's own tier was not kept"
        assert spills.metric("hit_tokens") > 0
        spills.assert_nothing_is_held()


def test_preemption_in_its_own_pass_leaves_no_stale_hash(llama: Path) -> None:
    """As without spill, but the blocks that were never computed are of both tiers."""
    victim, urgent = random_prompt(1, 9 * BLOCK), random_prompt(2, 2 * BLOCK)
    with engine(llama, blocks=40) as plain:
        expected = plain.ask([victim, urgent])
    scheduling = {
        "scheduling_policy": "priority", "max_num_batched_tokens": 4 * BLOCK, "long_prefill_token_threshold": 2 * BLOCK,
    }  # fmt: skip
    transfer = spilling(resident=6, spilled=5, **OFFLOAD, store="lazy")
    with engine(llama, transfer, max_model_len=10 * BLOCK, **scheduling) as spills:
        assert len(spills.gpu_pool.blocks) == 11
        names = [spills.add(victim, priority=1)]
        spills.step()
        names.append(spills.add(urgent, priority=0))
        answers = spills.run()
        assert spills.preemptions() > 0
        assert_same([answers[name] for name in names], expected)
