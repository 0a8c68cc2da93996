"""RAM for idle KV: how much of it a plan takes unasked, and what a small pool is good for."""

import json
from typing import Any

import pytest

from overspill.hardware import parse_gpu, parse_ram
from overspill.kv.sizes import GiB
from overspill.launch.machine import wishes_of
from overspill.measure.candidates import find_candidates
from overspill.planning.arguments import vllm_args
from overspill.planning.planner import Plan, make_plan
from overspill.planning.report import plan_as_text
from overspill.planning.setup import Wishes
from tests.test_plan import LLAMA_8B, model


def planned(gpu: str, ram: str, max_model_len: int = 32768, **wishes: Any) -> Plan:
    made = make_plan(model(LLAMA_8B), parse_gpu(gpu), parse_ram(ram), Wishes(max_model_len=max_model_len, **wishes))
    assert made.chosen is not None
    return made


def pool(made: Plan) -> int:
    assert made.chosen is not None
    return made.chosen.offload_bytes // GiB


def options(made: Plan) -> dict[str, Any]:
    assert made.chosen is not None
    words = vllm_args(made, made.chosen)
    return dict(json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"])


def test_free_ram_is_taken_by_half() -> None:
    """Of 60 GiB: 30 for idle KV, unless the user names the RAM or the pool; 3 are the engine's process."""
    assert pool(planned("rtx4090", "60GiB", ram_given=False)) == 30
    assert pool(planned("rtx4090", "60GiB")) == 57
    assert pool(planned("rtx4090", "60GiB", ram_given=False, offload_ram_bytes=50 * GiB)) == 50
    assert "half of the RAM, --offload-ram sets it" in plan_as_text(planned("rtx4090", "60GiB", ram_given=False))
    assert "half of the RAM" not in plan_as_text(planned("rtx4090", "60GiB"))


def test_what_the_engine_needs_comes_before_idle_kv() -> None:
    """128k tokens spill 12.1 GiB: of 20 GiB less than half is left beside that and the process."""
    made = planned("rtx4090", "20GiB", 131072, ram_given=False)
    assert pool(made) == 4
    assert "half of the RAM" not in plan_as_text(made)


def test_only_settings_that_name_ram_give_it() -> None:
    assert not wishes_of({}).ram_given
    assert wishes_of({"ram": GiB}).ram_given


def test_a_pool_smaller_than_the_gpus_takes_what_it_drops() -> None:
    """An H200 keeps more KV than 61 GiB of RAM: eager copies of it would be of blocks that the GPU has."""
    made = planned("h200", "64GiB")
    assert made.chosen is not None and pool(made) == 61 < made.chosen.kv.resident_bytes // GiB
    assert options(made)["store"] == "lazy"
    assert "when the GPU drops them: it holds more" in plan_as_text(made)
    larger = planned("rtx4090", "64GiB")
    assert "store" not in options(larger) and "when the GPU drops them" not in plan_as_text(larger)


@pytest.mark.parametrize("given", ["store=eager", "remote=mooncake://127.0.0.1:50051", "park=true"])
def test_a_small_pool_is_eager_where_that_is_needed(given: str) -> None:
    assert options(planned("h200", "64GiB", kv_options=given)).get("store", "eager") == "eager"


def test_a_pool_that_is_not_made_says_why() -> None:
    """Of 8,192 tokens a step, 2 GiB near eviction are copied while the GPU has them: a pool of less than twice that
    would hold little else."""
    told = plan_as_text(planned("h200", "6GiB"))
    refused = "No idle KV is kept: less than 4 GiB of RAM is left, and most of what would fit there is still on the GPU"
    assert refused in told
    assert pool(planned("h200", "6GiB")) == 0 and pool(planned("h200", "7GiB")) == 4
    assert options(planned("h200", "7GiB"))["store"] == "lazy"
    assert "No idle KV" not in plan_as_text(planned("h200", "6GiB", offload_ram_bytes=0)), "as was asked"


def test_a_small_pool_that_was_asked_for_is_made() -> None:
    asked = planned("h200", "6GiB", offload_ram_bytes=2 * GiB)
    assert options(asked)["host_bytes"] == 2 * GiB and "store" not in options(asked)


def test_tuning_tries_the_other_way_to_store() -> None:
    def labels(made: Plan) -> list[str]:
        return [one.label for one in find_candidates(made, lambda settings: made)]

    assert "stored eagerly" in labels(planned("h200", "64GiB"))
    assert "stored lazily" in labels(planned("rtx4090", "64GiB"))
