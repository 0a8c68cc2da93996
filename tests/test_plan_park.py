"""Plans of engines that can be parked: RAM for a copy of their weights, beside their KV."""

import json
from typing import Any

from overspill.hardware import parse_gpu, parse_ram
from overspill.model.config import Config
from overspill.model.description import describe
from overspill.planning.arguments import vllm_args
from overspill.planning.planner import Plan, make_plan
from overspill.planning.refusal import refusal
from overspill.planning.report import plan_as_json, plan_as_text
from overspill.planning.setup import Wishes
from tests import model_configs as models

LLAMA_8B = models.llama_3_1_8b()


def with_ram(ram: str, **wishes: Any) -> Plan:
    facts = describe(Config(LLAMA_8B, where="config.json"), None, name="model")
    return make_plan(facts, parse_gpu("rtx4090"), parse_ram(ram), Wishes(max_model_len=16384, **wishes))


def transfer(made: Plan) -> dict[str, Any]:
    assert made.chosen is not None
    arguments = vllm_args(made, made.chosen)
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return dict(config["kv_connector_extra_config"])


def test_a_parked_model_needs_ram_for_its_weights() -> None:
    plain, parks = with_ram("64GiB"), with_ram("64GiB", kv_options="park=true")
    assert plain.chosen is not None and parks.chosen is not None
    copy = parks.facts.weights.total_bytes
    assert parks.chosen.parks and parks.chosen.parked_bytes == copy and not plain.chosen.parks
    assert 0 <= plain.chosen.offload_bytes - parks.chosen.offload_bytes - copy < 2**30, "in whole GiB"
    assert parks.chosen.peak_ram_bytes <= 64 * 2**30
    assert plain.least_ram_bytes is not None and parks.least_ram_bytes == plain.least_ram_bytes + copy
    given = transfer(parks)
    assert given["park"] is True and given["host_bytes"] == parks.chosen.offload_bytes
    told = plan_as_json(parks)
    assert told["parked_bytes"] == copy and "weights' copy" in plan_as_text(parks)
    assert plan_as_json(plain)["parked_bytes"] == 0 and "weights' copy" not in plan_as_text(plain)


def test_too_little_ram_to_park_is_refused_with_a_way_out() -> None:
    parks = with_ram("12GiB", kv_options="park=true")
    assert parks.chosen is None and with_ram("12GiB").chosen is not None
    assert "Without --park it needs no RAM for a copy of the weights" in refusal(parks)


def test_a_small_pool_mirrors_an_engine_that_is_parked() -> None:
    """It is all there is while the engine is parked; one that runs for ever has that KV on the GPU."""
    plain, parks = with_ram("6GiB"), with_ram("22GiB", kv_options="park=true")
    assert plain.chosen is not None and plain.chosen.offload_bytes == 0
    assert parks.chosen is not None and 0 < parks.chosen.offload_bytes < parks.chosen.kv.resident_bytes
    assert "store" not in transfer(parks)
