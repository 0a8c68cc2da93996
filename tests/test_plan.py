"""Plans for models and machines that people have: what fits, what goes to RAM, what is recommended."""

import json
from typing import Any

import pytest

from overspill.figures import Origin
from overspill.hardware import parse_gpu, parse_ram
from overspill.kv.options import Options
from overspill.model.config import Config
from overspill.model.describe import describe
from overspill.model.facts import ModelFacts
from overspill.plan.arguments import vllm_args
from overspill.plan.planner import Plan, Wishes, make_plan
from overspill.plan.report import plan_as_json
from overspill.plan.text import plan_as_text

GIB = 2**30

# Shapes from the models' config.json.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
OLMO_7B = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def model(config: dict[str, Any]) -> ModelFacts:
    return describe(Config(config, where="config.json"), None, name="model")


def plan(config: dict[str, Any], gpu: str, ram: str, max_model_len: int, **wishes: Any) -> Plan:
    return make_plan(model(config), parse_gpu(gpu), parse_ram(ram), Wishes(max_model_len=max_model_len, **wishes))


def test_what_fits_stays_on_the_gpu() -> None:
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
    total = made.facts.weights.total_bytes + spilled.kv.gpu_bytes + spilled.overheads.total.value
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


def test_without_enough_ram_there_is_no_way_and_the_longest_context_is_told() -> None:
    made = plan(LLAMA_8B, "24GiB", "4GiB", 131072)
    assert [way for way in made.ways if way.is_exact] == []
    assert 20_000 < made.longest_context < 60_000
    shorter = plan(LLAMA_8B, "24GiB", "4GiB", made.longest_context)
    assert shorter.recommended is not None and shorter.recommended.is_exact
    assert [w for w in plan(LLAMA_8B, "24GiB", "4GiB", made.longest_context + 64).ways if w.is_exact] == []


def test_a_smaller_kv_dtype_is_offered_but_not_recommended_over_an_exact_way() -> None:
    made = plan(LLAMA_8B, "24GiB", "128GiB", 131072)
    assert made.recommended is not None and made.recommended.is_exact
    assert any(way.kv_cache_dtype == "fp8" for way in made.ways)
    asked = plan(LLAMA_8B, "24GiB", "128GiB", 131072, kv_cache_dtype="fp8")
    assert asked.recommended is not None and asked.recommended.kv_cache_dtype == "fp8"


def test_speeds_from_a_table_are_called_assumed() -> None:
    way = plan(LLAMA_8B, "rtx4090", "128GiB", 131072).recommended
    assert way is not None
    assert way.decode_tokens_per_s.origin is Origin.ASSUMED and way.overheads.total.origin is Origin.ASSUMED


def test_a_budget_on_a_bigger_card_is_kept() -> None:
    made = plan(LLAMA_8B, "h200", "128GiB", 131072, gpu_memory_bytes=24 * GIB)
    assert made.usable_gpu_bytes.value <= 24 * GIB
    assert made.gpu_memory_utilization == pytest.approx(24 / 139.8, abs=0.005)
    assert made.recommended is not None and made.recommended.num_mechanisms


def test_more_ram_never_makes_a_plan_slower() -> None:
    speeds = []
    for ram in ("8GiB", "16GiB", "32GiB", "64GiB", "128GiB"):
        made = plan(LLAMA_8B, "24GiB", ram, 100_000)
        speeds.append(max((way.decode_tokens_per_s.value for way in made.ways if way.is_exact), default=0.0))
    assert speeds == sorted(speeds) and speeds[-1] > 0


# In vLLM's words, as JSON, as text.


def test_the_flags_are_those_that_vllm_takes() -> None:
    """Parsed by vLLM's own parser, and understood by our own connector."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for config, gpu, length in ((LLAMA_8B, "24GiB", 131072), (OLMO_7B, "16GiB", 4096), (LLAMA_8B, "h200", 4096)):
        made = plan(config, gpu, "128GiB", length)
        for way in made.ways:
            parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
            parsed = parser.parse_args(["--model", "m", *vllm_args(made, way)])
            assert parsed.max_model_len == length
            assert parsed.offload_group_size == way.weights.group_size
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
    assert told["vllm_args"][:2] == ["--max-model-len", "131072"] and told["decode_tokens_per_s"] > 0


def test_the_text_says_where_numbers_come_from() -> None:
    text = plan_as_text(plan(LLAMA_8B, "24GiB", "128GiB", 131072))
    assert "KV spilled" in text and "window" in text and "assumed" in text and "* KV spilled to RAM" in text
    assert max(len(line) for line in text.splitlines()) < 120
    nothing = plan_as_text(plan(LLAMA_8B, "8GiB", "4GiB", 131072))
    assert "does not fit" in nothing
