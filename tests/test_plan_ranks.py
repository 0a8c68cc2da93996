"""Plans for several GPUs: what each rank keeps, sizes that do not divide, which GPUs, and when PCIe loses."""

from dataclasses import replace
from typing import Any

import pytest

from overspill.figures import measured
from overspill.hardware import Hardware, parse_gpu, parse_ram
from overspill.hardware.gpu import weakest
from overspill.hardware.machine import Machine
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size
from overspill.launch import machine
from overspill.launch.machine import find_device, rank_environment, require_possible
from overspill.manager.needs import Replanned, holds_of, need_of
from overspill.manager.web.rendering import fragment
from overspill.model.facts import LatentAttention
from overspill.planning.arguments import vllm_args
from overspill.planning.attempts import PROCESS_RAM_BYTES
from overspill.planning.planner import Plan, make_plan
from overspill.planning.ranks import rank_facts
from overspill.planning.refusal import refusal
from overspill.planning.report import plan_as_json, plan_as_text
from overspill.planning.setup import CPU, Wishes
from overspill.planning.speed import decode_step_s, prefill_s
from overspill.settings import SettingsError, as_flags, parse_settings
from tests import model_configs as models
from tests.test_plan import GIB, LLAMA_8B, QWEN_30B, awq, model, plan_of
from tests.test_plan_parts import H200, LLAMA

LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
}  # fmt: skip
# By hand. Keys and values of a token: 80 layers x 2 x 8 heads x 128 numbers x 2 bytes.
KV_PER_TOKEN = 80 * 2 * 8 * 128 * 2
NORMS = 2 * 8192 * 2  # of one layer, in bf16, on every rank
MATRICES = 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672)  # q, k and v, o, and three of the MLP
VOCAB = 128256 * 8192 * 2  # the embedding, and the lm_head again
# AutoAWQ: half a byte, and for each 128 a scale of 2 bytes and a zero of half a byte.
BF16, FOUR_BITS = 2 * MATRICES, MATRICES // 2 + MATRICES // 128 * 5 // 2
# Of an RTX 3090: 24 GiB less what the driver keeps, of which vLLM takes 92 %.
CARD = 24 * GIB - GIB // 2
USABLE = int(CARD * 0.92)


