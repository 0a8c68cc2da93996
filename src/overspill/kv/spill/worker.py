"""Spill in a worker: memory for KV buffer and arena, and the window during a step."""

import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from overspill.kv.attention.library import AttentionUnavailable
from overspill.kv.attention.pool import Pool
from overspill.kv.buffer import KvAllocation, KvBuffer, Units, lent_pieces, map_buffer, spill_pieces
from overspill.kv.copies import Copier
from overspill.kv.cuda import PinnedRanges, gpu_numa_node
from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import HostMemory
from overspill.kv.jobs import Lateness, Sample, StepJobs, StepReport
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.ram import numa_cpus
from overspill.kv.sizes import MiB, format_size
from overspill.kv.spill.arena_copier import ArenaCopier
from overspill.kv.spill.capacity import far_groups, lent_units, spill_geometry
from overspill.kv.spill.far import FarAttention, attends_plainly, layout_of
from overspill.kv.spill.geometry import mapped_units, most_graphed_tokens
from overspill.kv.spill.graphs import SpilledGraphs
from overspill.kv.spill.program import is_graphable
from overspill.kv.spill.streams import CudaStreams, HostStreams, Streams
from overspill.kv.spill.window import Layer, Window, attention_layers, plan_accesses
from overspill.kv.vllm_api import KVCacheConfig, has_decode_graphs

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

_SECONDS_BETWEEN_MESSAGES = 10
_SECONDS_FOR_MEMORY, _SECONDS_BETWEEN_TRIES = 5.0, 0.1


