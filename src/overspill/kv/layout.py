"""Where a block's bytes lie in vLLM's KV buffer."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from overspill.kv.errors import OverspillError
from overspill.kv.vllm_api import KVCacheConfig

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
