"""How fast plans say that spilled KV decodes: the link and the CPU side by side, in FULL graphs or in pieces."""

from dataclasses import replace
from typing import Any

import pytest

from overspill.figures import Known, assumed
from overspill.hardware import parse_gpu, parse_ram
from overspill.hardware.stated import parse_cpu_attention, parse_link
from overspill.kv.spill.geometry import most_graphed_tokens
from overspill.model.config import Config
from overspill.model.description import describe
from overspill.planning.drafts import num_drafts
from overspill.planning.planner import Plan, make_plan
from overspill.planning.report import plan_as_json, plan_as_text
from overspill.planning.setup import NO_CPU_ATTENTION, Wishes
from overspill.planning.speed import Load, Machine, decode_step_s
from overspill.planning.ways import Way
from tests import model_configs as models

LLAMA_8B = models.llama_3_1_8b()
GEMMA_2 = {
    **LLAMA_8B, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 128,
    "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_activation": "gelu",
    "layer_types": ["full_attention"] * 32,
}  # fmt: skip
FAST = parse_cpu_attention("100GB/s")


def plan(
    config: dict[str, Any], max_model_len: int = 131072, cpu: Known[int] = FAST, card: str = "h200", **wishes: Any
) -> Plan:
    facts = describe(Config(config, where="config.json"), None, name="model")
    gpu = replace(parse_gpu(card), link=parse_link("55GB/s"))
    asked = Wishes(max_model_len=max_model_len, gpu_memory_bytes=24 * 10**9, **wishes)
    return make_plan(facts, gpu, parse_ram("400GB"), asked, cpu_attention=cpu)


def spilled(made: Plan) -> Way:
    return next(way for way in made.ways if way.kv.spilled_bytes and way.is_exact and not way.weights.ram_bytes)


def step_s(made: Plan) -> float:
    return 1 / spilled(made).decode_tokens_per_s.value


def streamed(made: Plan) -> int:
    way = spilled(made)
    return way.geometry.request_bytes(made.max_model_len) - way.kv.resident_bytes + way.geometry.bytes_per_block


@pytest.mark.parametrize("length", [131072, 524288])
def test_link_and_cpu_together_carry_spilled_kv(length: int) -> None:
    made = plan(LLAMA_8B, length)
    assert step_s(made) == pytest.approx(streamed(made) / 155e9, rel=0.1)
    assert step_s(made) > streamed(made) / 155e9, "weights are read too"


def test_the_gpu_alone_decodes_at_the_links_speed() -> None:
    made = plan(LLAMA_8B, kv_options="spill_compute=gpu")
    assert step_s(made) == pytest.approx(streamed(made) / 55e9, rel=0.02)
    assert step_s(made) == step_s(plan(LLAMA_8B, cpu=NO_CPU_ATTENTION))
    assert made.cpu_attention is None and "CPU attention" not in plan_as_text(made)


def test_little_spilled_kv_costs_little_in_full_graphs() -> None:
    """In pieces, 32 layers took 21 ms however little they streamed."""
    machine = Machine(memory_bytes_per_s=4.8e12, flops=989e12, link_bytes_per_s=55e9)
    load = Load(weight_bytes=15 * 10**9, kv_bytes=5 * 10**9, spilled_kv_bytes=3 * 10**8, num_layers=32)
    alone = decode_step_s(machine, replace(load, spilled_kv_bytes=0))
    pieces, graphed = (decode_step_s(machine, replace(load, is_graphed=each)) for each in (False, True))
    assert alone < graphed < alone + 0.002 and pieces > 0.02


@pytest.mark.parametrize(
    "wishes",
    [
        {"kv_options": "spill_graphs=false"},
        {"enforce_eager": True},
        {"at_once": 33},
        {"at_once": 9, "drafts": "ngram:2"},
    ],
    ids=["pieces", "eager", "large batches", "drafts of many"],
)
def test_steps_in_pieces_leave_nothing_to_the_cpu(wishes: dict[str, Any]) -> None:
    length = 16384 if "at_once" in wishes else 131072
    with_cpu, without = (plan(LLAMA_8B, length, cpu, **wishes) for cpu in (FAST, NO_CPU_ATTENTION))
    assert spilled(with_cpu).at_once_tokens_per_s == spilled(without).at_once_tokens_per_s


