"""Stores: which GPU blocks are copied to RAM and when, and the blocks pinned meanwhile."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from overspill.kv.host_cache import HostCache, Stored, heads_first
from overspill.kv.jobs import StoreJob
from overspill.kv.metrics import OverspillStats
from overspill.kv.provenance import Origin, Origins
from overspill.kv.speeds import Speeds, store_budget
from overspill.kv.vllm_api import (
    BlockHashWithGroupId,
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_group_id,
    return_to_front,
    watch_new_blocks,
)

# A store of few blocks costs a step as much as a store of many, so blocks are batched over a few steps.
_BLOCKS_TO_STORE_AT_ONCE = 32
_STEPS_TO_WAIT = 8

# Hits remove blocks from the middle of the queue unnoticed; a full walk now and then corrects the count.
_STEPS_BETWEEN_FULL_WALKS = 16
# A thousand stores in one step delay the scheduler by 10 ms; twice the blocks just taken stays ahead of eviction.
_FEW = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A GPU block offered for storing, to be skipped if its content has changed since."""

    block: KVCacheBlock
    key: BlockHashWithGroupId
    request_id: str


@dataclass(slots=True)
class StoreInFlight:
    gpu_blocks: list[KVCacheBlock]
    host_blocks: list[KVCacheBlock]
    origins: list[Origin]
    token_counts: list[int | None]
    # The blocks were near eviction, and return to the queue's head after the store.
    to_front: bool
    abandoned: bool = False
    reports: int = 0
    failed: bool = False


