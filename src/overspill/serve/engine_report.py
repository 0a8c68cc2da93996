"""Start reports: how far each vLLM worker has come, and what became of the plan, one JSON file for each worker.

`register` is a vLLM plugin, which writes them from inside the workers; `overspill serve` reads them. It does nothing
unless serve names a folder with a variable, and nothing that it does may stop an engine. It also has workers size their
KV by the plan, where there is one (`overspill.serve.planned_kv`).
"""

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from overspill.files import replace_file
from overspill.kv.contract import Method, wrap_once
from overspill.kv.sizes import GiB
from overspill.planning import device_share

# Names a folder. No OVERSPILL_ in front: it is not a setting, and serve gives it to the processes it starts.
VARIABLE = "_OVERSPILL_START_REPORT"
_PINNING_EVERY_S = 0.5
# CUDA's context is half a GiB; more is what a neighbour took while it was made.
_MOST_CONTEXT_BYTES = 2 * GiB


class Phase(StrEnum):
    """Phases of a start, in order; each value is the line that is shown."""

    STARTING = "starting vLLM"
    LOADING = "loading the model"
    PROFILING = "profiling its memory"
    ALLOCATING = "allocating the KV cache"
    WARMING_UP = "compiling and capturing graphs"
    STARTED = "starting to listen"
    READY = "ready"


_ORDER = list(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryReport:
    """RAM of the connector: the pool of offload or the arena of spill."""

    num_bytes: int
    pinned_bytes: int
    is_prepared: bool
    """Whether filling and pinning it, which goes on in the background, is over."""
    refused: str
    """Why pinning was refused; empty if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One worker. None is not known yet, or not on this platform."""

    phase: Phase
    weights_bytes: int | None = None
    """On the device, slots for those in RAM included."""
    offloader: str | None = None
    """vLLM's class."""
    weights_in_ram_bytes: int | None = None
    kv_bytes: int | None = None
    """Of all blocks, resident and spilled."""
    resident_bytes: int | None = None
    spilled_bytes: int | None = None
    window_bytes: int | None = None
    pool: HostMemoryReport | None = None
    arena: HostMemoryReport | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_bytes: int | None = None
    """That CUDA graphs took, or that vLLM set aside for them where it sized KV itself."""
    excess_bytes: int | None = None
    """Taken of the GPU beyond the plan's budget; None where vLLM sized KV itself, within the budget."""
    context_bytes: int | None = None
    max_model_len: int | None = None

    @property
    def host_memory(self) -> list[HostMemoryReport]:
        return [memory for memory in (self.pool, self.arena) if memory is not None]

    @property
    def is_prepared(self) -> bool:
        return all(memory.is_prepared for memory in self.host_memory)


def write(report: Report, folder: Path, rank: int) -> None:
    replace_file(folder / f"rank-{rank}.json", msgspec.json.encode(report).decode())


def read(folder: Path) -> list[Report]:
    """Of all ranks, in order; ranks without a report are left out."""
    paths = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths]


def earliest(reports: list[Report]) -> Phase:
    """The phase of the slowest worker."""
    return min((report.phase for report in reports), key=_ORDER.index, default=Phase.STARTING)


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    if not os.environ.get(VARIABLE) and not os.environ.get(device_share.VARIABLE):
        return
    # This class holds the worker of every platform. It loads plugins while it makes the worker, and its next call is
    # the wrapped one.
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def reported(init_device: Method) -> Method:
        def init_reported_device(self: Any) -> None:
            _never_fail(_size_kv_by_plan, self.worker)
            folder = os.environ.get(VARIABLE)
            if folder and Path(folder).is_dir():
                _never_fail(WorkerReporter, self.worker, Path(folder))
            init_device(self)

        return init_reported_device

    wrap_once(WorkerWrapperBase, "init_device", reported)


def _size_kv_by_plan(worker: Any) -> None:
    from overspill.serve import planned_kv  # loads torch, which serve itself has no use for

    planned_kv.register(worker)


