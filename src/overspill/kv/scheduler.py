"""The engine core's side: what to store, what to load, and which blocks are held meanwhile."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    get_group_id,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from overspill.kv.host_cache import Hit, HostCache, Stored
from overspill.kv.host_memory import num_host_slots, slot_stride
from overspill.kv.jobs import LoadJob, StepJobs, StepReport, StoreJob
from overspill.kv.layout import bytes_per_block
from overspill.kv.metrics import OverspillStats
from overspill.kv.nearly_evicted import EvictionFront
from overspill.kv.options import Options
from overspill.kv.speeds import Speeds, load_beats_recompute, store_budget

logger = init_logger(__name__)

# A copy of a few blocks costs the step as much as a copy of many, so blocks wait for company, but not for long.
_BLOCKS_TO_STORE_AT_ONCE = 32
_STEPS_TO_WAIT = 8


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a cached GPU block comes from; void once the block carries another hash."""

    key: BlockHashWithGroupId
    parent: BlockHashWithGroupId | None
    event: BlockStored | None


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


@dataclass(slots=True)
class LoadInFlight:
    request_id: str
    gpu_blocks: list[KVCacheBlock]
    host_blocks: list[KVCacheBlock]
    reports: int = 0


class OffloadScheduler:
    """Decides; the workers copy. A block that is being copied is referenced on both sides until every worker has
    reported, whatever becomes of the request meanwhile."""

    def __init__(self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._options = options
        self._world_size = vllm_config.parallel_config.world_size
        self._block_bytes = bytes_per_block(kv_cache_config)
        self._num_gpu_blocks = kv_cache_config.num_blocks
        self._groups = kv_cache_config.prefix_cacheable_group_ids
        self._gapless_groups = {
            group
            for group in self._groups
            if isinstance(kv_cache_config.kv_cache_groups[group].kv_cache_spec, FullAttentionSpec)
        }
        self._max_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.host = HostCache(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            num_slots=num_host_slots(options, self._world_size, self._block_bytes),
            eviction=options.eviction,
        )
        self.speeds = Speeds()
        self.stats = OverspillStats()
        self._gpu: BlockPool | None = None
        self._front: EvictionFront | None = None
        self._next_job = 0
        self._used_bytes = -1

        # Lookups between get_num_new_matched_tokens and update_state_after_alloc of the same scheduling pass.
        # Nothing is given up in RAM in between, so hits need no pin.
        self._local_tokens: dict[str, int] = {}
        self._hits: dict[str, Hit] = {}
        self._admitted: set[str] = set()  # and not finished yet

        self._origins: dict[int, Origin] = {}  # by GPU block id
        self._filled: list[Candidate] = []  # since the last step
        self._num_planned = 0  # of them, those that an earlier step has seen
        self._steps_waited = 0
        self._deferred: deque[Candidate] = deque()  # for want of link or GPU blocks
        self._ready_stores: list[StoreJob] = []
        self._incomplete: set[str] = set()  # requests of which a block could not be stored
        self._unloadable: set[str] = set()  # requests that are computed whatever RAM holds
        self._planned_loads: dict[str, tuple[LoadInFlight, bool]] = {}

        self._loads: dict[int, LoadInFlight] = {}
        self._stores: dict[int, StoreInFlight] = {}
        self._storing: set[BlockHashWithGroupId] = set()
        self._blocks_storing = 0
        self._blocks_loading = 0
        self._heads_loading: set[int] = set()  # first host block of every load

    # Seeing what the GPU's pool does.

    def bind(self, pool: BlockPool) -> None:
        """Watch the GPU's block pool: which blocks become full, and how fast the free queue moves.

        Hooking the two methods where it happens makes a step cost what it fills, not what it runs.
        """
        self._gpu = pool
        cache_full_blocks = pool.cache_full_blocks

        def observed_cache_full_blocks(
            request: Request,
            blocks: list[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            kv_cache_group_id: int,
            block_mask: list[bool] | None = None,
        ) -> None:
            cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=num_cached_blocks,
                num_full_blocks=num_full_blocks,
                block_size=block_size,
                kv_cache_group_id=kv_cache_group_id,
                block_mask=block_mask,
            )
            if kv_cache_group_id in self._groups:
                self._saw_full_blocks(
                    request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id
                )

        pool.cache_full_blocks = observed_cache_full_blocks
        if self._options.store == "lazy":
            self._watch_front(pool)

    def _watch_front(self, pool: BlockPool) -> None:
        # Twice what a step can take, and never more than half of the pool.
        depth = 2 * sum(-(-self._max_batched_tokens // self.host.group_block_sizes[g]) for g in self._groups)
        front = self._front = EvictionFront(pool, min(max(depth, 2), max(1, self._num_gpu_blocks // 2)))
        get_new_blocks = pool.get_new_blocks

        def observed_get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
            front.taken(num_blocks)
            return get_new_blocks(num_blocks)

        pool.get_new_blocks = observed_get_new_blocks

    def _saw_full_blocks(
        self, request: Request, blocks: list[KVCacheBlock], first: int, last: int, block_size: int, group: int
    ) -> None:
        eager = self._options.store == "eager"
        for i in range(first, last):
            block = blocks[i]
            key = block.block_hash
            # A hash that ends inside the block is a state the next step overwrites.
            if block.is_null or key is None or block.block_hash_num_tokens != (i + 1) * block_size:
                continue
            parent = blocks[i - 1].block_hash if i > 0 and not blocks[i - 1].is_null else None
            event = self._stored_event(request, i, block_size, group) if self.host.events_enabled else None
            self._origins[block.block_id] = Origin(key, parent, event)
            if eager:
                self._filled.append(Candidate(block, key, request.request_id))

    def _stored_event(self, request: Request, index: int, block_size: int, group: int) -> BlockStored:
        start, end = index * block_size, (index + 1) * block_size
        hashes, per_block = request.block_hashes, block_size // self.host.hash_block_size
        extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[(index + 1) * per_block - 1])],
            parent_block_hash=maybe_convert_block_hash(hashes[index * per_block - 1]) if index else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys([extra_keys]),
            group_idx=group,
            locality="LOCAL",
        )

    # Admission.

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the GPU's can come from RAM; None asks to be asked again later."""
        request_id = request.request_id
        self._hits.pop(request_id, None)
        self._local_tokens[request_id] = num_local_tokens
        # The last token is always computed, for its logits.
        max_tokens = request.num_tokens - 1
        if request.skip_reading_prefix_cache or max_tokens <= num_local_tokens or request_id in self._unloadable:
            return 0, False
        hit = self.host.lookup(request.block_hashes, num_local_tokens, max_tokens)
        if hit is None:
            return 0, False
        blocks = self._blocks_to_load(hit)
        if not blocks:
            return 0, False
        if blocks[0].block_id in self._heads_loading:
            # Another request is loading the same blocks; when it is done they are a hit on the GPU.
            return None, False
        if self._options.load == "auto" and not load_beats_recompute(
            self.speeds,
            num_tokens=hit.num_tokens,
            num_bytes=len(blocks) * self._block_bytes,
            queued_bytes=self._blocks_loading * self._block_bytes,
        ):
            self.stats.count("loads_skipped_tokens", hit.num_tokens)
            self.host.use(blocks)
            return 0, False
        self._hits[request_id] = hit
        return hit.num_tokens, True

    def _blocks_to_load(self, hit: Hit) -> list[KVCacheBlock]:
        return [
            block
            for group in self._groups
            for block in hit.blocks[group][hit.num_local_tokens // self.host.group_block_sizes[group] :]
            if not block.is_null
        ]

    def admit(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has its GPU blocks: plan its load, and keep RAM's copy of its local prefix fresh."""
        request_id = request.request_id
        num_local = self._local_tokens.pop(request_id, None)
        hit = self._hits.pop(request_id, None)
        if num_local is None:
            return  # the second call for an asynchronous load
        self._admitted.add(request_id)
        self._keep_local_prefix(request_id, blocks, num_local)
        if num_external_tokens == 0:
            self.stats.count("miss_tokens", request.num_tokens - num_local)
            return
        self.stats.count("miss_tokens", request.num_tokens - num_local - num_external_tokens)
        self._plan_load(request_id, blocks, num_external_tokens, hit)

    def _plan_load(self, request_id: str, blocks: KVCacheBlocks, num_external_tokens: int, hit: Hit | None) -> None:
        host_blocks: list[KVCacheBlock] = []
        gpu_blocks: list[KVCacheBlock] = []
        void = hit is None or hit.num_tokens != num_external_tokens
        if hit is not None and not void:
            end = hit.num_local_tokens + hit.num_tokens
            for group in self._groups:
                size = self.host.group_block_sizes[group]
                span = slice(hit.num_local_tokens // size, -(-end // size))
                # Null targets lie before the window.
                pairs = zip_longest(blocks.blocks[group][span], hit.blocks[group][span])
                wanted = [(target, source) for target, source in pairs if target is not None and not target.is_null]
                # Does the GPU expect bytes that RAM does not have?
                void = void or any(source is None or source.is_null for _, source in wanted)
                gpu_blocks += [target for target, _ in wanted]
                host_blocks += [source for _, source in wanted]
        if void:
            logger.warning(
                "Overspill: %d tokens of request %s cannot be loaded as offered; they will be recomputed",
                num_external_tokens, request_id,
            )  # fmt: skip
            host_blocks, gpu_blocks = [], []
            self._unloadable.add(request_id)
        else:
            self.stats.count("hit_tokens", num_external_tokens)
        self.host.read(host_blocks)
        assert self._gpu is not None
        self._gpu.touch(gpu_blocks)
        self._blocks_loading += len(host_blocks)
        if host_blocks:
            self._heads_loading.add(host_blocks[0].block_id)
        self._planned_loads[request_id] = (LoadInFlight(request_id, gpu_blocks, host_blocks), void)

    def _keep_local_prefix(self, request_id: str, blocks: KVCacheBlocks, num_local_tokens: int) -> None:
        """A hit on the GPU makes RAM's copy newer, or makes one: in lazy mode a prefix that is used all the time
        never comes near eviction, and in eager mode a store may have been dropped."""
        for group in self._groups:
            used: list[KVCacheBlock] = []
            for block in blocks.blocks[group][: num_local_tokens // self.host.group_block_sizes[group]]:
                key = block.block_hash
                if block.is_null or key is None:
                    continue
                copy = self.host.find(key)
                if copy is not None:
                    used.append(copy)
                elif key not in self._storing and self._origin(block) is not None:
                    self._filled.append(Candidate(block, key, request_id))
            self.host.use(used)

    def _origin(self, block: KVCacheBlock) -> Origin | None:
        origin = self._origins.get(block.block_id)
        return origin if origin is not None and origin.key == block.block_hash else None

    # Every step.

    def plan_step(self, scheduler_output: SchedulerOutput) -> StepJobs:
        num_tokens = scheduler_output.total_num_scheduled_tokens
        jobs = StepJobs(num_tokens=num_tokens)
        for request_id, (load, void) in self._planned_loads.items():
            job_id = self._new_job()
            self._loads[job_id] = load
            jobs.loads.append(
                LoadJob(
                    job_id,
                    request_id,
                    [block.block_id - 1 for block in load.host_blocks],
                    [block.block_id for block in load.gpu_blocks],
                    # With nothing else to run, the forward may be queued behind the copies instead of after them.
                    early=num_tokens == 0,
                    void=void,
                )
            )
        self._planned_loads.clear()
        preempted = scheduler_output.preempted_req_ids
        if preempted:
            self._drop_uncomputed(preempted)
        if self._filled or self._deferred:
            self._steps_waited += 1
            enough = len(self._filled) >= _BLOCKS_TO_STORE_AT_ONCE or self._steps_waited >= _STEPS_TO_WAIT
            if enough or num_tokens == 0 or preempted or self._gpu_is_short():
                self._choose_stores()
        if self._front is not None:
            # vLLM may hold the same content in two blocks.
            nearly_evicted = {b.block_hash: b for b in self._front.advance(self._wanted_from_front, self._budget())}
            self._start_store(list(nearly_evicted.values()), to_front=True)
        self._num_planned = len(self._filled)
        jobs.stores, self._ready_stores = self._ready_stores, []
        return jobs

    def _new_job(self) -> int:
        self._next_job += 1
        return self._next_job

    def _drop_uncomputed(self, preempted: set[str]) -> None:
        """A request preempted in the pass that hashed its block never computed it."""
        new = self._filled[self._num_planned :]
        self._filled[self._num_planned :] = [c for c in new if c.request_id not in preempted]

    def _gpu_is_short(self) -> bool:
        """Whether the next pass may preempt a request, and hand on its blocks before they could be stored."""
        assert self._gpu is not None
        return self._gpu.get_num_free_blocks() < self._num_gpu_blocks // 4

    def _budget(self) -> int:
        return store_budget(
            self.speeds,
            block_bytes=self._block_bytes,
            blocks_in_flight=self._blocks_storing,
            gpu_blocks=self._num_gpu_blocks,
        )

    def _choose_stores(self) -> None:
        """Start stores of what was filled, as far as link and GPU blocks go."""
        self._steps_waited = 0
        budget = self._budget()
        chosen: list[KVCacheBlock] = []
        keys: set[BlockHashWithGroupId] = set()

        def choose(candidate: Candidate) -> None:
            if candidate.key in keys or not self._wanted(candidate.block, candidate.key):
                return
            if len(chosen) >= budget:
                self._defer(candidate)
            elif self._continues_a_stored_one(candidate, keys):
                chosen.append(candidate.block)
                keys.add(candidate.key)
            else:
                self._incomplete |= {candidate.request_id} & self._admitted
                self.stats.count("stores_dropped_blocks")

        for _ in range(min(len(self._deferred), budget)):
            choose(self._deferred.popleft())
        filled, self._filled, self._num_planned = self._filled, [], 0
        for candidate in filled:
            choose(candidate)
        self._start_store(chosen, to_front=False)

    def _wanted(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> bool:
        return block.block_hash == key and key not in self._storing and self.host.find(key) is None

    def _continues_a_stored_one(self, candidate: Candidate, chosen: set[BlockHashWithGroupId]) -> bool:
        """Whether the block could be hit. In full attention nothing is hit beyond a hole; lazy stores, which bring
        the tail of a prefix first, close it later."""
        if self._front is not None or get_group_id(candidate.key) not in self._gapless_groups:
            return True
        origin = self._origin(candidate.block)
        parent = origin.parent if origin is not None else None
        return parent is None or parent in chosen or parent in self._storing or self.host.find(parent) is not None

    def _wanted_from_front(self, block: KVCacheBlock) -> bool:
        key = block.block_hash
        return key is not None and self._wanted(block, key) and self._origin(block) is not None

    def _defer(self, candidate: Candidate) -> None:
        self._deferred.append(candidate)
        if len(self._deferred) > self._num_gpu_blocks:
            dropped = self._deferred.popleft()
            self._incomplete |= {dropped.request_id} & self._admitted
            self.stats.count("stores_dropped_blocks")

    def _start_store(self, gpu_blocks: list[KVCacheBlock], *, to_front: bool) -> None:
        if not gpu_blocks:
            return
        assert self._gpu is not None
        before = self.host.num_cached
        origins = [self._origins[block.block_id] for block in gpu_blocks]
        # A prefix longer than the pool must not push out its own head.
        parents = self._stored_parents(origins)
        self.host.pin(parents)
        host_blocks = self.host.allocate(len(gpu_blocks))
        self.host.release(parents)
        self.stats.count("evicted_blocks", before - self.host.num_cached)
        if len(host_blocks) < len(gpu_blocks):
            self.stats.count("stores_dropped_blocks", len(gpu_blocks) - len(host_blocks))
            gpu_blocks, origins = gpu_blocks[: len(host_blocks)], origins[: len(host_blocks)]
            if not gpu_blocks:
                return
        self._gpu.touch(gpu_blocks)
        job_id = self._new_job()
        self._stores[job_id] = StoreInFlight(
            gpu_blocks, host_blocks, origins, [b.block_hash_num_tokens for b in gpu_blocks], to_front
        )
        self._storing.update(origin.key for origin in origins)
        self._blocks_storing += len(gpu_blocks)
        self._ready_stores.append(
            StoreJob(job_id, [b.block_id for b in gpu_blocks], [b.block_id - 1 for b in host_blocks])
        )

    def _stored_parents(self, origins: Sequence[Origin]) -> list[KVCacheBlock]:
        """What is in RAM and is continued by these blocks, which mostly continue each other."""
        keys = {origin.key for origin in origins}
        parents = {o.parent for o in origins if o.parent is not None and o.parent not in keys}
        return [block for parent in parents if (block := self.host.find(parent)) is not None]

    # Completions.

    def complete(self, output: KVConnectorOutput) -> None:
        # vLLM keeps the blocks of a failed load reserved for its request, and would wait for ever to load again.
        self._unloadable |= (output.failed_recving or set()) & self._admitted
        report = output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            return
        if report.corrupt_slots:
            self._drop_corrupt(report.corrupt_slots)
        self.speeds.saw_load(report.load_speed.amount, report.load_speed.seconds)
        self.speeds.saw_prefill(report.prefill_speed.amount, report.prefill_speed.seconds)
        for job_id, count in report.loaded.items():
            load = self._loads[job_id]
            load.reports += count
            if job_id in report.failed:
                # Nothing says which of them cannot be read; found again, they would fail again, for ever.
                self.host.drop(load.host_blocks)
            if load.reports == self._world_size:
                del self._loads[job_id]
                self._release_load(load)
        for job_id, count in report.stored.items():
            store = self._stores[job_id]
            store.reports += count
            store.failed |= job_id in report.failed
            if store.reports == self._world_size:
                del self._stores[job_id]
                self._finish_store(store)

    def _drop_corrupt(self, slots: set[int]) -> None:
        blocks = [self.host.pool.blocks[slot + 1] for slot in slots]
        dropped = self.host.drop(blocks)
        logger.warning(
            "Overspill: %d block(s) in RAM no longer held what was stored; dropped, and the tokens are recomputed",
            dropped,
        )

    def _release_load(self, load: LoadInFlight) -> None:
        assert self._gpu is not None
        self._blocks_loading -= len(load.host_blocks)
        if load.host_blocks:
            self._heads_loading.discard(load.host_blocks[0].block_id)
        self.host.release(load.host_blocks)
        self._gpu.free_blocks(reversed(load.gpu_blocks))

    def _finish_store(self, store: StoreInFlight) -> None:
        self._blocks_storing -= len(store.gpu_blocks)
        self._storing.difference_update(origin.key for origin in store.origins)
        if store.failed or store.abandoned:
            self.host.release(store.host_blocks)
        else:
            held = zip(store.host_blocks, store.origins, store.token_counts, strict=True)
            self.host.insert([Stored(block, origin.key, n, origin.parent) for block, origin, n in held])
            if self.host.events_enabled:
                # In one queue with the removals: a reader must see them in the order in which they happened.
                self.host.pool.kv_event_queue += [o.event for o in store.origins if o.event is not None]
        self._release_gpu(store.gpu_blocks, to_front=store.to_front)

    def _release_gpu(self, blocks: Sequence[KVCacheBlock], *, to_front: bool) -> None:
        assert self._gpu is not None
        if not to_front:
            self._gpu.free_blocks(reversed(blocks))
            return
        # vLLM would put them behind everything else, and evict what is used more in their place.
        idle: list[KVCacheBlock] = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                idle.append(block)
        self._gpu.free_block_queue.prepend_n(idle)

    # Ends.

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """The request is over, its blocks are about to be freed; copies under way go on."""
        request_id = request.request_id
        self._local_tokens.pop(request_id, None)
        self._hits.pop(request_id, None)
        self._unloadable.discard(request_id)
        self._admitted.discard(request_id)
        if request_id in self._incomplete:
            self._incomplete.discard(request_id)
            self._offer_again(request_id, block_ids)
        if self._filled:
            # Its blocks may be handed to another request in the next pass, before the next step is planned.
            self._choose_stores()

    def _offer_again(self, request_id: str, block_ids: tuple[list[int], ...]) -> None:
        """A prefix with a hole is worth only what lies before the hole."""
        assert self._gpu is not None
        for group in self._groups:
            for block_id in block_ids[group]:
                block = self._gpu.blocks[block_id]
                if block.block_hash is not None and self._wanted_from_front(block):
                    self._filled.append(Candidate(block, block.block_hash, request_id))

    def reset(self) -> bool:
        """Forget everything in RAM. False while a load is under way: its request would still get the old content."""
        for request_id in list(self._planned_loads):
            load, _ = self._planned_loads[request_id]
            self._planned_loads[request_id] = (LoadInFlight(request_id, [], []), True)
            self._release_load(load)
        self._hits.clear()
        self._filled.clear()
        self._num_planned = 0
        self._deferred.clear()
        self._steps_waited = 0
        for store in self._stores.values():
            store.abandoned = True
        self.host.clear()
        return not self._loads

    def has_stores(self) -> bool:
        """Whether the engine should go on stepping although no request is left."""
        return bool(self._stores or self._loads or self._filled or self._deferred)

    def holds_gpu_blocks(self) -> bool:
        """Whether waiting a moment frees blocks, so that nobody need be preempted."""
        return bool(self._stores)

    def take_stats(self) -> OverspillStats | None:
        used = self.host.num_cached * slot_stride(self._block_bytes) * self._world_size
        if used != self._used_bytes:
            self._used_bytes = used
            self.stats.gauge("pool_used_bytes", used)
        return self.stats.take()

    def take_events(self) -> Iterable[KVCacheEvent]:
        if not self.host.events_enabled:
            return ()
        events = self.host.pool.take_events()
        for event in events:
            if isinstance(event, BlockRemoved):
                event.locality = "LOCAL"
        return events
