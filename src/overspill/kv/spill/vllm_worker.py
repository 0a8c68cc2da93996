"""vLLM's worker with spill and park.

For spill, the worker counts KV in RAM as capacity, checks the order of layers, and picks CUDA graphs; for park, it
holds the weights. Set as vLLM's `--worker-cls`; with Overspill installed, it replaces vLLM's own worker when
`spill_bytes` or `park` is given.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.platforms import current_platform

from overspill.kv.errors import OverspillError
from overspill.kv.jobs import StepJobs
from overspill.kv.plugin import check_engine
from overspill.kv.spill.capacity import kv_bytes_with_spill
from overspill.kv.spill.window import Layer
from overspill.kv.spill.worker import SpillWorker
from overspill.kv.vllm_api import (
    SchedulerOutput,
    around_steps,
    batch_order,
    get_kv_transfer_group,
    override_backend,
    own_connector,
    run_dummy_step,
    watch_batches,
    watch_kv,
    without_full_graphs,
    worker_class,
)
from overspill.kv.weights import Weights, hold_weights

VllmWorker = worker_class()

_SPLIT_BACKENDS = {
    True: ("CPU_ATTN", "overspill.kv.spill.far_host.SplitBackend"),
    False: ("FLASH_ATTN", "overspill.kv.spill.far_cuda.SplitBackend"),
}


class OverspillWorker(VllmWorker):  # type: ignore[misc, valid-type]
    def determine_available_memory(self) -> int:
        available: int = super().determine_available_memory()
        options = check_engine(self.vllm_config)
        if options is None or not options.spill_bytes:
            return available
        return kv_bytes_with_spill(options, self.vllm_config, self.get_kv_cache_spec(), available)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        options = check_engine(self.vllm_config)
        spills = options is not None and options.spill_bytes > 0
        if options is not None and spills and options.spill_compute == "auto":
            override_backend(*_SPLIT_BACKENDS[current_platform.is_cpu()])
        super().load_model(*args, **kwargs)
        if spills:
            make = share_attention if current_platform.is_cpu() else choose_graphs_by_step
            around_steps(self.model_runner, after_moves(make(self.model_runner)))
        if options is not None and options.park:
            self.overspill_weights = hold_weights(self.vllm_config, self.model_runner.get_model(), options)

    def compile_or_warm_up_model(self) -> Any:
        spill: SpillWorker | None = getattr(get_kv_transfer_group(), "spill_worker", None)
        if spill is not None:
            self._check_order(spill)
        times = super().compile_or_warm_up_model()
        weights: Weights | None = getattr(self, "overspill_weights", None)
        if weights is not None:
            weights.prepare()
        if spill is not None:
            spill.start_threads()
            spill.capture_graphs(self.model_runner)
            spill.wait_until_ready()
            spill.measure_threads()
        return times

    # Parking. The engine core calls these methods, and repeats a call if a rank failed.

    def overspill_park(self, weights_version: int) -> dict[str, float]:
        """Take weights and KV out of GPU memory; the GPU's KV is lost. No step may be in flight."""
        weights: Weights = self.overspill_weights
        self.synchronize_device()
        copied = weights.copy(weights_version)
        buffer = own_connector("buffer").buffer
        freed = buffer.mapped_bytes + weights.mapped_bytes
        buffer.unmap()
        weights.release()
        return {"weights_bytes": weights.num_bytes, "copied_bytes": copied, "freed_bytes": freed}

    def overspill_wake(self) -> dict[str, float]:
        weights: Weights = self.overspill_weights
        own_connector("buffer").buffer.map()
        restored = weights.restore()
        return {"weights_bytes": restored, "copy_seconds": weights.copy_seconds}

    def overspill_keep_units(self, units: Collection[int]) -> None:
        """Keep memory only under these units of blocks; no kernel or copy in flight may use the others."""
        own_connector("buffer").buffer.keep_units(units)

    def sleep(self, level: int = 1) -> None:
        """Refuse with park: vLLM has emptied its caches and the pool by now, and would wake without memory for KV."""
        if hasattr(self, "overspill_weights"):
            raise OverspillError("this engine is parked and woken by Overspill: use it instead of vLLM's sleep mode")
        super().sleep(level)

    def shutdown(self) -> None:
        weights: Weights | None = getattr(self, "overspill_weights", None)
        if weights is not None:
            weights.close()
        super().shutdown()

    def _check_order(self, spill: SpillWorker) -> None:
        """Check the order of layers, before graphs are captured: a replay would record nothing."""
        modules = self.vllm_config.compilation_config.static_forward_context
        # Where layers are traced rather than called as custom operations, the recording would be traced too.
        untraced = torch.compiler.set_stance("force_eager") if current_platform.is_cpu() else nullcontext()
        with recorded(modules, spill.layers) as accesses, untraced:
            run_dummy_step(self.model_runner)
        check_order(accesses, spill.layers, self.vllm_config.model_config.model)


