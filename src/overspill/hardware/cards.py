"""Table of common cards with their data sheets' figures, for stated GPUs and for what NVML does not report."""

import difflib
import re
from dataclasses import dataclass

from overspill.figures import Known, assumed
from overspill.hardware.gpu import LINK_EFFICIENCY, link_from_pcie
from overspill.kv.sizes import MiB

# Memory that nvidia-smi shows and the driver keeps from CUDA: 360 MiB on an RTX 4090, 490 on an RTX 5090 and an A30,
# 610 on an H200, 720 on a B200; this is the middle.
DRIVER_RESERVE_BYTES = 512 * MiB


@dataclass(frozen=True, slots=True)
class Card:
    key: str  # as written after --gpu
    name: str  # as NVML reports it
    marketed_gb: int  # on the box; no card gives all of it to CUDA
    shown_mib: int  # nvidia-smi's memory.total, with ECC as the card ships
    memory_gb_s: float
    bf16_tflops: float  # dense, float32 accumulation; fp16 before compute capability 8.0
    compute_capability: tuple[int, int]
    pcie: tuple[int, int]  # generation, width
    other_names: tuple[str, ...] = ()
    link_gb_s: float | None = None  # each way, where it is not PCIe
    nvlink_gb_s: float | None = None  # to other cards, each way, on boards that always have it

    @property
    def total_bytes(self) -> int:
        """Memory CUDA reports, approximately."""
        return self.shown_mib * MiB - DRIVER_RESERVE_BYTES


