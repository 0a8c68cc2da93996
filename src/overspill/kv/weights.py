"""Weights of an engine that can be parked: their copy in RAM, and the memory that is released and restored.

On CUDA this is the memory vLLM allocates for its sleep mode: weights, and state made at startup. On the CPU platform
parameters and buffers are moved into a mapping of Overspill's; weights that kernels have packed for themselves stay.
"""

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from overspill.kv.buffer import HostBuffer, plain_pieces
from overspill.kv.cuda import BatchCopy, PinnedRanges, gpu_numa_node
from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import HostMemory
from overspill.kv.options import Options
from overspill.kv.sizes import MiB, format_size
from overspill.kv.vllm_api import (
    Allocation,
    release_allocation,
    restore_allocation,
    sleep_mode_allocations,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

_SLOT_BYTES = 2 * MiB
_ALIGNMENT = 64
_ALWAYS = -1  # the version of no copy

Range = tuple[int, int]  # address, length


class Weights(ABC):
    """Weights of one worker. Their copy in RAM is made once, beside the first requests, and used until they change."""

    def __init__(self, *, pin: bool, are_constant: bool) -> None:
        self._pin = pin
        self._are_constant = are_constant
        self._memory: HostMemory | None = None
        self._copied_version = _ALWAYS
        self._places: list[Range] = []  # ranges copied to `_memory`, one after the other
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.is_released = False
        self.copy_seconds = 0.0  # of the last copy back

    # What each platform provides.

    @abstractmethod
    def constant_places(self) -> list[Range]:
        """Memory that only a weight update changes."""

    @abstractmethod
    def other_places(self) -> list[Range]:
        """Memory that steps may change."""

    @abstractmethod
    def _transfer(self, targets: Iterable[int], sources: Iterable[int], lengths: Iterable[int]) -> None:
        """Copy all ranges, and wait for completion."""

    @abstractmethod
    def _release(self) -> None: ...

    @abstractmethod
    def _restore(self) -> None:
        """Restore all of the memory, or on failure none of it."""

    @abstractmethod
    def _pinning(self) -> tuple[PinnedRanges | None, int | None]:
        """Registration of the copy in RAM for DMA, and the copy's NUMA node; None where the platform has neither."""

    # Sizes.

    @property
    def num_bytes(self) -> int:
        return sum(length for _, length in (*self.constant_places(), *self.other_places()))

    @property
    def mapped_bytes(self) -> int:
        return 0 if self.is_released else self.num_bytes

    # The copy.

    def prepare(self) -> None:
        """Allocate RAM, and copy the weights in the background."""
        self._allocate()
        self._thread = threading.Thread(target=self._copy_first, name="overspill-weights", daemon=True)
        self._thread.start()

    def _allocate(self) -> HostMemory:
        pinning, numa_node = self._pinning()
        places = [*self.constant_places(), *self.other_places()]
        slots = -(-sum(length for _, length in places) // _SLOT_BYTES)
        memory = HostMemory(max(1, slots), _SLOT_BYTES, numa_node=numa_node, name="copy of the weights", option="park")
        memory.prepare(pinning if self._pin else None)
        self._memory, self._places = memory, places
        return memory

    def _copy_first(self) -> None:
        assert self._memory is not None
        try:
            if self._memory.wait_until_prepared() and not self._stop.is_set():
                self._copy(self.constant_places(), to_ram=True)
                self._copied_version = 0
        except Exception as error:
            logger.warning("Overspill: the weights could not be copied to RAM yet: %s", error)

    def copy(self, version: int) -> int:
        """Bring the copy up to date before memory is released; returns the bytes copied. `version` counts calls that
        may have changed weights."""
        if self.is_released:
            return 0
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._memory is None or self._places != [*self.constant_places(), *self.other_places()]:
            self._drop()
            self._allocate().wait_until_prepared()
        is_fresh = self._are_constant and self._copied_version == version
        places = self.other_places() if is_fresh else [*self.constant_places(), *self.other_places()]
        self._copied_version = _ALWAYS  # until the copy is complete
        self._copy(places, to_ram=True)
        self._copied_version = version
        return sum(length for _, length in places)

    def _copy(self, places: Iterable[Range], *, to_ram: bool) -> None:
        """Copy ranges to or from RAM, split at the borders of separately registered pieces."""
        memory, wanted = self._memory, set(places)
        assert memory is not None
        piece = memory.slots_per_piece * memory.slot_stride
        here: list[int] = []
        ram: list[int] = []
        lengths: list[int] = []
        offset = 0
        for address, length in self._places:
            at = 0
            while (address, length) in wanted and at < length:
                part = min(length - at, piece - (offset + at) % piece)
                here.append(address + at)
                ram.append(memory.address + offset + at)
                lengths.append(part)
                at += part
            offset += length
        self._transfer(*((ram, here) if to_ram else (here, ram)), lengths)

    def _drop(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._copied_version = _ALWAYS

    # Releasing and restoring.

    def release(self) -> None:
        if not self.is_released:
            assert self._copied_version != _ALWAYS or not self._places, "weights were to be released without a copy"
            self.is_released = True
            self._release()

    def restore(self) -> int:
        """Restore memory and content; returns the bytes restored."""
        if not self.is_released:
            return 0
        self._restore()
        began = time.perf_counter()
        try:
            self._copy(self._places, to_ram=False)
        except BaseException:
            self._release()  # its content must not be taken for weights
            raise
        self.copy_seconds = time.perf_counter() - began
        self.is_released = False
        return self.num_bytes

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._drop()


class CudaWeights(Weights):
    def __init__(self, device: torch.device, *, pin: bool, are_constant: bool) -> None:
        super().__init__(pin=pin, are_constant=are_constant)
        self._device = device
        self._batch = BatchCopy()
        lowest, _ = torch.cuda.Stream.priority_range()
        self._stream = torch.cuda.Stream(device, priority=lowest)
        self._allocations: list[Allocation] = []

    def constant_places(self) -> list[Range]:
        return [(each.address, each.num_bytes) for each in self._all() if each.is_weights]

    def other_places(self) -> list[Range]:
        return [(each.address, each.num_bytes) for each in self._all() if not each.is_weights]

    def _all(self) -> list[Allocation]:
        """Sleep-mode allocations; while released, those recorded at the release, since some may be freed meanwhile."""
        return self._allocations if self.is_released else sleep_mode_allocations()

    def _transfer(self, targets: Iterable[int], sources: Iterable[int], lengths: Iterable[int]) -> None:
        torch.cuda.set_device(self._device)  # the first copy runs in a thread
        dst, src, sizes = (np.array(list(values), np.uint64) for values in (targets, sources, lengths))
        if not len(dst):
            return
        self._batch(dst, src, sizes, self._stream.cuda_stream)
        self._stream.synchronize()

    def _release(self) -> None:
        self._allocations = sleep_mode_allocations()
        for allocation in self._allocations:
            release_allocation(allocation)
        torch.cuda.empty_cache()

    def _restore(self) -> None:
        torch.cuda.empty_cache()
        restored: list[Allocation] = []
        free, needed = torch.cuda.mem_get_info(self._device)[0], sum(each.num_bytes for each in self._allocations)
        if free < needed:
            raise OverspillError(
                f"waking needs {format_size(needed)} of GPU memory for weights, and {format_size(free)} is free: park "
                "or stop whatever holds the rest"
            )
        try:
            for allocation in self._allocations:
                restore_allocation(allocation)
                restored.append(allocation)
        except BaseException:
            for allocation in restored:
                release_allocation(allocation)
            raise

    def _pinning(self) -> tuple[PinnedRanges | None, int | None]:
        return PinnedRanges(self._device), gpu_numa_node(self._device)


class HostWeights(Weights):
    def __init__(self, model: torch.nn.Module, *, pin: bool, are_constant: bool) -> None:
        super().__init__(pin=pin, are_constant=are_constant)
        self._buffer = move_tensors(model)
        self._place = self._buffer.tensor().data_ptr(), self._buffer.num_bytes

    def constant_places(self) -> list[Range]:
        return [self._place]

    def other_places(self) -> list[Range]:
        return []

    def _transfer(self, targets: Iterable[int], sources: Iterable[int], lengths: Iterable[int]) -> None:
        for target, source, length in zip(targets, sources, lengths, strict=True):
            ctypes.memmove(target, source, length)

    def _release(self) -> None:
        self._buffer.unmap()

    def _restore(self) -> None:
        self._buffer.map()

    def _pinning(self) -> tuple[PinnedRanges | None, int | None]:
        return None, None

    def close(self) -> None:
        """Free all memory; the model's tensors are invalid afterwards."""
        super().close()
        self._buffer.close()


def move_tensors(model: torch.nn.Module) -> HostBuffer:
    """Move parameters and buffers into one mapping; tensors that share memory still share it afterwards."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if each.numel()}
    offsets: dict[int, int] = {}
    size = 0
    for address, storage in storages.items():
        offsets[address] = size
        size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    buffer = HostBuffer(max(1, size), plain_pieces(max(1, size)), "park")
    whole = buffer.tensor().untyped_storage()
    for each in tensors:
        if not each.numel():
            continue
        address = each.untyped_storage().data_ptr()
        place = offsets[address] // each.itemsize + each.storage_offset()
        moved = torch.empty(0, dtype=each.dtype).set_(whole, place, each.size(), each.stride())
        moved.copy_(each.data)
        each.data = moved
    return buffer


_held: Weights | None = None


def hold_weights(vllm_config: VllmConfig, model: torch.nn.Module, options: Options) -> Weights:
    """Create this worker's weights, once the model is loaded."""
    global _held
    settings: dict[str, Any] = {"pin": options.pin, "are_constant": are_constant(vllm_config)}
    if current_platform.is_cpu():
        _held = HostWeights(model, **settings)
    else:
        _held = CudaWeights(torch.device("cuda", torch.cuda.current_device()), **settings)
    return _held


def weights_to_copy() -> int:
    """Bytes of RAM that the copy of this worker's weights will take."""
    return _held.num_bytes if _held is not None else 0


def are_constant(vllm_config: VllmConfig) -> bool:
    """Whether steps leave the memory of the weights unchanged: LoRA adapters are loaded beside the weights as requests
    arrive, EPLB may move experts, and multimodal models may keep embeddings of a step there, as Qwen3-VL does."""
    return (
        vllm_config.lora_config is None
        and not vllm_config.parallel_config.enable_eplb
        and not vllm_config.model_config.is_multimodal_model
    )
