"""Geometry of the KV buffer with spill: places and numbers of resident and spilled blocks. Arithmetic only."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

NUM_HALVES = 2
# Granularity of CUDA's mappings.
CUDA_GRANULARITY = 2 * 2**20
# Most units of GPU blocks that the window lends: moving each takes the driver some time.
_MOST_LENT = 32
# Steps that stream have few requests; with drafts each has several tokens. Larger batches run without FULL graphs.
_MOST_GRAPHED_TOKENS, _MOST_GRAPHED_DRAFTING = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """vLLM's KV buffer, layers outermost: `num_regions` regions of `num_blocks` pages each.

    In every region the first blocks have GPU memory of their own. The addresses of the last `num_spilled` blocks map
    to a window half, shared by all regions of the same parity; the content of these blocks is in RAM, in the arena.
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
        """Size of the address range, not of the memory under it."""
        return self.num_regions * self.region_bytes

    def half_of(self, region: int) -> int:
        return region % self.num_halves

    def spilled_offset(self, region: int) -> int:
        """Offset in the buffer of the region's spilled blocks."""
        return region * self.region_bytes + self.resident_bytes


def block_step(page_bytes: int, granularity: int) -> int:
    """Fewest blocks whose pages fill whole mappings; both tiers have a multiple of this."""
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
    """Fewest spilled blocks with which there are `num_blocks` in total; None if no number suffices.

    For each spilled block, the window takes a part of a resident block's memory.
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
    """Most spilled blocks whose window leaves memory for `num_resident` resident blocks."""
    step = block_step(page_bytes, granularity)
    room = available_bytes - -(-num_resident // step) * step * page_bytes * num_regions
    return max(0, room) // (min(NUM_HALVES, num_regions) * page_bytes) // step * step


@dataclass(frozen=True, slots=True)
class LentUnits:
    """Units of the loan: stretches of the last GPU blocks and of the spilled blocks, which have memory by turns."""

    geometry: Geometry
    num_blocks: int
    """GPU blocks in one unit."""
    count: int
    """Units of GPU blocks; together they take no more memory than the whole window."""
    num_spilled: int
    """Spilled blocks in one unit of the window; the last unit may have fewer."""

    @property
    def num_fixed(self) -> int:
        """GPU blocks that always have memory."""
        return self.geometry.num_resident - self.count * self.num_blocks

    @property
    def window_count(self) -> int:
        return -(-self.geometry.num_spilled // self.num_spilled)

    def blocks(self, unit: int) -> range:
        first = self.num_fixed + unit * self.num_blocks
        return range(first, first + self.num_blocks)

    def spilled(self, unit: int) -> range:
        """Block ids of one unit of the window."""
        first = self.geometry.num_resident + unit * self.num_spilled
        return range(first, min(first + self.num_spilled, self.geometry.num_blocks))

    def covered(self, num_window: int) -> int:
        """Spilled blocks in `num_window` units of the window."""
        return min(self.geometry.num_spilled, num_window * self.num_spilled)

    def beside(self, num_window: int) -> int:
        """Units of GPU blocks that can have memory while the window has `num_window` units."""
        geometry = self.geometry
        left = geometry.num_halves * (geometry.num_spilled - self.covered(num_window))
        return min(self.count, left // (self.num_blocks * geometry.num_regions))


def lent_blocks(num_spilled: int, page_bytes: int, num_regions: int, granularity: int) -> tuple[int, int]:
    """GPU blocks per unit, and the number of units for which the whole window has memory."""
    step = block_step(page_bytes, granularity)
    pages = min(NUM_HALVES, num_regions) * num_spilled
    unit = max(step, pages // num_regions // _MOST_LENT // step * step)
    return unit, pages // (unit * num_regions)


def lent_units_of(geometry: Geometry, granularity: int) -> LentUnits | None:
    """Division into units of the loan; None if the window is too small to be lent in parts."""
    page, regions = geometry.page_bytes, geometry.num_regions
    unit, count = lent_blocks(geometry.num_spilled, page, regions, granularity)
    step = block_step(page, granularity)
    spilled = max(step, unit * regions // geometry.num_halves // step * step)
    return LentUnits(geometry, unit, count, spilled) if count else None


def mapped_units(units: LentUnits, resident: Iterable[int], window: Iterable[int]) -> frozenset[int]:
    """Unit numbers as the KV buffer counts them: units of the window come after all units of GPU blocks."""
    return frozenset([*resident, *(units.count + unit for unit in window)])


def most_graphed_tokens(per_request: int) -> int:
    """Most tokens of a FULL graph with spilled KV, if a step computes `per_request` of each request."""
    return _MOST_GRAPHED_TOKENS if per_request == 1 else _MOST_GRAPHED_DRAFTING * per_request