# Speeds are from NVIDIA's data sheets and architecture white papers, named above each group. Many sheets give only
# tensor rates with sparsity; those are halved. GeForce cards accumulate in float32 at half the rate of the same chip
# sold for workstations, hence the RTX 4090 below the RTX 6000 Ada.
# shown_mib is nvidia-smi's figure as users of the cards posted it; ECC on GDDR6 takes a sixteenth (L4, L40S, A10, T4).
CARDS = (
    # GeForce RTX 3060 product page: 12.7 TFLOPS float32, twice that on tensor cores.
    Card("rtx3060", "NVIDIA GeForce RTX 3060", 12, 12288, 360, 25.5, (8, 6), (4, 16), ("3060", "RTX 3060 12GB")),
    # NVIDIA Ampere GA102 GPU Architecture white paper, appendix A.
    Card("rtx3090", "NVIDIA GeForce RTX 3090", 24, 24576, 936, 71.2, (8, 6), (4, 16), ("3090",)),
    # GeForce RTX 4060 Ti product page: 22.1 TFLOPS float32, twice that on tensor cores; eight lanes only.
    Card("rtx4060ti", "NVIDIA GeForce RTX 4060 Ti", 16, 16380, 288, 44.1, (8, 9), (4, 8),
         ("4060 Ti", "RTX 4060 Ti 16GB")),
    # GeForce RTX 4070 Ti SUPER product page: 44.1 TFLOPS float32, twice that on tensor cores.
    Card("rtx4070tisuper", "NVIDIA GeForce RTX 4070 Ti SUPER", 16, 16376, 672, 88.2, (8, 9), (4, 16),
         ("4070 Ti SUPER",)),
    # NVIDIA Ada GPU Architecture white paper, appendices.
    Card("rtx4080", "NVIDIA GeForce RTX 4080", 16, 16376, 717, 97.5, (8, 9), (4, 16), ("4080",)),
    Card("rtx4090", "NVIDIA GeForce RTX 4090", 24, 24564, 1008, 165.2, (8, 9), (4, 16), ("4090",)),
    # NVIDIA RTX Blackwell GPU Architecture white paper, appendices.
    Card("rtx5070ti", "NVIDIA GeForce RTX 5070 Ti", 16, 16303, 896, 87.9, (12, 0), (5, 16), ("5070 Ti",)),
    Card("rtx5080", "NVIDIA GeForce RTX 5080", 16, 16303, 960, 112.6, (12, 0), (5, 16), ("5080",)),
    Card("rtx5090", "NVIDIA GeForce RTX 5090", 32, 32607, 1792, 209.5, (12, 0), (5, 16), ("5090",)),
    # Data sheets NVIDIA RTX A2000, A4000, A4500, A5000, A6000.
    Card("a2000", "NVIDIA RTX A2000 12GB", 12, 12282, 288, 31.9, (8, 6), (4, 16), ("RTX A2000",)),
    Card("a4000", "NVIDIA RTX A4000", 16, 16376, 448, 76.7, (8, 6), (4, 16)),
    Card("a4500", "NVIDIA RTX A4500", 20, 20470, 640, 94.6, (8, 6), (4, 16)),
    Card("a5000", "NVIDIA RTX A5000", 24, 24564, 768, 111.1, (8, 6), (4, 16)),
    Card("a6000", "NVIDIA RTX A6000", 48, 49140, 768, 154.8, (8, 6), (4, 16)),
    # Data sheet NVIDIA RTX 6000 Ada Generation.
    Card("rtx6000ada", "NVIDIA RTX 6000 Ada Generation", 48, 49140, 960, 364.2, (8, 9), (4, 16), ("6000 Ada",)),
    # NVIDIA RTX Blackwell PRO GPU Architecture white paper: 126.0 TFLOPS float32, four times that on tensor cores.
    Card("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, 97887, 1792, 503.8, (12, 0), (5, 16),
         ("RTX PRO 6000 Blackwell", "PRO 6000")),
    # Data sheets NVIDIA T4, L4, L40S, A10, A30.
    Card("t4", "Tesla T4", 16, 15360, 320, 65, (7, 5), (3, 16)),
    Card("l4", "NVIDIA L4", 24, 23034, 300, 121, (8, 9), (4, 16)),
    Card("l40s", "NVIDIA L40S", 48, 46068, 864, 362, (8, 9), (4, 16)),
    Card("a10", "NVIDIA A10", 24, 23028, 600, 125, (8, 6), (4, 16)),
    Card("a30", "NVIDIA A30", 24, 24576, 933, 165, (8, 0), (4, 16)),
    # Data sheet NVIDIA V100: the PCIe card's 112 TFLOPS, the lower figure.
    Card("v100-16gb", "Tesla V100-PCIE-16GB", 16, 16384, 900, 112, (7, 0), (3, 16), ("Tesla V100-SXM2-16GB",)),
    Card("v100-32gb", "Tesla V100-PCIE-32GB", 32, 32768, 900, 112, (7, 0), (3, 16), ("Tesla V100-SXM2-32GB",)),
    # Data sheet NVIDIA A100; at 80 GB the PCIe card's memory bandwidth, the lower figure.
    Card("a100-40gb", "NVIDIA A100-PCIE-40GB", 40, 40960, 1555, 312, (8, 0), (4, 16), ("NVIDIA A100-SXM4-40GB",)),
    Card("a100-80gb", "NVIDIA A100 80GB PCIe", 80, 81920, 1935, 312, (8, 0), (4, 16), ("NVIDIA A100-SXM4-80GB",)),
    # Data sheets NVIDIA H100 and H200.
    Card("h100-pcie", "NVIDIA H100 PCIe", 80, 81559, 2000, 756, (9, 0), (5, 16)),
    Card("h100-sxm", "NVIDIA H100 80GB HBM3", 80, 81559, 3350, 989, (9, 0), (5, 16), ("H100 SXM5",),
         nvlink_gb_s=450),
    Card("h200", "NVIDIA H200", 141, 143771, 4800, 989, (9, 0), (5, 16), ("H200 SXM",), nvlink_gb_s=450),
    # Data sheet NVIDIA GH200 Grace Hopper Superchip, 96 GB HBM3: NVLink-C2C of 900 GB/s, both ways together. The 480GB
    # and 120GB in NVML's names are the CPU's memory.
    Card("gh200", "NVIDIA GH200 480GB", 96, 97871, 4000, 989, (9, 0), (5, 16), ("NVIDIA GH200 120GB", "GH200 96GB"),
         link_gb_s=450),
    # Data sheet NVIDIA DGX B200, an eighth of it.
    Card("b200", "NVIDIA B200", 180, 183359, 8000, 2250, (10, 0), (5, 16), nvlink_gb_s=900),
)  # fmt: skip

