"""The table of cards: plausible rows, and names as people write them."""

from itertools import pairwise

import pytest

from overspill.hardware.cards import CARDS, Card, card_in_machine, find_card, modest_card, nearest_cards, tensor_flops
from overspill.kv.sizes import GiB, MiB

BY_KEY = {card.key: card for card in CARDS}
every_card = pytest.mark.parametrize("card", CARDS, ids=BY_KEY)


def test_keys_and_names_are_unique() -> None:
    assert len(BY_KEY) == len(CARDS) == len({card.name for card in CARDS})
    assert all(find_card(name) is card for card in CARDS for name in (card.key, card.name, *card.other_names))


@every_card
def test_cuda_memory_is_slightly_below_the_marketed_size(card: Card) -> None:
    on_the_box = card.marketed_gb * GiB
    # ECC on GDDR6 takes a sixteenth of it.
    assert 0.88 * on_the_box < card.total_bytes < card.shown_mib * MiB <= on_the_box


@every_card
def test_speeds_are_within_what_cards_can_do(card: Card) -> None:
    assert 250 <= card.memory_gb_s <= 8000
    assert 20 <= card.bf16_tflops <= 2500
    # Between 60 (V100) and 420 (L4, RTX 6000 Ada) operations for each byte read: a digit lost or a rate with sparsity
    # would fall out.
    assert 60 <= card.bf16_tflops * 1000 / card.memory_gb_s <= 420
    generation, width = card.pcie
    assert 3 <= generation <= 5 and width in (8, 16)
    assert (7, 0) <= card.compute_capability <= (12, 0)


@pytest.mark.parametrize(
    "rising",
    [
        ("rtx3060", "rtx3090", "rtx4090", "rtx5090"),
        ("rtx4060ti", "rtx4070tisuper", "rtx4080", "rtx4090"),
        ("rtx5070ti", "rtx5080", "rtx5090", "rtxpro6000"),
        ("a2000", "a4000", "a4500", "a5000", "a6000"),
        ("t4", "v100-32gb", "a100-40gb", "a100-80gb", "h100-pcie", "h100-sxm", "h200", "b200"),
    ],
    ids=lambda keys: keys[0],
)
def test_the_better_card_of_a_line_is_nowhere_worse(rising: tuple[str, ...]) -> None:
    cards = [BY_KEY[key] for key in rising]
    for lesser, better in pairwise(cards):
        assert lesser.marketed_gb <= better.marketed_gb
        assert lesser.memory_gb_s <= better.memory_gb_s
        assert lesser.bf16_tflops <= better.bf16_tflops
        assert lesser.pcie <= better.pcie


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("rtx4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"),
        ("4070 Ti Super", "rtx4070tisuper"),
        ("RTX A6000", "a6000"),
        ("a6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("RTX PRO 6000 Blackwell", "rtxpro6000"),
        ("Tesla T4", "t4"),
        ("a100 80gb", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100 PCIe", "h100-pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
    ],
)
def test_a_card_is_found_by_any_of_its_names(written: str, key: str) -> None:
    card = find_card(written)
    assert card is not None and card.key == key


@pytest.mark.parametrize(
    "written", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "rtx", "", "a100"]
)
def test_another_card_of_a_similar_name_is_not_taken_for_it(written: str) -> None:
    assert find_card(written) is None


@pytest.mark.parametrize(
    ("written", "nearest"),
    [("rtx4900", "rtx4090"), ("a100", "a100-40gb"), ("h100", "h100-sxm"), ("v100", "v100-16gb"), ("l40", "l40s"),
     ("rtx 3090 ti", "rtx3090"), ("rtx6000", "rtx6000ada")],
)  # fmt: skip
def test_a_wrong_name_gets_the_nearest_ones(written: str, nearest: str) -> None:
    assert nearest in nearest_cards(written)


def test_a_family_lists_its_members_and_nothing_else() -> None:
    assert nearest_cards("a100") == ["a100-40gb", "a100-80gb"]


def test_nothing_is_near_to_nonsense() -> None:
    assert nearest_cards("") == nearest_cards("zzz") == []