def touches_spilled(scheduler_output: SchedulerOutput) -> bool:
    metadata = scheduler_output.kv_connector_metadata
    return isinstance(metadata, StepJobs) and metadata.spill is not None


Around = Callable[[SchedulerOutput], AbstractContextManager[Any]]


def after_moves(around: Around) -> Around:
    """Move memory between GPU blocks and window before the step begins."""

    def step(scheduler_output: SchedulerOutput) -> AbstractContextManager[Any]:
        if isinstance(jobs := scheduler_output.kv_connector_metadata, StepJobs):
            get_kv_transfer_group().spill_worker.move_memory(jobs)
        return around(scheduler_output)

    return step


def share_attention(runner: Any) -> Around:
    """Let the attention backend know which of a step's blocks the CPU attends to."""

    def split(scheduler_output: SchedulerOutput) -> AbstractContextManager[None]:
        far = get_kv_transfer_group().spill_worker.far if touches_spilled(scheduler_output) else None
        if far is None:
            return nullcontext()
        jobs = scheduler_output.kv_connector_metadata
        assert isinstance(jobs, StepJobs)
        return far.step(jobs.spill, lambda: batch_order(runner))

    return split


def choose_graphs_by_step(runner: Any) -> Around:
    """Run steps that touch spilled KV in graphs of their own or piecewise, because vLLM's FULL graphs are replayed
    without the per-layer hooks; all other steps keep vLLM's graphs."""

    order: list[str] = []
    watch_batches(runner, order)

    def graphs(scheduler_output: SchedulerOutput) -> AbstractContextManager[Any]:
        if not touches_spilled(scheduler_output):
            return nullcontext()
        spill = get_kv_transfer_group().spill_worker
        if spill.graphs is None:
            return without_full_graphs(runner)
        stack = ExitStack()
        stack.enter_context(spill.graphs.step(runner))
        if spill.far is not None:
            stack.enter_context(spill.far.step(scheduler_output.kv_connector_metadata.spill, lambda: order))
        return stack

    return graphs


class KvAccess(NamedTuple):
    is_write: bool
    layer: str

    def __str__(self) -> str:
        return f"{'writes' if self.is_write else 'reads'} the KV of {self.layer}"


def check_order(accesses: Sequence[KvAccess], layers: Sequence[Layer], model: str) -> None:
    """Refuse a model whose forward does not access KV as the window expects: layer by layer, write, then read.

    The window prepares a layer's half between the previous layer's attention and the layer's own. A model that writes
    KV earlier (ahead of time, for another layer, on a side stream) would overwrite KV that another layer reads.

    A backend may write within its attention, which shows no write; a layer that reads another's KV never writes.
    """
    at = 0
    for access in accesses:
        expected = layers[at] if at < len(layers) else None
        if expected is None or access.layer != expected.name or (access.is_write and not expected.is_owner):
            wanted = f"expected {expected.name}" if expected is not None else "expected nothing more"
            raise OverspillError(
                f"spill does not work with {model}: its forward {access} where Overspill {wanted}. Remove spill_bytes; "
                "offload (host_bytes) works"
            )
        at += not access.is_write
    if at < len(layers):
        raise OverspillError(
            f"spill does not work with {model}: its forward never read the KV of {layers[at].name}. Remove "
            "spill_bytes; offload (host_bytes) works"
        )


@contextmanager
def recorded(modules: Mapping[str, Any], layers: Sequence[Layer]) -> Iterator[list[KvAccess]]:
    """Record the layers' writes and reads inside this context. `modules` is vLLM's static forward context."""
    accesses: list[KvAccess] = []
    with ExitStack() as stack:
        for layer in layers:
            write, read = (
                partial(accesses.append, KvAccess(True, layer.name)),
                partial(accesses.append, KvAccess(False, layer.name)),
            )
            stack.callback(watch_kv(modules[layer.name], write, read))
        yield accesses
