"""Plans that could not be: refused before minutes of loading; and cards that are said to do, which must."""

import json
from typing import Any

import pytest

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB
from overspill.launch.machine import plan_for
from overspill.measure import CannotMeasure
from overspill.measure.subject import Subject
from overspill.measure.tuning import Goal, Tuning, define
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.planning.speed import Load, Machine, prefill_s
from tests import model_configs as models
from tests.test_plan import LLAMA_8B, OLMO_7B, plan

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