def rank_bytes(matrices: int, ranks: int) -> int:
    return 80 * (NORMS + matrices // ranks) + 2 * VOCAB // ranks + 8192 * 2  # and the last norm


def seventy(quantized: bool, ranks: int, max_model_len: int, ram: str = "256GiB", **wishes: Any) -> Plan:
    facts = awq(LLAMA_70B) if quantized else model(LLAMA_70B)
    return plan_of(facts, "rtx3090", ram, max_model_len, tensor_parallel_size=ranks, **wishes)


def check_rank(made: Plan) -> None:
    """What lies on one GPU, added up again, is within what vLLM may take of it."""
    way = made.chosen
    assert way is not None
    on_gpu = made.rank.weights.total_bytes - way.weights.saved_bytes + way.kv.device_bytes + way.overheads.total.value
    assert USABLE - way.geometry.bytes_per_block * 64 <= on_gpu <= USABLE == made.usable_gpu_bytes.value
    assert way.geometry.kv_bytes_per_token == KV_PER_TOKEN // made.num_ranks
    assert way.peak_ram_bytes <= made.ram_bytes.value


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("quantized", "matrices"), [(True, FOUR_BITS), (False, BF16)], ids=["4-bit", "bf16"])
def test_a_rank_has_its_part_of_llama_70b(quantized: bool, matrices: int, ranks: int) -> None:
    facts = rank_facts(awq(LLAMA_70B) if quantized else model(LLAMA_70B), ranks)
    assert facts.weights.total_bytes == rank_bytes(matrices, ranks)
    assert (facts.num_heads, facts.num_kv_heads) == (64 // ranks, 8 // ranks)


def test_four_bits_on_two_cards_hold_a_short_context() -> None:
    """18.5 of 21.6 GiB are weights on each: with some 2.4 GiB for the rest, some 7,500 tokens of KV are left."""
    assert rank_bytes(FOUR_BITS, 2) / GIB == pytest.approx(18.52, abs=0.005)
    made = seventy(True, 2, 4096)
    check_rank(made)
    assert made.recommended is not None and made.recommended.name == "everything on the GPU"
    left = USABLE - rank_bytes(FOUR_BITS, 2) - made.recommended.overheads.total.value
    assert made.longest_on_gpu == (left // (KV_PER_TOKEN // 2) // 16 - 1) * 16, "one block is vLLM's null block"
    assert 6144 < made.longest_on_gpu < 8192


def test_four_bits_on_two_cards_spill_a_long_context() -> None:
    """131,072 tokens are 40 GiB of KV, 20 on each rank, of which about 1 GiB fits."""
    assert 131072 * KV_PER_TOKEN == 40 * GIB
    made = seventy(True, 2, 131072)
    check_rank(made)
    way = made.recommended
    assert way is not None and way.name == "KV spilled to RAM"
    assert 20 * GIB <= way.kv.resident_bytes + way.kv.spilled_bytes < 21 * GIB
    assert way.kv.window_bytes == way.kv.spilled_bytes // 40, "two of 80 layers"
    # 20 of 40 GiB cross each link for a token, at 85 % of PCIe 4.0 x16.
    assert 1 / way.decode_tokens_per_s.value == pytest.approx(way.kv.spilled_bytes / 26.8e9, rel=0.03)
    assert way.connector_sizes["spill_bytes"] == 2 * way.kv.spilled_bytes, "the connector divides it again"
    found = plan_as_json(made)
    assert found["spilled_kv_bytes"] == 2 * way.kv.spilled_bytes and len(found["ranks"]) == 2
    assert sum(rank["ram_bytes"] for rank in found["ranks"]) == way.peak_ram_bytes


def test_four_bits_on_four_cards_hold_the_whole_context() -> None:
    """9.3 GiB of weights and 10 of KV are on each."""
    made = seventy(True, 4, 131072)
    check_rank(made)
    assert made.recommended is not None and made.recommended.name == "everything on the GPU"
    assert made.recommended.kv.resident_bytes >= 10 * GIB and made.longest_on_gpu == 131072


@pytest.mark.parametrize(("ranks", "on_gpu"), [(2, 18), (4, 19)])
def test_bf16_keeps_most_weights_in_ram(ranks: int, on_gpu: int) -> None:
    """131 GiB of weights: 66 or 33 for each card, of which at most so many GiB fit beside 8,192 tokens."""
    made = seventy(False, ranks, 8192)
    check_rank(made)
    way = made.recommended
    assert way is not None and way.weights.ram_bytes and not way.kv.spilled_bytes
    assert rank_bytes(BF16, ranks) - way.weights.ram_bytes < on_gpu * GIB
    layer = NORMS + BF16 // ranks
    assert way.weights.ram_bytes == len(way.weights.layers) * layer
    # Each rank reads its own part over its own link.
    assert way.decode_tokens_per_s.value < 26.8e9 / way.weights.ram_bytes
    assert plan_as_json(made)["weights_in_ram_bytes"] == ranks * way.weights.ram_bytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_with_little_ram_is_refused(ranks: int) -> None:
    made = seventy(False, ranks, 8192, ram="48GiB")
    assert made.recommended is None and made.least_ram_bytes is not None and made.least_ram_bytes > 48 * GIB
    least = -(-made.least_ram_bytes // GIB)
    said = refusal(made)
    assert f"on each of {ranks} GPUs" in said and f"Least RAM that would do: --ram {least}GiB" in said
    assert seventy(False, ranks, 8192, ram=f"{least}GiB").recommended is not None


def test_ram_is_divided_among_ranks() -> None:
    one, two = (seventy(True, ranks, 131072, ram="96GiB", offload_ram_bytes=8 * GIB) for ranks in (1, 2))
    assert one.chosen is not None and two.chosen is not None
    assert two.chosen.offload_bytes == 4 * GIB and two.chosen.connector_sizes["host_bytes"] == 8 * GIB
    assert two.chosen.peak_ram_bytes == 2 * (3 + 4) * GIB + 2 * two.chosen.kv.spilled_bytes


def test_arguments_and_text_name_the_ranks() -> None:
    made = seventy(True, 2, 4096)
    assert made.chosen is not None
    words = vllm_args(made, made.chosen)
    assert words[words.index("--tensor-parallel-size") + 1] == "2" and "--pipeline-parallel-size" not in words
    assert "--kv-cache-memory-bytes" not in words, "what NCCL takes is not known well enough"
    text = plan_as_text(made)
    assert "GPU of each rank" in text and "18.5 GiB for each rank" in text and "PCIe, if no switch is shared" in text


# What divides.


@pytest.mark.parametrize(
    ("config", "size", "why", "sizes"),
    [
        (LLAMA_70B, 3, "64 attention heads", "1, 2, 4, 8, 16"),
        (models.qwen2_5_7b(), 8, "28 attention heads", "1, 2, 4"),
        (LLAMA_8B, 64, "32 attention heads", "1, 2, 4, 8, 16"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    config: dict[str, Any], size: int, why: str, sizes: str
) -> None:
    with pytest.raises(OverspillError, match=f"--tensor-parallel-size {size} .*{why}; use one of {sizes}$"):
        rank_facts(model(config), size)


def test_fewer_kv_heads_than_ranks_are_kept_by_several() -> None:
    """Llama-3.1-8B has 8 KV heads: on 16 ranks each has one, and its matrices of keys and values."""
    eight, sixteen = (rank_facts(model(LLAMA_8B), ranks) for ranks in (8, 16))
    assert eight.num_kv_heads == sixteen.num_kv_heads == 1 and eight.caches == sixteen.caches
    norms, keys, rest = 2 * 4096 * 2, 2 * 4096 * 1024 * 2, 2 * 4096 * (2 * 4096 + 3 * 14336)
    assert sixteen.weights.layer_bytes[0] == norms + keys // 8 + rest // 16


def test_every_rank_keeps_latent_kv_and_routers_whole() -> None:
    deepseek = model(models.deepseek_v2_lite())
    half = rank_facts(deepseek, 2)
    assert isinstance(half.caches[0].cache, LatentAttention) and half.caches == deepseek.caches
    qwen = rank_facts(model(QWEN_30B), 4)
    router, norms = 128 * 2048 * 2, (2 * 2048 + 2 * 128) * 2
    assert qwen.weights.replicated_bytes[0] == router + norms
    assert qwen.weights.expert_bytes[0] == 128 * 3 * 768 * 2048 * 2 // 4


def test_stages_have_their_layers_and_one_end() -> None:
    stage = rank_facts(model(LLAMA_70B), 1, 2)
    assert stage.num_layers == len(stage.caches) == 40
    assert stage.weights.total_bytes == 40 * (NORMS + BF16) + VOCAB + 8192 * 2
    with pytest.raises(OverspillError, match="it has 80 layers, and stages must be equal; use one of 1, 2, 4, 5, 8"):
        rank_facts(model(LLAMA_70B), 1, 3)
    with pytest.raises(OverspillError, match="KV of several kinds"):
        rank_facts(model(models.gemma_3_4b()), 1, 2)


def test_stages_never_spill() -> None:
    made = plan_of(awq(LLAMA_70B), "rtx3090", "256GiB", 131072, pipeline_parallel_size=2)
    assert not any(way.kv.spilled_bytes for way in made.ways)
    short = plan_of(awq(LLAMA_70B), "rtx3090", "256GiB", 4096, pipeline_parallel_size=2)
    assert short.chosen is not None
    words = vllm_args(short, short.chosen)
    assert words[words.index("--pipeline-parallel-size") + 1] == "2" and short.chosen.offload_bytes


# Between GPUs.


def test_tensor_parallelism_over_pcie_can_lose() -> None:
    """A small model on fast cards: its all-reduces cost more than reading half of the weights saves."""
    small = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 48}
    made = plan_of(model(small), "h100-pcie", "64GiB", 4096, tensor_parallel_size=4)
    assert made.faster and made.faster[0][0] == "one GPU"
    assert "tensor parallelism over PCIe is slower here: one GPU would answer at" in made.warnings[0]
    assert f"warning: {made.warnings[0]}" in plan_as_text(made)
    over_nvlink = plan_of(model(small), "h100-sxm", "64GiB", 4096, tensor_parallel_size=4)
    assert not over_nvlink.faster and not over_nvlink.warnings
    assert not any(said == "one GPU" for said, _ in seventy(True, 2, 8192).faster), "alone, it reads weights in RAM"


def test_the_weakest_of_each_counts() -> None:
    large, small = parse_gpu("a6000"), parse_gpu("rtx4090")
    half_free = replace(large, free_bytes=measured(large.total_bytes.value // 2))
    both = weakest([half_free, small])
    assert both.total_bytes == small.total_bytes and both.link.value == min(large.link.value, small.link.value)
    assert both.free_bytes.value == small.total_bytes.value // 2, "vLLM takes the same share of both"
    assert both.memory_bytes_per_second == large.memory_bytes_per_second and both.bf16_flops == large.bf16_flops
    assert both.name == "NVIDIA RTX A6000 and NVIDIA GeForce RTX 4090"


# Which GPUs.


def found(count: int) -> Hardware:
    ram = measured(64 * GIB)
    card = parse_gpu("rtx4090")
    gpus = tuple(replace(card, index=i, uuid=f"GPU-{i}a", numa_node=i // 2) for i in range(count))
    return Hardware(Machine(ram_total_bytes=ram, cgroup_limit_bytes=None, ram_available_bytes=ram, numa_nodes=()), gpus)


def test_the_first_gpus_are_taken_or_those_that_are_named() -> None:
    def indexes(**settings: Any) -> list[int]:
        return [gpu.index for gpu in find_device({"device": "cuda", **settings}, found(4)).gpus]

    assert indexes(tensor_parallel_size=2) == [0, 1] and indexes(gpus="3") == [3]
    assert indexes(tensor_parallel_size=2, gpus="3,1") == [3, 1] == indexes(pipeline_parallel_size=2, gpus="GPU-3,1")
    assert len(find_device({"gpu": "rtx4090", "tensor_parallel_size": 8}, found(1)).gpus) == 8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, r"8 GPU\(s\) are needed .* and 4 are here"),
        ({"tensor_parallel_size": 2, "gpus": "0,7"}, "--gpus 0,7 names a GPU that is not here"),
        ({"tensor_parallel_size": 2, "gpus": "1"}, "1 are chosen with --gpus"),
        ({"gpus": "0,1"}, r"1 GPU\(s\) are needed .* and 2 are chosen"),
        ({"gpu": "rtx4090", "gpus": "0"}, "leave one out"),
    ],
)
def test_gpus_that_are_not_there_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(OverspillError, match=said):
        find_device({"device": "cuda", **settings}, found(4))


def test_vllm_sees_the_chosen_gpus() -> None:
    wishes = Wishes(max_model_len=4096, tensor_parallel_size=2, gpus="3,1")
    gpus = find_device({"device": "cuda", "tensor_parallel_size": 2, "gpus": "3,1"}, found(4)).gpus
    made = make_plan(model(LLAMA_8B), gpus, parse_ram("64GiB"), wishes)
    assert rank_environment(made) == {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert rank_environment(replace(made, wishes=replace(wishes, gpus=None))) == {}
    ranks = plan_as_json(made)["ranks"]
    assert [(rank["index"], rank["numa_node"]) for rank in ranks] == [(3, 1), (1, 0)]
    assert "GPU 3   NVIDIA GeForce RTX 4090, NUMA node 1" in plan_as_text(made)


def test_ranks_of_the_cpu_build_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_numa_nodes", lambda: ())
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    device = find_device({"device": "cpu", "tensor_parallel_size": 2}, found(0))
    assert [gpu.total_bytes.value for gpu in device.gpus] == [8 * GIB] * 2, "a quarter, for both"
    wishes = Wishes(max_model_len=4096, tensor_parallel_size=2)
    made = make_plan(model(LLAMA_8B), device.gpus, device.ram_bytes, wishes, platform=CPU)
    assert made.stand_in_bytes == 16 * GIB
    assert rank_environment(made, {}) == {"VLLM_CPU_OMP_THREADS_BIND": "2,3|5,7"}
    assert rank_environment(made, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}) == {}


def test_a_model_of_the_registry_keeps_its_ranks() -> None:
    kept = parse_settings({"tensor_parallel_size": "2", "pipeline_parallel_size": 1, "gpus": " 1, GPU-0a"})
    assert kept == {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "gpus": "1,GPU-0a"}
    assert as_flags(kept)[-2:] == ["--gpus", "1,GPU-0a"] and parse_settings({"gpus": 1}) == {"gpus": "1"}
    for wrong in ("all", "0,0", "", "0;1", True):
        with pytest.raises(SettingsError, match=r"--gpus: .* is not a list of different GPUs"):
            parse_settings({"gpus": wrong})
    with pytest.raises(SettingsError, match=r"Overspill has its own setting for .*; use --tensor-parallel-size"):
        parse_settings({"vllm_args": ["-tp", "2"]})


def test_stages_without_compiling_are_refused_on_the_cpu() -> None:
    """vLLM's second stage died at its first step."""
    wishes = Wishes(pipeline_parallel_size=2, enforce_eager=True)
    with pytest.raises(OverspillError, match="use --no-enforce-eager"):
        require_possible(wishes, parse_gpu("24GiB"), CPU)
    require_possible(wishes, parse_gpu("24GiB"))


def test_the_manager_counts_the_ram_of_all_ranks() -> None:
    made = seventy(True, 2, 4096, offload_ram_bytes=8 * GIB)
    way = made.chosen
    assert way is not None and way.offload_bytes == 4 * GIB
    need = need_of(made, {"offload_ram": 8 * GIB, "tensor_parallel_size": 2})
    assert need.least.ram_bytes == need.takes.ram_bytes == way.peak_ram_bytes
    assert need.takes.gpu_bytes == CARD, "of each GPU"
    held = holds_of(plan_as_json(made))
    assert held.ram_bytes >= 8 * GIB + 2 * PROCESS_RAM_BYTES


def test_elastic_kv_is_refused_on_several_gpus() -> None:
    with pytest.raises(OverspillError, match="--elastic shares one GPU"):
        require_possible(Wishes(elastic=True, tensor_parallel_size=2), parse_gpu("rtx3090"))


def test_the_page_says_what_each_gpu_has() -> None:
    made = seventy(True, 2, 131072)
    planned = Replanned(plan=made, limit=131072)
    text = " ".join(fragment("planned.html", plan=made, planned=planned).split())
    assert "Weights on each of 2 GPUs</dt><dd>18.5 GiB" in text and "KV on each GPU" in text
    assert made.chosen is not None
    assert f"KV spilled to RAM</dt><dd>{format_size(2 * made.chosen.kv.spilled_bytes)}" in text


def test_a_token_goes_through_all_stages() -> None:
    two = replace(H200, pipeline_parallel_size=2)
    assert decode_step_s(two, LLAMA) == 2 * decode_step_s(H200, LLAMA)
    assert (
        prefill_s(H200, LLAMA, 8192, 2048) < prefill_s(two, LLAMA, 8192, 2048) < 2 * prefill_s(H200, LLAMA, 8192, 2048)
    )


def test_one_gpu_without_nvlink_leaves_all_to_pcie() -> None:
    linked = parse_gpu("h100-sxm")
    assert weakest((linked, linked)).nvlink is not None
    assert weakest((linked, replace(linked, nvlink=None))).nvlink is None
