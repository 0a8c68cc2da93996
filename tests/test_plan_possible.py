"""Plans that could not be: refused before minutes of loading; and cards that are said to do, which must."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB
from overspill.launch.machine import plan_for, require_connector
from overspill.measure import CannotMeasure
from overspill.measure.subject import Subject
from overspill.measure.tuning import Goal, Tuning, define
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.planning.speed import Load, Machine, prefill_s
from tests import model_configs as models
from tests.test_plan import LLAMA_8B, OLMO_7B, awq, plan, plan_of, qwen3_next_weights

STATED = {"gpu": "rtx4090", "ram": 64 * GiB, "max_model_len": 8192}


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(folder)


def planned(folder: str, **settings: Any) -> Plan:
    return plan_for(folder, {**STATED, **settings})


def test_a_chunk_smaller_than_a_steps_requests_is_refused(llama_8b: str) -> None:
    with pytest.raises(OverspillError, match=r"--max-num-batched-tokens 16 is less than the 32 .* --max-num-seqs 16"):
        planned(llama_8b, max_num_batched_tokens=16, max_num_seqs=32)
    assert planned(llama_8b, max_num_batched_tokens=16).max_num_seqs == 16, "where nothing else was asked for"


def test_a_planned_chunk_has_room_for_a_token_of_each_request(llama_8b: str) -> None:
    """The plan chose 2,048 for 4,096 requests, which vLLM refuses."""
    chosen = planned(llama_8b, max_num_seqs=4096, max_model_len=1024).chosen
    assert chosen is not None and chosen.max_num_batched_tokens == 4096


def test_what_the_connector_would_refuse_is_refused(llama_8b: str) -> None:
    with pytest.raises(OverspillError, match="--park does not work with pipeline parallelism"):
        planned(llama_8b, park=True, pipeline_parallel_size=2)
    with pytest.raises(OverspillError, match="spilled KV must be registered for DMA"):
        planned(llama_8b, max_model_len=65_536, kv_options="pin=false")
    assert planned(llama_8b, max_model_len=65_536).chosen is not None
    hybrid = awq(models.qwen3_next_80b_a3b(), qwen3_next_weights())
    with pytest.raises(OverspillError, match="--drafts rewrites the state of Mamba"):
        require_connector(plan_of(hybrid, "h200", "64GiB", 8192, drafts="ngram"))
    require_connector(plan_of(hybrid, "h200", "64GiB", 8192))
    require_connector(plan_of(hybrid, "h200", "64GiB", 8192, drafts="ngram", offload_ram_bytes=0))


@pytest.mark.parametrize("groups", [(4, 8), (4, 0)])
def test_a_group_has_at_most_its_layers_in_ram(llama_8b: str, groups: tuple[int, int]) -> None:
    with pytest.raises(OverspillError, match=r"--offload-num-in-group \d is how many of the 4 layers .*; give 1 to 4"):
        planned(llama_8b, offload_groups=groups)


def test_a_size_of_gpu_memory_does_not_say_what_the_card_can_do(llama_8b: str) -> None:
    """32 GiB became a V100, which refuses bfloat16, has no KV in fp8, and shares no attention with the CPU."""
    made = planned(llama_8b, gpu="32GiB", dtype="bfloat16", max_model_len=131_072, cpu_attention="20GB/s")
    assert made.cpu_attention is not None and {way.kv_cache_dtype for way in made.ways} == {"auto", "fp8"}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_kv_in_the_models_own_type_is_shared_with_the_cpu(llama_8b: str, dtype: str) -> None:
    made = planned(llama_8b, max_model_len=131_072, kv_cache_dtype=dtype, cpu_attention="20GB/s")
    assert made.cpu_attention is not None
    assert planned(llama_8b, max_model_len=131_072, kv_cache_dtype="fp8", cpu_attention="20GB/s").cpu_attention is None


def test_cohere_models_state_their_length(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "model_max_length": 262_144}))
    made = planned(str(tmp_path), gpu="h200", max_model_len=200_000)
    assert made.facts.max_position_embeddings == 262_144 and not made.warnings
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "model_max_length": None}))
    assert planned(str(tmp_path)).facts.max_position_embeddings == 131_072


def test_a_card_that_would_do_alone_is_told_with_the_ram_for_a_parked_copy(llama_8b: str) -> None:
    small = planned(llama_8b, gpu="12GiB", ram=4 * GiB, park=True)
    said = re.search(r"Smallest card that would do alone: --gpu (\S+) --ram (\d+)GiB", refusal(small))
    assert small.chosen is None and said is not None
    assert planned(llama_8b, gpu=said[1], ram=int(said[2]) * GiB, park=True).chosen is not None
    asked = planned(llama_8b, gpu="12GiB", ram=4 * GiB, weights_ram=8 * GiB)
    assert asked.chosen is None and "alone" not in refusal(asked)


def test_bfloat16_is_refused_on_a_card_without(llama_8b: str) -> None:
    with pytest.raises(OverspillError, match=r"V100.* has 7\.0; use --dtype float16"):
        planned(llama_8b, gpu="v100-32gb", dtype="bfloat16")
    assert planned(llama_8b, gpu="v100-32gb", dtype="float16").chosen is not None


@pytest.mark.parametrize(
    ("config", "length"), [(LLAMA_8B, 131_072), (LLAMA_8B, 8192), (OLMO_7B, 4096), (models.qwen3_8b(), 32_768)]
)
@pytest.mark.parametrize("utilization", [None, 0.7])
def test_a_card_of_the_needed_size_is_just_enough(
    config: dict[str, Any], length: int, utilization: float | None
) -> None:
    small = plan(config, "12GiB", "64GiB", length, gpu_memory_utilization=utilization)
    needed = small.need_gpu_bytes
    enough, too_small = (
        plan(config, f"{size / GiB:.6f}GiB", "64GiB", length, gpu_memory_utilization=utilization)
        for size in (needed + 1000, 0.99 * needed)
    )
    assert enough.longest_on_gpu >= length > too_small.longest_on_gpu


def test_a_card_is_advised_with_the_ram_that_any_card_needs(llama_8b: str) -> None:
    made = planned(llama_8b, offload_ram=100 * GiB)
    assert not made.ways and "alone: --gpu a4500 --ram 103GiB." in refusal(made), refusal(made)
    enough = planned(llama_8b, offload_ram=100 * GiB, gpu="a4500", ram=103 * GiB)
    assert enough.chosen is not None


def test_a_fit_with_fp8_kv_only_is_tuned_if_allowed(llama_8b: str) -> None:
    """Its candidates ask for fp8, which a server does not take by itself."""
    subject = Subject(name="model", source=llama_8b)
    given = {"gpu": "rtx4090", "ram": 10 * GiB, "max_model_len": 131_072}

    def defined(**how: Any) -> Tuning:
        return define(subject, model="model", goal=Goal.TTFT, given=given, **how)

    with pytest.raises(CannotMeasure, match="fit with KV in fp8 only, which may change answers; use --allow-fp8"):
        defined()
    found = {each.label: each for each in defined(allow_fp8=True).candidates}
    assert next(iter(found)) == "plan" and "chunks of 4096" in found
    for each in found.values():
        assert each.settings["kv_cache_dtype"] == "fp8" and not each.is_exact
        assert plan_for(llama_8b, {**given, **each.settings}).recommended is not None


def test_short_chunks_wait_for_the_weights() -> None:
    machine = Machine(memory_bytes_per_s=1e12, flops=1e14, link_bytes_per_s=2.5e10)
    load = Load(weight_bytes=15 * 10**9, parameters_per_token=8 * 10**9)
    assert prefill_s(machine, load, 32_768, 8) > 32_768 / 8 * 15e9 / 1e12
    assert prefill_s(machine, load, 32_768, 8192) < 4 * prefill_s(machine, load, 8192, 8192) * 1.01