def test_cards_of_one_name_and_other_memory_are_not_mixed_up() -> None:
    assert card_in_machine("NVIDIA GeForce RTX 4060 Ti", 16380 * MiB) is BY_KEY["rtx4060ti"]
    assert card_in_machine("NVIDIA GeForce RTX 4060 Ti", 8188 * MiB) is None
    assert card_in_machine("NVIDIA RTX A6000", 46068 * MiB) is BY_KEY["a6000"]  # with ECC switched on


def test_modest_card_takes_the_slowest_memory_of_its_size() -> None:
    assert modest_card(24 * GiB).key == "l4"
    assert modest_card(23 * GiB).key == "l4"
    assert modest_card(80 * GiB).key == "a100-80gb"
    assert modest_card(500 * GiB).key == "b200"


# Cores and boost clocks are of the same white papers as the rates, which the table has.
@pytest.mark.parametrize(
    ("key", "cores", "clock_mhz"),
    [("rtx3090", 10496, 1695), ("rtx4090", 16384, 2520), ("rtx5090", 21760, 2407), ("a6000", 10752, 1800),
     ("rtx6000ada", 18176, 2505), ("rtxpro6000", 24064, 2617), ("t4", 2560, 1590), ("a100-40gb", 6912, 1410),
     ("h100-sxm", 16896, 1830), ("b200", 18944, 1850), ("v100-16gb", 5120, 1380), ("rtx3060", 3584, 1777),
     ("rtx4060ti", 4352, 2535), ("rtx4070tisuper", 8448, 2610), ("rtx4080", 9728, 2505), ("rtx5080", 10752, 2617),
     ("rtx5070ti", 8960, 2452), ("a2000", 3328, 1200), ("a4000", 6144, 1560), ("a4500", 7168, 1650),
     ("a5000", 8192, 1695), ("l4", 7424, 2040), ("a10", 9216, 1695), ("a30", 3584, 1440), ("h100-pcie", 14592, 1620)],
)  # fmt: skip
def test_flops_from_cores_and_clock_match_the_data_sheets(key: str, cores: int, clock_mhz: int) -> None:
    card = BY_KEY[key]
    flops = tensor_flops(card.name, card.compute_capability, cores, clock_mhz)
    assert flops == pytest.approx(card.bf16_tflops * 1e12, rel=0.02)


# Width of the memory in bits and Gbit/s of each, of the same sheets.
@pytest.mark.parametrize(
    ("key", "bits", "gbit_s"),
    [("rtx3060", 192, 15), ("rtx3090", 384, 19.5), ("rtx4060ti", 128, 18), ("rtx4070tisuper", 256, 21),
     ("rtx4080", 256, 22.4), ("rtx4090", 384, 21), ("rtx5070ti", 256, 28), ("rtx5080", 256, 30), ("rtx5090", 512, 28),
     ("a2000", 192, 12), ("a4000", 256, 14), ("a4500", 320, 16), ("a5000", 384, 16), ("a6000", 384, 16),
     ("rtx6000ada", 384, 20), ("rtxpro6000", 512, 28), ("t4", 256, 10), ("l4", 192, 12.5), ("l40s", 384, 18),
     ("a10", 384, 12.5), ("a30", 3072, 2.43), ("v100-16gb", 4096, 1.754), ("a100-40gb", 5120, 2.43),
     ("a100-80gb", 5120, 3.024), ("h100-pcie", 5120, 3.186), ("h100-sxm", 5120, 5.238), ("h200", 6144, 6.4),
     ("gh200", 6144, 5.24), ("b200", 8192, 8)],
)  # fmt: skip
def test_memory_speed_follows_from_its_width_and_clock(key: str, bits: int, gbit_s: float) -> None:
    assert bits * gbit_s / 8 == pytest.approx(BY_KEY[key].memory_gb_s, rel=0.03)


def test_flops_of_an_unknown_architecture_are_not_guessed() -> None:
    assert tensor_flops("NVIDIA X1", (13, 0), 10000, 2000) is None
