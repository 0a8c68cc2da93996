"""Where resident and spilled blocks lie, and how many of each fit: arithmetic only."""

import math
from dataclasses import dataclass

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size

NUM_HALVES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """vLLM's KV buffer, layers outermost: `num_regions` regions of `num_blocks` pages each.

    In every region the first blocks are memory of their own; the last `num_spilled` ones are addresses of a window half
    that all regions of the same parity share. What spilled blocks hold lies in RAM, in the arena.
    """

    num_blocks: int
    num_spilled: int
    num_regions: int
    page_bytes: int

    @property
    def num_resident(self) -> int:
        return self.num_blocks - self.num_spilled

    @property
    def region_bytes(self) -> int:
        return self.num_blocks * self.page_bytes

    @property
    def resident_bytes(self) -> int:
        """Of one region."""
        return self.num_resident * self.page_bytes

    @property
    def half_bytes(self) -> int:
        """Of one window half, and of one region's part of the arena."""
        return self.num_spilled * self.page_bytes

    @property
    def num_halves(self) -> int:
        return min(NUM_HALVES, self.num_regions)

    @property
    def buffer_bytes(self) -> int:
        """Addresses, not memory."""
        return self.num_regions * self.region_bytes

    def half_of(self, region: int) -> int:
        return region % self.num_halves

    def spilled_offset(self, region: int) -> int:
        """Where the region's spilled blocks begin in the buffer."""
        return region * self.region_bytes + self.resident_bytes


def block_step(page_bytes: int, granularity: int) -> int:
    """Memory is mapped in granules, so tiers change at multiples of this many blocks."""
    return granularity // math.gcd(page_bytes, granularity)


def num_spilled_blocks(spill_bytes: int, block_bytes: int, step: int) -> int:
    """Blocks whose KV fits in the RAM given; the scheduler and every worker must agree on it."""
    return spill_bytes // block_bytes // step * step


def window_bytes(num_spilled: int, page_bytes: int, num_regions: int) -> int:
    """GPU memory for the window: two layers' worth of every spilled block."""
    return min(NUM_HALVES, num_regions) * num_spilled * page_bytes


def num_resident_blocks(
    available_bytes: int, num_spilled: int, page_bytes: int, num_regions: int, granularity: int
) -> int:
    """Blocks that fit in GPU memory beside the window."""
    step = block_step(page_bytes, granularity)
    window = window_bytes(num_spilled, page_bytes, num_regions)
    resident = max(0, available_bytes - window) // (page_bytes * num_regions) // step * step
    if resident:
        return resident
    block_bytes = page_bytes * num_regions
    need = window + step * block_bytes
    per_block = min(NUM_HALVES, num_regions) * page_bytes
    most = max(0, available_bytes - step * block_bytes) // per_block // step * step
    advice = (
        f'largest spill_bytes that leaves room: "{most * block_bytes // 2**20}MiB"'
        if most
        else "even the smallest window does not fit"
    )
    raise OverspillError(
        f"spilling {num_spilled} blocks needs {format_size(need)} of GPU memory for KV ({format_size(window)} of it "
        f"the window); {format_size(available_bytes)} is there. Lower spill_bytes ({advice}), raise resident_bytes or "
        "--gpu-memory-utilization, or shorten --max-model-len."
    )
