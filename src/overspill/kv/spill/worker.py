"""A worker's side of spill: memory for the KV buffer and the arena, and the window during a step."""

import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from overspill.kv.copies import Copier
from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import HostMemory
from overspill.kv.jobs import StepJobs, StepReport
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.sizes import MiB, format_size
from overspill.kv.spill.aliased_memory import AliasedMemory
from overspill.kv.spill.allocation import KvAllocation
from overspill.kv.spill.arena_copier import ArenaCopier
from overspill.kv.spill.layers import attention_layers, spill_geometry
from overspill.kv.spill.streams import HostStreams, Streams
from overspill.kv.spill.window import Layer, Window, plan_accesses
from overspill.kv.vllm_api import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

_SECONDS_BETWEEN_SIGNS = 10


class SpillWorker:
    """One per rank."""

    def __init__(self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._options = options
        self._vllm_config = vllm_config
        self._config = kv_cache_config
        self._rank = vllm_config.parallel_config.rank
        self.geometry = spill_geometry(options, vllm_config, kv_cache_config)
        self.stats = OverspillStats()
        self.arena: HostMemory | None = None
        self.streams: Streams | None = None
        self.layers: list[Layer] = []
        self.must_pin = False
        self._memory: Any = None
        self._window: Window | None = None

    # Start.

    @property
    def arena_bytes(self) -> int:
        return self.geometry.num_regions * self.geometry.half_bytes

    def allocation(self) -> AbstractContextManager[Any]:
        """The context in which vLLM allocates its KV buffer."""
        return KvAllocation(self.geometry.buffer_bytes, self._map_buffer)

    def _map_buffer(self) -> torch.Tensor:
        if current_platform.is_cpu():
            self._memory = AliasedMemory(self.geometry)
        else:
            from overspill.kv.spill.cuda_memory import CudaAliasedMemory

            self._memory = CudaAliasedMemory(self.geometry, torch.device("cuda", torch.cuda.current_device()))
        tensor: torch.Tensor = self._memory.tensor()
        return tensor

    def register(self, buffer: torch.Tensor) -> None:
        """`buffer` is vLLM's KV cache as bytes."""
        geometry = self.geometry
        if self._memory is None:
            raise OverspillError("vLLM did not allocate its KV cache where Overspill could map it; spill cannot work")
        # One slot is one region's spilled blocks, so that no copy crosses a registered piece.
        numa_node = None
        if buffer.is_cuda:
            from overspill.kv.cuda import PinnedRanges, gpu_numa_node
            from overspill.kv.spill.cuda_streams import CudaStreams

            numa_node = gpu_numa_node(buffer.device)
        self.arena = HostMemory(
            geometry.num_regions, geometry.half_bytes, numa_node=numa_node, name="arena", option="spill_bytes"
        )
        self.must_pin = buffer.is_cuda
        if buffer.is_cuda:
            self.arena.prepare(PinnedRanges(buffer.device))
            self.streams = CudaStreams(geometry, buffer, self.arena)
        else:
            self.arena.prepare(None)
            self.streams = HostStreams(geometry, buffer, self.arena)
        modules = self._vllm_config.compilation_config.static_forward_context
        self.layers = attention_layers(modules, self._config, geometry)
        self._window = Window(plan_accesses(self.layers, geometry), self.streams)
        logger.info(
            "Overspill: %d of %d KV blocks are on the GPU, %d spill to %s of RAM through a window of %s",
            geometry.num_resident, geometry.num_blocks, geometry.num_spilled, format_size(self.arena_bytes),
            format_size(geometry.num_halves * geometry.half_bytes),
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Before the engine serves: the first spilled request would have to wait, and could still be refused."""
        assert self.arena is not None
        began = time.monotonic()
        while not self.arena.wait_until_prepared(_SECONDS_BETWEEN_SIGNS):
            logger.info(
                "Overspill: %s of %s of RAM for spilled KV is ready after %.0f s",
                format_size(self.arena.pinned_bytes), format_size(self.arena.num_bytes), time.monotonic() - began,
            )  # fmt: skip
        if not self.must_pin or self.arena.pinned_bytes == self.arena.num_bytes:
            return
        # Copies of pageable memory may run before or after what events say of them.
        raise OverspillError(
            f"spill needs {format_size(self.arena.num_bytes)} of RAM registered for DMA, and the driver took "
            f"{format_size(self.arena.pinned_bytes)} ({self.arena.pinning_refused}). Raise the memlock limit (ulimit "
            f'-l unlimited; in a container --ulimit memlock=-1), or use "spill_bytes": '
            f'"{self.arena.pinned_bytes // MiB}MiB" or less'
        )

    def copier(self, gpu: Copier, pool: HostMemory) -> Copier:
        """Offload's copies, where some blocks are not on the GPU."""
        assert self.arena is not None and self.streams is not None
        return ArenaCopier(gpu, self.geometry, self.arena, pool, self.streams)

    # Every step.

    def begin_step(self, jobs: StepJobs) -> None:
        if jobs.spill is None and not jobs.moves:
            return
        assert self._window is not None and self.streams is not None
        if jobs.moves:
            self._move(jobs.moves, self.streams)
        if jobs.spill is not None:
            self._window.begin(jobs.spill)

    def _move(self, pairs: list[tuple[int, int]], streams: Streams) -> None:
        """Between steps: after all that came before, and before all that comes."""
        streams.save_after(streams.computed())
        streams.fill_after(streams.saved())
        streams.move(pairs)
        streams.compute_after(streams.filled())

    def before_layer(self, name: str) -> None:
        if self._window is not None:
            self._window.before_read(name)

    def after_layer(self, name: str) -> None:
        if self._window is not None:
            self._window.after_read(name)

    def end_step(self) -> None:
        assert self._window is not None and self.streams is not None
        if not self._window.is_active:
            return
        self._window.end()
        streams = self.streams
        self.stats.count("spill_in_bytes", streams.bytes_in)
        self.stats.count("spill_out_bytes", streams.bytes_out)
        streams.bytes_in = streams.bytes_out = 0

    def report(self, report: StepReport) -> None:
        """Put what is known by now into the report."""
        if self._window is None:
            return
        self._window.report(report.stream_speed)
        speed = report.stream_speed
        if speed.seconds:
            self.stats.gauge("spill_link_bytes_per_second", speed.amount / speed.seconds, self._rank)

    def take_stats(self) -> OverspillStats | None:
        return self.stats.take()

    def shutdown(self) -> None:
        """Copies end, then memory goes back, whatever fails on the way. vLLM's KV tensors are void afterwards."""
        with ExitStack() as stack:
            if self._memory is not None:
                stack.callback(self._memory.close)
            if self.arena is not None:
                stack.callback(self.arena.close)
            if self.streams is not None:
                stack.callback(self.streams.close)
            self._memory = self.arena = self.streams = self._window = None
