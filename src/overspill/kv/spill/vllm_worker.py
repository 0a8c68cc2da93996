"""vLLM's worker with spill: it counts KV in RAM as capacity, and picks CUDA graphs that let spill work.

Set as vLLM's `--worker-cls`; with Overspill installed, vLLM's own worker is replaced by it when `spill_bytes` is given.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from overspill.kv.jobs import StepJobs
from overspill.kv.preflight import check_engine
from overspill.kv.spill.memory_budget import kv_bytes_with_spill
from overspill.kv.spill.order import check_order, recorded
from overspill.kv.spill.worker import SpillWorker

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


class OverspillWorker(VllmWorker):
    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        options = check_engine(self.vllm_config)
        if options is None or not options.spill_bytes:
            return available
        return kv_bytes_with_spill(options, self.vllm_config, self.get_kv_cache_spec(), available)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if not current_platform.is_cpu():
            choose_graphs_by_step(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        spill: SpillWorker | None = getattr(get_kv_transfer_group(), "spill_worker", None)
        if spill is not None:
            self._check_order(spill)
        times = super().compile_or_warm_up_model()
        if spill is not None:
            spill.wait_until_ready()
        return times

    def _check_order(self, spill: SpillWorker) -> None:
        """Before graphs are captured: replayed, they would show nothing of what they do."""
        modules = self.vllm_config.compilation_config.static_forward_context
        # Where layers are traced rather than called as custom operations, tracing would see the recording.
        untraced = torch.compiler.set_stance("force_eager") if current_platform.is_cpu() else nullcontext()
        with recorded(modules, spill.layers) as events, untraced:
            self.model_runner._dummy_run(1, force_attention=True, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        check_order(events, spill.layers, self.vllm_config.model_config.model)


def touches_spilled(scheduler_output: SchedulerOutput) -> bool:
    metadata = scheduler_output.kv_connector_metadata
    return isinstance(metadata, StepJobs) and metadata.spill is not None


def choose_graphs_by_step(runner: Any) -> None:
    """A FULL graph is replayed without the per-layer hooks, so steps that touch spilled KV run piecewise; all others
    keep their FULL graphs, which take half the time for small batches."""
    if "execute_model" in vars(runner):
        return  # weights are loaded a second time
    execute_model = runner.execute_model

    def execute_model_by_step(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        with _without_full_graphs(runner) if touches_spilled(scheduler_output) else nullcontext():
            return execute_model(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model_by_step


@contextmanager
def _without_full_graphs(runner: Any) -> Iterator[None]:
    """Both model runners ask an object of theirs which graph a batch runs in."""
    v2 = getattr(runner, "cudagraph_manager", None)
    chooser = v2 if v2 is not None else runner.cudagraph_dispatcher
    dispatch = chooser.dispatch

    def dispatch_v1(*args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
        return dispatch(*args, invalid_modes={*(invalid_modes or ()), CUDAGraphMode.FULL}, **kwargs)

    def dispatch_v2(
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> Any:
        # FULL graphs are captured for decodes only (preflight sees to that), and a batch is known as one by these.
        return dispatch(num_reqs, num_tokens, None, num_active_loras, None, num_ubatches)

    chooser.dispatch = dispatch_v1 if v2 is None else dispatch_v2
    try:
        yield
    finally:
        del chooser.dispatch  # the class's own again
