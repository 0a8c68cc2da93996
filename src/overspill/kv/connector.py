"""The connector that vLLM loads: one instance in the scheduler and one in each worker; every hook delegates."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.buffer import (
    BLOCK_OUTERMOST,
    LAYER_OUTERMOST,
    KvAllocation,
    KvBuffer,
    block_regions,
    bytes_per_block,
    kv_buffer,
    map_buffer,
    plain_pieces,
    unit_pieces,
)
from overspill.kv.cuda import CudaMark
from overspill.kv.disk.flush import flush_at_shutdown, write_in_workers
from overspill.kv.elastic import Elastic, add_elastic, elastic_shape
from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import num_host_slots, slot_stride
from overspill.kv.jobs import StepJobs, StepReport
from overspill.kv.metrics import OverspillPromMetrics, OverspillStats
from overspill.kv.options import Options
from overspill.kv.park import add_parking
from overspill.kv.plugin import check_engine, require_spill_classes, require_worker
from overspill.kv.provenance import Adapters, StaleHashes, watch_engine_core
from overspill.kv.ram import require_ram
from overspill.kv.scheduler import OffloadScheduler
from overspill.kv.sizes import format_size
from overspill.kv.speeds import Speeds, StepTimer, WallMark
from overspill.kv.spill.scheduler import SpillScheduler
from overspill.kv.spill.worker import SpillWorker
from overspill.kv.tier import Tier
from overspill.kv.vllm_api import (
    CacheHitSource,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheEvent,
    KVCacheManager,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    LoRARequest,
    Request,
    SchedulerOutput,
    SupportsHMA,
    count_skipped_blocks,
    reset_with_prefix_cache,
)
from overspill.kv.weights import weights_to_copy
from overspill.kv.worker import OffloadWorker

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only


class OverspillConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector for offload (RAM keeps KV that no running request uses), spill (running requests use RAM) or both."""

    _cache_hit_source = CacheHitSource.HOST
    # A store that is dropped is a later miss, nothing worse.
    requires_kv_delivery = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Under MultiConnector this is the child's own configuration; the plugin requires the policy of the outer one.
        options = self._options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config)
        # vLLM's default aborts a request whose load failed. The scheduler reads this after building the connector.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._scheduler: OffloadScheduler | None = None
        self._worker: OffloadWorker | None = None
        self.spill_scheduler: SpillScheduler | None = None
        self.spill_worker: SpillWorker | None = None
        self._timer: StepTimer | None = None
        self._speeds = Speeds()
        self._stale_hashes = StaleHashes()
        self.adapters = Adapters()
        # Tells workers whether their copy of the weights is current; incremented by calls that may change weights.
        self.weights_version = 0
        self.is_parking = False
        self._buffer: KvBuffer | None = None
        self._num_buffer_bytes = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
        self._kv_cache_config = kv_cache_config
        self._shape = elastic_shape(options, vllm_config, kv_cache_config)
        self.elastic: Elastic | None = None
        if self._shape is not None:
            require_worker(vllm_config, "elastic KV")
            if role == KVConnectorRole.SCHEDULER:
                add_elastic()
                self.elastic = Elastic(
                    self._shape, options, kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
                )
        if options.park:
            require_worker(vllm_config, "park")
            if role == KVConnectorRole.SCHEDULER:
                watch_engine_core()
                add_parking()
        if options.host_bytes:
            _check_pool_size(options, vllm_config, kv_cache_config)
            _check_stages(vllm_config, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                watch_engine_core()
                if options.disk_bytes:
                    flush_at_shutdown(vllm_config)
                self._scheduler = OffloadScheduler(options, vllm_config, kv_cache_config, self._speeds)
            else:
                self._worker = OffloadWorker(options, vllm_config, kv_cache_config)
        if options.spill_bytes:
            require_spill_classes(vllm_config, options)
            if role == KVConnectorRole.SCHEDULER:
                self.spill_scheduler = SpillScheduler(options, vllm_config, kv_cache_config, self._speeds)
            else:
                self.spill_worker = SpillWorker(options, vllm_config, kv_cache_config)
                if self._shape is not None:
                    self.spill_worker.units = self._shape.units, range(self._shape.first)

    @property
    def scheduler(self) -> OffloadScheduler:
        assert self._scheduler is not None, "a scheduler hook was called on a worker's connector"
        return self._scheduler

    @property
    def worker(self) -> OffloadWorker:
        assert self._worker is not None, "a worker hook was called on the scheduler's connector"
        return self._worker

    @property
    def _tiers(self) -> Sequence[Tier]:
        return self._scheduler.tiers if self._scheduler is not None else ()

    # Class hooks.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        options = check_engine(vllm_config)
        return LAYER_OUTERMOST if options is not None and options.spill_bytes else BLOCK_OUTERMOST

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return OverspillStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return OverspillPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker hooks, in the order of a step.

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        if self.spill_worker is not None:
            return self.spill_worker.allocation()
        is_mapped = self._options.park or self._shape is not None
        return KvAllocation(self._num_buffer_bytes, self._map_buffer) if is_mapped else None

    def _map_buffer(self) -> torch.Tensor:
        num_bytes = self._num_buffer_bytes
        if self._shape is None:
            self._buffer = map_buffer(num_bytes, plain_pieces(num_bytes), "park")
        else:
            regions = block_regions(self._kv_cache_config)
            pieces = unit_pieces(self._shape.units, regions[0].block_bytes, *(region.offset for region in regions))
            self._buffer = map_buffer(num_bytes, pieces, "ledger", range(self._shape.first))
        return self._buffer.tensor()

    @property
    def buffer(self) -> KvBuffer:
        """vLLM's KV buffer, mapped by Overspill."""
        buffer = self.spill_worker.buffer if self.spill_worker is not None else self._buffer
        assert buffer is not None, "vLLM's KV buffer was not mapped by Overspill"
        return buffer

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        buffer = kv_buffer(kv_caches)
        self._timer = StepTimer(CudaMark if buffer.is_cuda else WallMark)
        # Checked again for this rank: the model has taken RAM since the start, and the plugin may not be loaded.
        needs = {
            "host_bytes": self._worker.pool_bytes if self._worker is not None else 0,
            "spill_bytes": self.spill_worker.arena_bytes if self.spill_worker is not None else 0,
            "park": weights_to_copy() if self._options.park else 0,
        }
        require_ram(needs, self._options.reserve_bytes)
        if self.spill_worker is not None:
            self.spill_worker.register(buffer)
        if self._worker is not None:
            self._worker.register(buffer, self.spill_worker)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepJobs) and self._timer is not None
        if self._worker is not None:
            self._worker.begin_step(connector_metadata)
        if self.spill_worker is not None:
            self.spill_worker.begin_step(connector_metadata)
        self._timer.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """No-op: bind_connector_metadata starts loads before the forward, which does not touch their blocks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for spilled KV, which arrives layer by layer; loads copy whole blocks of all layers."""
        if self.spill_worker is not None:
            self.spill_worker.before_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Save spilled KV, which leaves layer by layer; stores copy whole blocks of all layers."""
        if self.spill_worker is not None:
            self.spill_worker.after_layer(layer_name)

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepJobs) and self._timer is not None
        self._timer.end_step(metadata)
        if self.spill_worker is not None:
            self.spill_worker.end_step()
        if self._worker is not None:
            self._worker.end_step(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        metadata = self._connector_metadata
        if self._worker is None:
            return KVConnectorTransferResults()
        if not isinstance(metadata, StepJobs):
            return self._worker.results(None)
        # With some drafting methods vLLM calls this before the step has ended. Loads announced now may make the GPU
        # wait, and that time must not count as part of the step.
        assert self._timer is not None
        self._timer.end_step(metadata)
        return self._worker.results(metadata)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = StepReport()
        for part in (self._timer, self.spill_worker, self._worker):
            if part is not None:
                part.report(report)
        return None if report.is_empty() else report

    # Scheduler hooks.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._stale_hashes.bind(kv_cache_manager.block_pool)
        if self.spill_scheduler is not None:
            self.spill_scheduler.placement.bind(kv_cache_manager)
        if self._scheduler is not None:
            count_skipped_blocks(kv_cache_manager)
            self._scheduler.bind(kv_cache_manager.block_pool)
        if self.elastic is not None:
            self.elastic.bind(kv_cache_manager, self._scheduler.stores if self._scheduler is not None else None)
        if self._options.park:
            # Callers signal new weights by resetting the prefix cache.
            reset_with_prefix_cache(kv_cache_manager.block_pool, self._note_reset)

    def on_new_request(self, request: Request) -> None:
        adapter = request.lora_request
        if self._scheduler is None or adapter is None:
            return
        if self.adapters.is_replaced(adapter):
            # Running requests keep the adapter's old weights; other requests must not hit the KV they compute.
            self.adapter_changed(adapter, f"adapter {adapter.lora_name}", self._scheduler.live)
        else:
            self._scheduler.register_adapter(adapter)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.admit(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        jobs = StepJobs(num_tokens=scheduler_output.total_num_scheduled_tokens)
        if self.elastic is not None:
            self.elastic.planned()
        self._stale_hashes.end_pass(
            scheduler_output.num_scheduled_tokens.keys(), scheduler_output.preempted_req_ids or ()
        )
        if self._scheduler is not None:
            self._scheduler.plan_step(scheduler_output, jobs)
        if self.spill_scheduler is not None:
            self.spill_scheduler.plan_step(scheduler_output, jobs)
        return jobs

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            report = None
        else:
            self._speeds.record(report)
            if self.spill_scheduler is not None:
                self.spill_scheduler.balance.record(report.lateness)
        if self._scheduler is not None:
            self._scheduler.complete(connector_output.failed_recving or (), report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._stale_hashes.finished(request.request_id)
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        summary = self.spill_scheduler.finished(request) if self.spill_scheduler is not None else None
        return False, summary  # blocks being copied are referenced; vLLM may free the rest

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.is_busy()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.stores.will_free_gpu_blocks()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events() if self._scheduler is not None else ()

    def reset_cache(self) -> bool | None:
        if self._scheduler is None:
            return None
        for tier in self._scheduler.tiers:
            tier.clear()
        return self._scheduler.reset()

    def weights_changed(self, what: str, request_ids: Iterable[str]) -> None:
        """Drop cached KV: `what` may have replaced weights while these requests held KV of the old ones."""
        self.weights_version += 1
        for tier in self._tiers:
            tier.detach(f"{what} may change weights")
        self._drop_cached(what, request_ids)

    def adapter_changed(self, adapter: LoRARequest, what: str, request_ids: Iterable[str]) -> None:
        """Drop cached KV: only `adapter` may have changed, so KV of the model itself is still written to disk."""
        if self._scheduler is not None:
            self._scheduler.adapters.bar(adapter)
        self.weights_version += 1
        self._drop_cached(what, request_ids)

    def _drop_cached(self, what: str, request_ids: Iterable[str]) -> None:
        if self._scheduler is None:
            return  # the caller has to reset vLLM's own caches
        num_blocks = self._scheduler.host.num_cached
        self._stale_hashes.weights_changed(request_ids)
        self._scheduler.reset()
        if num_blocks:
            logger.info("Overspill: dropped %d block(s) of KV in RAM: %s may change weights", num_blocks, what)

    def _note_reset(self) -> bool:
        self.weights_version += not self.is_parking
        return True

    # Parking, in the engine core.

    def store_all(self) -> None:
        """Offer every block cached on the GPU for storing in RAM."""
        if self._scheduler is not None:
            self._scheduler.stores.offer_all()

    @contextmanager
    def parking(self) -> Iterator[None]:
        """Context in which a reset of the GPU's prefix cache leaves KV in RAM alone."""
        self._set_parking(True)
        try:
            yield
        finally:
            self._set_parking(False)

    def _set_parking(self, is_parking: bool) -> None:
        self.is_parking = is_parking
        if self._scheduler is not None:
            self._scheduler.is_parking = is_parking

    def flush_disk(self, core: Any, limit_s: float) -> int:
        """Write all KV in RAM to disk, between steps only; returns the number of blocks written."""
        if self._scheduler is None or self._scheduler.disk is None:
            return 0
        return self._scheduler.disk.flush(lambda job: write_in_workers(core, job, limit_s), limit_s)

    # Scheduler and worker hooks.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        parts = (self._scheduler, self.spill_scheduler, self._worker, self.spill_worker, self.elastic)
        taken = [stats for part in parts if part is not None and (stats := part.take_stats()) is not None]
        for more in taken[1:]:
            taken[0].aggregate(more)
        return taken[0] if taken else None

    def shutdown(self) -> None:
        with ExitStack() as stack:
            # Run in reverse: the offload worker copies from and to memory of the spill worker, so it stops before it.
            if self.elastic is not None:
                stack.callback(self.elastic.close)
            if self._buffer is not None:
                stack.callback(self._buffer.close)
            if self.spill_worker is not None:
                stack.callback(self.spill_worker.shutdown)
            if self._worker is not None:
                stack.callback(self._worker.shutdown)
            for tier in self._tiers:
                stack.callback(tier.close)


def _check_stages(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse unequal pipeline stages: the scheduler counts slots by rank 0's blocks, and would give out slots that a
    rank with other layers does not have. Every rank checks, because each sees only its own layers."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return
    layers, groups = vllm_config.model_config.get_total_num_hidden_layers(), kv_cache_config.kv_cache_groups
    if len(groups) != 1 or len(groups[0].layer_names) * stages != layers:
        held = " and ".join(str(len(group.layer_names)) for group in groups)
        raise OverspillError(
            f"stages of a pipeline must hold KV of equally many layers of one kind: {layers} layers make {stages} "
            f"stages, and this one holds KV of {held}. Use a --pipeline-parallel-size that divides them, or "
            "--tensor-parallel-size"
        )


def _check_pool_size(options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    ranks = vllm_config.parallel_config.world_size
    block = bytes_per_block(kv_cache_config)
    if num_host_slots(options, ranks, block) == 0:
        raise OverspillError(
            f"host_bytes is {format_size(options.host_bytes)}, less than one KV block of this model "
            f"({format_size(slot_stride(block))} on each of {ranks} rank(s)); "
            f"give at least {format_size(slot_stride(block) * ranks)}"
        )
