"""Which GPU blocks are copied to RAM, when, and what is held while they are."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from overspill.kv.host_cache import HostCache, Stored
from overspill.kv.jobs import StoreJob
from overspill.kv.metrics import OverspillStats
from overspill.kv.nearly_evicted import EvictionFront
from overspill.kv.origins import Origin, Origins
from overspill.kv.speeds import Speeds, store_budget
from overspill.kv.vllm_api import (
    BlockHashWithGroupId,
    BlockPool,
    KVCacheBlock,
    get_group_id,
    return_to_front,
    watch_new_blocks,
)

# A copy of a few blocks costs the step as much as a copy of many, so blocks wait for company, but not for long.
_BLOCKS_TO_STORE_AT_ONCE = 32
_STEPS_TO_WAIT = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A GPU block to store, if it still holds what it held when it was offered."""

    block: KVCacheBlock
    key: BlockHashWithGroupId
    request_id: str


@dataclass(slots=True)
class StoreInFlight:
    gpu_blocks: list[KVCacheBlock]
    host_blocks: list[KVCacheBlock]
    origins: list[Origin]
    token_counts: list[int | None]
    # They were near eviction before the store and go back to where they were.
    to_front: bool
    abandoned: bool = False
    reports: int = 0
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    lazy: bool
    world_size: int
    block_bytes: int
    num_gpu_blocks: int
    # How many blocks at the head of the GPU's free queue count as near eviction.
    front_depth: int
    # Groups in which nothing is hit beyond a hole.
    gapless_groups: Collection[int]


