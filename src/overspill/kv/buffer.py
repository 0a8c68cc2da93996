"""vLLM's KV buffer: where a block's bytes lie in it, and the memory that spill maps under it."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.platforms import current_platform

from overspill.kv.cuda import AddressRange, PhysicalMemory, mapping_granularity
from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import MAP_ANONYMOUS, MAP_FIXED, MAP_PRIVATE, MAP_SHARED, map_memory, unmap_memory
from overspill.kv.sizes import format_size
from overspill.kv.spill.geometry import CUDA_GRANULARITY, Geometry
from overspill.kv.vllm_api import (
    KVCacheConfig,
)

# Block-outermost: a block of all layers is one contiguous piece, one copy. The default keeps layers outermost.
BLOCK_OUTERMOST = "BLNHC"
# Layer-outermost: a layer's blocks are one contiguous range, which spill maps and streams.
LAYER_OUTERMOST = "LBNHC"


@dataclass(frozen=True, slots=True)
class Region:
    """A range of the buffer in which block b occupies [offset + b * block_bytes, offset + (b + 1) * block_bytes)."""

    offset: int
    block_bytes: int


def block_regions(kv_cache_config: KVCacheConfig) -> list[Region]:
    """The regions that together hold every block; one if blocks are outermost, one per layer otherwise.

    Cache groups lie over each other: a block id belongs to one group at a time, and the same bytes serve all.
    """
    num_blocks = kv_cache_config.num_blocks
    found: dict[int, Region] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        span = num_blocks * tensor.block_stride
        if tensor.layer_stride >= span:
            offsets: Iterable[int] = range(
                tensor.offset, tensor.offset + len(tensor.layers) * tensor.layer_stride, span
            )
        else:
            offsets = [0]
        for offset in offsets:
            region = found.setdefault(offset, Region(offset, tensor.block_stride))
            if region.block_bytes != tensor.block_stride:
                raise OverspillError(
                    f"this model's cache groups have pages of different sizes ({region.block_bytes} and "
                    f"{tensor.block_stride} bytes) at the same place; Overspill cannot move it"
                )
    regions = sorted(found.values(), key=lambda region: region.offset)
    for left, right in pairwise(regions):
        if left.offset + num_blocks * left.block_bytes > right.offset:
            raise OverspillError("this model's KV cache regions overlap in part; Overspill cannot move it")
    return regions


def bytes_per_block(kv_cache_config: KVCacheConfig) -> int:
    return sum(region.block_bytes for region in block_regions(kv_cache_config))


def kv_buffer(kv_caches: dict[str, Any]) -> torch.Tensor:
    """vLLM's KV cache as bytes: all layers' tensors are views of one buffer."""
    first = next(iter(kv_caches.values()))
    tensor: torch.Tensor = first[0] if isinstance(first, list | tuple) else first
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class KvAllocation(TorchFunctionMode):
    """Inside this context the one `torch.zeros` that makes vLLM's KV buffer returns `make()` instead.

    vLLM enters the connector's memory-pool context for this allocation alone. A `torch.cuda.MemPool` could serve it
    too, but needs a compiled allocator.
    """

    def __init__(self, num_bytes: int, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._num_bytes = num_bytes
        self._make = make
        self._answered = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self._num_bytes,) and kwargs.get("dtype") is torch.int8:
            self._answered += 1
            return self._make()
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None and self._answered != 1:
            raise OverspillError(
                f"vLLM allocated its KV buffer of {self._num_bytes} bytes {self._answered} times where it was expected "
                "once; spill works with vLLM 0.32.0 only"
            )


def granularity() -> int:
    """Granularity of mappings. The scheduler has no GPU to query; workers check that theirs is not coarser."""
    return mmap.PAGESIZE if current_platform.is_cpu() else CUDA_GRANULARITY


class AliasedMemory:
    """The CPU platform's buffer: two window halves lie under all spilled ranges, as the same pages."""

    def __init__(self, geometry: Geometry) -> None:
        self._length = geometry.buffer_bytes
        self._address = map_memory(self._length, MAP_PRIVATE | MAP_ANONYMOUS, "spill_bytes")
        halves = [os.memfd_create(f"overspill-window-{half}") for half in range(geometry.num_halves)]
        try:
            for half in halves:
                os.ftruncate(half, geometry.half_bytes)
            for region in range(geometry.num_regions):
                start = self._address + geometry.spilled_offset(region)
                map_memory(
                    geometry.half_bytes, MAP_SHARED | MAP_FIXED, "spill_bytes",
                    address=start, descriptor=halves[geometry.half_of(region)],
                )  # fmt: skip
        except BaseException:
            self.close()
            raise
        finally:
            for half in halves:
                os.close(half)  # the mappings keep the memory

    def tensor(self) -> torch.Tensor:
        """The buffer; it must not be used after `close`."""
        memory = (ctypes.c_int8 * self._length).from_address(self._address)
        return torch.frombuffer(memory, dtype=torch.int8)

    def close(self) -> None:
        if self._address:
            unmap_memory(self._address, self._length)
            self._address = 0


class CudaAliasedMemory:
    """The GPU's buffer: two window halves lie under the spilled ranges of all regions."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        index = device.index
        found = mapping_granularity(index)
        if granularity() % found:
            raise OverspillError(
                f"this GPU maps memory in pieces of {format_size(found)}, and spill was planned for "
                f"{format_size(granularity())}. Remove spill_bytes"
            )
        self._device = device
        self._stack = ExitStack()
        try:
            self._range = AddressRange(index, geometry.buffer_bytes)
            self._stack.callback(self._range.close)
            halves = [self._create(geometry.half_bytes) for _ in range(geometry.num_halves)]
            for region in range(geometry.num_regions):
                self._range.map(region * geometry.region_bytes, self._create(geometry.resident_bytes))
                self._range.map(geometry.spilled_offset(region), halves[geometry.half_of(region)])
        except BaseException:
            self._stack.close()
            raise

    def _create(self, num_bytes: int) -> PhysicalMemory:
        memory = PhysicalMemory(self._device.index, num_bytes)
        # Not released at once, although mappings would keep it alive: a window half is mapped many times.
        self._stack.callback(memory.release)
        return memory

    def tensor(self) -> torch.Tensor:
        """The buffer, zeroed: memory of an earlier process may hold NaN."""
        return self._range.tensor().zero_()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._stack.close()
