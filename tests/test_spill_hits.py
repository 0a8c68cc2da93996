"""Hits on cached prefixes with spill: in RAM, on the GPU, in both, and on blocks of the step that writes them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from overspill.kv.spill.streams import HostStreams
from tests.engine import BLOCK, PAGE, Engine, assert_same, engine, random_prompt, spilling

PREFIX = random_prompt(1, 4 * BLOCK)
LONG, SHORT = random_prompt(2, 900), [PREFIX + random_prompt(seed, 20) for seed in (3, 4, 5)]


def push_the_prefix_to_ram(spills: Engine) -> None:
    """A long request has all of the GPU when the first short one comes."""
    long = spills.add(LONG, 60)
    for _ in range(3):
        spills.step()
    short = spills.add(SHORT[0], 4)
    done = spills.run()
    assert {long, short} <= done.keys()


@pytest.mark.parametrize("offload", [{}, {"host_bytes": "64MiB", "load": "always", "verify": "all"}])
def test_a_short_request_hits_a_prefix_in_ram(llama: Path, schedule: None, offload: dict[str, Any]) -> None:
    with engine(llama, blocks=400) as plain:
        expected = [plain.ask_one(p) for p in SHORT]
    with engine(llama, spilling(**offload)) as spills:
        push_the_prefix_to_ram(spills)
        answers = [spills.ask_one(p) for p in SHORT[1:]]
        assert_same(answers, expected[1:])
        assert [answer.num_cached for answer in answers] == [4 * BLOCK] * 2
        spills.drain()
        assert spills.gpu_pool.get_num_free_blocks() == len(spills.gpu_pool.blocks) - 1, "blocks leaked"


def test_a_long_conversation_stays_cached_in_ram(llama: Path) -> None:
    with engine(llama, spilling()) as spills:
        first = spills.ask_one(LONG)
        again = spills.ask_one(LONG + list(first.tokens))
        assert again.num_cached >= 900 // BLOCK * BLOCK


def test_a_long_request_leaves_a_recent_prefix_on_the_gpu(llama: Path) -> None:
    """Its own blocks are enough, and the short request that returns stays out of RAM."""
    with engine(llama, spilling(resident=24)) as spills:
        spills.ask_one(SHORT[0], 4)
        spills.ask_one(LONG)
        spilled = spills.metric("spilled_steps")
        assert spilled > 0
        assert spills.ask_one(SHORT[1], 4).num_cached == 4 * BLOCK
        assert spills.metric("spilled_steps") == spilled


def test_a_prefix_is_hit_in_the_step_that_writes_it(llama: Path, schedule: None) -> None:
    short = LONG[: 4 * BLOCK] + random_prompt(3, 20)
    settings = {"long_prefill_token_threshold": 256, "max_num_batched_tokens": 1024}
    with engine(llama, blocks=400, **settings) as plain:
        expected = plain.ask([LONG, short])
    with engine(llama, spilling(), **settings) as spills:
        answers = spills.ask([LONG, short])
        assert answers[1].num_cached == 4 * BLOCK, "the second did not hit what the first wrote"
        assert_same(answers, expected)


def test_a_prefix_in_both_tiers_is_hit_beside_a_full_gpu(llama: Path) -> None:
    prompt = random_prompt(1, 15 * BLOCK)
    with engine(llama, blocks=400) as plain:
        expected = plain.ask_one(prompt + SHORT[0][:10], 4)
    with engine(llama, spilling(resident=20, spilled=4), max_model_len=600) as spills:
        other = spills.add(random_prompt(9, 5 * BLOCK), 30)
        spills.step()
        spills.step()
        spills.add(prompt, 2)
        assert other in spills.run()
        name = spills.add(prompt + SHORT[0][:10], 4)
        assert_same([spills.run(limit=200)[name]], [expected])


def test_a_hybrid_that_fits_stays_on_the_gpu(models: Callable[[str], Path]) -> None:
    """Groups are given their blocks one after the other; each counted what the others need again."""
    with engine(models("gemma3"), spilling(resident=40, spilled=60, regions=2), max_model_len=900) as spills:
        spills.ask_one(random_prompt(1, 8 * BLOCK), 4)
        assert spills.metric("spilled_steps") == 0 and spills.metric("plain_steps") == 4


def test_offload_loads_the_tail_behind_a_head_in_ram(llama: Path) -> None:
    prompt = random_prompt(1, 12 * BLOCK)
    offload = {"host_bytes": "64MiB", "load": "always", "verify": "all"}
    with engine(llama, spilling(resident=24, **offload)) as spills:
        spills.add(random_prompt(9, 16 * BLOCK), 200)
        spills.step()
        spills.step()
        name = spills.add(prompt, 2)
        spills.step()
        request = next(r for r in spills.vllm_scheduler.running if r.request_id.startswith(name))
        table = spills.vllm_scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        spills.run()
        spills.drain()
        assert any(block >= 24 for block in table[:4]), "its head should be in RAM"
        spills.gpu_pool.evict_blocks(set(table[4:]))  # as others push out the tail first
        answer = spills.ask_one(prompt + SHORT[0][:10], 4)
        assert answer.num_cached == 12 * BLOCK and spills.metric("load_bytes") > 0


def test_vllms_copies_of_spilled_blocks_are_made_in_the_arena(llama: Path, schedule: None) -> None:
    """vLLM copies a block for a hit that ends inside it. At a spilled block's address it would copy the window."""
    with engine(llama, spilling()) as spills:
        first = spills.spill.geometry.num_resident
        resident = SimpleNamespace(kv_cache_block_copies=[KVCacheBlockCopy(1, 2)])
        assert spills.spill._block_copies(resident) == [] and resident.kv_cache_block_copies  # type: ignore[arg-type]
        spilled = SimpleNamespace(kv_cache_block_copies=[KVCacheBlockCopy(1, 2), KVCacheBlockCopy(first + 3, 5)])
        pairs = spills.spill._block_copies(spilled)  # type: ignore[arg-type]
        assert pairs == [(1, 2), (first + 3, 5)] and spilled.kv_cache_block_copies is None
        worker = spills.spill_worker
        streams, arena = worker.streams, worker.arena
        assert isinstance(streams, HostStreams) and arena is not None
        arena.slots[:, 3 * PAGE : 4 * PAGE] = 40
        worker._copy_blocks([*pairs, (5, first + 7)], streams)
        assert all(bool((region[5] == 40).all()) for region in streams._resident)
        assert (arena.slots[:, 7 * PAGE : 8 * PAGE] == 40).all()
