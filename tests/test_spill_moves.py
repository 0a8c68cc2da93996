"""A cached prefix in RAM moves to the GPU, once, for a request that fits there; one that does not streams it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from overspill.kv.spill.moves import Moves
from overspill.kv.spill.policy import TierCosts, move_to_gpu
from overspill.kv.spill.tiers import TieredQueue
from overspill.kv.spill.worker import SpillWorker
from tests.engine import BLOCK, Engine, assert_same, engine, random_prompt, spilling

# Llama-3.1-8B on an H200: a system prompt of 1,000 tokens.
COSTS = TierCosts(
    block_bytes=2 * 2**20, block_size=16, link_bytes_per_s=55e9, prefill_tokens_per_s=15_000, expected_steps=256,
    num_blocks=100, step_overhead_s=0.006, reuse_probability=0.5,
)  # fmt: skip


def test_a_request_that_fits_takes_its_prefix_to_the_gpu() -> None:
    assert move_to_gpu(COSTS, num_spilled_hits=63, num_free_resident=1000)


def test_a_request_that_does_not_fit_streams_it() -> None:
    assert not move_to_gpu(COSTS, num_spilled_hits=63, num_free_resident=99)


def test_a_move_for_few_tokens_is_not_worth_its_evictions() -> None:
    assert not move_to_gpu(replace(COSTS, expected_steps=2), num_spilled_hits=63, num_free_resident=1000)
    assert move_to_gpu(
        replace(COSTS, expected_steps=2, reuse_probability=0.0), num_spilled_hits=63, num_free_resident=1000
    )


# Blocks 1 to 5 are on the GPU, 6 to 9 in RAM.


@pytest.fixture
def pool() -> BlockPool:
    pool = BlockPool(10, enable_caching=True, hash_block_size=16)
    pool.free_block_queue = TieredQueue(pool.free_block_queue.get_all_free_blocks(), 6)
    return pool


@pytest.fixture
def moves(pool: BlockPool) -> Moves:
    moves = Moves(block_size=16, num_resident=6)
    moves.bind(pool)
    return moves


def cached(pool: BlockPool, ids: list[int]) -> list[KVCacheBlock]:
    """A prefix in these blocks, free and cached."""
    pool.get_new_blocks(9)
    blocks = [pool.blocks[i] for i in ids]
    for block in blocks:
        key = make_block_hash_with_group_id(BlockHash(bytes([block.block_id]) * 32), 0)
        block._block_hash = key
        pool.cached_block_hash_to_block.insert(key, block)
    pool.free_blocks(reversed(pool.blocks[1:]))
    return blocks


def test_blocks_before_the_first_spilled_one_are_not_moved(pool: BlockPool, moves: Moves) -> None:
    prefix = cached(pool, [1, 2, 7, 3, 8])
    assert moves.propose("r", prefix) == 32
    assert moves.offered_tokens("r") == 48
    assert [block.ref_cnt for block in prefix] == [0, 0, 1, 1, 1], "they are held, or would be handed out"


def test_the_copies_are_those_of_the_requests_new_blocks(pool: BlockPool, moves: Moves) -> None:
    prefix = cached(pool, [1, 7, 3, 8])
    moves.propose("r", prefix)
    new = pool.get_new_blocks(4)
    moves.admit("r", KVCacheBlocks(([pool.blocks[1], *new],)), 48)
    assert moves.offered_tokens("r") == 0
    assert all(block.block_hash is None for block in prefix[1:]), "the next one would find the old blocks"
    assert moves.take() == [(7, new[0].block_id), (3, new[1].block_id), (8, new[2].block_id)]
    assert [block.ref_cnt for block in prefix[1:]] == [0, 0, 0]
    assert moves.take() == []


def test_a_request_that_was_not_admitted_leaves_all_as_it_was(pool: BlockPool, moves: Moves) -> None:
    prefix = cached(pool, [7, 8])
    moves.propose("r", prefix)
    assert moves.take() == []
    assert [block.ref_cnt for block in prefix] == [0, 0]
    assert all(block.block_hash is not None for block in prefix)


def test_another_number_of_tokens_than_offered_moves_nothing(pool: BlockPool, moves: Moves) -> None:
    prefix = cached(pool, [7, 8])
    moves.propose("r", prefix)
    moves.admit("r", KVCacheBlocks((pool.get_new_blocks(2),)), 16)
    assert moves.take() == [] and all(block.block_hash is not None for block in prefix)


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
def test_a_popular_prefix_is_not_streamed_for_ever(llama: Path, schedule: None, offload: dict[str, Any]) -> None:
    with engine(llama, blocks=400) as plain:
        expected = [plain.ask_one(p) for p in SHORT]
    with engine(llama, spilling(**offload)) as spills:
        push_the_prefix_to_ram(spills)
        spilled, streamed = spills.metric("spilled_steps"), spills.metric("spill_in_bytes")
        answers = [spills.ask_one(p) for p in SHORT[1:]]
        assert_same(answers, expected[1:])
        assert [answer.num_cached for answer in answers] == [4 * BLOCK] * 2
        assert spills.metric("moved_blocks") == 4, "once, and the second finds it there"
        assert spills.metric("spilled_steps") == spilled and spills.metric("spill_in_bytes") == streamed
        spills.drain()
        assert spills.gpu_pool.get_num_free_blocks() == len(spills.gpu_pool.blocks) - 1, "blocks leaked"


def test_without_the_copy_the_tokens_are_wrong(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(llama, blocks=400) as plain:
        expected = plain.ask_one(SHORT[1])
    monkeypatch.setattr(SpillWorker, "_move", lambda self, pairs, streams: None)
    with engine(llama, spilling()) as spills:
        push_the_prefix_to_ram(spills)
        assert spills.ask_one(SHORT[1]).differs_from(expected)


def test_a_long_conversation_is_left_in_ram(llama: Path) -> None:
    with engine(llama, spilling()) as spills:
        first = spills.ask_one(LONG)
        again = spills.ask_one(LONG + list(first.tokens))
        assert again.num_cached >= 900 // BLOCK * BLOCK
        assert spills.metric("moved_blocks") == 0


def test_a_prefix_that_is_being_written_is_not_moved(llama: Path, schedule: None) -> None:
    """A hit on a block written in the same step again: there is nothing to copy before the step has run."""
    short = LONG[: 4 * BLOCK] + random_prompt(3, 20)
    settings = {"long_prefill_token_threshold": 256, "max_num_batched_tokens": 1024}
    with engine(llama, blocks=400, **settings) as plain:
        expected = plain.ask([LONG, short])
    with engine(llama, spilling(), **settings) as spills:
        answers = spills.ask([LONG, short])
        assert answers[1].num_cached == 4 * BLOCK, "the second did not hit what the first wrote"
        assert_same(answers, expected)


def test_blocks_hashed_in_this_pass_are_no_sources(pool: BlockPool, moves: Moves) -> None:
    prefix = cached(pool, [1, 7, 8])
    assert [block.block_id for block in moves.sources(prefix)] == [7, 8]
    moves._written.add(8)
    assert moves.sources(prefix) == []
    moves.take()
    assert [block.block_id for block in moves.sources(prefix)] == [7, 8], "the step that writes it is on its way"


def test_a_move_needing_its_blocks_twice_does_not_stall(llama: Path) -> None:
    """The prefix began in RAM and ended on the GPU. Held there until it is copied, it left too few blocks, and was
    proposed again in every pass, for ever, beside an engine that did nothing."""
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


def test_a_request_not_admitted_with_a_move_gets_no_other_offer(pool: BlockPool, moves: Moves) -> None:
    moves.propose("r", cached(pool, [7, 8]))
    moves.take()
    assert not moves.may_propose("r")
    moves.finished("r")
    assert moves.may_propose("r")


def test_the_tail_of_a_moved_request_is_on_the_gpu_too(llama: Path) -> None:
    """Blocks are taken twice, moved ones and then new ones; the second time the first ones were counted again."""
    with engine(llama, spilling(resident=9)) as spills:
        push_the_prefix_to_ram(spills)
        before = spills.metric("spilled_steps")
        spills.ask_one(SHORT[1], 4)
        assert spills.metric("moved_blocks") == 4 and spills.metric("spilled_steps") == before


def test_a_hybrid_that_fits_stays_on_the_gpu(models: Callable[[str], Path]) -> None:
    """Groups are given their blocks one after the other; each counted what the others need again."""
    with engine(models("gemma3"), spilling(resident=40, spilled=60, regions=2), max_model_len=900) as spills:
        spills.ask_one(random_prompt(1, 8 * BLOCK), 4)
        assert spills.metric("spilled_steps") == 0 and spills.metric("plain_steps") == 4


def test_a_move_does_not_hide_more_that_offload_has(llama: Path) -> None:
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


def test_waiting_requests_do_not_count_hits_repeatedly(llama: Path) -> None:
    with engine(llama, spilling(resident=12, spilled=24), max_model_len=1000, max_num_seqs=2) as spills:
        prefix = random_prompt(1, 4 * BLOCK)
        spills.ask_one(prefix, 2)
        spills.add(random_prompt(2, 24 * BLOCK), 100)
        spills.step()
        spills.add(prefix + random_prompt(3, 12 * BLOCK), 4)
        for _ in range(50):
            spills.step()
        assert spills.spill.placement.queue._hits < 12
        spills.run()


def test_a_moved_prefix_is_not_published_as_gone(pool: BlockPool, moves: Moves) -> None:
    pool.enable_kv_cache_events = True
    prefix = cached(pool, [7, 8])
    moves.propose("r", prefix)
    moves.admit("r", KVCacheBlocks((pool.get_new_blocks(2),)), 32)
    assert pool.take_events() == [] and all(block.block_hash is None for block in prefix)
