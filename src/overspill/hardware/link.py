"""The link between RAM and a GPU: its speed each way, and what PCIe promises."""

from dataclasses import dataclass

from overspill.figures import Known, assumed, derived

# What remains of a link's rate after packet headers and flow control. One H200 on PCIe 5.0 x16 copies pinned
# memory at 55.3 of 63.0 GB/s (88 %); older generations stay a little lower, and a plan should not promise too much.
LINK_EFFICIENCY = 0.85
PCIE_WIDTHS = (1, 2, 4, 8, 16)

# Bytes per second of one lane: transfers per second, times what the line code leaves (8b/10b, 128b/130b, and for 6.0
# 242 of 256 bytes of a FLIT), over 8 bits. PCI Express Base Specification 6.0.
_LANE_BYTES_PER_SECOND = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
PCIE_GENERATIONS = tuple(_LANE_BYTES_PER_SECOND)


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second of large copies of pinned memory, each way alone."""

    h2d_bytes_per_second: Known[int]
    d2h_bytes_per_second: Known[int]


def same_both_ways(rate: Known[int]) -> Link:
    return Link(rate, rate)


def pcie_bytes_per_second(generation: int, width: int) -> int:
    """The rate on paper, each way. A generation newer than those known counts as the newest of them."""
    lane = _LANE_BYTES_PER_SECOND[min(max(generation, 1), max(_LANE_BYTES_PER_SECOND))]
    return int(lane * width)


def link_from_pcie(generation: Known[int] | None, width: Known[int] | None) -> Link:
    """What a copy reaches on such a link; where the link is not known, on the slowest that is still common."""
    if generation is None or width is None:
        rate = int(pcie_bytes_per_second(3, 16) * LINK_EFFICIENCY)
        return same_both_ways(assumed(rate, "PCIe link not known: taken as 3.0 x16"))
    rate = int(pcie_bytes_per_second(generation.value, width.value) * LINK_EFFICIENCY)
    note = f"{LINK_EFFICIENCY:.0%} of PCIe {generation.value}.0 x{width.value}"
    return same_both_ways(derived(rate, generation, width, note=note))