_FILLERS = re.compile(r"nvidia|geforce|tesla|quadro|generation|[^a-z0-9]")


def _plain(name: str) -> str:
    """A card name normalised for comparison. "Laptop GPU" stays, since that is a different chip."""
    return _FILLERS.sub("", name.lower())


def _spellings(card: Card) -> set[str]:
    """Normalised names of a card; workstation cards also without the leading RTX."""
    plain = {_plain(name) for name in (card.key, card.name, *card.other_names)}
    return plain | {name.removeprefix("rtx") for name in plain if name.startswith("rtxa")}


_BY_SPELLING = {spelling: card for card in CARDS for spelling in _spellings(card)}


def find_card(name: str) -> Card | None:
    return _BY_SPELLING.get(_plain(name))


def nearest_cards(name: str, count: int = 3) -> list[str]:
    """Keys of the cards that the name may have meant."""
    plain = _plain(name)
    family = [card.key for spelling, card in _BY_SPELLING.items() if plain and spelling.startswith(plain)]
    alike = family or [_BY_SPELLING[near].key for near in difflib.get_close_matches(plain, _BY_SPELLING, n=2 * count)]
    return list(dict.fromkeys(alike))[:count]


def card_in_machine(nvml_name: str, shown_bytes: int) -> Card | None:
    """The row for a card that NVML names; memory must match too, since one name has several (RTX 3060, RTX 4060 Ti)."""
    card = find_card(nvml_name)
    if card is None or abs(shown_bytes - card.shown_mib * MiB) > 0.1 * card.shown_mib * MiB:
        return None
    return card


def link_of_card(card: Card, generation: Known[int] | None, width: Known[int] | None) -> Known[int]:
    """Rate of the card's link to RAM: its own link where it has one, else PCIe as detected or stated."""
    if card.link_gb_s is None:
        return link_from_pcie(generation, width)
    note = f"{LINK_EFFICIENCY:.0%} of what the data sheet of the {card.name} says"
    return assumed(int(card.link_gb_s * 1e9 * LINK_EFFICIENCY), note)


def modest_card(total_bytes: int) -> Card:
    """The card of slowest memory among those nearest in memory size: a plan had better promise too little."""
    gap = min(abs(card.marketed_gb * 1024 * MiB - total_bytes) for card in CARDS)
    alike = [card for card in CARDS if abs(card.marketed_gb * 1024 * MiB - total_bytes) == gap]
    return min(alike, key=lambda card: card.memory_gb_s)


# Dense bf16 FLOP (fp16 before 8.0) per CUDA core and clock, with float32 accumulation, from the same white papers:
# 82 SMs x 128 cores x 4 x 1.695 GHz give the 71.2 TFLOPS of an RTX 3090.
_FLOP_PER_CORE_CLOCK = {
    (7, 0): 16, (7, 5): 16, (8, 0): 32, (8, 6): 8, (8, 9): 8, (9, 0): 32, (10, 0): 64, (10, 3): 64, (12, 0): 8,
}  # fmt: skip
_HALVED_ON_GEFORCE = {(7, 5), (8, 6), (8, 9), (12, 0)}


def tensor_flops(name: str, compute_capability: tuple[int, int], cores: int, clock_mhz: int) -> int | None:
    """Dense bf16 FLOPS of a card that is not in the table; an upper bound, as few cards hold their highest clock."""
    per_core = _FLOP_PER_CORE_CLOCK.get(compute_capability)
    if per_core is None:
        return None
    if "geforce" in name.lower() and compute_capability in _HALVED_ON_GEFORCE:
        per_core //= 2
    return cores * per_core * clock_mhz * 10**6