class Stores:
    """Candidates and stores in flight. Blocks in flight are pinned on the GPU and in RAM until every worker has
    reported, even if their request ends meanwhile."""

    def __init__(
        self,
        host: HostCache,
        origins: Origins,
        speeds: Speeds,
        stats: OverspillStats,
        job_ids: Iterator[int],
        live: Collection[str],
        *,
        lazy: bool,
        world_size: int,
        block_bytes: int,
        num_gpu_blocks: int,
        front_depth: int,
        gapless_groups: Collection[int],
    ) -> None:
        """The first `front_depth` blocks of the GPU's free queue count as near eviction. In `gapless_groups` a hit ends
        at the first missing block."""
        self._lazy, self._front_depth, self._gapless_groups = lazy, front_depth, gapless_groups
        self._world_size, self._block_bytes, self._num_gpu_blocks = world_size, block_bytes, num_gpu_blocks
        self._host, self._origins, self._speeds, self._stats = host, origins, speeds, stats
        self._job_ids = job_ids
        self._live = live  # requests admitted and not finished
        self.on_stored: Callable[[Sequence[Stored]], None] | None = None
        self._gpu: BlockPool | None = None
        self._fronts: list[EvictionFront] = []
        self._offered: list[Candidate] = []
        self._steps_waited = 0
        self._deferred: deque[Candidate] = deque()  # beyond the budget of link and GPU blocks
        self._ready: list[StoreJob] = []
        self._incomplete: set[str] = set()  # live requests with a block that could not be stored
        self._keys: set[BlockHashWithGroupId] = set()  # being stored
        self.in_flight: dict[int, StoreInFlight] = {}
        self.num_blocks = 0  # in flight

    def bind(self, pool: BlockPool) -> None:
        self._gpu = pool
        if self._lazy:
            self._watch_front(pool)

    def _watch_front(self, pool: BlockPool) -> None:
        queue = pool.free_block_queue
        # With spill, each tier has a free queue of its own.
        tiers = getattr(queue, "tiers", (queue,))
        # If RAM cannot hold copies of all blocks near eviction, the copies evict each other.
        depth = max(1, min(self._front_depth, self._host.num_slots // len(tiers)))
        self._fronts = [EvictionFront(tier, depth) for tier in tiers]
        watch_new_blocks(pool, self._taken)

    def _taken(self, num_blocks: int) -> None:
        for front in self._fronts:
            front.taken(num_blocks)

    # Offering.

    def filled(self, block: KVCacheBlock, key: BlockHashWithGroupId, request_id: str) -> None:
        """Offer a block that became full; lazy mode leaves it to the eviction front."""
        if not self._lazy:
            self._offered.append(Candidate(block, key, request_id))

    def offer(self, blocks: Iterable[KVCacheBlock], request_id: str) -> None:
        """Offer cached blocks that lack a copy, in either mode."""
        for block in blocks:
            if block.block_hash is not None and self.lacks_copy(block):
                self._offered.append(Candidate(block, block.block_hash, request_id))

    def offer_all(self) -> None:
        """Offer every cached block without a copy in RAM: least recently used first, so that later ones may evict
        their copies, and each after the head of its prefix."""
        assert self._gpu is not None
        free = self._gpu.free_block_queue.get_all_free_blocks()
        held = [block for block in self._gpu.blocks if block.ref_cnt > 0]
        wanted = {block.block_hash: block for block in (*free, *held) if self.lacks_copy(block)}

        def above(block: KVCacheBlock) -> KVCacheBlock | None:
            origin = self._origins.of(block)
            return wanted.get(origin.parent) if origin is not None and origin.parent is not None else None

        self.offer(heads_first(wanted.values(), above), "")

    def finished(self, request_id: str, blocks: Iterable[KVCacheBlock]) -> None:
        """Start stores now: the request's blocks may be reallocated before the next step is planned."""
        if request_id in self._incomplete:
            self._incomplete.discard(request_id)
            # A prefix with a hole is worth only what lies before the hole.
            self.offer(blocks, request_id)
        if self._offered:
            self._choose()

    # Planning.

    def plan(self, num_tokens: int, preempted: Collection[str]) -> list[StoreJob]:
        """Stores to start after this step's forward."""
        if self._offered or self._deferred:
            self._steps_waited += 1
            enough = len(self._offered) >= _BLOCKS_TO_STORE_AT_ONCE or self._steps_waited >= _STEPS_TO_WAIT
            if enough or num_tokens == 0 or preempted or self._gpu_is_short():
                self._choose()
        for front in self._fronts:
            # vLLM may hold the same content in two blocks.
            nearly_evicted = {b.block_hash: b for b in front.advance(self.lacks_copy, self._budget())}
            self._start(list(nearly_evicted.values()), to_front=True)
        jobs, self._ready = self._ready, []
        return jobs

    def _gpu_is_short(self) -> bool:
        """Whether the next pass may preempt a request and reallocate its blocks before they are stored."""
        assert self._gpu is not None
        return self._gpu.get_num_free_blocks() < self._num_gpu_blocks // 4

    def _budget(self) -> int:
        return store_budget(
            self._speeds,
            block_bytes=self._block_bytes,
            blocks_in_flight=self.num_blocks,
            gpu_blocks=self._num_gpu_blocks,
        )

    def _choose(self) -> None:
        """Start stores of offered blocks, within the budget of link and GPU blocks."""
        budget = self._budget()
        chosen: list[KVCacheBlock] = []
        keys: set[BlockHashWithGroupId] = set()

        def choose(candidate: Candidate) -> None:
            if candidate.key in keys or not self._is_wanted(candidate.block, candidate.key):
                return
            if len(chosen) >= budget:
                self._defer(candidate)
            elif self._can_be_hit(candidate, keys):
                chosen.append(candidate.block)
                keys.add(candidate.key)
            else:
                self._drop(candidate)

        for _ in range(min(len(self._deferred), budget)):
            choose(self._deferred.popleft())
        offered, self._offered, self._steps_waited = self._offered, [], 0
        for candidate in offered:
            choose(candidate)
        self._start(chosen, to_front=False)

    def _is_wanted(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> bool:
        return block.block_hash == key and key not in self._keys and self._host.find(key) is None

    def lacks_copy(self, block: KVCacheBlock) -> bool:
        """Whether a block is cached, and neither in RAM nor on its way there."""
        key = block.block_hash
        if key is None or self._host.find(key) is not None:
            return False  # first, because most blocks in the queue are stored already
        return key not in self._keys and self._origins.of(block) is not None

    def _can_be_hit(self, candidate: Candidate, chosen: Collection[BlockHashWithGroupId]) -> bool:
        """Whether a hit can reach the block: full attention ends it at a gap. Lazy mode stores tails before heads."""
        if self._lazy or get_group_id(candidate.key) not in self._gapless_groups:
            return True
        origin = self._origins.of(candidate.block)
        parent = origin.parent if origin is not None else None
        return parent is None or parent in chosen or parent in self._keys or self._host.find(parent) is not None

    def _defer(self, candidate: Candidate) -> None:
        self._deferred.append(candidate)
        if len(self._deferred) > self._num_gpu_blocks:
            self._drop(self._deferred.popleft())

    def _drop(self, candidate: Candidate) -> None:
        if candidate.request_id in self._live:
            self._incomplete.add(candidate.request_id)
        self._stats.count("stores_dropped_blocks")

    def _start(self, gpu_blocks: list[KVCacheBlock], *, to_front: bool) -> None:
        if not gpu_blocks:
            return
        assert self._gpu is not None
        origins = [origin for block in gpu_blocks if (origin := self._origins.of(block)) is not None]
        assert len(origins) == len(gpu_blocks)
        host_blocks = self._allocate(origins)
        if len(host_blocks) < len(gpu_blocks):
            self._stats.count("stores_dropped_blocks", len(gpu_blocks) - len(host_blocks))
            gpu_blocks, origins = gpu_blocks[: len(host_blocks)], origins[: len(host_blocks)]
            if not gpu_blocks:
                return
        self._gpu.touch(gpu_blocks)
        job_id = next(self._job_ids)
        counts = [block.block_hash_num_tokens for block in gpu_blocks]
        self.in_flight[job_id] = StoreInFlight(gpu_blocks, host_blocks, origins, counts, to_front)
        self._keys.update(origin.key for origin in origins)
        self.num_blocks += len(gpu_blocks)
        self._ready.append(StoreJob(job_id, [b.block_id for b in gpu_blocks], [b.block_id - 1 for b in host_blocks]))

    def _allocate(self, origins: Sequence[Origin]) -> list[KVCacheBlock]:
        """Allocate host blocks without evicting parents of new ones: a prefix longer than the pool keeps its head."""
        keys = {origin.key for origin in origins}
        parents = {o.parent for o in origins if o.parent is not None and o.parent not in keys}
        held = [block for parent in parents if (block := self._host.find(parent)) is not None]
        before = self._host.num_cached
        self._host.pin(held)
        blocks = self._host.allocate(len(origins))
        self._host.release(held)
        self._stats.count("evicted_blocks", before - self._host.num_cached)
        return blocks

    # Ending.

    def report(self, job_id: int, count: int, *, failed: bool) -> None:
        """Count `count` more workers as done with the store."""
        assert self._gpu is not None
        store = self.in_flight[job_id]
        store.reports += count
        store.failed |= failed
        if store.reports < self._world_size:
            return
        del self.in_flight[job_id]
        self.num_blocks -= len(store.gpu_blocks)
        self._keys.difference_update(origin.key for origin in store.origins)
        if store.failed or store.abandoned:
            self._host.release(store.host_blocks)
        else:
            held = zip(store.host_blocks, store.origins, store.token_counts, strict=True)
            items = []
            for block, o, n in held:
                if self._host.find(o.key) is not None:
                    # A read from disk or from the store between machines has brought the same content meanwhile.
                    self._host.release([block])
                else:
                    items.append(Stored(block, o.key, n, o.parent, o.adapter, o.event))
            self._host.insert(items)
            if self.on_stored is not None:
                self.on_stored(items)
        if store.to_front:
            return_to_front(self._gpu, store.gpu_blocks)
        else:
            self._gpu.free_blocks(reversed(store.gpu_blocks))

    def reset(self) -> None:
        """Drop offers, and discard the content of stores in flight."""
        self._offered.clear()
        self._deferred.clear()
        self._steps_waited = 0
        for store in self.in_flight.values():
            store.abandoned = True

    def is_busy(self) -> bool:
        return bool(self.in_flight or self._offered or self._deferred)

    def will_free_gpu_blocks(self) -> bool:
        """Whether stores in flight hold the last references to GPU blocks."""
        return any(block.ref_cnt == 1 for store in self.in_flight.values() for block in store.gpu_blocks)


class EvictionFront:
    """The next `depth` blocks of the GPU's free queue, visited by a walk that remembers its position.

    A block is visited about once on its way to the head, so the cost of a step depends on how far the queue has moved
    since the last one, not on the number of running requests.
    """

    def __init__(self, queue: FreeKVCacheBlockQueue, depth: int) -> None:
        self._queue = queue
        self._depth = depth
        self._cursor: KVCacheBlock | None = None
        self._ahead = 0  # upper bound of visited blocks between head and cursor
        self._taken = 0  # since the last step
        self._steps = 0
        self._num_found = 0  # since blocks were taken

    def taken(self, count: int) -> None:
        """Note that `count` blocks were allocated from the head."""
        self._ahead -= count
        self._taken += count
        self._num_found = 0

    def advance(self, wanted: Callable[[KVCacheBlock], bool], limit: int) -> list[KVCacheBlock]:
        """Visit blocks until `depth` are ahead of the cursor; return at most `limit` wanted ones, nearest eviction
        first, and only few unless many blocks are being taken.

        While no block is taken, none comes nearer to eviction, and at most `depth` are found: otherwise an idle engine
        would keep copying, for ever if the copies evict each other from RAM.
        """
        self._steps += 1
        limit = min(limit, self._depth - self._num_found, max(_FEW, 2 * self._taken))
        self._taken = 0
        cursor = self._cursor
        if cursor is None or cursor.ref_cnt > 0 or self._ahead <= 0 or self._steps >= _STEPS_BETWEEN_FULL_WALKS:
            cursor, self._ahead, self._steps = None, 0, 0
        found: list[KVCacheBlock] = []
        if self._ahead < self._depth:
            for block in self._queue.iter_blocks_after(cursor):
                if self._ahead >= self._depth or len(found) >= limit:
                    break
                if block.block_hash is not None and wanted(block):
                    found.append(block)  # the caller pins it, which removes it from the queue
                else:
                    cursor = block
                    self._ahead += 1
        self._cursor = cursor
        self._num_found += len(found)
        return found
