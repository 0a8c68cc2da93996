"""Plans for models and machines that people have: what fits, what goes to RAM, what is recommended."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from overspill.figures import Origin
from overspill.hardware import parse_gpu, parse_ram
from overspill.hardware.stated import parse_link
from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.model.checkpoint import Tensor
from overspill.model.config import Config
from overspill.model.derived import derive_tensors
from overspill.model.description import describe
from overspill.model.facts import ModelFacts
from overspill.planning.arguments import vllm_args
from overspill.planning.memory import Profile
from overspill.planning.planner import Plan, make_plan, smallest_card
from overspill.planning.refusal import refusal
from overspill.planning.report import plan_as_json, plan_as_text
from overspill.planning.setup import Wishes, nothing_measured
from tests import model_configs as models

GIB = 2**30
LLAMA_8B = models.llama_3_1_8b()
OLMO_7B = models.olmo_2_7b()
QWEN_30B = models.qwen3_coder_30b_a3b()
QWEN_4B = {
    **models.qwen3_8b(), "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip


def model(config: dict[str, Any]) -> ModelFacts:
    return describe(Config(config, where="config.json"), None, name="model")


def plan_of(facts: ModelFacts, gpu: str, ram: str, max_model_len: int, *, profiles: Any = None, **wishes: Any) -> Plan:
    asked = Wishes(max_model_len=max_model_len, **wishes)
    return make_plan(facts, parse_gpu(gpu), parse_ram(ram), asked, profiles=profiles or nothing_measured)


def plan(config: dict[str, Any], gpu: str, ram: str, max_model_len: int, **wishes: Any) -> Plan:
    return plan_of(model(config), gpu, ram, max_model_len, **wishes)


def awq(config: dict[str, Any], weights: dict[str, tuple[int, ...]] | None = None) -> ModelFacts:
    """Linear layers in four bits, in groups of 128, as AutoAWQ writes them; routers and the rest stay as they are.

    `weights` are shapes by name, of a model for which there is no formula.
    """
    tensors = []
    written = Config(config, where="config.json")
    if weights is None:
        derived = derive_tensors(written, dtype="bfloat16", is_tied=False, quantization=None)
    else:
        derived = [Tensor(name=f"{name}.weight", dtype="BF16", shape=shape) for name, shape in weights.items()]
    for tensor in derived:
        name = tensor.name.removesuffix(".weight")
        if not re.search(r"layers\..*_proj$", name):
            tensors.append(tensor)
            continue
        out, inner = tensor.shape
        tensors += [
            Tensor(name=f"{name}.qweight", dtype="I32", shape=(inner, out // 8)),
            Tensor(name=f"{name}.qzeros", dtype="I32", shape=(inner // 128, out // 8)),
            Tensor(name=f"{name}.scales", dtype="F16", shape=(inner // 128, out)),
        ]
    quantised = {**config, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    return describe(Config(quantised, where="config.json"), tensors, name="model")


def qwen3_next_weights() -> dict[str, tuple[int, ...]]:
    """48 layers: every fourth with attention, the others with gated delta nets; each with 513 experts."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (151936, 2048), "lm_head": (151936, 2048)}
    for i in range(48):
        layer: dict[str, tuple[int, ...]] = {"mlp.gate": (512, 2048), "mlp.shared_expert_gate": (1, 2048)}
        if i % 4 == 3:
            layer |= {f"self_attn.{name}_proj": (512, 2048) for name in "kv"}
            layer |= {"self_attn.q_proj": (8192, 2048), "self_attn.o_proj": (2048, 4096)}  # queries and gates
        else:
            layer |= {"linear_attn.in_proj_qkvz": (12288, 2048), "linear_attn.in_proj_ba": (64, 2048)}
            layer |= {"linear_attn.conv1d": (8192, 1, 4), "linear_attn.out_proj": (2048, 4096)}
        for expert in ["shared_expert", *(f"experts.{e}" for e in range(512))]:
            layer |= {f"mlp.{expert}.gate_proj": (512, 2048), f"mlp.{expert}.up_proj": (512, 2048)}
            layer |= {f"mlp.{expert}.down_proj": (2048, 512)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def test_a_model_that_fits_stays_on_the_gpu() -> None:
    made = plan(LLAMA_8B, "24GiB", "64GiB", 32768)
    way = made.recommended
    assert way is not None and way.name == "everything on the GPU"
    assert way.kv.resident_bytes >= 32768 * 131072 + 16 * 131072
    assert way.kv.spilled_bytes == way.kv.window_bytes == way.weights.ram_bytes == 0
    assert all(other.num_mechanisms == 0 for other in made.ways), "moving to RAM what fits only loses"


def test_a_context_beyond_the_gpu_spills() -> None:
    """131,072 tokens of Llama-3.1-8B are 16 GiB of KV beside 15 GiB of weights."""
    made = plan(LLAMA_8B, "24GiB", "128GiB", 131072)
    spilled = next(way for way in made.ways if way.name == "KV spilled to RAM")
    assert spilled.kv.resident_bytes + spilled.kv.spilled_bytes >= 131072 * 131072
    assert spilled.kv.window_bytes == spilled.kv.spilled_bytes // 16, "two of 32 layers"
    total = made.facts.weights.total_bytes + spilled.kv.device_bytes + spilled.overheads.total.value
    assert total <= made.usable_gpu_bytes.value
    assert made.longest_context == 131072
    assert made.recommended is spilled, "weights in RAM would slow short requests as well"


def test_seven_billion_parameters_do_not_mean_eight_gigabytes() -> None:
    """OLMo-2-7B has 13.6 GiB of weights and, without grouped queries, half a MiB of KV a token: 16 GiB are too few."""
    made = plan(OLMO_7B, "16GiB", "30GiB", 4096)
    way = made.recommended
    assert way is not None and "RAM" in way.name
    assert way.ram_bytes + 3 * GIB <= 30 * GIB
    assert way.kv.resident_bytes + way.kv.spilled_bytes >= 4096 * 524288


def test_without_enough_ram_the_plan_gives_the_longest_context() -> None:
    made = plan(LLAMA_8B, "24GiB", "4GiB", 131072)
    assert [way for way in made.ways if way.is_exact] == []
    assert 20_000 < made.longest_context < 60_000
    shorter = plan(LLAMA_8B, "24GiB", "4GiB", made.longest_context)
    assert shorter.recommended is not None and shorter.recommended.is_exact
    assert [w for w in plan(LLAMA_8B, "24GiB", "4GiB", made.longest_context + 64).ways if w.is_exact] == []


def test_fp8_kv_is_offered_but_not_preferred_to_an_exact_way() -> None:
    made = plan(LLAMA_8B, "24GiB", "128GiB", 131072)
    assert made.recommended is not None and made.recommended.is_exact
    assert any(way.kv_cache_dtype == "fp8" for way in made.ways)
    asked = plan(LLAMA_8B, "24GiB", "128GiB", 131072, kv_cache_dtype="fp8")
    assert asked.recommended is not None and asked.recommended.kv_cache_dtype == "fp8"


def test_a_fit_with_fp8_kv_only_is_refused_with_alternatives() -> None:
    """A plan of Llama-3.1-8B for a 24 GB card and 10 GiB of RAM recommended KV in fp8, and serve started it."""
    made = plan(LLAMA_8B, "rtx4090", "10GiB", 131072)
    assert made.recommended is None and made.chosen is None
    assert made.ways and not any(way.is_exact for way in made.ways), "told all the same"
    said, told, text = refusal(made), plan_as_json(made), plan_as_text(made)
    for part in ("--kv-cache-dtype fp8, which rounds KV and so may change answers", "--ram 15GiB", "--gpu rtx5090",
                 f"--max-model-len {made.longest_context}"):  # fmt: skip
        assert part in said and part in text
    assert not told["fits"] and not told["forced"] and "vllm_args" not in told
    assert told["ways"] and not any(way["recommended"] or way["is_exact"] for way in told["ways"])
    assert "does not fit by any exact method" in text and "KV spilled to RAM, KV in fp8" in text
    assert "*" not in text and not made.warnings
    asked = plan(LLAMA_8B, "rtx4090", "10GiB", 131072, kv_cache_dtype="fp8").recommended
    assert asked is not None and asked.kv_cache_dtype == "fp8", "as the refusal says"
    assert "--kv-cache-dtype" not in refusal(plan(LLAMA_8B, "2GiB", "10GiB", 131072)), "where that does not help"


def test_rounded_kv_is_forced_with_a_warning() -> None:
    made = plan(LLAMA_8B, "rtx4090", "10GiB", 131072, force=True)
    way = made.chosen
    assert made.recommended is None and way is made.forced is made.lossy is made.ways[0]
    assert way is not None and "--kv-cache-dtype" in vllm_args(made, way)
    (warning,) = made.warnings
    assert "KV is kept in fp8, which rounds it and so may change answers" in warning
    told = plan_as_json(made)
    assert told["forced"] and not told["fits"] and not any(one["recommended"] for one in told["ways"])
    assert "* KV spilled to RAM, KV in fp8" in plan_as_text(made) and "* forced." in plan_as_text(made)
    # Where an exact way fits, there is nothing to force.
    exact = plan(LLAMA_8B, "rtx4090", "16GiB", 131072, force=True)
    assert exact.forced is None and exact.lossy is None and exact.chosen is exact.recommended is not None


def test_speeds_from_a_table_are_called_assumed() -> None:
    way = plan(LLAMA_8B, "rtx4090", "128GiB", 131072).recommended
    assert way is not None
    assert way.decode_tokens_per_s.origin is Origin.ASSUMED and way.overheads.total.origin is Origin.ASSUMED


def test_a_budget_on_a_bigger_card_is_kept() -> None:
    made = plan(LLAMA_8B, "h200", "128GiB", 131072, gpu_memory_bytes=24 * GIB)
    assert made.usable_gpu_bytes.value + made.budget.context_bytes.value < 24 * GIB
    assert made.gpu_memory_utilization == pytest.approx((24 - 0.91) / 139.9, abs=0.0005)
    assert made.recommended is not None and made.recommended.num_mechanisms


def test_more_ram_never_makes_a_plan_slower() -> None:
    speeds = []
    for ram in ("8GiB", "16GiB", "32GiB", "64GiB", "128GiB"):
        made = plan(LLAMA_8B, "24GiB", ram, 100_000)
        speeds.append(max((1 / way.request_s for way in made.ways if way.is_exact), default=0.0))
    assert speeds == sorted(speeds) and speeds[-1] > 0


# Cases that users brought.


def test_thirty_billion_parameters_in_four_bits_on_24_gb() -> None:
    """Qwen3-Coder-30B-A3B in AWQ with 128 GB of RAM: weights fit, and a context of 131,072 tokens, 12 GiB, does not."""
    facts = awq(QWEN_30B)
    assert 15 * GIB < facts.weights.total_bytes < 17 * GIB
    short = plan_of(facts, "24GB", "128GB", 32768).recommended
    assert short is not None and short.name == "everything on the GPU"
    long = plan_of(facts, "24GB", "128GB", 131072).recommended
    assert long is not None and long.name == "KV spilled to RAM" and long.weights.ram_bytes == 0
    assert long.geometry.kv_bytes_per_token == 96 * 1024
    assert plan_of(facts, "24GB", "128GB", 262144).longest_context == 262144


def test_eighty_billion_in_four_bits_spill_256k_tokens_on_48_gb() -> None:
    """Qwen3-Next-80B-A3B: KV of its 12 attention layers spills, and states of the other 36 stay. By hand:

    Weights: experts 48 x 512 x 3 x 2048 x 512 = 77.3 billion, at 4 bits and 18 / 128 bits for zeros and scales.
    A state: 32 heads x 128 x 128 numbers and 3 x 8192 of the convolution, 2 bytes each = 1,097,728 bytes. A token in
    an attention layer: 2 x 2 x 256 x 2 = 2048 bytes. So a block is 34 x 16 = 544 tokens, the least whose page,
    1,114,112 bytes, holds a state; a block of 12 layers is 13,369,344 bytes.
    Blocks: 262,144 tokens are 482, 3 groups of states with 2 each are 6, and one is vLLM's null block.
    """
    facts = awq(models.qwen3_next_80b_a3b(), qwen3_next_weights())
    experts = 48 * 512 * 3 * 2048 * 512
    assert experts * (4 + 4 / 128 + 16 / 128) / 8 < facts.weights.total_bytes < 41 * GIB
    made = plan_of(facts, "48GiB", "128GB", 262144, weights_ram_bytes=0)
    way = made.recommended
    assert way is not None and way.name == "KV spilled to RAM" and made.longest_context == 262144
    geometry = way.geometry
    assert (geometry.block_size, geometry.page_size_bytes, geometry.num_regions) == (544, 544 * 2048, 12)
    assert (geometry.blocks_per_request(262144), geometry.states_per_request) == (482 + 6, 6)
    assert geometry.kv_bytes_per_token == 12 * 2048
    block = 12 * 544 * 2048
    # A page is 17 x 64 KiB, and memory is mapped 2 MiB at a time: blocks change tiers 32 at a time.
    resident, spilled = way.kv.resident_bytes // block, way.kv.spilled_bytes // block
    assert resident % 32 == spilled % 32 == 0 and resident + spilled >= 489 > resident + spilled - 2 * 32
    assert way.kv.window_bytes == 2 * spilled * 544 * 2048
    # Of its 482 blocks the request has those in RAM that do not fit beside its states and the null block.
    streamed = (482 - (resident - 7)) * block
    assert made.gpu.link is not None
    assert way.decode_tokens_per_s.value == pytest.approx(made.gpu.link.value / streamed, rel=0.1)


def test_four_billion_parameters_on_16_gb_need_nothing() -> None:
    made = plan(QWEN_4B, "16GB", "32GB", 32768, offload_ram_bytes=0)
    assert made.recommended is not None and made.recommended.ram_bytes == 0
    assert made.recommended.name == "everything on the GPU" and "--kv-transfer-config" not in vllm_args(
        made, made.recommended
    )


def test_experts_in_ram_are_read_where_they_lie() -> None:
    """Prefetching would move all 128 of a layer's experts for the 8 that a token meets."""
    made = plan(QWEN_30B, "48GiB", "128GiB", 32768)
    best = made.recommended
    assert best is not None and best.weights.is_uva
    prefetched = next(way for way in made.ways if way.name == "weights in RAM")
    assert best.decode_tokens_per_s.value > 4 * prefetched.decode_tokens_per_s.value
    arguments = vllm_args(made, best)
    assert arguments[arguments.index("--offload-backend") + 1] == "uva"
    assert float(arguments[arguments.index("--cpu-offload-gb") + 1]) * GIB <= best.weights.ram_bytes


def test_ram_for_weights_is_told_with_what_loading_takes() -> None:
    prefetched = plan(LLAMA_8B, "16GB", "24GiB", 16384)
    assert prefetched.chosen is not None and not prefetched.chosen.weights.is_uva
    assert "5.63 GiB pinned, 11.3 GiB while they are loaded" in plan_as_text(prefetched)
    # Less RAM than loading takes: the GPU reads the weights itself, which are pinned once.
    tight = plan(LLAMA_8B, "12GB", "14GiB", 8192)
    assert tight.chosen is not None and tight.chosen.weights.is_uva
    assert "8.91 GiB pinned\n" in plan_as_text(tight)


def test_reads_in_ram_are_not_named_where_prefetching_wins() -> None:
    made = plan(LLAMA_8B, "16GiB", "64GiB", 16384)
    assert any(way.weights.ram_bytes for way in made.ways)
    for way in made.ways:
        rivals = [w for w in made.ways if w.weights.ram_bytes and not w.weights.is_uva and w.is_exact == way.is_exact]
        if way.weights.is_uva and rivals:
            assert way.request_s < max(rival.request_s for rival in rivals)


# The other way round.


def test_the_least_ram_is_enough_and_no_less_is() -> None:
    made = plan(LLAMA_8B, "24GiB", "4GiB", 131072)
    least = made.least_ram_bytes
    assert least is not None and 10 * GIB < least < 16 * GIB
    facts = model(LLAMA_8B)

    def exact(ram: int) -> bool:
        found = make_plan(facts, parse_gpu("24GiB"), parse_ram(f"{ram}B"), Wishes(max_model_len=131072))
        return any(way.is_exact for way in found.ways)

    assert exact(least) and not exact(least - 1)


def test_a_model_that_fits_needs_only_the_engines_own_ram() -> None:
    assert plan(LLAMA_8B, "24GiB", "64GiB", 8192).least_ram_bytes == 3 * GIB


def test_no_ram_is_enough_for_a_gpu_without_room_for_a_window() -> None:
    made = plan(LLAMA_8B, "2GiB", "128GiB", 131072)
    assert made.least_ram_bytes is None and made.recommended is None and made.longest_context == 0
    assert "No amount of RAM" in refusal(made) and "smaller or a quantised model" in refusal(made)


def test_cards_are_told_when_nothing_fits() -> None:
    made = plan(LLAMA_8B, "24GiB", "8GiB", 131072)
    alone, with_ram = (smallest_card(made.cards, alone=alone) for alone in (True, False))
    assert alone is not None and with_ram is not None
    assert alone.key == "a100-40gb", "16 GiB of KV and 15 of weights"
    assert with_ram.total_bytes < alone.total_bytes
    for card, ways in ((alone, "everything on the GPU"), (with_ram, "KV spilled to RAM")):
        recommended = plan(LLAMA_8B, card.key, "8GiB", 131072).recommended
        assert recommended is not None and recommended.name == ways
    assert plan(LLAMA_8B, "24GiB", "64GiB", 8192).cards == ()
    assert len(plan(LLAMA_8B, "24GiB", "64GiB", 8192, cards=True).cards) > 20


def test_a_refusal_says_need_have_and_what_would_work() -> None:
    made = plan(LLAMA_8B, "24GiB", "8GiB", 131072, kv_cache_dtype="auto")
    said = refusal(made)
    assert "\n" not in said and made.recommended is None
    for part in ("131072 tokens", "35.3 GiB of GPU memory", "24 GiB of GPU memory and 8 GiB of RAM", "--ram 15GiB",
                 f"--max-model-len {made.longest_context}", "--gpu a100-40gb"):  # fmt: skip
        assert part in said


def test_force_takes_the_way_nearest_to_fitting() -> None:
    made = plan(LLAMA_8B, "24GiB", "8GiB", 131072, kv_cache_dtype="auto", force=True)
    assert made.recommended is None and made.chosen is made.forced is not None
    assert made.forced.kv.spilled_bytes + 3 * GIB == made.least_ram_bytes
    assert "warning: the plan finds no way that fits" in plan_as_text(made) and plan_as_json(made)["forced"] is True
    assert plan(LLAMA_8B, "24GiB", "128GiB", 131072, force=True).forced is None


def test_a_context_beyond_the_models_own_is_warned_of() -> None:
    made = plan(OLMO_7B, "h200", "128GiB", 8192)
    assert made.recommended is not None and "--max-model-len 4096" in made.warnings[0]


def test_advice_never_exceeds_the_models_own_context() -> None:
    """509,936 tokens would fit in RAM, and vLLM refuses them."""
    made = plan(LLAMA_8B, "rtx4090", "64GiB", 1_048_576)
    assert made.recommended is None and made.longest_context > 131072
    assert "--max-model-len 131072." in refusal(made) and str(made.longest_context) not in refusal(made)


def test_a_refusal_says_that_weights_must_fit_on_the_gpu_once() -> None:
    """OLMo-2-7B on 12 GB got "use a smaller or a quantised model", while larger ones of other classes fit."""
    made = plan(OLMO_7B, "rtx3060", "256GiB", 1024)
    said = refusal(made)
    assert "Olmo2ForCausalLM through Transformers" in said and "smaller or a quantised model" not in said
    needed = re.search(r"the weights \(13\.6 GiB\) must fit there once\. That needs ([\d.]+) GiB of GPU memory", said)
    assert needed is not None
    for size, fits in ((float(needed[1]) + 0.1, True), (float(needed[1]) - 0.1, False)):
        assert (plan(OLMO_7B, f"{size}GiB", "256GiB", 1024).recommended is not None) == fits
    assert plan(LLAMA_8B, "rtx3060", "256GiB", 1024).recommended is not None
    assert "Transformers" not in refusal(plan(LLAMA_8B, "2GiB", "256GiB", 1024))


# What a run has measured.


def test_measured_figures_replace_assumed_ones() -> None:
    seen = Profile(non_torch_bytes=GIB, activation_bytes=2 * GIB, graph_bytes=GIB // 2, context_bytes=GIB)
    made = plan(LLAMA_8B, "24GiB", "64GiB", 8192, profiles=lambda chunk, dtype: seen if chunk == 8192 else None,
                max_num_batched_tokens=8192)  # fmt: skip
    way = made.recommended
    assert way is not None and way.overheads.activation_bytes.origin is Origin.MEASURED
    assert way.overheads.total.value == int(3.5 * GIB) and made.budget.context_bytes.value == GIB
    assert "measured, on an earlier run" in plan_as_text(made)
    assumed = plan(LLAMA_8B, "24GiB", "64GiB", 8192, max_num_batched_tokens=8192).recommended
    assert assumed is not None and assumed.kv.resident_bytes > way.kv.resident_bytes


# Wishes.


def test_ram_for_idle_kv_is_what_was_asked_for() -> None:
    for asked in (0, 5 * GIB):
        way = plan(LLAMA_8B, "24GiB", "128GiB", 131072, offload_ram_bytes=asked).recommended
        assert way is not None and way.offload_bytes == asked
    made = plan(LLAMA_8B, "24GiB", "20GiB", 131072, offload_ram_bytes=10 * GIB)
    assert not any(way.is_exact and way.kv.spilled_bytes for way in made.ways), "RAM is needed for both"
    assert made.least_ram_bytes is not None and made.least_ram_bytes > 20 * GIB


def test_smaller_batches_leave_more_for_kv() -> None:
    def resident(**wishes: Any) -> int:
        way = plan(LLAMA_8B, "24GiB", "64GiB", 8192, **wishes).recommended
        assert way is not None
        return way.kv.resident_bytes

    assert resident(max_num_batched_tokens=2048) > resident(max_num_batched_tokens=8192)
    assert resident(enforce_eager=True, max_num_batched_tokens=2048) > resident(max_num_batched_tokens=2048)
    assert resident(max_num_seqs=16) > resident(max_num_seqs=256)


# Weights in RAM, as asked.


def test_weights_in_ram_are_what_was_asked_for_in_whole_layers() -> None:
    """What was asked for went to vLLM beside a plan that had given the same RAM to KV."""
    layer = model(LLAMA_8B).weights.layer_bytes[0]
    for asked in (1, 4 * GIB, 8 * GIB):
        made = plan(LLAMA_8B, "24GiB", "32GiB", 131072, weights_ram_bytes=asked)
        assert made.recommended is not None
        for way in made.ways:
            assert asked <= way.weights.ram_bytes < asked + 2 * layer and way.weights.ram_bytes % layer == 0
            taken = way.weights.pinned_bytes + way.kv.spilled_bytes + way.offload_bytes + 3 * GIB
            assert taken <= 32 * GIB
            on_gpu = made.facts.weights.total_bytes - way.weights.saved_bytes
            assert on_gpu + way.kv.device_bytes + way.overheads.total.value <= made.usable_gpu_bytes.value
    more, less = (
        plan(LLAMA_8B, "24GiB", "128GiB", 131072, weights_ram_bytes=asked).recommended for asked in (4 * GIB, 0)
    )
    assert more is not None and less is not None and less.weights.ram_bytes == 0
    assert more.kv.resident_bytes > less.kv.resident_bytes + 3 * GIB, "what they leave is for KV"


def test_no_weights_in_ram_where_none_are_asked_for() -> None:
    free = plan(LLAMA_8B, "12GiB", "64GiB", 16384)
    assert free.recommended is not None and free.recommended.weights.ram_bytes
    made = plan(LLAMA_8B, "12GiB", "64GiB", 16384, weights_ram_bytes=0)
    assert made.recommended is None and made.longest_context == 0
    assert made.fitting_weights_ram is not None
    said = re.search(r"It would fit with --weights-ram (\d+)MiB", refusal(made))
    assert said is not None
    found = plan(LLAMA_8B, "12GiB", "64GiB", 16384, weights_ram_bytes=int(said[1]) * 2**20).recommended
    assert found is not None and found.weights.ram_bytes == made.fitting_weights_ram


def test_too_many_weights_for_ram_get_the_amount_that_fits() -> None:
    """Pinned, 12 GiB of weights take 14."""
    made = plan(LLAMA_8B, "24GiB", "16GiB", 65536, weights_ram_bytes=12 * GIB, kv_cache_dtype="auto")
    said = refusal(made)
    assert made.recommended is None and made.least_ram_bytes is not None and made.least_ram_bytes > 16 * GIB
    assert "with 12 GiB of weights there, as requested; there is 24 GiB of GPU memory and 16 GiB of RAM" in said
    assert f"--ram {-(-made.least_ram_bytes // GIB)}GiB" in said and "It would fit with --weights-ram" in said
    enough = plan(LLAMA_8B, "24GiB", f"{made.least_ram_bytes}B", 65536, weights_ram_bytes=12 * GIB)
    assert enough.recommended is not None


def test_more_weights_than_the_layers_have_is_refused() -> None:
    with pytest.raises(OverspillError, match=r"--weights-ram is 14 GiB, and the layers of model have 13 GiB"):
        plan(LLAMA_8B, "24GiB", "64GiB", 4096, weights_ram_bytes=14 * GIB)


def test_the_groups_of_layers_that_were_asked_for_are_planned() -> None:
    made = plan(LLAMA_8B, "24GiB", "64GiB", 65536, offload_groups=(4, 1))
    way = made.recommended
    assert way is not None and (way.weights.group_size, way.weights.num_in_group) == (4, 1)
    arguments = vllm_args(made, way)
    assert arguments[arguments.index("--offload-group-size") + 1] == "4"
    with pytest.raises(OverspillError, match="--offload-group-size 40 moves nothing to RAM"):
        plan(LLAMA_8B, "24GiB", "64GiB", 65536, offload_groups=(40, 1))


# The share of the GPU.


def test_the_share_that_was_asked_for_is_what_is_planned_with() -> None:
    """A plan was made with 0.92, and vLLM started with 0.85 did not have the room."""
    usual, less = (
        plan(LLAMA_8B, "24GiB", "64GiB", 8192),
        plan(LLAMA_8B, "24GiB", "64GiB", 8192, gpu_memory_utilization=0.85),
    )
    assert usual.gpu_memory_utilization == 0.92 and less.gpu_memory_utilization == 0.85
    assert less.usable_gpu_bytes.value == int(24 * GIB * 0.85)
    assert less.recommended is not None and usual.recommended is not None
    assert usual.recommended.kv.resident_bytes - less.recommended.kv.resident_bytes > 1.6 * GIB
    arguments = vllm_args(less, less.recommended)
    assert arguments[arguments.index("--gpu-memory-utilization") + 1] == "0.8500"
    limit, context = less.budget.limit_bytes, less.budget.context_bytes
    assert limit.value < 24 * GIB and "by --gpu-memory-utilization" in limit.note
    assert less.usable_gpu_bytes.value + context.value <= limit.value, "CUDA's context comes on top"


def test_a_share_that_is_not_free_is_lowered_with_a_warning() -> None:
    made = plan(LLAMA_8B, "24GiB", "64GiB", 8192, gpu_memory_utilization=1.0)
    assert made.gpu_memory_utilization is not None and made.gpu_memory_utilization < 0.97
    assert f"planned with {made.gpu_memory_utilization:g}" in made.warnings[0]
    assert not plan(LLAMA_8B, "24GiB", "64GiB", 8192, gpu_memory_utilization=0.9).warnings


def test_a_share_and_a_size_of_the_gpu_are_refused_together() -> None:
    with pytest.raises(
        OverspillError, match=r"--gpu-memory 8 GiB and --gpu-memory-utilization 0.5 both say.*leave one"
    ):
        plan(LLAMA_8B, "24GiB", "64GiB", 4096, gpu_memory_bytes=8 * GIB, gpu_memory_utilization=0.5)


# What RAM makes of a GPU.


def test_the_longest_context_is_given_with_and_without_ram() -> None:
    made = plan(LLAMA_8B, "24GiB", "128GiB", 131072)
    told = plan_as_json(made)
    alone = told["longest_on_gpu_tokens"]
    assert 20_000 < alone < 60_000 and told["longest_context"] == 131072
    assert f"Longest context: {alone:,} tokens on the GPU alone, 131,072 tokens with this RAM." in plan_as_text(made)
    without = plan(LLAMA_8B, "24GiB", "3GiB", 8192, weights_ram_bytes=0, offload_ram_bytes=0, kv_cache_dtype="auto")
    assert without.longest_context == alone, "with RAM for nothing but the engine's process"
    asked = plan(LLAMA_8B, "24GiB", "128GiB", 131072, weights_ram_bytes=8 * GIB)
    assert asked.longest_on_gpu == alone, "whatever is asked of RAM"
    assert "none on the GPU alone" in plan_as_text(plan(LLAMA_8B, "12GiB", "64GiB", 16384))


def test_tokens_that_are_kept_warm_are_those_that_the_pool_holds() -> None:
    made = plan(LLAMA_8B, "24GiB", "128GiB", 131072, offload_ram_bytes=10 * GIB)
    assert plan_as_json(made)["warm_tokens"] == 10 * GIB // 131072 == 81920
    assert "Idle KV that RAM holds: 81,920 tokens" in plan_as_text(made)
    assert plan_as_json(made)["disk_tokens"] == 0 and "disk" not in plan_as_text(made).lower()
    nothing = plan(LLAMA_8B, "8GiB", "4GiB", 131072)
    assert nothing.chosen is None and plan_as_json(nothing)["warm_tokens"] == 0


def test_tokens_that_the_disk_holds_need_a_pool() -> None:
    disk = f"disk_bytes={200 * GIB}"
    made = plan(LLAMA_8B, "24GiB", "128GiB", 131072, offload_ram_bytes=10 * GIB, kv_options=disk)
    assert plan_as_json(made)["disk_tokens"] == 200 * GIB // 131072 == 1_638_400
    assert "Disk                 200 GiB" in plan_as_text(made) and "over restarts: 1,638,400." in plan_as_text(made)
    without = plan(LLAMA_8B, "24GiB", "128GiB", 131072, offload_ram_bytes=0, kv_options=disk)
    assert plan_as_json(without)["disk_bytes"] == 0 and "Disk" not in plan_as_text(without)


# Several at once.


def test_a_refusal_names_the_requests_at_once() -> None:
    """The need of 16 requests was told as if one of them had it."""
    assert "This is for 16 requests of the full length at once" in refusal(
        plan(LLAMA_8B, "24GiB", "16GiB", 32768, at_once=16)
    )
    assert "--at-once" not in refusal(plan(LLAMA_8B, "24GiB", "4GiB", 131072))


def test_requests_that_are_to_run_at_once_all_have_room() -> None:
    for gpu, at_once in (("24GiB", 1), ("24GiB", 2), ("24GiB", 4), ("48GiB", 3)):
        made = plan(LLAMA_8B, gpu, "128GiB", 65536, at_once=at_once)
        assert made.recommended is not None and plan_as_json(made)["at_once"] == at_once
        for way in made.ways:
            assert way.requests_at_once(65536) >= at_once
    one, four = (plan(LLAMA_8B, "24GiB", "128GiB", 65536, at_once=n) for n in (1, 4))
    assert one.recommended is not None and four.recommended is not None
    kv = 65536 * 131072
    more = four.recommended.kv.resident_bytes + four.recommended.kv.spilled_bytes
    assert more >= 4 * kv and four.need_gpu_bytes - one.need_gpu_bytes >= 3 * kv
    assert four.longest_on_gpu < one.longest_on_gpu / 3
    assert four.least_ram_bytes is not None and one.least_ram_bytes is not None
    assert four.least_ram_bytes > one.least_ram_bytes + 3 * kv * 0.9


def test_ways_are_ranked_by_how_fast_all_requests_are_together() -> None:
    made = plan(LLAMA_8B, "24GiB", "128GiB", 32768, at_once=8)
    way = made.recommended
    assert way is not None and way.kv.spilled_bytes
    assert [one.request_s for one in made.ways] == sorted(one.request_s for one in made.ways)
    assert way.at_once_tokens_per_s.origin is Origin.ASSUMED
    # Eight times as fast as one alone it would be, if the link had nothing to bring.
    assert way.at_once_tokens_per_s.value < 8 * way.decode_tokens_per_s.value
    streamed = 8 * way.geometry.request_bytes(32768) - way.kv.resident_bytes
    link = made.gpu.link.value
    assert way.at_once_tokens_per_s.value < 8 * link / streamed
    assert "decode of 8 requests together" in plan_as_text(made)
    fits = plan(LLAMA_8B, "48GiB", "128GiB", 8192, at_once=8).recommended
    assert fits is not None and not fits.kv.spilled_bytes
    assert fits.at_once_tokens_per_s.value > 5 * fits.decode_tokens_per_s.value


def test_no_fewer_requests_may_run_than_are_to_run_at_once() -> None:
    made = plan(LLAMA_8B, "h200", "128GiB", 1024, at_once=100)
    assert made.max_num_seqs == 100 and made.recommended is not None
    arguments = vllm_args(made, made.recommended)
    assert arguments[arguments.index("--max-num-seqs") + 1] == "100"


def test_requests_that_fit_at_once() -> None:
    way = plan(LLAMA_8B, "24GiB", "128GiB", 131072).recommended
    assert way is not None and way.requests_at_once(131072) == 1
    blocks = (way.kv.resident_bytes + way.kv.spilled_bytes) // (16 * 131072) - 1
    assert way.requests_at_once(8192) == blocks // 512
    assert 1 < way.short_requests <= 64 and way.short_tokens_per_s.value > 5 * way.decode_tokens_per_s.value


# In vLLM's words, as JSON, as text.


def test_the_flags_are_those_that_vllm_takes() -> None:
    """Parsed by vLLM's own parser, and understood by our own connector."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for config, gpu, length in (
        (LLAMA_8B, "24GiB", 131072),
        (OLMO_7B, "16GiB", 4096),
        (LLAMA_8B, "h200", 4096),
        (QWEN_30B, "48GiB", 4096),
    ):
        made = plan(config, gpu, "128GiB", length)
        for way in made.ways:
            parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
            parsed = parser.parse_args(["--model", "m", *vllm_args(made, way)])
            assert parsed.max_model_len == length
            assert parsed.offload_group_size == way.weights.group_size
            assert parsed.cpu_offload_gb == (way.weights.cpu_offload_gb if way.weights.is_uva else 0)
            assert parsed.gpu_memory_utilization == made.gpu_memory_utilization
            assert parsed.kv_cache_memory_bytes == way.kv.device_bytes
            assert parsed.max_num_seqs == 64 and parsed.enforce_eager is False
            if way.ram_bytes - way.weights.ram_bytes:
                assert parsed.kv_transfer_config is not None
                options = Options.parse(parsed.kv_transfer_config.kv_connector_extra_config)
                assert options.spill_bytes == way.kv.spilled_bytes and options.host_bytes == way.offload_bytes


def test_the_json_has_bytes_as_integers() -> None:
    told = plan_as_json(plan(LLAMA_8B, "24GiB", "128GiB", 131072))
    assert json.loads(json.dumps(told)) == told
    assert told["kv_bytes_per_token"] == 131072 and told["kv_bytes"] == 131072 * 131072
    assert told["weights_bytes"] == 16_060_522_496
    for name in ("weights_in_ram_bytes", "resident_kv_bytes", "window_bytes", "spilled_kv_bytes", "offload_bytes"):
        assert isinstance(told[name], int)
    assert told["context_bytes"]["value"] > 0 and told["least_ram_bytes"] > 10 * GIB and told["concurrency"] == {
        "131072": 1, "8192": 16,
    }  # fmt: skip
    assert told["vllm_args"][:2] == ["--max-model-len", "131072"] and told["decode_tokens_per_s"] > 0


def test_the_link_that_speeds_come_from_is_told() -> None:
    made = plan(LLAMA_8B, "rtx4090", "128GiB", 131072)
    assert re.search(r"^link +26\.8 GB/s   assumed, 85% of PCIe 4\.0 x16; --link", plan_as_text(made), re.MULTILINE)
    rate = made.gpu.link.value
    told = plan_as_json(made)["link_bytes_per_s"]
    assert told == {"value": rate, "origin": "assumed", "note": "85% of PCIe 4.0 x16"}
    stated = replace(made, gpu=replace(made.gpu, link=parse_link("25GB/s")))
    assert "25.0 GB/s   assumed, stated with --link\n" in plan_as_text(stated)


def test_the_text_says_where_numbers_come_from() -> None:
    text = plan_as_text(plan(LLAMA_8B, "24GiB", "128GiB", 131072))
    assert "KV spilled" in text and "window" in text and "assumed" in text and "* KV spilled to RAM" in text
    assert max(len(line) for line in text.splitlines()) < 120
    nothing = plan_as_text(plan(LLAMA_8B, "8GiB", "4GiB", 131072))
    assert "does not fit" in nothing and "need: " in nothing and "have: 8 GiB of GPU memory" in nothing
    assert "CUDA context" in text
    cards = plan_as_text(plan(LLAMA_8B, "24GiB", "128GiB", 131072, cards=True))
    assert re.search(r"h200 +140 GiB   on the GPU alone", cards) and re.search(r"rtx4090 .* with this RAM", cards)
