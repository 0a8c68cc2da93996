"""Offload in the engine core: decides which blocks to load and store; the workers copy them."""

import itertools
from collections.abc import Collection, Iterable

from vllm.config import VllmConfig

from overspill.kv.buffer import bytes_per_block
from overspill.kv.disk.key import AdapterDigests
from overspill.kv.disk.tier import DiskTier
from overspill.kv.host_cache import HostCache
from overspill.kv.host_memory import num_host_slots, slot_stride
from overspill.kv.jobs import StepJobs, StepReport
from overspill.kv.loads import Loads
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.provenance import Origins
from overspill.kv.remote.tier import RemoteTier
from overspill.kv.speeds import Speeds
from overspill.kv.stores import Stores
from overspill.kv.tier import Tier
from overspill.kv.vllm_api import (
    BlockPool,
    BlockRemoved,
    FullAttentionSpec,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheEvent,
    LoRARequest,
    Request,
    SchedulerOutput,
    reset_with_prefix_cache,
)


class OffloadScheduler:
    """Ties admissions, steps, reports and ends of requests to loads, stores and the tiers below RAM."""

    def __init__(
        self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, speeds: Speeds
    ) -> None:
        world_size = vllm_config.parallel_config.world_size
        block_bytes = bytes_per_block(kv_cache_config)
        self._slot_bytes = slot_stride(block_bytes) * world_size
        self._groups = kv_cache_config.prefix_cacheable_group_ids
        self.host = HostCache(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            num_slots=num_host_slots(options, world_size, block_bytes),
            eviction=options.eviction,
        )
        self.speeds = speeds
        self.stats = OverspillStats()
        self._used_bytes = -1
        self._keep_on_reset = options.keep_on_reset
        self.is_parking = False  # the GPU's cache is being reset, RAM's is kept
        self._gpu: BlockPool | None = None
        self.live: set[str] = set()  # requests admitted and not finished
        self._local_tokens: dict[str, int] = {}  # kept from lookup to admission in the same pass
        job_ids = itertools.count(1)
        self.adapters = AdapterDigests()
        is_kept = bool(options.disk_bytes or options.remote)  # in a tier below RAM
        self._origins = Origins(
            self._groups,
            self.host.hash_block_size,
            with_events=self.host.events_enabled,
            adapter_of=self.adapters.of if is_kept else None,
        )
        shared = (
            options, vllm_config, kv_cache_config, self.host, self.speeds, self.stats, job_ids,
            slot_stride(block_bytes), self.adapters, self._origins.event,
        )  # fmt: skip
        self.disk = DiskTier(*shared) if options.disk_bytes else None
        self.remote = RemoteTier(*shared) if options.remote else None
        # The nearest to RAM first.
        self.tiers: list[Tier] = [tier for tier in (self.disk, self.remote) if tier is not None]
        self.loads = Loads(
            self.host, self.speeds, self.stats, job_ids, self.live, self.tiers,
            always=options.load == "always", world_size=world_size, block_bytes=block_bytes, groups=self._groups,
        )  # fmt: skip
        groups = kv_cache_config.kv_cache_groups
        self.stores = Stores(
            self.host, self._origins, self.speeds, self.stats, job_ids, self.live,
            lazy=options.store == "lazy", world_size=world_size, block_bytes=block_bytes,
            num_gpu_blocks=kv_cache_config.num_blocks, front_depth=self._front_depth(vllm_config, kv_cache_config),
            gapless_groups={one for one in self._groups if isinstance(groups[one].kv_cache_spec, FullAttentionSpec)},
        )  # fmt: skip
        if self.remote is not None:
            self.stores.on_stored = self.remote.stored

    def _front_depth(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
        """Depth of the eviction fronts: twice the blocks a step can take, at most half of the GPU's blocks."""
        most = vllm_config.scheduler_config.max_num_batched_tokens
        depth = 2 * sum(-(-most // self.host.group_block_sizes[group]) for group in self._groups)
        return min(depth, max(1, kv_cache_config.num_blocks // 2))

    def bind(self, pool: BlockPool) -> None:
        """Hook into the GPU's block pool."""
        self._gpu = pool
        if not self._keep_on_reset:
            # vLLM resets its prefix cache after new weights, and by default spares connectors. It refuses while any
            # GPU block is held, so no load or store is in flight when RAM is cleared with it.
            reset_with_prefix_cache(pool, self._reset_with_gpu)
        self.loads.bind(pool)
        self.stores.bind(pool)
        self._origins.watch(pool, self.stores.filled)

    def _reset_with_gpu(self) -> bool:
        if self.is_parking:
            return True
        for tier in self.tiers:
            tier.detach("vLLM's prefix cache was reset, as after new weights; keep_on_reset keeps it")
        return self.reset()

    def register_adapter(self, adapter: LoRARequest) -> None:
        if self.tiers:
            self.adapters.register(adapter, self.tiers[0].digests / "adapters.json")

    # Admission.

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        self._local_tokens[request.request_id] = num_local_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        return self.loads.match(request, num_local_tokens)

    def admit(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load of a request that now has its GPU blocks, and refresh RAM's copy of its local prefix."""
        request_id = request.request_id
        num_local = self._local_tokens.pop(request_id, None)
        if num_local is None:
            return  # vLLM's second call for an asynchronous load
        self.live.add(request_id)
        self._keep_local_prefix(request_id, blocks, num_local)
        self.stats.count("miss_tokens", request.num_tokens - num_local - num_external_tokens)
        self.loads.admit(request, blocks, num_external_tokens)

    def _keep_local_prefix(self, request_id: str, blocks: KVCacheBlocks, num_local_tokens: int) -> None:
        """Refresh RAM's copy of a prefix hit on the GPU, or offer to store one: in lazy mode a prefix in constant use
        never comes near eviction, and in eager mode a store may have been dropped.

        The walk goes from the tail to the first copy whose prefix is whole, because prefixes are long."""
        for group in self._groups:
            copies: list[KVCacheBlock] = []
            without: list[KVCacheBlock] = []
            found = blocks.blocks[group]
            for i in reversed(range(num_local_tokens // self.host.group_block_sizes[group])):
                block = found[i]
                if block.is_null:
                    break  # a sliding window begins after it
                if block.block_hash is None:
                    continue
                copy = self.host.find(block.block_hash)
                if copy is None:
                    without.append(block)
                    continue
                is_whole = self.host.has_whole_prefix(copy)
                copies.append(copy)
                if is_whole:
                    break
            self.host.use(copies[::-1])
            self.stores.offer(without[::-1], request_id)

    # Steps.

    def plan_step(self, scheduler_output: SchedulerOutput, jobs: StepJobs) -> None:
        """Add the step's loads and stores to its jobs."""
        jobs.loads = self.loads.plan()
        jobs.stores = self.stores.plan(jobs.num_tokens, scheduler_output.preempted_req_ids or ())
        for tier in self.tiers:
            tier.plan(jobs)

    def complete(self, failed_requests: Collection[str], report: StepReport | None) -> None:
        """Process the workers' report of a step."""
        self.loads.recompute(failed_requests)
        if report is None:
            return
        if report.corrupt_slots:
            self.loads.drop_corrupt(report.corrupt_slots)
        for job_id, count in report.loaded.items():
            self.loads.report(job_id, count, failed=job_id in report.failed)
        for job_id, count in report.stored.items():
            self.stores.report(job_id, count, failed=job_id in report.failed)
        for tier in self.tiers:
            tier.complete(report)

    # Ends of requests.

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """Forget a request that has ended, before its blocks are freed; copies in flight continue."""
        assert self._gpu is not None
        request_id = request.request_id
        self.live.discard(request_id)
        self._local_tokens.pop(request_id, None)
        self.loads.finished(request_id)
        for tier in self.tiers:
            tier.finished(request_id)
        pool = self._gpu.blocks
        self.stores.finished(request_id, (pool[block_id] for group in self._groups for block_id in block_ids[group]))

    def reset(self) -> bool:
        """Drop everything in RAM; False if a load in flight could not be stopped."""
        nothing_loading = self.loads.reset()
        self.stores.reset()
        for tier in self.tiers:
            tier.reset()
        self.host.clear()
        return nothing_loading

    def is_busy(self) -> bool:
        """Whether the engine must keep stepping even without requests."""
        is_busy = bool(self.loads.in_flight) or self.stores.is_busy()
        return is_busy or any(tier.is_busy() for tier in self.tiers)

    # Statistics and events.

    def take_stats(self) -> OverspillStats | None:
        used = self.host.num_cached * self._slot_bytes
        if used != self._used_bytes:
            self._used_bytes = used
            self.stats.gauge("pool_used_bytes", used)
        for tier in self.tiers:
            tier.take_stats()
        return self.stats.take()

    def take_events(self) -> Iterable[KVCacheEvent]:
        if not self.host.events_enabled:
            return ()
        events = self.host.pool.take_events()
        for event in events:
            if isinstance(event, BlockRemoved):
                event.locality = "LOCAL"
        return events
