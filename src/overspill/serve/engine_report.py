"""A vLLM plugin: workers tell `overspill serve` how far their start has come, and what became of the plan.

It does nothing unless serve asks for it with a variable, and nothing that it does may stop an engine.
"""

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from overspill.kv.wrapping import Method, wrap_once
from overspill.serve.report import VARIABLE, HostMemoryReport, Phase, Report, write

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

_PINNING_EVERY_S = 0.5


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    folder = os.environ.get(VARIABLE)
    if not folder or not Path(folder).is_dir():
        return
    # Whatever worker class an engine uses, on whatever platform, this one holds it. Plugins are loaded while it makes
    # the worker, and the next that it does is this call.
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def reported(init_device: Method) -> Method:
        def init_reported_device(self: Any) -> None:
            _never_fail(Reporter, self.worker, Path(folder))
            init_device(self)

        return init_reported_device

    wrap_once(WorkerWrapperBase, "init_device", reported)


class Reporter:
    """Follows one worker through the calls that vLLM starts it with."""

    def __init__(self, worker: Any, folder: Path) -> None:
        self._worker, self._folder = worker, folder
        self._kv_cache_config: Any = None
        self._captured_graph_bytes: int | None = None
        self._free_before = _free_bytes(worker)
        self._around("load_model", before=lambda *_: self._tell(Phase.LOADING))
        self._around("determine_available_memory", before=lambda *_: self._tell(Phase.PROFILING))
        self._around("initialize_from_config", before=self._allocating)
        self._around("compile_or_warm_up_model", before=self._warming_up, after=self._started)

    def _around(self, name: str, *, before: Callable[..., object], after: Callable[[], None] | None = None) -> None:
        """An attribute of this one worker; its class, and what other plugins did to it, stay as they are."""
        call = getattr(self._worker, name)

        @functools.wraps(call)
        def reporting(*args: Any, **kwargs: Any) -> Any:
            _never_fail(before, *args)
            result = call(*args, **kwargs)
            if after is not None:
                _never_fail(after)
            return result

        setattr(self._worker, name, reporting)

    def _allocating(self, kv_cache_config: Any) -> None:
        self._kv_cache_config = kv_cache_config
        self._tell(Phase.ALLOCATING)

    def _warming_up(self) -> None:
        self._tell(Phase.WARMING_UP)
        runner = self._worker.model_runner
        capture = getattr(runner, "capture_model", None)
        if capture is None:
            return

        def capture_model(*args: Any, **kwargs: Any) -> Any:
            self._captured_graph_bytes = capture(*args, **kwargs)
            return self._captured_graph_bytes

        runner.capture_model = capture_model

    def _started(self) -> None:
        report = self._tell(Phase.STARTED)
        if not report.is_prepared:
            threading.Thread(target=_never_fail, args=(self._follow_pinning,), daemon=True).start()

    def _follow_pinning(self) -> None:
        """Hundreds of GiB take minutes, and the engine serves meanwhile."""
        while not self._tell(Phase.STARTED).is_prepared:
            time.sleep(_PINNING_EVERY_S)

    def _tell(self, phase: Phase) -> Report:
        report = self._report() if phase is Phase.STARTED else Report(phase=phase)
        write(report, self._folder, self._worker.rank)
        return report

    def _report(self) -> Report:
        runner, config = self._worker.model_runner, self._worker.vllm_config
        kv = self._kv_cache_config
        # Not on the CPU, where kernels keep weights in forms of their own.
        weights = getattr(runner, "model_memory_usage", None)
        return Report(
            phase=Phase.STARTED,
            weights_bytes=None if weights is None else int(weights),
            num_blocks=kv.num_blocks,
            kv_bytes=max((tensor.size for tensor in kv.kv_cache_tensors), default=0),
            captured_graph_bytes=self._captured_graph_bytes,
            cudagraph_mode=config.compilation_config.cudagraph_mode.name,
            attention_backend=_attention_backend(runner),
            max_model_len=config.model_config.max_model_len,
            **_weights_in_ram(),
            **_connector_memory(),
            **self._profile(weights),
        )

    def _profile(self, weights_bytes: int | None) -> dict[str, Any]:
        """As vLLM's own profiling found it; nothing where it did not profile."""
        worker = self._worker
        if weights_bytes is None or not hasattr(worker, "total_consumed"):
            return {}
        from vllm import envs

        graphs = worker.cudagraph_memory_estimate if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0
        context = None
        if self._free_before is not None:
            context = max(0, self._free_before - worker.init_snapshot.free_memory)
        return {
            "activation_bytes": int(worker.peak_activation_memory - graphs),
            "non_torch_bytes": max(0, int(worker.total_consumed - weights_bytes)),
            "graph_bytes": int(graphs),
            "context_bytes": context,
        }


def _never_fail(call: Callable[..., Any], *args: Any) -> None:
    """An engine must not stop for what is only told of it."""
    try:
        call(*args)
    except Exception:
        logger.warning("Overspill: the start could not be reported", exc_info=True)


def _weights_in_ram() -> dict[str, Any]:
    from vllm.model_executor.offloader.base import get_offloader

    offloader = get_offloader()
    moved: int = getattr(offloader, "total_offloaded_bytes", 0) or getattr(offloader, "cpu_offload_bytes", 0)
    return {"offloader": type(offloader).__name__, "weights_in_ram_bytes": moved}


def _connector_memory() -> dict[str, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from overspill.kv.connector import OverspillConnector

    if not has_kv_transfer_group():
        return {}
    group = get_kv_transfer_group()
    ours = [one for one in (group, *getattr(group, "_connectors", ())) if isinstance(one, OverspillConnector)]
    if not ours:
        return {}
    told: dict[str, Any] = {}
    if (offload := ours[0]._worker) is not None:
        told["pool"] = _host_memory(offload.memory)
    if (spill := ours[0].spill_worker) is not None:
        geometry = spill.geometry
        block_bytes = geometry.buffer_bytes // geometry.num_blocks
        told["arena"] = _host_memory(spill.arena)
        told["resident_bytes"] = geometry.num_resident * block_bytes
        told["spilled_bytes"] = geometry.num_spilled * block_bytes
        told["window_bytes"] = geometry.num_halves * geometry.half_bytes
    return told


def _host_memory(memory: Any) -> HostMemoryReport:
    return HostMemoryReport(
        num_bytes=memory.num_bytes,
        pinned_bytes=memory.pinned_bytes,
        is_prepared=memory.is_prepared,
        refused=memory.pinning_refused or "",
    )


def _attention_backend(runner: Any) -> str | None:
    groups = getattr(runner, "attn_groups", None) or []
    names = {group.backend.get_name() for per_cache in groups for group in per_cache}
    return ", ".join(sorted(names)) or None


def _free_bytes(worker: Any) -> int | None:
    """By the driver, before this process has a context of its own: asking CUDA would make one."""
    if worker.device_config.device_type != "cuda":
        return None
    from overspill.hardware import detect

    gpus = detect().gpus
    return gpus[worker.local_rank].free_bytes.value if worker.local_rank < len(gpus) else None
