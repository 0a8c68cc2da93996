"""A GPU and its link to RAM as a planner sees them, the GPUs a program sees, and PCIe's nominal rates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from overspill.figures import Known, assumed, derived

# Share of a link's rate left after packet headers and flow control. One H200 on PCIe 5.0 x16 copies pinned
# memory at 55.3 of 63.0 GB/s (88 %); older generations stay a little lower, and a plan should not promise too much.
LINK_EFFICIENCY = 0.85
_Figure = TypeVar("_Figure", Known[int], Known[int] | None)
PCIE_WIDTHS = (1, 2, 4, 8, 16)

# Bytes per second of one lane: transfers per second, times the payload share of the line code (8b/10b, 128b/130b, and
# for 6.0 242 of 256 bytes of a FLIT), over 8 bits. PCI Express Base Specification 6.0.
_LANE_BYTES_PER_SECOND = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
PCIE_GENERATIONS = tuple(_LANE_BYTES_PER_SECOND)


def pcie_bytes_per_second(generation: int, width: int) -> int:
    """Nominal rate, each way. Generations newer than those known count as the newest known."""
    lane = _LANE_BYTES_PER_SECOND[min(max(generation, 1), max(_LANE_BYTES_PER_SECOND))]
    return int(lane * width)


def link_from_pcie(generation: Known[int] | None, width: Known[int] | None) -> Known[int]:
    """Rate of copies over such a link; an unknown link counts as the slowest that is still common."""
    if generation is None or width is None:
        rate = int(pcie_bytes_per_second(3, 16) * LINK_EFFICIENCY)
        return assumed(rate, "PCIe link not known: taken as 3.0 x16")
    rate = int(pcie_bytes_per_second(generation.value, width.value) * LINK_EFFICIENCY)
    note = f"{LINK_EFFICIENCY:.0%} of PCIe {generation.value}.0 x{width.value}"
    return derived(rate, generation, width, note=note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; None marks what neither the driver nor the table of cards knows."""

    index: int  # NVML's, in order of PCI addresses
    uuid: str  # "" for a card that is only stated
    name: str
    total_bytes: Known[int]  # what CUDA, and so vLLM, counts as the GPU's memory
    free_bytes: Known[int]
    memory_bytes_per_second: Known[int] | None
    bf16_flops: Known[int] | None  # dense, with float32 accumulation, as vLLM computes; fp16 where there is no bf16
    compute_capability: tuple[int, int] | None
    link: Known[int]  # bytes per second of large copies of pinned memory, each way alone
    driver_version: str = ""
    nvlink: Known[int] | None = None  # bytes per second to the other GPUs, each way; None over PCIe
    numa_node: int | None = None  # the node whose CPUs and RAM are nearest
    memory_numa_node: int | None = None  # set where the GPU's own memory is a NUMA node, as on a GH200

    @property
    def is_stated(self) -> bool:
        return not self.uuid

    @property
    def peer_link(self) -> Known[int]:
        """Rate to the other GPUs; without NVLink, over the same PCIe link as spilled KV and weights."""
        return self.nvlink or self.link


def weakest(gpus: Sequence[Gpu]) -> Gpu:
    """A GPU to plan every rank for: the least of each figure, and the smallest free share, since vLLM takes the same
    share of each card."""
    first = gpus[0]
    if len(set(gpus)) == 1:
        return first
    total = _least([gpu.total_bytes for gpu in gpus])
    share = min(gpus, key=lambda gpu: gpu.free_bytes.value / gpu.total_bytes.value)
    free = int(total.value * share.free_bytes.value / share.total_bytes.value)
    nvlinks = [gpu.nvlink for gpu in gpus if gpu.nvlink is not None]
    return replace(
        first,
        name=" and ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        total_bytes=total,
        free_bytes=derived(free, share.free_bytes, note=share.free_bytes.note),
        memory_bytes_per_second=_least([gpu.memory_bytes_per_second for gpu in gpus]),
        bf16_flops=_least([gpu.bf16_flops for gpu in gpus]),
        compute_capability=min((gpu.compute_capability for gpu in gpus if gpu.compute_capability), default=None),
        link=_least([gpu.link for gpu in gpus]),
        nvlink=_least(nvlinks) if len(nvlinks) == len(gpus) else None,
    )


def _least(figures: Sequence[_Figure]) -> _Figure:
    """The smallest figure; an unknown one (None) may be less than any."""
    return min(figures, key=lambda figure: -1 if figure is None else figure.value)


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs a CUDA program sees, in its order.

    Numbers count as NVML counts, by PCI address, as vLLM takes them; CUDA itself does so only with
    CUDA_DEVICE_ORDER=PCI_BUS_ID, which matters where the cards differ. As in CUDA, the first entry that names no GPU
    ends the list. vLLM treats an empty setting as unset.
    """
    if not setting:
        return tuple(gpus)
    found: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        gpu = _named(gpus, entry)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return tuple(found)


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    alike = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]  # CUDA accepts a unique prefix
    return alike[0] if len(alike) == 1 else None
