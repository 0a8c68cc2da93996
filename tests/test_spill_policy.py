"""Where blocks come from, and who may run how often."""

from dataclasses import replace

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from overspill.kv.spill.policy import TierCosts, heavy_requests, left_to_others, steps_apart, take_spilled
from overspill.kv.spill.recent import RecentMost
from overspill.kv.spill.tiers import Choice, TieredQueue

# Llama-3.1-8B on an H200.
COSTS = TierCosts(
    block_bytes=2 * 2**20, block_size=16, link_bytes_per_s=55e9, prefill_tokens_per_s=15_000, expected_steps=256,
    num_blocks=1000, step_overhead_s=0.006, reuse_probability=0.5,
)  # fmt: skip


def test_a_request_that_goes_on_for_long_takes_cached_gpu_blocks() -> None:
    assert not take_spilled(COSTS)


def test_a_request_ending_soon_leaves_cached_blocks_on_the_gpu() -> None:
    assert take_spilled(replace(COSTS, expected_steps=8))


def test_cached_gpu_blocks_unlikely_to_be_reused_are_evicted() -> None:
    assert not take_spilled(replace(COSTS, expected_steps=8, reuse_probability=0.01))


def test_a_short_request_does_not_slow_its_batch_for_few_blocks() -> None:
    few = replace(COSTS, expected_steps=8, num_blocks=3)
    assert not take_spilled(few)
    assert take_spilled(replace(few, step_overhead_s=0.0)), "unless it streams already"


@pytest.mark.parametrize(
    ("most", "now", "left"),
    [
        (0, 0, 0),  # nobody else was here: a long request takes all there is
        (100, 0, 100),
        (100, 60, 40),  # they have some of it already
        (100, 130, 0),
        (900, 0, 250),  # never more than a quarter
        (900, 200, 50),
    ],
)
def test_a_spilling_request_leaves_gpu_blocks_to_returning_ones(most: int, now: int, left: int) -> None:
    assert left_to_others(most=most, now=now, num_resident=1000) == left


def test_recent_needs_of_other_requests_expire() -> None:
    time = 0.0
    recent = RecentMost(30, clock=lambda: time)
    for amount in (5, 20, 10):
        recent.saw(amount)
    assert recent.most == 20
    time = 29.0
    recent.saw(7)
    time = 45.0
    assert recent.most == 20, "remembered for 30 seconds at least"
    recent.saw(8)
    time = 80.0
    assert recent.most == 8
    time = 200.0
    assert recent.most == 0
    recent.saw(3)
    recent.forget()
    assert recent.most == 0


@pytest.mark.parametrize(
    ("spilled_s", "plain_s", "share", "apart"),
    [
        (0.25, 0.01, 1.0, 1),  # always
        (0.25, 0.01, 0.5, 26),  # 25 plain steps take as long as one spilled
        (0.25, 0.01, 0.2, 101),
        (0.01, 0.01, 0.5, 1),  # it costs no more than a plain step
        (10.0, 0.001, 0.1, 256),  # never waits longer than this
    ],
)
def test_a_spilled_request_takes_its_share_of_the_time(
    spilled_s: float, plain_s: float, share: float, apart: int
) -> None:
    assert steps_apart(spilled_step_s=spilled_s, plain_step_s=plain_s, share=share, most=256) == apart
    if 1 < apart < 256:
        assert spilled_s / (spilled_s + (apart - 1) * plain_s) <= share


def test_a_long_request_is_heavy_beside_short_ones_on_the_gpu() -> None:
    assert heavy_requests({"long": 0.25}, plain_step_s=0.01, others_run=True) == {"long"}
    assert heavy_requests({"long": 0.25}, plain_step_s=0.01, others_run=False) == set()


def test_a_long_request_is_heavy_beside_lightly_streaming_ones() -> None:
    streaming_s = {"long": 0.25, "a": 0.015, "b": 0.02}
    assert heavy_requests(streaming_s, plain_step_s=0.01, others_run=False) == {"long"}


