"""Where blocks come from, and who may run how often."""

from collections import deque

import numpy as np
import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from overspill.kv.jobs import Lateness
from overspill.kv.speeds import Speeds
from overspill.kv.spill.balance import Balance, cpu_share
from overspill.kv.spill.placement import Choice, TieredQueue
from overspill.kv.spill.scheduler import heavy_requests, steps_apart


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


@pytest.mark.parametrize("kept", [0, 1])
def test_cached_gpu_blocks_are_kept_while_spilled_ones_are_empty(pool: BlockPool, kept: int) -> None:
    block = pool.get_new_blocks(1)[0]
    hold(block)
    pool.free_blocks([block])
    choose(pool, num_kept_cached=kept)
    others = ids(pool.get_new_blocks(2))
    assert others == [2, 3], "empty GPU blocks first"
    assert ids(pool.get_new_blocks(1)) == ([4] if kept else [1])


def test_the_least_recently_used_gpu_blocks_are_not_kept(pool: BlockPool) -> None:
    taken = pool.get_new_blocks(3)
    for block in taken:
        hold(block, bytes([block.block_id]) * 32)
    pool.free_blocks(taken)
    choose(pool, num_kept_cached=2)
    assert ids(pool.get_new_blocks(2)) == [1, 4]


def test_without_empty_blocks_the_oldest_cached_gpu_block_goes(pool: BlockPool) -> None:
    taken = pool.get_new_blocks(7)
    for block in taken:
        hold(block, bytes([block.block_id]) * 32)
    pool.free_blocks(taken)
    choose(pool, num_kept_cached=3)
    assert ids(pool.get_new_blocks(1)) == [1], "an empty spilled block is worth waiting for, a cached one is not"


def test_empty_gpu_blocks_are_counted_up_to_a_limit(pool: BlockPool) -> None:
    assert [queue(pool).num_empty_resident(most) for most in (0, 2, 9)] == [0, 2, 3]
    block = pool.get_new_blocks(1)[0]
    hold(block)
    pool.free_blocks([block])
    assert queue(pool).num_empty_resident(9) == 2


def test_the_walk_along_the_queue_sees_every_free_block_once(pool: BlockPool) -> None:
    order = list(queue(pool).iter_blocks_after(None))
    assert ids(order) == [1, 2, 3, 4, 5, 6, 7]
    assert ids(list(queue(pool).iter_blocks_after(order[1]))) == [3, 4, 5, 6, 7]
    assert ids(list(queue(pool).iter_blocks_after(order[4]))) == [6, 7]


# The CPU's part of a step.

GB = 10**9
LINK, CPU = 55.0 * GB, 90.0 * GB


@pytest.mark.parametrize(
    ("gigabytes", "own_s", "share"),
    [
        (0.3, 0.007, 0.0),  # streamed while the GPU computes
        (12.4, 0.0, 90 / 145),
        (12.4, 0.009, 0.596),  # the link has a start of 9 ms
    ],
)
def test_link_and_cpu_end_together(gigabytes: float, own_s: float, share: float) -> None:
    num_bytes = int(gigabytes * GB)
    found = cpu_share(num_bytes, link_bytes_per_s=LINK, cpu_bytes_per_s=CPU, own_s=own_s)
    assert found == pytest.approx(share, abs=0.001)
    if found:
        assert own_s + found * num_bytes / CPU == pytest.approx((1 - found) * num_bytes / LINK)


def simulate(balance: Balance, num_bytes: int, own_s: float, steps: int, cpu: float) -> float:
    """Steps of 32 layers that take as long as the slower of the two; returns the mean time of the last eight. Reports
    come three steps late, as of an engine that schedules ahead, and layers differ by a few per cent."""
    random = np.random.default_rng(1)
    times, reports = [], deque([Lateness()] * 3)
    for _ in range(steps):
        far = int(balance.share(num_bytes, LINK) * num_bytes)
        far = far if far > num_bytes // 100 else 0
        ends = (own_s + far / cpu) * random.uniform(0.98, 1.02, 32), (num_bytes - far) / LINK
        times.append(max(own_s + far / cpu, ends[1]))
        reports.append(Lateness(32, int((ends[0] > ends[1]).sum())) if far else Lateness())
        balance.record(reports.popleft())
    return sum(times[-8:]) / 8


@pytest.mark.parametrize("plain_step_s", [0.0, 0.005, 0.2])
@pytest.mark.parametrize("slowed_down", [1.0, 0.5, 0.1])
def test_the_balance_is_found_and_found_again(plain_step_s: float, slowed_down: float) -> None:
    """Though the CPU is slower beside the link than alone."""
    balance = Balance(Speeds(far_bytes_per_s=CPU, plain_step_s=plain_step_s))
    cpu = slowed_down * CPU
    for num_bytes, own_s, steps in (
        (12_400_000_000, 0.009, 400), (12_400_000_000, 0.050, 100), (12_400_000_000, 0.009, 100),
        (300_000_000, 0.007, 100), (12_400_000_000, 0.009, 100),
    ):  # fmt: skip
        best_s = max(own_s, (num_bytes + cpu * own_s) / (LINK + cpu))
        assert simulate(balance, num_bytes, own_s, steps, cpu) < 1.1 * best_s, (num_bytes, own_s)


def test_a_step_with_drafts_leaves_the_cpu_less_and_one_without_as_much_as_before() -> None:
    balance = Balance(Speeds(far_bytes_per_s=CPU))
    alone = balance.share(12 * GB, LINK)
    drafting = balance.share(12 * GB, LINK, 9)
    assert drafting == pytest.approx(cpu_share(12 * GB, link_bytes_per_s=LINK, cpu_bytes_per_s=CPU / 2.6, own_s=0))
    assert 0.6 * alone < drafting < 0.7 * alone
    assert balance.share(12 * GB, LINK) == pytest.approx(alone)
    balance.record(Lateness(32, 32))
    assert balance.share(12 * GB, LINK, 9) < drafting, "what was learned without drafts holds with them"
    speeds = Speeds()
    balance = Balance(speeds)
    assert balance.share(12 * GB, LINK, 9) == 0
    speeds.far_bytes_per_s = CPU
    assert balance.share(12 * GB, LINK, 9) == pytest.approx(drafting), "measured since"


def test_a_share_guessed_before_any_plain_step_is_guessed_again() -> None:
    speeds = Speeds(far_bytes_per_s=CPU)
    balance = Balance(speeds)
    blind = balance.share(420_000_000, LINK)
    speeds.plain_step_s = 0.0063
    again = balance.share(420_000_000, LINK)
    assert again < blind / 2
    balance.record(Lateness(32, 32))
    assert balance.share(420_000_000, LINK) < again, "and moves on from there"


def test_a_cpu_that_was_always_late_is_tried_again() -> None:
    balance = Balance(Speeds(far_bytes_per_s=CPU))
    while balance.share(GB, LINK):
        balance.record(Lateness(32, 32))
    shares = [balance.share(GB, LINK) for _ in range(600)]
    assert shares[0] == 0 and 0 < shares[-1] <= 0.05