class WorkerReporter:
    """Follows one worker through the calls that vLLM starts it with."""

    def __init__(self, worker: Any, folder: Path) -> None:
        self._worker, self._folder = worker, folder
        self._kv_cache_config: Any = None
        self._free_before = _free_bytes(worker)
        self._around("load_model", before=lambda *_: self._write(Phase.LOADING))
        self._around("determine_available_memory", before=lambda *_: self._write(Phase.PROFILING))
        self._around("initialize_from_config", before=self._allocating)
        self._around("compile_or_warm_up_model", before=lambda *_: self._write(Phase.WARMING_UP), after=self._started)

    def _around(self, name: str, *, before: Callable[..., object], after: Callable[[], None] | None = None) -> None:
        """Wraps a method of this one worker; its class, and the wrappers of other plugins, stay as they are."""
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
        self._write(Phase.ALLOCATING)

    def _started(self) -> None:
        report = self._write(Phase.STARTED)
        if not report.is_prepared:
            threading.Thread(target=_never_fail, args=(self._follow_pinning,), daemon=True).start()

    def _follow_pinning(self) -> None:
        """Hundreds of GiB take minutes, and the engine serves meanwhile."""
        while not self._write(Phase.STARTED).is_prepared:
            time.sleep(_PINNING_EVERY_S)

    def _write(self, phase: Phase) -> Report:
        report = self._report() if phase is Phase.STARTED else Report(phase=phase)
        write(report, self._folder, self._worker.rank)
        return report

    def _report(self) -> Report:
        kv = self._kv_cache_config
        # Not on the CPU, where kernels keep weights in forms of their own.
        weights = getattr(self._worker.model_runner, "model_memory_usage", None)
        return Report(
            phase=Phase.STARTED,
            weights_bytes=None if weights is None else int(weights),
            kv_bytes=max((tensor.size for tensor in kv.kv_cache_tensors), default=0),
            max_model_len=self._worker.vllm_config.model_config.max_model_len,
            **_weights_in_ram(),
            **_connector_memory(),
            **self._profile(weights),
        )

    def _profile(self, weights_bytes: int | None) -> dict[str, Any]:
        """As it was measured for a KV cache of the planned size, or by vLLM's own profiling; empty where neither was
        done."""
        worker = self._worker
        if weights_bytes is None:
            return {}
        if (sized := getattr(worker, "overspill_memory", None)) is not None:
            return {
                "activation_bytes": sized.taken.activation_bytes,
                "non_torch_bytes": sized.non_torch_bytes,
                "graph_bytes": sized.graph_bytes,
                "excess_bytes": sized.excess_bytes,
                "context_bytes": self._context_bytes(),
            }
        if not hasattr(worker, "total_consumed"):
            return {}
        from vllm import envs

        graphs = worker.cudagraph_memory_estimate if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0
        return {
            "activation_bytes": int(worker.peak_activation_memory - graphs),
            "non_torch_bytes": max(0, int(worker.total_consumed - weights_bytes)),
            "graph_bytes": int(graphs),
            "context_bytes": self._context_bytes(),
        }

    def _context_bytes(self) -> int | None:
        """None where a neighbour took or freed memory while the context was made."""
        if self._free_before is None:
            return None
        lost: int = self._free_before - self._worker.init_snapshot.free_memory
        return lost if 0 <= lost <= _MOST_CONTEXT_BYTES else None


def _never_fail(call: Callable[..., Any], *args: Any) -> None:
    """A report must not stop an engine."""
    try:
        call(*args)
    except Exception:
        from vllm.logger import init_logger

        logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only
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
    found: dict[str, Any] = {}
    if (offload := ours[0]._worker) is not None:
        found["pool"] = _host_memory(offload.memory)
    if (spill := ours[0].spill_worker) is not None:
        geometry = spill.geometry
        block_bytes = geometry.buffer_bytes // geometry.num_blocks
        found["arena"] = _host_memory(spill.arena)
        found["resident_bytes"] = spill.num_resident * block_bytes
        found["spilled_bytes"] = geometry.num_spilled * block_bytes
        found["window_bytes"] = geometry.num_halves * geometry.half_bytes
    return found


def _host_memory(memory: Any) -> HostMemoryReport:
    return HostMemoryReport(
        num_bytes=memory.num_bytes,
        pinned_bytes=memory.pinned_bytes,
        is_prepared=memory.is_prepared,
        refused=memory.pinning_refused or "",
    )


def _free_bytes(worker: Any) -> int | None:
    """By the driver, before this process has a CUDA context: a question to CUDA would make one."""
    if worker.device_config.device_type != "cuda":
        return None
    from overspill.hardware import detect

    gpus = detect().gpus
    return gpus[worker.local_rank].free_bytes.value if worker.local_rank < len(gpus) else None
