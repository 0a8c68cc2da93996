"""KV cache of the planned size in a vLLM worker on a GPU, whatever neighbours on the card do meanwhile.

vLLM sizes KV by the memory of the whole card: it asserts that nothing was freed while it profiled, and counts memory
that others took as its own. With `--kv-cache-memory-bytes` it measures nothing. So this module measures the worker's
own memory, and shrinks KV where the rest of the engine takes more than planned.
"""

import gc
import os
from dataclasses import dataclass
from typing import Any

import torch

from overspill.kv.contract import Method, wrap_once
from overspill.kv.sizes import GiB, MiB, format_size
from overspill.planning.device_share import DeviceShare, Taken

# PyTorch's minimum. vLLM also sets it for its own profiling: otherwise buffers that grow meanwhile would pin the memory
# they have left.
_MAX_SPLIT_MIB = 20
# Libraries were never seen to exceed the plan by this much, nor graphs PyTorch's pool: anything beyond was taken by a
# neighbour.
_MOST_LIBRARIES_BYTES, _MOST_GRAPHS_BYTES = 512 * MiB, GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMemory:
    """Memory that PyTorch's allocator holds for this process."""

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int


@dataclass(slots=True, kw_only=True)
class Sized:
    """Memory of one worker, kept as its attribute `overspill_memory` for the start report."""

    share: DeviceShare
    taken: Taken
    kv_bytes: int
    """KV on the GPU, including spill's window."""
    non_torch_bytes: int | None
    """Memory beside weights once the largest batch has run; None if a neighbour took or freed memory."""
    graph_bytes: int = 0

    @property
    def excess_bytes(self) -> int:
        return self.share.excess_bytes(self.kv_bytes, self.taken, self.graph_bytes)


def register(worker: Any) -> None:
    """Wrap the class of vLLM's own worker; spill's worker inherits from it and adds RAM to its result. No-op without a
    share."""
    if worker.device_config.device_type != "cuda" or DeviceShare.read(os.environ) is None:
        return
    from vllm.v1.worker.gpu_worker import Worker

    wrap_once(Worker, "determine_available_memory", sized_by_plan)


def sized_by_plan(determine: Method) -> Method:
    def determine_planned_memory(self: Any) -> int:
        share = DeviceShare.read(os.environ)
        if share is None or self.cache_config.kv_cache_memory_bytes is None:
            available: int = determine(self)
            return available
        settle()
        torch.accelerator.reset_peak_memory_stats(self.device)
        with self._scoped_allocator_max_split(max_split_size_mb=_MAX_SPLIT_MIB):
            planned: int = determine(self)
        settle()
        self.overspill_memory = sized = _size(self, share, planned, torch_memory(self.device))
        self.model_runner.capture_model = _measured_capture(self, sized)
        return sized.kv_bytes

    return determine_planned_memory


def settle() -> None:
    """Return the allocator's unused memory to the driver."""
    gc.collect()
    torch.accelerator.empty_cache()


def torch_memory(device: Any) -> TorchMemory:
    stats = torch.accelerator.memory_stats(device)
    return TorchMemory(
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        peak_bytes=stats.get("allocated_bytes.all.peak", 0),
        reserved_bytes=torch.accelerator.memory_reserved(device),
    )


def free_bytes(device: Any) -> int:
    """Free memory of the card, whichever process takes the rest."""
    free: int = torch.accelerator.get_memory_info(device)[0]
    return free


def _size(worker: Any, share: DeviceShare, planned: int, now: TorchMemory) -> Sized:
    weights, before = int(worker.model_runner.model_memory_usage), worker.init_snapshot
    taken = Taken(
        weights_bytes=weights,
        reserved_bytes=now.reserved_bytes - before.torch_memory,
        activation_bytes=now.peak_bytes - now.allocated_bytes,
    )
    consumed = before.free_memory - free_bytes(worker.device)
    libraries = consumed - taken.reserved_bytes
    is_ours = 0 <= libraries <= share.non_torch_bytes + _MOST_LIBRARIES_BYTES
    kv_bytes = share.kv_bytes(planned, taken)
    _log(share, taken, planned, kv_bytes)
    return Sized(
        share=share, taken=taken, kv_bytes=kv_bytes, non_torch_bytes=max(0, consumed - weights) if is_ours else None
    )


def _log(share: DeviceShare, taken: Taken, planned: int, kv_bytes: int) -> None:
    from vllm.logger import init_logger

    logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only
    if kv_bytes == planned:
        logger.info("Overspill: %s of GPU memory for KV, as planned", format_size(kv_bytes))
        return
    logger.warning(
        "Overspill: %s of GPU memory is left for KV, and %s was planned: weights take %s and a step of the largest "
        "batch %s of the %s that the engine may use",
        f"-{format_size(-kv_bytes)}" if kv_bytes < 0 else format_size(kv_bytes), format_size(planned),
        format_size(taken.weights_bytes), format_size(taken.activation_bytes), format_size(share.budget_bytes),
    )  # fmt: skip


def _measured_capture(worker: Any, sized: Sized) -> Method:
    """Wrap capture to record the graphs' size: the card's loss, or PyTorch's pool where a neighbour distorts that."""
    capture = worker.model_runner.capture_model

    def capture_model(*args: Any, **kwargs: Any) -> int:
        settle()
        before = torch_memory(worker.device).reserved_bytes
        lost: int = capture(*args, **kwargs)
        pool = max(0, torch_memory(worker.device).reserved_bytes - before)
        sized.graph_bytes = lost if pool <= lost <= pool + _MOST_GRAPHS_BYTES else pool
        return lost

    return capture_model
