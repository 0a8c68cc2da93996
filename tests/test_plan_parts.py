"""The parts of a plan: which layers go to RAM, how memory is divided, how fast it is."""

import pytest

from overspill.plan.speed import Load, Machine, decode_step_s, prefill_s
from overspill.plan.weights import NONE, offload_at_least

GIB = 2**30
LAYERS = [436 * 2**20] * 32  # Llama-3.1-8B in bf16


def test_nothing_is_moved_when_nothing_is_needed() -> None:
    assert offload_at_least(0, LAYERS) is NONE
    assert offload_at_least(-5, LAYERS) is NONE


def test_the_least_that_frees_enough_is_moved() -> None:
    found = offload_at_least(4 * GIB, LAYERS)
    assert found is not None and found.saved_bytes >= 4 * GIB
    # One layer less would not do: a slot of one layer stays on the GPU.
    assert found.ram_bytes == -(-4 * GIB // LAYERS[0]) * LAYERS[0] + LAYERS[0]


@pytest.mark.parametrize("gib", [1, 3, 6, 10, 13])
def test_what_is_moved_follows_vllms_rule(gib: int) -> None:
    found = offload_at_least(gib * GIB, LAYERS)
    assert found is not None
    moved = [i for i in range(32) if i % found.group_size >= found.group_size - found.num_in_group]
    assert found.ram_bytes == len(moved) * LAYERS[0]
    assert 31 in moved or 32 % found.group_size


def test_of_equal_groupings_the_one_that_alternates_is_taken() -> None:
    found = offload_at_least(15 * LAYERS[0], LAYERS)
    assert found is not None and (found.group_size, found.num_in_group) == (2, 1)


def test_more_than_all_layers_cannot_be_freed() -> None:
    assert offload_at_least(14 * GIB, LAYERS) is None


H200 = Machine(memory_bytes_per_s=4.8e12, flops=989e12, link_bytes_per_s=55e9)
LLAMA = Load(
    active_weight_bytes=15 * GIB, weights_in_ram_bytes=0, kv_bytes=0, spilled_kv_bytes=0,
    parameters_per_token=8_030_000_000, attention_flops_per_token_pair=4 * 32 * 128 * 32,
)  # fmt: skip


def test_a_decode_step_takes_what_the_weights_take() -> None:
    """5.0 ms were measured on an H200 with FULL graphs."""
    assert decode_step_s(H200, LLAMA) == pytest.approx(0.005, rel=0.1)


def test_spilled_kv_goes_at_the_speed_of_the_link() -> None:
    """A sketch on an H200 took 199 ms for 11.0 GB of spilled KV."""
    from dataclasses import replace

    spilled = replace(LLAMA, kv_bytes=13_100_000_000, spilled_kv_bytes=11_000_000_000)
    assert decode_step_s(H200, spilled) == pytest.approx(0.2, rel=0.02)


def test_prefill_hides_the_link_when_chunks_are_long_enough() -> None:
    """100,000 tokens took 6.5 s there, spilled or not; chunks of 512 tokens would wait for the link."""
    from dataclasses import replace

    spilled = replace(LLAMA, kv_bytes=13_100_000_000, spilled_kv_bytes=11_000_000_000)
    there = prefill_s(H200, LLAMA, 100_000, 8192)
    assert there == pytest.approx(6.5, rel=0.25)
    assert prefill_s(H200, spilled, 100_000, 8192) < 1.1 * there
    assert prefill_s(H200, spilled, 100_000, 512) > 2 * there
