"""The walk along the head of vLLM's free queue, on vLLM's own pool."""

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from overspill.kv.stores import EvictionFront


class Queue:
    """A pool whose cached blocks are all free, with a front that sees what is taken, and counts what it looks at."""

    def __init__(self, num_blocks: int, depth: int) -> None:
        self.pool = BlockPool(num_blocks + 1, True, 16)
        self.front = EvictionFront(self.pool.free_block_queue, depth)
        self.stored: set[int] = set()
        self.looked_at = 0
        self.free_filled(num_blocks)

    def free_filled(self, count: int) -> list[KVCacheBlock]:
        """A request fills `count` blocks and ends."""
        self.front.taken(count)
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            self.stored.discard(block.block_id)
            name = BlockHash(f"{block.block_id}-{id(self)}-{self.looked_at}".encode())
            self.pool._insert_block_hash(make_block_hash_with_group_id(name, 0), block, num_tokens=16)
        self.pool.free_blocks(blocks)
        return blocks

    def next_out(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()[:count]]

    def wanted(self, block: KVCacheBlock) -> bool:
        self.looked_at += 1
        return block.block_id not in self.stored

    def advance(self, limit: int = 100) -> list[int]:
        """As the scheduler does: what is found is referenced, and goes back to the front when it is stored."""
        found = self.front.advance(self.wanted, limit)
        self.pool.touch(found)
        for block in found:
            block.ref_cnt -= 1
            self.stored.add(block.block_id)
        self.pool.free_block_queue.prepend_n(found)
        return [block.block_id for block in found]


def test_the_blocks_that_leave_next_are_found_nearest_first() -> None:
    queue = Queue(20, depth=4)
    nearest = queue.next_out(4)
    found = queue.advance(limit=4)
    assert found == nearest


def test_advance_returns_at_most_the_limit_and_the_rest_later() -> None:
    queue = Queue(20, depth=6)
    nearest = queue.next_out(6)
    assert queue.advance(limit=2) == nearest[:2]
    found = set(nearest[:2])
    for _ in range(20):
        found |= set(queue.advance(limit=2))
    assert set(nearest) <= found


def test_a_block_without_content_is_passed_over() -> None:
    queue = Queue(6, depth=6)
    empty = queue.pool.get_new_blocks(2)
    queue.front.taken(2)
    queue.pool.free_blocks(empty)
    assert not {block.block_id for block in empty} & set(queue.advance())


def test_whatever_is_taken_from_the_queue_was_seen_before() -> None:
    """What lazy mode rests on: no cached block is lost for want of a store, as long as a step takes at most `depth`."""
    queue = Queue(64, depth=8)
    for step in range(300):
        queue.advance()
        taken = queue.next_out(step % 5)
        assert set(taken) <= queue.stored
        queue.free_filled(step % 5)


def test_hits_in_the_middle_of_the_queue_do_not_blind_it() -> None:
    queue = Queue(64, depth=8)
    for step in range(300):
        queue.advance()
        waiting = queue.pool.free_block_queue.get_all_free_blocks()
        hit = waiting[step * 7 % len(waiting)]
        queue.pool.touch([hit])
        queue.pool.free_blocks([hit])
        queue.free_filled(2)
    unseen = [step for step in range(40) if not _next_are_stored(queue)]
    assert len(unseen) <= 16


def _next_are_stored(queue: Queue) -> bool:
    queue.advance()
    known = set(queue.next_out(2)) <= queue.stored
    queue.free_filled(2)
    return known


def test_an_idle_queue_costs_next_to_nothing() -> None:
    queue = Queue(500, depth=100)
    for _ in range(5):
        queue.advance()
    queue.looked_at = 0
    for _ in range(160):
        queue.advance()
    assert queue.looked_at <= 160 * 100 / 16 + 200


def test_an_unused_queue_yields_only_blocks_near_eviction() -> None:
    queue = Queue(64, depth=8)
    found = [queue.advance(limit=3) for _ in range(20)]
    assert sum(len(some) for some in found) == 8
    queue.stored.clear()  # they were pushed out of RAM
    assert not any(queue.advance() for _ in range(20))
    queue.free_filled(1)
    assert queue.advance()


def test_a_backlog_is_spread_over_steps() -> None:
    """A thousand blocks were found in one step, which then took 15 ms of the scheduler's time."""
    queue = Queue(4000, depth=1000)
    queue.advance(limit=2000)  # after 4000 were taken
    most = 0
    for _ in range(200):
        assert set(queue.next_out(36)) <= queue.stored
        queue.free_filled(36)
        most = max(most, len(queue.advance(limit=2000)))
    assert most <= 72
