"""The parts of a plan: which layers go to RAM, what the GPU's memory holds besides, how fast it is."""

from dataclasses import replace
from typing import Any

import pytest

from overspill.figures import Origin, assumed
from overspill.hardware import parse_gpu
from overspill.kv.errors import OverspillError
from overspill.kv.spill.geometry import num_resident_blocks
from overspill.model.facts import expert_size, parameters_per_token, pinned_share
from overspill.model.kv import CacheSettings, kv_geometry
from overspill.planning.attempts import PROCESS_RAM_BYTES, peak_ram_bytes
from overspill.planning.memory import (
    KvSplit,
    Profile,
    assumed_overheads,
    gpu_budget,
    measured_overheads,
    num_graph_sizes,
    split_kv,
    table_bytes,
)
from overspill.planning.speed import UVA_TOKENS_PER_READ, Load, Machine, decode_step_s, prefill_s
from overspill.planning.weights import WeightOffload, groupings, uva_offloads
from tests import model_configs as models
from tests.model_tensors import describe_config

GIB = 2**30
LAYERS = (436 * 2**20,) * 32  # Llama-3.1-8B in bf16


def least_that_saves(num_bytes: int) -> WeightOffload | None:
    return next((one for one in groupings(LAYERS) if one.saved_bytes >= num_bytes), None)


# Weights in RAM.


