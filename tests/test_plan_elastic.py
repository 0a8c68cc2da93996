"""Plans of engines whose KV grows and shrinks: they begin with what is free, and may have the whole card."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from overspill.figures import assumed
from overspill.hardware import parse_gpu, parse_ram
from overspill.kv.ledger import Ledger
from overspill.kv.sizes import GiB
from overspill.launch.launch import Launch
from overspill.model.config import Config
from overspill.model.description import describe
from overspill.planning.arguments import device_share, vllm_args
from overspill.planning.memory import Profile
from overspill.planning.planner import Plan, make_plan
from overspill.planning.report import plan_as_json
from overspill.planning.setup import Wishes
from overspill.tiny import make_llama
from tests import model_configs as models

LEDGER = "/state/ledgers/GPU-1.ledger"
ELASTIC = {"elastic": True, "ledger": LEDGER}
# As measured: nothing is doubtful.
PROFILE = Profile(non_torch_bytes=GiB // 4, activation_bytes=GiB, graph_bytes=GiB // 2, context_bytes=GiB // 2)


def planned(*, free: int = 48 * GiB, ram: str = "128GiB", measured: bool = True, **wishes: Any) -> Plan:
    facts = describe(Config(models.llama_3_1_8b(), where="config.json"), None, name="model")
    gpu = replace(parse_gpu("80GiB"), free_bytes=assumed(free, "others have the rest"))
    profiles = {"profiles": lambda *_: PROFILE} if measured else {}
    return make_plan(facts, gpu, parse_ram(ram), Wishes(max_model_len=16384, **wishes), **profiles)


def flags(plan: Plan) -> tuple[int, dict[str, Any]]:
    assert plan.chosen is not None
    words = vllm_args(plan, plan.chosen)
    extra = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    return int(words[words.index("--kv-cache-memory-bytes") + 1]), extra


def test_an_elastic_engine_begins_with_its_plan_and_may_have_the_card() -> None:
    fixed, elastic, alone = planned(), planned(**ELASTIC, elastic_weight=3), planned(free=80 * GiB)
    assert elastic.chosen is not None and fixed.chosen is not None
    kv_bytes, extra = flags(elastic)
    assert extra["ledger"] == LEDGER and extra["ledger_weight"] == 3
    assert extra["ledger_bytes"] == fixed.chosen.kv.resident_bytes < kv_bytes
    assert abs(kv_bytes - flags(alone)[0]) < GiB // 16, "as with no other engine on the card"
    assert "ledger" not in flags(fixed)[1] and flags(fixed)[0] == fixed.chosen.kv.device_bytes
    assert plan_as_json(elastic)["elastic"] and not plan_as_json(fixed)["elastic"]
    share, plain = device_share(elastic, elastic.chosen), device_share(fixed, fixed.chosen)
    assert share is not None and plain is not None and share.budget_bytes > plain.budget_bytes


def test_what_is_only_assumed_is_not_taken_at_first() -> None:
    plan = planned(**ELASTIC, measured=False)
    assert plan.chosen is not None and plan.chosen.overheads.doubt_bytes > 0
    assert flags(plan)[1]["ledger_bytes"] == plan.chosen.kv.resident_bytes - plan.chosen.overheads.doubt_bytes


def test_gpu_memory_bounds_what_it_may_grow_to() -> None:
    bounded, unbounded = planned(**ELASTIC, gpu_memory_bytes=52 * GiB), planned(**ELASTIC)
    assert flags(bounded)[0] < flags(unbounded)[0] - 20 * GiB


def test_elastic_without_effect_is_said() -> None:
    no_pool = planned(**ELASTIC, offload_ram_bytes=0)
    assert any("--elastic would do nothing here" in one and "idle KV" in one for one in no_pool.warnings)
    no_server = planned(elastic=True)
    assert any("--elastic would do nothing here" in one and "server" in one for one in no_server.warnings)
    assert "ledger" not in flags(no_server)[1] and not plan_as_json(no_server)["elastic"]


def test_a_server_on_a_cpu_leaves_what_others_hold(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    source = make_llama(tmp_path / "tiny")
    given = {"device": "cpu", "gpu_memory": 24 << 20, "ram": 12 * GiB, "offload_ram": 64 << 20, "elastic": True}

    def first(**how: Any) -> int:
        launch = Launch.of(str(source), {**given, "max_model_len": 512, "dtype": "float32"}, **how)
        assert launch.plan.chosen is not None
        words = vllm_args(launch.plan, launch.plan.chosen)
        extra = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
        return int(extra.get("ledger_bytes", 0))

    alone = first(is_server=True)
    ledger = Ledger(tmp_path / "overspill/ledgers/cpu.ledger")
    ledger.take(1, held=8 << 20, floor=1 << 20, most=20 << 20, weight=1)
    assert alone > 8 << 20 and 0 <= first(is_server=True) - (alone - (8 << 20)) < 1 << 20, "a block is less"
    assert first() == 0, "not a server"
    ledger.close()
