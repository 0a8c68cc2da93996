"""How many blocks lie where: arithmetic, with numbers of real models."""

import pytest

from overspill.kv.spill.geometry import (
    Geometry,
    block_step,
    least_spilled_blocks,
    most_spilled_blocks,
    num_resident_blocks,
    num_spilled_blocks,
    window_bytes,
)

MIB, GIB = 2**20, 2**30
# Llama-3.1-8B in bf16: 32 layers, 16 tokens of 8 heads of 128 numbers, K and V.
PAGE, LAYERS = 16 * 8 * 128 * 2 * 2, 32
BLOCK = PAGE * LAYERS


def test_regions_lie_one_behind_the_other_and_end_in_the_window() -> None:
    geometry = Geometry(num_blocks=100, num_spilled=60, num_regions=4, page_bytes=16)
    assert geometry.num_resident == 40
    assert [geometry.spilled_offset(region) for region in range(4)] == [640, 2240, 3840, 5440]
    assert [geometry.half_of(region) for region in range(4)] == [0, 1, 0, 1]
    assert geometry.half_bytes == 960
    assert geometry.buffer_bytes == 6400


def test_a_model_of_one_layer_needs_one_half() -> None:
    geometry = Geometry(num_blocks=10, num_spilled=5, num_regions=1, page_bytes=16)
    assert geometry.num_halves == 1 and geometry.half_of(0) == 0
    assert window_bytes(5, 16, 1) == 80


@pytest.mark.parametrize(
    ("page", "step"), [(64 * 1024, 32), (2 * MIB, 1), (4 * MIB, 1), (48 * 1024, 128), (1152 * 16, 1024)]
)
def test_tiers_change_at_whole_granules(page: int, step: int) -> None:
    assert block_step(page, 2 * MIB) == step
    assert step * page % (2 * MIB) == 0


def test_llama_8b_spills_eight_kib_of_window_for_each_token() -> None:
    spilled = num_spilled_blocks(16 * GIB, BLOCK, block_step(PAGE, 2 * MIB))
    assert spilled * 16 == 131072
    assert window_bytes(spilled, PAGE, LAYERS) == 131072 * 8 * 1024


def test_what_is_left_beside_the_window_is_resident() -> None:
    spilled = 8192
    resident = num_resident_blocks(6 * GIB, spilled, PAGE, LAYERS, 2 * MIB)
    assert resident == (6 - 1) * GIB // BLOCK == 2560
    assert num_resident_blocks(GIB, spilled, PAGE, LAYERS, 2 * MIB) == 0
    assert num_resident_blocks(GIB // 2, spilled, PAGE, LAYERS, 2 * MIB) == 0


def test_the_number_of_spilled_blocks_is_a_whole_number_of_steps() -> None:
    assert num_spilled_blocks(33 * BLOCK, BLOCK, 32) == 32
    assert num_spilled_blocks(31 * BLOCK, BLOCK, 32) == 0


@pytest.mark.parametrize("tokens", [20_000, 131_072, 524_288])
@pytest.mark.parametrize("available", [2 * GIB, 6 * GIB])
def test_the_least_spill_for_a_context_is_enough_and_minimal(tokens: int, available: int) -> None:
    need = tokens // 16 + 1
    least = least_spilled_blocks(need, available, PAGE, LAYERS, 2 * MIB)
    if least is None:
        most = most_spilled_blocks(available, PAGE, LAYERS, 2 * MIB)
        assert most + num_resident_blocks(available, most, PAGE, LAYERS, 2 * MIB) < need
        return

    def total(spilled: int) -> int:
        return spilled + num_resident_blocks(available, spilled, PAGE, LAYERS, 2 * MIB)

    assert total(least) >= need
    assert least == 0 or total(least - 32) < need


def test_a_window_of_two_layers_gains_nothing_for_a_model_of_two() -> None:
    assert least_spilled_blocks(1000, GIB, MIB, 2, 2 * MIB) is None


def test_the_most_that_can_be_spilled_leaves_a_resident_block() -> None:
    most = most_spilled_blocks(GIB, PAGE, LAYERS, 2 * MIB)
    assert num_resident_blocks(GIB, most, PAGE, LAYERS, 2 * MIB) == 32
    assert num_resident_blocks(GIB, most + 32, PAGE, LAYERS, 2 * MIB) == 0
    assert most_spilled_blocks(MIB, PAGE, LAYERS, 2 * MIB) == 0