@pytest.mark.parametrize("at_once, drafts", [(32, "off"), (8, "ngram:2"), (8, "ngram:16")])
def test_batches_in_graphs_share_with_the_cpu(at_once: int, drafts: str) -> None:
    made = [plan(LLAMA_8B, 16384, cpu, at_once=at_once, drafts=drafts) for cpu in (FAST, NO_CPU_ATTENTION)]
    with_cpu, without = (spilled(one).at_once_tokens_per_s.value for one in made)
    assert with_cpu > without
    assert at_once * (1 + num_drafts(drafts)) <= most_graphed_tokens(1 + num_drafts(drafts))


@pytest.mark.parametrize(
    "config", [GEMMA_2, models.gpt_oss_20b_bf16(), models.deepseek_v2_lite()], ids=["caps", "sinks", "latent"]
)
def test_layers_the_cpu_cannot_compute_stream_everything(config: dict[str, Any]) -> None:
    made = plan(config)
    assert made.cpu_attention is None and plan_as_json(made)["cpu_attention_bytes_per_s"] is None
    assert [way.decode_tokens_per_s.value for way in made.ways] == [
        way.decode_tokens_per_s.value for way in plan(config, cpu=NO_CPU_ATTENTION).ways
    ]


@pytest.mark.parametrize(
    ("card", "kv_cache_dtype", "shares"),
    [("h200", None, True), ("h200", "fp8", True), ("rtx5090", None, True), ("l40s", "fp8", False),
     ("b200", None, False), ("v100-32gb", None, False)],
)  # fmt: skip
def test_the_cpu_shares_with_flash_attention_only(card: str, kv_cache_dtype: str | None, shares: bool) -> None:
    made = plan(LLAMA_8B, 262144, card=card, kv_cache_dtype=kv_cache_dtype)
    assert (made.cpu_attention is not None) is shares
    assert (step_s(made) < 0.6 * streamed(made) / 55e9) is shares


def test_layers_with_windows_stream_beside_shared_ones() -> None:
    machine = Machine(memory_bytes_per_s=4.8e12, flops=989e12, link_bytes_per_s=55e9, cpu_bytes_per_s=100e9)
    load = Load(weight_bytes=10**9, kv_bytes=10**10, spilled_kv_bytes=10**10, num_layers=32, is_graphed=True)
    all_shared, half, none = (
        decode_step_s(machine, replace(load, shared_kv_bytes=shared)) for shared in (10**10, 5 * 10**9, 0)
    )
    assert all_shared < half < none
    assert half == pytest.approx((10**10 - 5 * 10**9 * 100 / 155) / 55e9, rel=0.05)


def test_the_plan_says_how_fast_the_cpu_is_taken_to_be() -> None:
    made = plan(LLAMA_8B)
    assert "CPU attention     100.0 GB/s   assumed, stated with --cpu-attention\n" in plan_as_text(made)
    assert plan_as_json(made)["cpu_attention_bytes_per_s"]["value"] == 100 * 10**9
    other = plan_as_text(plan(LLAMA_8B, cpu=assumed(18 * 10**9, "6 threads")))
    assert "18.0 GB/s   assumed, 6 threads; --cpu-attention states another\n" in other


def test_the_plan_says_what_a_missing_library_costs() -> None:
    made = plan(LLAMA_8B, cpu=assumed(0, "attention on the CPU was not built"))
    assert "none   all spilled KV streams: attention on the CPU was not built\n" in plan_as_text(made)
    assert "CPU attention" not in plan_as_text(plan(LLAMA_8B, 4096)), "nothing spills"