def test_equals_are_not_heavy_to_each_other() -> None:
    assert heavy_requests({"a": 0.25, "b": 0.25}, plain_step_s=0.01, others_run=False) == set()
    assert heavy_requests({"a": 0.25, "b": 0.25}, plain_step_s=0.01, others_run=True) == {"a", "b"}


@pytest.fixture
def pool() -> BlockPool:
    """Blocks 1 to 3 on the GPU, 4 to 7 in RAM."""
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    pool.free_block_queue = TieredQueue(pool.free_block_queue.get_all_free_blocks(), 4)
    return pool


def choose(pool: BlockPool, **choice: int) -> None:
    queue(pool)._choose = lambda: Choice(**choice)


def hold(block: KVCacheBlock, content: bytes = b"x" * 32) -> None:
    """Let the block be cached."""
    block._block_hash = make_block_hash_with_group_id(BlockHash(content), 0)


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def queue(pool: BlockPool) -> TieredQueue:
    assert isinstance(pool.free_block_queue, TieredQueue)
    return pool.free_block_queue


def test_gpu_blocks_come_first(pool: BlockPool) -> None:
    assert ids(pool.get_new_blocks(5)) == [1, 2, 3, 4, 5]
    assert pool.get_num_free_blocks() == 2


def test_freed_blocks_return_to_their_tier(pool: BlockPool) -> None:
    taken = pool.get_new_blocks(7)
    pool.free_blocks(reversed(taken))
    assert (queue(pool).num_free_resident, queue(pool).num_free_spilled) == (3, 4)
    assert sorted(ids(pool.get_new_blocks(3))) == [1, 2, 3]


def test_a_long_request_begins_in_ram_and_ends_on_the_gpu(pool: BlockPool) -> None:
    choose(pool, num_spilled_first=2)
    assert ids(pool.get_new_blocks(5)) == [4, 5, 1, 2, 3]


@pytest.mark.parametrize("take", [False, True])
def test_a_cached_gpu_block_is_kept_or_not_as_was_decided(pool: BlockPool, take: bool) -> None:
    block = pool.get_new_blocks(1)[0]
    hold(block)
    pool.free_blocks([block])
    choose(pool, take_spilled=take)
    others = ids(pool.get_new_blocks(2))
    assert others == [2, 3], "empty GPU blocks first"
    assert ids(pool.get_new_blocks(1)) == ([4] if take else [1])


def test_without_empty_blocks_the_oldest_cached_gpu_block_goes(pool: BlockPool) -> None:
    taken = pool.get_new_blocks(7)
    for block in taken:
        hold(block, bytes([block.block_id]) * 32)
    pool.free_blocks(taken)
    choose(pool, take_spilled=True)
    assert ids(pool.get_new_blocks(1)) == [1], "an empty spilled block is worth waiting for, a cached one is not"


def test_reuse_is_learned_from_hits_and_evictions(pool: BlockPool) -> None:
    assert queue(pool).reuse_probability == 0.5
    queue(pool).found(8)
    assert queue(pool).reuse_probability == 0.9
    taken = pool.get_new_blocks(3)
    for block in taken:
        hold(block, bytes([block.block_id]) * 32)
    pool.free_blocks(taken)
    pool.get_new_blocks(3)
    assert queue(pool).reuse_probability == pytest.approx(9 / 13)


def test_the_walk_along_the_queue_sees_every_free_block_once(pool: BlockPool) -> None:
    order = list(queue(pool).iter_blocks_after(None))
    assert ids(order) == [1, 2, 3, 4, 5, 6, 7]
    assert ids(list(queue(pool).iter_blocks_after(order[1]))) == [3, 4, 5, 6, 7]
    assert ids(list(queue(pool).iter_blocks_after(order[4]))) == [6, 7]
