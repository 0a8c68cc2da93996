"""Start reports: the phase and memory of each vLLM worker, one JSON file per worker.

`register` is a vLLM plugin that writes them from inside the workers; `overspill serve` reads them. Workers report only
if serve names a folder in a variable, and a failing report never stops an engine. Where there is a plan, the plugin
also makes workers size their KV by it (`overspill.serve.planned_kv`).
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

# Names the folder of reports. No OVERSPILL_ prefix: it is not a setting; serve sets it for the processes it starts.
VARIABLE = "_OVERSPILL_START_REPORT"
_PINNING_EVERY_S = 0.5
# A CUDA context takes half a GiB; a neighbour took anything beyond this limit while it was created.
_MOST_CONTEXT_BYTES = 2 * GiB


class Phase(StrEnum):
    """Phases of a start, in order; each value is the text shown to users."""

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
    """RAM held by the connector: the offload pool or the spill arena."""

    num_bytes: int
    pinned_bytes: int
    is_prepared: bool
    """Whether filling and pinning the memory in the background has finished."""
    refused: str
    """Why pinning was refused; empty if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """State of one worker; None means not known yet, or not available on this platform."""

    phase: Phase
    weights_bytes: int | None = None
    """Weights on the device, including slots for those in RAM."""
    offloader: str | None = None
    """Class name of vLLM's weight offloader."""
    weights_in_ram_bytes: int | None = None
    kv_bytes: int | None = None
    """KV cache of all blocks, resident and spilled."""
    resident_bytes: int | None = None
    spilled_bytes: int | None = None
    window_bytes: int | None = None
    pool: HostMemoryReport | None = None
    arena: HostMemoryReport | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_bytes: int | None = None
    """Memory that CUDA graphs took, or that vLLM set aside for them where it sized KV itself."""
    excess_bytes: int | None = None
    """GPU memory taken beyond the plan's budget; None where vLLM sized KV itself, within the budget."""
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
    """Reports of all ranks, in order; ranks without one are left out."""
    paths = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths]


def earliest(reports: list[Report]) -> Phase:
    """The phase of the slowest worker."""
    return min((report.phase for report in reports), key=_ORDER.index, default=Phase.STARTING)


def register() -> None:
    """Install the plugin; vLLM calls this in every process, possibly more than once."""
    if not os.environ.get(VARIABLE) and not os.environ.get(device_share.VARIABLE):
        return
    # This class holds the worker on every platform. It loads plugins while it creates the worker, and calls the method
    # wrapped here next.
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
    from overspill.serve import planned_kv  # imports torch, which serve itself does not need

    planned_kv.register(worker)


class WorkerReporter:
    """Reports one worker's progress through the calls by which vLLM starts it."""

    def __init__(self, worker: Any, folder: Path) -> None:
        self._worker, self._folder = worker, folder
        self._kv_cache_config: Any = None
        self._free_before = _free_bytes(worker)
        self._around("load_model", before=lambda *_: self._write(Phase.LOADING))
        self._around("determine_available_memory", before=lambda *_: self._write(Phase.PROFILING))
        self._around("initialize_from_config", before=self._allocating)
        self._around("compile_or_warm_up_model", before=lambda *_: self._write(Phase.WARMING_UP), after=self._started)

    def _around(self, name: str, *, before: Callable[..., object], after: Callable[[], None] | None = None) -> None:
        """Wrap a method of this worker only; its class and other plugins' wrappers stay untouched."""
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
        """Report until pinning has finished: hundreds of GiB take minutes, and the engine serves meanwhile."""
        while not self._write(Phase.STARTED).is_prepared:
            time.sleep(_PINNING_EVERY_S)

    def _write(self, phase: Phase) -> Report:
        report = self._report() if phase is Phase.STARTED else Report(phase=phase)
        write(report, self._folder, self._worker.rank)
        return report

    def _report(self) -> Report:
        kv = self._kv_cache_config
        # Missing on the CPU, where kernels keep weights in layouts of their own.
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
        """Overheads, measured while sizing KV by the plan or by vLLM's own profiling; empty where neither was done."""
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
        """Memory of the CUDA context; None if a neighbour took or freed memory during its creation."""
        if self._free_before is None:
            return None
        lost: int = self._free_before - self._worker.init_snapshot.free_memory
        return lost if 0 <= lost <= _MOST_CONTEXT_BYTES else None


def _never_fail(call: Callable[..., Any], *args: Any) -> None:
    """Call a function and only log its exception: a report must not stop an engine."""
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
    """Free GPU memory by the driver, read before this process has a CUDA context: querying CUDA would create one."""
    if worker.device_config.device_type != "cuda":
        return None
    from overspill.hardware import detect

    gpus = detect().gpus
    return gpus[worker.local_rank].free_bytes.value if worker.local_rank < len(gpus) else None
