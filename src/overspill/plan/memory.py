"""How GPU memory and RAM are divided for one way to serve a context."""

from dataclasses import dataclass

from overspill.kv.spill.geometry import (
    CUDA_GRANULARITY,
    block_step,
    least_spilled_blocks,
    most_spilled_blocks,
    num_resident_blocks,
    num_spilled_blocks,
    window_bytes,
)
from overspill.model.kv import KVGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSplit:
    """One rank's KV: what is resident, what the window takes, and what lies in RAM."""

    resident_bytes: int
    window_bytes: int
    spilled_bytes: int

    @property
    def gpu_bytes(self) -> int:
        return self.resident_bytes + self.window_bytes


def split_kv(geometry: KVGeometry, max_model_len: int, available_bytes: int, *, spill: bool) -> KvSplit | None:
    """KV for one request of `max_model_len` in so much GPU memory, with the least in RAM; None if there is no way."""
    block_bytes = geometry.bytes_per_block
    need = geometry.blocks_per_request(max_model_len) + 1  # and vLLM's null block
    if need * block_bytes <= available_bytes:
        resident = available_bytes // block_bytes * block_bytes
        return KvSplit(resident_bytes=resident, window_bytes=0, spilled_bytes=0)
    if not spill:
        return None
    page, regions = geometry.page_size_bytes, geometry.num_regions
    spilled = least_spilled_blocks(need, available_bytes, page, regions, CUDA_GRANULARITY)
    return _split(geometry, spilled, available_bytes) if spilled else None


def longest_context(geometry: KVGeometry, available_bytes: int, spill_bytes: int, limit: int) -> int:
    """The most tokens of one request, up to `limit`, with so much RAM for spilled KV.

    The more is spilled, the larger the window: beyond some point more RAM makes a context no longer.
    """
    page, regions, block_bytes = geometry.page_size_bytes, geometry.num_regions, geometry.bytes_per_block
    total = available_bytes
    if spill_bytes:
        step = block_step(page, CUDA_GRANULARITY)
        spilled = min(
            num_spilled_blocks(spill_bytes, block_bytes, step),
            most_spilled_blocks(available_bytes, page, regions, CUDA_GRANULARITY),
        )
        split = _split(geometry, spilled, available_bytes)
        total = max(total, split.resident_bytes + split.spilled_bytes)
    return geometry.longest_context(total, limit)


def _split(geometry: KVGeometry, spilled: int, available_bytes: int) -> KvSplit:
    page, regions = geometry.page_size_bytes, geometry.num_regions
    resident = num_resident_blocks(available_bytes, spilled, page, regions, CUDA_GRANULARITY)
    return KvSplit(
        resident_bytes=resident * geometry.bytes_per_block,
        window_bytes=window_bytes(spilled, page, regions),
        spilled_bytes=spilled * geometry.bytes_per_block,
    )