def test_the_least_that_frees_enough_is_moved() -> None:
    found = least_that_saves(4 * GIB)
    # One layer less would not do: a slot of one layer stays on the GPU.
    assert found is not None and found.ram_bytes == -(-4 * GIB // LAYERS[0]) * LAYERS[0] + LAYERS[0]


@pytest.mark.parametrize("gib", [1, 3, 6, 10, 13])
def test_moved_layers_follow_vllms_rule(gib: int) -> None:
    found = least_that_saves(gib * GIB)
    assert found is not None
    moved = [i for i in range(32) if i % found.group_size >= found.group_size - found.num_in_group]
    assert list(found.layers) == moved and found.ram_bytes == len(moved) * LAYERS[0]
    assert 31 in moved or 32 % found.group_size


def test_of_equal_groupings_the_one_that_alternates_is_taken() -> None:
    found = least_that_saves(15 * LAYERS[0])
    assert found is not None and (found.group_size, found.num_in_group) == (2, 1)


def test_more_than_all_layers_cannot_be_freed() -> None:
    assert least_that_saves(14 * GIB) is None


def test_reads_in_ram_need_no_slot_and_take_the_first_layers() -> None:
    one, *_, last = uva_offloads(LAYERS)
    assert (one.layers, one.saved_bytes, one.is_uva) == ((0,), LAYERS[0], True)
    assert last.ram_bytes == sum(LAYERS)
    # vLLM goes on until it has moved as much as it was told, and one parameter more could be a large one.
    assert one.cpu_offload_gb * GIB <= one.ram_bytes < one.cpu_offload_gb * GIB + GIB / 5000


def test_pinned_weights_take_the_next_power_of_two() -> None:
    """Of Llama-3.1-8B: 224, 112, 48 and 32 MiB become 256, 128, 64 and 32."""
    assert pinned_share(describe_config(models.llama_3_1_8b())) == pytest.approx(480 / 416)
    for config in models.PUBLISHED.values():
        assert 1 <= pinned_share(describe_config(config())) <= 2


# GPU memory. Measured: H200, vLLM 0.32, Llama-3.1-8B in bf16, by benchmarks/spill.py.


def test_assumed_overheads_are_those_that_were_measured() -> None:
    facts = describe_config(models.llama_3_1_8b())
    found = assumed_overheads(facts, max_num_batched_tokens=8192, max_num_seqs=64)
    assert found.activation_bytes.value / GIB == pytest.approx(1.08, abs=0.04)
    assert found.graph_bytes.value / GIB == pytest.approx(0.21, abs=0.01), "of 19 sizes"
    shorter = assumed_overheads(facts, max_num_batched_tokens=2048, max_num_seqs=64)
    assert shorter.activation_bytes.value / GIB == pytest.approx(1.00, abs=0.03), "compiling takes as much as ever"
    eager = assumed_overheads(facts, max_num_batched_tokens=8192, max_num_seqs=64, enforce_eager=True)
    assert eager.activation_bytes.value / GIB == pytest.approx(0.84, abs=0.01)
    assert found.non_torch_bytes.value / GIB == pytest.approx(0.32, abs=0.04), "0.28 to 0.35 of three models"
    assert found.context_bytes.value / GIB == pytest.approx(0.51, abs=0.01)
    assert found.total.value == sum(
        figure.value for figure in (found.activation_bytes, found.non_torch_bytes, found.graph_bytes)
    ), "the context is not counted by vLLM"
    assert found.activation_bytes.origin is Origin.ASSUMED


@pytest.mark.parametrize(
    ("chunk", "is_eager", "gib"),
    # What stayed taken beside weights and 0.34 GiB of libraries, and the peak without graphs.
    [(8192, True, 0.52 + 0.30), (2048, True, 0.10 + 0.08), (8192, False, 0.53 + 0.38), (2048, False, 0.10 + 0.48)],
)
def test_experts_have_a_workspace_beside_what_attention_takes(chunk: int, is_eager: bool, gib: float) -> None:
    """Qwen3-Coder-30B-A3B, measured by benchmarks/prediction.py."""
    facts = describe_config(models.qwen3_30b_a3b())
    found = assumed_overheads(facts, max_num_batched_tokens=chunk, max_num_seqs=64, enforce_eager=is_eager)
    assert found.activation_bytes.value / GIB == pytest.approx(gib, abs=0.04)


def test_expected_use_stays_below_the_budget() -> None:
    """23.3 to 23.8 GB were in use of a budget of 24."""
    budget = gpu_budget(parse_gpu("h200"), 24 * 10**9, assumed(int(0.51 * GIB)))
    assert budget.used_bytes.value == budget.usable_bytes.value + int(0.51 * GIB)
    assert budget.used_bytes.value == pytest.approx(23.56e9, rel=0.01) and budget.used_bytes.origin is Origin.ASSUMED


def test_without_graphs_there_is_no_memory_for_them() -> None:
    facts = describe_config(models.llama_3_1_8b())
    found = assumed_overheads(facts, max_num_batched_tokens=2048, max_num_seqs=64, enforce_eager=True)
    assert found.graph_bytes.value == 0


@pytest.mark.parametrize(("max_num_seqs", "sizes"), [(1, 2), (4, 4), (64, 19), (128, 35), (256, 51), (1024, 51)])
def test_as_many_graphs_as_vllm_captures(max_num_seqs: int, sizes: int) -> None:
    """1, 2, 4, then every 8th up to 256 and every 16th up to 512."""
    assert num_graph_sizes(max_num_seqs) == sizes


def test_a_budget_holds_what_vllm_does_not_count_as_well() -> None:
    """Up to 0.90 GiB more than the fraction were in use."""
    gpu = parse_gpu("h200")
    found = gpu_budget(gpu, 24 * 10**9, assumed(int(0.51 * GIB)))
    assert found.gpu_memory_utilization is not None
    taken = found.gpu_memory_utilization * gpu.total_bytes.value
    assert taken + 0.90 * GIB <= 24 * 10**9 < taken + 0.91 * GIB + 2e-4 * gpu.total_bytes.value
    assert found.usable_bytes.value == pytest.approx(taken, abs=1)


def test_a_whole_card_is_used_as_vllm_does_by_default() -> None:
    assert gpu_budget(parse_gpu("h200"), None, assumed(int(0.51 * GIB))).gpu_memory_utilization == 0.92


def test_memory_that_others_use_is_not_ours() -> None:
    gpu = replace(parse_gpu("24GiB"), free_bytes=assumed(10 * GIB))
    found = gpu_budget(gpu, None, assumed(GIB // 2))
    assert 9 * GIB < found.usable_bytes.value < 9.5 * GIB and "other programs" in found.limit_bytes.note


def test_more_than_the_card_has_is_refused() -> None:
    with pytest.raises(OverspillError, match="--gpu-memory is 48 GiB, and a GPU of 24 GiB has 24 GiB; give at most"):
        gpu_budget(parse_gpu("24GiB"), 48 * GIB, assumed(GIB // 2))


def test_block_tables_are_set_aside_as_the_engine_does() -> None:
    geometry = kv_geometry(describe_config(models.llama_3_1_8b()))
    assert table_bytes(geometry, 131_072, 64) == 2 * 4 * 64 * 8192
    split = split_kv(geometry, 131_072, 6 * GIB, spill=True, granularity=2 << 20, max_num_seqs=64)
    assert split is not None and split.table_bytes == 4 << 20 and split.device_bytes <= 6 * GIB


# Parameters.


@pytest.mark.parametrize(
    ("config", "billions"),
    [(models.llama_3_1_8b(), 6.98), (models.qwen3_30b_a3b(), 2.74), (models.mixtral_8x7b(), 12.6)],
)
def test_a_token_meets_so_many_parameters(config: dict[str, Any], billions: float) -> None:
    assert parameters_per_token(describe_config(config)) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("config", "size"),
    [(models.qwen3_30b_a3b(), 768), (models.mixtral_8x7b(), 14336), (models.deepseek_v2_lite(), 1408)],
)
def test_the_size_of_an_expert_follows_from_its_weights(config: dict[str, Any], size: int) -> None:
    assert expert_size(describe_config(config)) == size


# Speed, on the same H200, with a link that was measured at 55.5 GB/s.

H200 = Machine(memory_bytes_per_s=4.8e12, flops=989e12, link_bytes_per_s=55.5e9)
TOKEN = 131_072
"""Bytes of KV."""
LLAMA = Load(
    weight_bytes=15_010_000_000, parameters_per_token=6_980_000_000, attention_flops_per_token_pair=4 * 32 * 128 * 32
)
STREAMED = {39_000: 0, 52_000: 982_000_000, 131_072: 12_000_000_000}


def long(num_tokens: int, streamed: int = 0) -> Load:
    return replace(LLAMA, kv_bytes=num_tokens * TOKEN, spilled_kv_bytes=streamed)


@pytest.mark.parametrize(
    ("num_tokens", "streamed", "milliseconds"),
    [(39_000, 0, 6.4), (131_072, 0, 9.2), (52_000, 982_000_000, 17.9), (131_072, 12_000_000_000, 219.0)],
)
def test_a_long_request_decodes_as_fast_as_was_measured(num_tokens: int, streamed: int, milliseconds: float) -> None:
    assert 1e3 * decode_step_s(H200, long(num_tokens, streamed)) == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(
    ("num_tokens", "streamed", "seconds"),
    [(39_000, 0, 1.58), (52_000, 982_000_000, 2.42), (131_072, 0, 10.8), (131_072, 12_000_000_000, 10.9)],
)
def test_a_first_token_comes_as_fast_as_was_measured(num_tokens: int, streamed: int, seconds: float) -> None:
    assert prefill_s(H200, long(num_tokens, streamed), num_tokens, 8192) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 4.83), (8, 4.99), (64, 6.05)])
def test_a_batch_takes_as_long_as_was_measured(batch: int, milliseconds: float) -> None:
    """128 tokens in and 256 out, so 256 each on average."""
    load = replace(LLAMA, num_requests=batch, kv_bytes=batch * 256 * TOKEN)
    assert 1e3 * decode_step_s(H200, load) == pytest.approx(milliseconds, rel=0.15)


def test_prefetched_weights_go_at_the_speed_of_the_link() -> None:
    """Every second layer of Llama-3.1-8B, 6.98 GB, gave 7.8 tokens/s."""
    load = replace(LLAMA, prefetched_weight_bytes=6_980_000_000)
    assert 1 / decode_step_s(H200, load) == pytest.approx(7.8, rel=0.05)


# Nine layers of Llama-3.1-8B, three in a row; 0.37 GB of KV spilled.
ROWS_OF_THREE = replace(
    LLAMA, num_layers=32, kv_bytes=16_384 * TOKEN, spilled_kv_bytes=370_000_000, prefetched_weight_bytes=3_926_016_000,
    num_prefetched_layers=9, num_prefetched_runs=3, is_eager=True,
)  # fmt: skip


def test_prefetched_layers_in_a_row_wait_for_each_other() -> None:
    """80 ms a step, and 0.91 s to the first of 16,360 tokens, by benchmarks/prediction.py."""
    assert decode_step_s(H200, ROWS_OF_THREE) == pytest.approx(0.080, rel=0.05)
    assert prefill_s(H200, ROWS_OF_THREE, 16_360, 2048) == pytest.approx(0.91, rel=0.1)
    apart = replace(ROWS_OF_THREE, num_prefetched_runs=9)
    assert prefill_s(H200, apart, 16_360, 2048) < 0.9 * prefill_s(H200, ROWS_OF_THREE, 16_360, 2048)
    # Where the GPU computes longer than the link takes, layers that lie apart cost nothing.
    there = replace(apart, prefetched_weight_bytes=0, num_prefetched_layers=0, num_prefetched_runs=0)
    assert prefill_s(H200, apart, 16_360, 16_384) == pytest.approx(prefill_s(H200, there, 16_360, 16_384), rel=0.02)


@pytest.mark.parametrize(
    ("layers", "runs"), [((), 0), ((3,), 1), ((0, 1, 2), 1), ((6, 7, 8, 15, 16, 17, 24), 3), ((1, 3, 5), 3)]
)
def test_layers_one_after_the_other_are_a_run(layers: tuple[int, ...], runs: int) -> None:
    assert WeightOffload(layers=layers, ram_bytes=1, pinned_bytes=1).num_runs == runs


def test_prefetched_weights_take_twice_their_ram_while_loading() -> None:
    """3.9 GB took 8.8 of RAM, 4.5 after what was left over had gone back; those read in RAM took 1.15 times theirs."""
    prefetched, uva = groupings(LAYERS, 480 / 416)[3], uva_offloads(LAYERS, 480 / 416)[3]
    assert prefetched.loading_bytes == 2 * prefetched.pinned_bytes
    assert uva.loading_bytes == uva.pinned_bytes
    # KV comes to RAM when the weights are there.
    assert peak_ram_bytes(prefetched, 0) == prefetched.loading_bytes + PROCESS_RAM_BYTES
    much = 3 * prefetched.pinned_bytes
    assert peak_ram_bytes(prefetched, much) == prefetched.pinned_bytes + much + PROCESS_RAM_BYTES


def test_reads_in_ram_are_slower_than_prefetching() -> None:
    """8 GiB gave 5.8 tokens/s, and 0.46 s to the first of 512."""
    moved = 8 * GIB
    load = replace(
        LLAMA, weight_bytes=LLAMA.weight_bytes - moved, uva_weight_bytes=moved, uva_prompt_weight_bytes=moved,
        uva_bytes_per_prompt_token=moved / UVA_TOKENS_PER_READ,
    )  # fmt: skip
    assert 1 / decode_step_s(H200, load) == pytest.approx(5.8, rel=0.15)
    assert prefill_s(H200, load, 512, 8192) == pytest.approx(0.46, rel=0.15)


def test_nothing_is_faster_than_the_hardware() -> None:
    for num_tokens, streamed in STREAMED.items():
        step = decode_step_s(H200, long(num_tokens, streamed))
        assert step > (15.01e9 + num_tokens * TOKEN) / 4.8e12 and step > streamed / 55.5e9


def test_a_little_spilled_kv_costs_a_piecewise_step() -> None:
    assert decode_step_s(H200, long(40_000, 1_000_000)) > decode_step_s(H200, long(40_000)) + 0.005


def test_prefill_hides_the_link_when_chunks_are_long_enough() -> None:
    spilled, there = long(100_000, 11_000_000_000), long(100_000)
    assert prefill_s(H200, spilled, 100_000, 8192) < 1.1 * prefill_s(H200, there, 100_000, 8192)
    assert prefill_s(H200, spilled, 100_000, 512) > 2 * prefill_s(H200, there, 100_000, 512)


def test_few_bytes_to_stream_do_not_make_a_fast_step() -> None:
    """21 to 29 ms for 0.3 GB: 32 layers are launched one by one."""
    little = replace(long(39_000, 285_000_000), num_layers=32)
    assert 0.015 < decode_step_s(H200, little) < 0.030
    assert decode_step_s(H200, replace(little, spilled_kv_bytes=12 * 10**9)) == pytest.approx(0.22, rel=0.05)


def test_without_graphs_layers_are_launched_one_by_one() -> None:
    eager = replace(long(39_000), num_layers=32, is_eager=True)
    assert 0.017 < decode_step_s(H200, eager) < 0.025
    experts = replace(eager, num_layers=48, has_experts=True)
    assert 0.047 < decode_step_s(H200, experts) < 0.085
    assert 0.098 < decode_step_s(H200, replace(experts, spilled_kv_bytes=3_800_000_000)) < 0.115


# What is only assumed may be more.


def test_a_request_that_barely_fits_by_assumption_spills_some_kv() -> None:
    """Llama-3.1-8B with 16,384 tokens: 2 GiB were thought to be there, 1.74 were, and vLLM refused to start."""
    geometry = kv_geometry(describe_config(models.llama_3_1_8b()), CacheSettings())

    def split(available: int, doubt: int) -> KvSplit | None:
        return split_kv(geometry, 16384, available, spill=True, granularity=2 << 20, max_num_seqs=64,
                        doubt_bytes=doubt)  # fmt: skip

    exactly = 2 * GIB + 8 * 2**20
    tight, safe = split(exactly, 0), split(exactly, GIB // 4)
    assert tight is not None and not tight.spilled_bytes
    assert safe is not None and safe.spilled_bytes
    # Even if there is a quarter GiB less, resident and spilled blocks hold it.
    less = num_resident_blocks(
        exactly - GIB // 4 - safe.table_bytes, safe.spilled_bytes // geometry.bytes_per_block,
        geometry.page_size_bytes, geometry.num_regions, 2 << 20,
    )  # fmt: skip
    assert less * geometry.bytes_per_block + safe.spilled_bytes >= 16384 * 131072 + geometry.bytes_per_block


def test_measured_overheads_need_no_safety_margin() -> None:
    facts = describe_config(models.llama_3_1_8b())
    assert assumed_overheads(facts, max_num_batched_tokens=2048, max_num_seqs=64).doubt_bytes > GIB // 4
    seen = Profile(non_torch_bytes=1, activation_bytes=2, graph_bytes=3, context_bytes=4)
    assert measured_overheads(seen).doubt_bytes == 0