class SpillWorker:
    """Spill on one rank."""

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
        self.buffer: KvBuffer | None = None
        # With elastic KV: units of resident blocks, and those that have memory at the start.
        self.units: tuple[Units, range] | None = None
        self.lent = lent_units(options, vllm_config, self.geometry)
        self._window: Window | None = None
        self._most_tokens = most_graphed_tokens(1 + int(vllm_config.num_speculative_tokens))
        self.graphs: SpilledGraphs | None = None
        self.far: FarAttention | None = None

    # Start.

    @property
    def arena_bytes(self) -> int:
        return self.geometry.num_regions * self.geometry.half_bytes

    def allocation(self) -> AbstractContextManager[Any]:
        """The context in which vLLM allocates its KV buffer."""
        return KvAllocation(self.geometry.buffer_bytes, self._map_buffer)

    def _map_buffer(self) -> torch.Tensor:
        num_bytes, lent = self.geometry.buffer_bytes, self.lent
        if lent is not None:
            first = mapped_units(lent, (), range(lent.window_count))
            self.buffer = map_buffer(num_bytes, lent_pieces(lent), "spill_bytes", first)
        else:
            units, some = self.units if self.units is not None else (None, None)
            self.buffer = map_buffer(num_bytes, spill_pieces(self.geometry, units), "spill_bytes", some)
        return self.buffer.tensor()

    @property
    def num_resident(self) -> int:
        """GPU blocks that have memory at the start."""
        return self.geometry.num_resident if self.lent is None else self.lent.num_fixed

    def register(self, buffer: torch.Tensor) -> None:
        """Map the arena, and set up layers, streams and window. `buffer` is vLLM's KV cache as bytes."""
        geometry = self.geometry
        if self.buffer is None:
            raise OverspillError("vLLM did not allocate its KV cache where Overspill could map it; spill cannot work")
        # A slot holds one region's spilled blocks, so that no copy crosses a registered piece.
        self._numa_node = gpu_numa_node(buffer.device) if buffer.is_cuda else None
        self.arena = HostMemory(
            geometry.num_regions, geometry.half_bytes, numa_node=self._numa_node, name="arena", option="spill_bytes"
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
            self.num_resident, self.num_resident + geometry.num_spilled, geometry.num_spilled,
            format_size(self.arena_bytes),
            format_size(geometry.num_halves * geometry.half_bytes),
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Wait for the arena before the engine serves; otherwise the first spilled request would wait, or fail."""
        assert self.arena is not None
        began = time.monotonic()
        while not self.arena.wait_until_prepared(_SECONDS_BETWEEN_MESSAGES):
            logger.info(
                "Overspill: %s of %s of RAM for spilled KV is ready after %.0f s",
                format_size(self.arena.pinned_bytes), format_size(self.arena.num_bytes), time.monotonic() - began,
            )  # fmt: skip
        if not self.must_pin or self.arena.pinned_bytes == self.arena.num_bytes:
            return
        # CUDA does not order copies of pageable memory by events.
        raise OverspillError(
            f"spill needs {format_size(self.arena.num_bytes)} of RAM registered for DMA, and the driver took "
            f"{format_size(self.arena.pinned_bytes)} ({self.arena.pinning_refused}). Raise the memlock limit (ulimit "
            f'-l unlimited; in a container --ulimit memlock=-1), or use "spill_bytes": '
            f'"{self.arena.pinned_bytes // MiB}MiB" or less'
        )

    def copier(self, gpu: Copier, pool: HostMemory) -> Copier:
        """Copier for offload that also handles spilled blocks."""
        assert self.arena is not None and self.streams is not None
        return ArenaCopier(gpu, self.geometry, self.arena, pool, self.streams)

    def capture_graphs(self, runner: Any) -> None:
        """Capture graphs for steps with spilled KV, once vLLM has captured its own."""
        assert self._window is not None
        if not isinstance(self.streams, CudaStreams):
            return
        if not self._options.spill_graphs:
            self._stop_threads()
            return
        if not is_graphable(self._window.accesses) or not has_decode_graphs(runner):
            logger.info("Overspill: steps with spilled KV run in pieces, not in FULL CUDA graphs")
            self._stop_threads()
            return
        self.graphs = SpilledGraphs(self._window, self.streams, self._most_tokens, self.far)  # type: ignore[arg-type]
        free, _ = torch.cuda.mem_get_info()
        self.graphs.capture(runner)
        logger.info(
            "Overspill: CUDA graphs for steps with spilled KV take %s",
            format_size(max(0, free - torch.cuda.mem_get_info()[0])),
        )

    def _stop_threads(self) -> None:
        """Stop the threads for lack of graphs: beside a GPU, the CPU shares attention inside graphs only."""
        if self.far is not None:
            self.far.close()
            self.far = None

    def start_threads(self) -> None:
        """Start threads for attention on the CPU, if it can be used. Steps stream all of their spilled KV until the
        threads' speed is known."""
        groups = far_groups(self._config) if self._options.spill_compute == "auto" else ()
        layers = [layer for layer in self.layers if layer.group in groups]
        modules = self._vllm_config.compilation_config.static_forward_context
        if not layers:
            return
        if not all(attends_plainly(modules[layer.name].impl) for layer in layers):
            logger.info("Overspill: the CPU cannot share this model's attention")
            return
        assert self.arena is not None
        try:
            ranks = self._vllm_config.parallel_config.world_size
            pool = Pool(self._options.spill_threads or None, cpus=numa_cpus(self._numa_node), pools=ranks)
        except AttentionUnavailable as error:
            logger.warning("Overspill: spilled KV is streamed, and the CPU does not share attention: %s", error)
            return
        spec = self._config.kv_cache_groups[layers[0].group].kv_cache_spec
        self._layout = layout_of(modules[layers[0].name], spec, self.geometry)
        if current_platform.is_cpu():
            self.far = FarAttention(layers, self.geometry, self.arena, pool)
            return
        from overspill.kv.spill.far_cuda import CudaFarAttention, scales_of

        scales = [scales_of(modules[layer.name]) for layer in layers]
        self.far = CudaFarAttention(layers, self.geometry, self.arena, pool, self._layout, scales, self._most_tokens)

    def measure_threads(self) -> None:
        if self.far is not None:
            self.far.measure(self._layout)

    # Every step.

    def move_memory(self, jobs: StepJobs) -> None:
        """Lend the window's memory to GPU blocks, or take it back, before anything of the step is queued: vLLM zeroes
        and copies new blocks before it binds the step's metadata."""
        if jobs.units is None:
            return
        assert self.buffer is not None
        if self.must_pin:  # steps and copies in flight may use memory that is given up
            torch.cuda.synchronize()
        self.stats.count("window_moves", int(self._rank == 0))
        deadline = time.monotonic() + _SECONDS_FOR_MEMORY
        while True:
            try:
                self.buffer.keep_units(jobs.units)
                return
            except OverspillError as error:
                # Another process took the memory, which was free for a moment.
                if time.monotonic() > deadline:
                    raise
                logger.warning("Overspill: memory for KV could not be allocated, will retry: %s", error)
                time.sleep(_SECONDS_BETWEEN_TRIES)

    def begin_step(self, jobs: StepJobs) -> None:
        if jobs.spill is None and not jobs.block_copies:
            return
        assert self._window is not None and self.streams is not None
        if jobs.block_copies:
            self._copy_blocks(jobs.block_copies, self.streams)
        if jobs.spill is None:
            return
        if self.graphs is not None and self.graphs.is_chosen:
            self.graphs.begin(jobs.spill)
            # All ranks replay the graph, and one of them counts.
            self.stats.count("graphed_steps", int(self._rank == 0))
        else:
            self._window.begin(jobs.spill, with_far=self.far is None or not self.far.shares_pieces())

    def _copy_blocks(self, pairs: list[tuple[int, int]], streams: Streams) -> None:
        """Copy blocks between steps: after all earlier work, and before all later work."""
        streams.save_after(streams.compute_event())
        streams.fill_after(streams.save_event())
        streams.copy_blocks(pairs)
        streams.compute_after(streams.fill_event())

    def before_layer(self, name: str) -> None:
        if self.graphs is not None and self.graphs.is_capturing:
            self.graphs.before_layer(name)
        elif self._window is not None:
            self._window.before_read(name)

    def after_layer(self, name: str) -> None:
        if self.graphs is not None and self.graphs.is_capturing:
            self.graphs.after_layer(name)
        elif self._window is not None:
            self._window.after_read(name)

    def end_step(self) -> None:
        assert self._window is not None and self.streams is not None
        self._window.end()
        streams = self.streams
        if not streams.bytes_in and not streams.bytes_out:
            return
        self.stats.count("spill_in_bytes", streams.bytes_in)
        self.stats.count("spill_out_bytes", streams.bytes_out)
        streams.bytes_in = streams.bytes_out = 0

    def report(self, report: StepReport) -> None:
        """Add measurements completed since the last call to the report."""
        if self._window is None:
            return
        self._window.report(report.stream_speed)
        if self.far is not None:
            self.stats.count("spill_far_bytes", self.far.num_bytes)
            report.far_speed, self.far.speed, self.far.num_bytes = self.far.speed, Sample(), 0
            report.lateness, self.far.lateness = self.far.lateness, Lateness()
        speed = report.stream_speed
        if speed.seconds:
            self.stats.gauge("spill_link_bytes_per_second", speed.amount / speed.seconds, self._rank)

    def take_stats(self) -> OverspillStats | None:
        return self.stats.take()

    def shutdown(self) -> None:
        """Finish copies, then free memory, even if a part of this fails. vLLM's KV tensors are invalid afterwards."""
        with ExitStack() as stack:
            if self.buffer is not None:
                stack.callback(self.buffer.close)
            if self.arena is not None:
                stack.callback(self.arena.close)
            if self.streams is not None:
                stack.callback(self.streams.close)
            if self.far is not None:
                stack.callback(self.far.close)
            self.buffer = self.arena = self.streams = self._window = self.far = None
