"""The class vLLM loads. It has two lives, one beside the scheduler and one in each worker; every hook delegates."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import num_host_slots, slot_stride
from overspill.kv.jobs import StepJobs
from overspill.kv.layout import BLOCK_OUTERMOST, bytes_per_block
from overspill.kv.metrics import OverspillPromMetrics, OverspillStats
from overspill.kv.options import Options
from overspill.kv.preflight import check_engine
from overspill.kv.scheduler import OffloadScheduler
from overspill.kv.sizes import format_size
from overspill.kv.worker import OffloadWorker


class OverspillConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV that no running request uses in RAM."""

    _cache_hit_source = CacheHitSource.HOST
    # A store that is dropped is a later miss, nothing worse.
    requires_kv_delivery = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Under MultiConnector this is the child's own configuration; preflight demands the policy of the outer one.
        options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config)
        # vLLM's default ends the request of a failed load. The scheduler reads this after building the connector.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        _check_pool_size(options, vllm_config, kv_cache_config)
        self._scheduler: OffloadScheduler | None = None
        self._worker: OffloadWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = OffloadScheduler(options, vllm_config, kv_cache_config)
        else:
            self._worker = OffloadWorker(options, vllm_config, kv_cache_config)

    @property
    def scheduler(self) -> OffloadScheduler:
        assert self._scheduler is not None, "a scheduler hook was called on a worker's connector"
        return self._scheduler

    @property
    def worker(self) -> OffloadWorker:
        assert self._worker is not None, "a worker hook was called on the scheduler's connector"
        return self._worker

    # Class hooks.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return BLOCK_OUTERMOST

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

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepJobs)
        self.worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads start in bind_connector_metadata, before the forward, which does not touch their blocks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole blocks of all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores are whole blocks of all layers."""

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepJobs)
        self.worker.end_step(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        metadata = self._connector_metadata
        return self.worker.results(metadata if isinstance(metadata, StepJobs) else None)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_report()

    # Scheduler hooks.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.admit(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.complete(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request, block_ids)
        return False, None  # blocks being copied are referenced; vLLM may free the rest

    def has_pending_push_work(self) -> bool:
        return self.scheduler.is_busy()

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.stores.will_free_gpu_blocks()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler.take_events()

    def reset_cache(self) -> bool | None:
        return self.scheduler.reset()

    # Both.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return self.worker.take_stats()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()


def _check_pool_size(options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    ranks = vllm_config.parallel_config.world_size
    block = bytes_per_block(kv_cache_config)
    if num_host_slots(options, ranks, block) == 0:
        raise OverspillError(
            f"host_bytes is {format_size(options.host_bytes)}, less than one KV block of this model "
            f"({format_size(slot_stride(block))} on each of {ranks} rank(s)); "
            f"give at least {format_size(slot_stride(block) * ranks)}"
        )