class Stores:
    """Candidates, and copies under way. A block that is being copied is referenced on both sides until every worker
    has reported, whatever becomes of its request meanwhile."""

    def __init__(
        self,
        settings: StoreSettings,
        host: HostCache,
        origins: Origins,
        speeds: Speeds,
        stats: OverspillStats,
        job_ids: Iterator[int],
        live: Collection[str],
    ) -> None:
        self._settings = settings
        self._host, self._origins, self._speeds, self._stats = host, origins, speeds, stats
        self._job_ids = job_ids
        self._live = live  # requests admitted and not finished
        self._gpu: BlockPool | None = None
        self._fronts: list[EvictionFront] = []
        self._offered: list[Candidate] = []
        self._steps_waited = 0
        self._deferred: deque[Candidate] = deque()  # for want of link or GPU blocks
        self._ready: list[StoreJob] = []
        self._incomplete: set[str] = set()  # live requests of which a block could not be stored
        self._keys: set[BlockHashWithGroupId] = set()  # being stored
        self.in_flight: dict[int, StoreInFlight] = {}
        self.num_blocks = 0  # in flight

    def bind(self, pool: BlockPool) -> None:
        self._gpu = pool
        if self._settings.lazy:
            self._watch_front(pool)

    def _watch_front(self, pool: BlockPool) -> None:
        queue = pool.free_block_queue
        # With spill, GPU blocks and spilled ones leave from heads of their own.
        tiers = getattr(queue, "tiers", (queue,))
        # If RAM could not hold the copies of all that is near eviction, they would push each other out.
        depth = max(1, min(self._settings.front_depth, self._host.num_slots // len(tiers)))
        self._fronts = [EvictionFront(tier, depth) for tier in tiers]
        watch_new_blocks(pool, self._taken)

    def _taken(self, num_blocks: int) -> None:
        for front in self._fronts:
            front.taken(num_blocks)

    # Offering.

    def filled(self, block: KVCacheBlock, key: BlockHashWithGroupId, request_id: str) -> None:
        """A block became full; eager mode stores it."""
        if not self._settings.lazy:
            self._offered.append(Candidate(block, key, request_id))

    def offer(self, blocks: Iterable[KVCacheBlock], request_id: str) -> None:
        """Cached blocks worth a copy, whatever the mode."""
        for block in blocks:
            if block.block_hash is not None and self._is_wanted_and_known(block):
                self._offered.append(Candidate(block, block.block_hash, request_id))

    def finished(self, request_id: str, blocks: Iterable[KVCacheBlock]) -> None:
        """The request's blocks may be handed to another one in the next pass, before the next step is planned."""
        if request_id in self._incomplete:
            self._incomplete.discard(request_id)
            # A prefix with a hole is worth only what lies before the hole.
            self.offer(blocks, request_id)
        if self._offered:
            self._choose()

    # Planning.

    def plan(self, num_tokens: int, preempted: Collection[str]) -> list[StoreJob]:
        """The stores to begin after this step's forward."""
        if self._offered or self._deferred:
            self._steps_waited += 1
            enough = len(self._offered) >= _BLOCKS_TO_STORE_AT_ONCE or self._steps_waited >= _STEPS_TO_WAIT
            if enough or num_tokens == 0 or preempted or self._gpu_is_short():
                self._choose()
        for front in self._fronts:
            # vLLM may hold the same content in two blocks.
            nearly_evicted = {b.block_hash: b for b in front.advance(self._is_wanted_and_known, self._budget())}
            self._start(list(nearly_evicted.values()), to_front=True)
        jobs, self._ready = self._ready, []
        return jobs

    def _gpu_is_short(self) -> bool:
        """Whether the next pass may preempt a request, and hand on its blocks before they could be stored."""
        assert self._gpu is not None
        return self._gpu.get_num_free_blocks() < self._settings.num_gpu_blocks // 4

    def _budget(self) -> int:
        return store_budget(
            self._speeds,
            block_bytes=self._settings.block_bytes,
            blocks_in_flight=self.num_blocks,
            gpu_blocks=self._settings.num_gpu_blocks,
        )

    def _choose(self) -> None:
        """Start stores of what was offered, as far as link and GPU blocks go."""
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

    def _is_wanted_and_known(self, block: KVCacheBlock) -> bool:
        key = block.block_hash
        if key is None or self._host.find(key) is not None:
            return False  # first, because that is what a walk along the queue meets most
        return key not in self._keys and self._origins.of(block) is not None

    def _can_be_hit(self, candidate: Candidate, chosen: Collection[BlockHashWithGroupId]) -> bool:
        """In full attention nothing is hit beyond a hole. Lazy stores bring the tail first and close it later."""
        if self._settings.lazy or get_group_id(candidate.key) not in self._settings.gapless_groups:
            return True
        origin = self._origins.of(candidate.block)
        parent = origin.parent if origin is not None else None
        return parent is None or parent in chosen or parent in self._keys or self._host.find(parent) is not None

    def _defer(self, candidate: Candidate) -> None:
        self._deferred.append(candidate)
        if len(self._deferred) > self._settings.num_gpu_blocks:
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
        """Host blocks, without pushing out what is continued: a prefix longer than the pool keeps its head."""
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
        """`count` more workers are done."""
        store = self.in_flight[job_id]
        store.reports += count
        store.failed |= failed
        if store.reports < self._settings.world_size:
            return
        del self.in_flight[job_id]
        self.num_blocks -= len(store.gpu_blocks)
        self._keys.difference_update(origin.key for origin in store.origins)
        if store.failed or store.abandoned:
            self._host.release(store.host_blocks)
        else:
            self._insert(store)
        self._release_gpu(store.gpu_blocks, to_front=store.to_front)

    def _insert(self, store: StoreInFlight) -> None:
        held = zip(store.host_blocks, store.origins, store.token_counts, strict=True)
        self._host.insert([Stored(block, origin.key, n, origin.parent) for block, origin, n in held])
        if self._host.events_enabled:
            # In one queue with the removals: a reader must see them in the order in which they happened.
            self._host.pool.kv_event_queue += [o.event for o in store.origins if o.event is not None]

    def _release_gpu(self, blocks: Sequence[KVCacheBlock], *, to_front: bool) -> None:
        assert self._gpu is not None
        if to_front:
            return_to_front(self._gpu, blocks)
        else:
            self._gpu.free_blocks(reversed(blocks))

    def reset(self) -> None:
        """Forget what was offered, and make nothing findable of what is under way."""
        self._offered.clear()
        self._deferred.clear()
        self._steps_waited = 0
        for store in self.in_flight.values():
            store.abandoned = True

    def is_busy(self) -> bool:
        return bool(self.in_flight or self._offered or self._deferred)

    def will_free_gpu_blocks(self) -> bool:
        """Whether blocks come free when the copies under way are over: nobody else holds them."""
        return any(block.ref_cnt == 1 for store in self.in_flight.values() for block in store.gpu_blocks)
