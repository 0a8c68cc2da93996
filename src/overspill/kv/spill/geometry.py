"""Geometry of the KV buffer with spill: places and numbers of resident and spilled blocks. Arithmetic only."""

import math
from dataclasses import dataclass

NUM_HALVES = 2
# Granularity of CUDA's mappings.
CUDA_GRANULARITY = 2 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """vLLM's KV buffer, layers outermost: `num_regions` regions of `num_blocks` pages each.

    In every region the first blocks have memory of their own; the last `num_spilled` ones are addresses of a window
    half, which all regions of the same parity share. The content of spilled blocks is in RAM, in the arena.
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
        """GPU memory of one region's resident blocks."""
        return self.num_resident * self.page_bytes

    @property
    def half_bytes(self) -> int:
        """Size of one window half, and of one region's part of the arena."""
        return self.num_spilled * self.page_bytes

    @property
    def num_halves(self) -> int:
        return min(NUM_HALVES, self.num_regions)

    @property
    def buffer_bytes(self) -> int:
        """Size of the address range, not of its memory."""
        return self.num_regions * self.region_bytes

    def half_of(self, region: int) -> int:
        return region % self.num_halves

    def spilled_offset(self, region: int) -> int:
        """Offset of the region's spilled blocks in the buffer."""
        return region * self.region_bytes + self.resident_bytes


def block_step(page_bytes: int, granularity: int) -> int:
    """Blocks of the smallest part that can be mapped: tiers have multiples of it."""
    return granularity // math.gcd(page_bytes, granularity)


def num_spilled_blocks(spill_bytes: int, block_bytes: int, step: int) -> int:
    """Blocks whose KV fits in `spill_bytes`; the scheduler and all workers compute the same number."""
    return spill_bytes // block_bytes // step * step


def window_bytes(num_spilled: int, page_bytes: int, num_regions: int) -> int:
    """GPU memory for the window: two layers' worth of every spilled block."""
    return min(NUM_HALVES, num_regions) * num_spilled * page_bytes


def num_resident_blocks(
    available_bytes: int, num_spilled: int, page_bytes: int, num_regions: int, granularity: int
) -> int:
    """Blocks that fit in GPU memory beside the window; may be zero."""
    step = block_step(page_bytes, granularity)
    room = available_bytes - window_bytes(num_spilled, page_bytes, num_regions)
    return max(0, room) // (page_bytes * num_regions) // step * step


def least_spilled_blocks(
    num_blocks: int, available_bytes: int, page_bytes: int, num_regions: int, granularity: int
) -> int | None:
    """The fewest spilled blocks that make `num_blocks` in all; None if no number does.

    Each spilled block takes a part of a resident block's memory, for the window.
    """
    step = block_step(page_bytes, granularity)
    gain = 1 - min(NUM_HALVES, num_regions) / num_regions
    short = num_blocks - available_bytes / (page_bytes * num_regions)
    if gain <= 0:
        return None
    about = max(0, math.ceil(short / gain)) // step * step
    for spilled in range(about, about + 4 * step, step):
        resident = num_resident_blocks(available_bytes, spilled, page_bytes, num_regions, granularity)
        if resident and resident + spilled >= num_blocks:
            return spilled
    return None


def most_spilled_blocks(
    available_bytes: int, page_bytes: int, num_regions: int, granularity: int, *, num_resident: int = 1
) -> int:
    """The most spilled blocks whose window leaves memory for `num_resident` resident ones."""
    step = block_step(page_bytes, granularity)
    room = available_bytes - -(-num_resident // step) * step * page_bytes * num_regions
    return max(0, room) // (min(NUM_HALVES, num_regions) * page_bytes) // step * step
