"""vLLM's worker with spill: it counts KV in RAM as capacity, and picks CUDA graphs that let spill work.

Set as vLLM's `--worker-cls`; with Overspill installed, vLLM's own worker is replaced by it when `spill_bytes` is given.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.platforms import current_platform

from overspill.kv.jobs import StepJobs
from overspill.kv.preflight import check_engine
from overspill.kv.spill.memory_budget import kv_bytes_with_spill
from overspill.kv.spill.order import check_order, recorded
from overspill.kv.spill.worker import SpillWorker
from overspill.kv.vllm_api import (
    SchedulerOutput,
    around_steps,
    get_kv_transfer_group,
    run_dummy_step,
    without_full_graphs,
    worker_class,
)

VllmWorker = worker_class()


class OverspillWorker(VllmWorker):  # type: ignore[misc, valid-type]
    def determine_available_memory(self) -> int:
        available: int = super().determine_available_memory()
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
            run_dummy_step(self.model_runner)
        check_order(events, spill.layers, self.vllm_config.model_config.model)


def touches_spilled(scheduler_output: SchedulerOutput) -> bool:
    metadata = scheduler_output.kv_connector_metadata
    return isinstance(metadata, StepJobs) and metadata.spill is not None


def choose_graphs_by_step(runner: Any) -> None:
    """A FULL graph is replayed without the per-layer hooks, so steps that touch spilled KV run piecewise; all others
    keep their FULL graphs, which take half the time for small batches."""

    def graphs(scheduler_output: SchedulerOutput) -> AbstractContextManager[None]:
        return without_full_graphs(runner) if touches_spilled(scheduler_output) else nullcontext()

    around_steps(runner, graphs)
