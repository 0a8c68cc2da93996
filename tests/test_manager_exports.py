"""The manager's /metrics: engines' own series beside its own, on a page that Prometheus reads, with rules for it."""

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from overspill.kv.options import Options
from overspill.manager import metrics
from overspill.manager.metrics import PREFIX, machine_families, merged
from overspill.manager.telemetry.machine import CpuSample, DiskSample, GpuSample, RamSample, Sample, chart_values
from overspill.manager.telemetry.watcher import Moment
from overspill.manager.web.charts import _CHARTS, charts_of
from overspill.measure.metrics import parse_counters, read_counters
from overspill.measure.target import Target
from overspill.upstream import Upstream
from tests.chat_model import make_chat_model
from tests.managed import SETTINGS, managed
from tests.managed_here import Here, managed_here
from tests.manager_process import Place
from tests.test_manager_metrics import Page

DOCS = Path(__file__).parents[1] / "docs"
NAME = re.compile(r"\b((?:overspill_|vllm:)\w*[a-z])\b")


def families(page: bytes) -> dict[str, Metric]:
    """As Prometheus' own parser reads it; each may be there once."""
    found = list(text_string_to_metric_families(page.decode()))
    assert len({one.name for one in found}) == len(found), sorted(one.name for one in found)
    series = [(sample.name, *sorted(sample.labels.items())) for one in found for sample in one.samples]
    assert len(set(series)) == len(series), "a series is there twice"
    return {one.name: one for one in found}


def values(family: Metric, name: str | None = None) -> dict[str, float]:
    return {one.labels["model"]: one.value for one in family.samples if name is None or one.name == name}


def engine_page(tokens: int, model: str = "served") -> bytes:
    page = Page(model).add(Counter, "vllm:prompt_tokens", tokens).add(Gauge, "vllm:num_requests_running", 1)
    page.add(Counter, "vllm:external_prefix_cache_hits", tokens / 10).add(Counter, "overspill_load_bytes", tokens * 2)
    return page.add(Histogram, "vllm:time_to_first_token_seconds", 0.3).text()


# The page, as a pure function


def test_merged_metrics_have_each_family_once_and_a_model_label() -> None:
    found = families(merged({"b": engine_page(20), "a": engine_page(10)}))
    assert values(found["vllm:prompt_tokens"], "vllm:prompt_tokens_total") == {"a": 10, "b": 20}
    assert found["vllm:prompt_tokens"].documentation == "help of vllm:prompt_tokens"
    ttft = found["vllm:time_to_first_token_seconds"]
    assert ttft.type == "histogram" and values(ttft, "vllm:time_to_first_token_seconds_count") == {"a": 1, "b": 1}
    assert {one.labels["model_name"] for one in ttft.samples} == {"served"}, "vLLM's own labels stay"
    assert merged({}) == b""


def test_odd_model_names_and_taken_labels_stay_parseable() -> None:
    odd = 'a "b"\\ c\nd'
    page = b'x{model_name="m"} 1\ny{model="theirs",other="model=\\"no\\""} 2\nz{other="model=\\"no\\""} 3\n'
    found = families(merged({odd: page}))
    assert found["x"].samples[0].labels == {"model": odd, "model_name": "m"}
    assert found["y"].samples[0].labels == {"model": odd, "exported_model": "theirs", "other": 'model="no"'}
    assert found["z"].samples[0].labels == {"model": odd, "other": 'model="no"'}


def test_malformed_lines_do_not_spoil_the_merged_metrics() -> None:
    page = b'<html>\nx 1\nx{broken="} 2\ny abc\n\xff\xfe\n# EOF\n# a remark\nz{a="1",} 3 1700000000000\n'
    found = families(merged({"a": page, "b": b"", "c": b"x +Inf"}))
    assert set(found) == {"x", "z"} and values(found["x"]) == {"a": 1, "c": float("inf")}


def test_a_family_with_conflicting_types_becomes_untyped() -> None:
    found = families(merged({"a": b"# TYPE x counter\nx 1\n", "b": b"# HELP x Help.\n# TYPE x gauge\nx 2\n"}))
    assert found["x"].type == "unknown" and values(found["x"]) == {"a": 1, "b": 2}


# The manager's


def add(place: Place, name: str, page: bytes, **behaviour: Any) -> None:
    file = place.folder / f"{name}.metrics"
    file.write_bytes(page)
    place.add(name, ram=1 << 20, behaviour={"metrics_file": str(file), **behaviour})


def start(here: Here, *names: str) -> None:
    with here.client() as client:
        for name in names:
            assert client.post(f"/api/engines/start/{name}").status_code == 200


def test_manager_metrics_include_series_of_ready_engines(place: Place) -> None:
    add(place, "a", engine_page(10))
    add(place, "b", engine_page(20))
    add(place, "c", engine_page(30))
    with managed_here(place) as here:
        start(here, "a", "b")
        found = families(httpx.get(f"{here.url}/metrics", timeout=60).content)
        assert values(found["vllm:prompt_tokens"], "vllm:prompt_tokens_total") == {"a": 10, "b": 20}
        assert values(found["overspill_manager_engine_answered"]) == {"a": 1, "b": 1}
        assert "overspill_manager_jobs" in found
        # Of each model the right ones: a bench through the gateway counts nobody else's.
        for name, tokens in (("a", 10), ("b", 20)):
            counted = read_counters(Target(url=here.url, model=name))
            assert counted == {"prompt_tokens": tokens, "tokens_from_ram": tokens / 10, "load_bytes": tokens * 2}
        assert read_counters(Target(url=here.url, model="c")) is None, "it does not run"


def test_a_slow_engine_is_reported_and_delays_nobody(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, being_asked, counts = Upstream.ask, set(), []
    monkeypatch.setattr(metrics, "_ENGINE_WAIT_S", 2.5)  # which nobody else waits

    async def counted(self: Upstream, url: str, path: str, timeout: float, **more: Any) -> Any:
        if timeout == 2.5:
            being_asked.add(url)
            counts.append(len(being_asked))
        answer = await ask(self, url, path, timeout, **more)
        being_asked.discard(url)
        return answer

    monkeypatch.setattr(Upstream, "ask", counted)
    add(place, "a", engine_page(10))
    add(place, "slow", engine_page(20), metrics_s=60)
    add(place, "slower", engine_page(20), metrics_s=60)
    add(place, "slowest", engine_page(20), metrics_s=60)
    with managed_here(place) as here:
        start(here, "a", "slow", "slower", "slowest")
        found = families(httpx.get(f"{here.url}/metrics", timeout=30).content)
        assert max(counts) == 4, "all are asked at once"
        assert values(found["overspill_manager_engine_answered"]) == {"a": 1, "slow": 0, "slower": 0, "slowest": 0}
        assert values(found["vllm:prompt_tokens"], "vllm:prompt_tokens_total") == {"a": 10}


def test_gauges_of_gpus_and_disks_omit_unknown_values() -> None:
    gpu = GpuSample(
        index=1, uuid="GPU-1", name="H200", total_bytes=9, used_bytes=4, use=0.5, temperature_c=61, power_w=512.5,
        to_gpu_bytes_per_s=None, from_gpu_bytes_per_s=7, processes={},
    )  # fmt: skip
    disk = DiskSample(folder="/x", total_bytes=100, free_bytes=40, read_bytes_per_s=None, write_bytes_per_s=3)
    ram = RamSample(total_bytes=8, available_bytes=5, bound="RAM", swap_used_bytes=0)
    sample = Sample(at=1.0, ram=ram, cpu=CpuSample(use=0.1, num_cpus=2), gpus=(gpu,), disks={"models": disk})
    told = {
        (one.name.removeprefix(PREFIX), *sample.labels.values()): sample.value
        for one in machine_families(Moment(sample=sample, values=chart_values(sample)))
        for sample in one.samples
    }
    expected = {
        ("gpu_temperature_celsius", "1"): 61, ("gpu_power_watts", "1"): 512.5, ("gpu_from_gpu_bytes_per_s", "1"): 7,
        ("disk_free_bytes", "models"): 40, ("disk_total_bytes", "models"): 100,
        ("disk_write_bytes_per_s", "models"): 3, ("ram_available_bytes",): 5,
    }  # fmt: skip
    assert expected.items() <= told.items()
    assert ("gpu_to_gpu_bytes_per_s", "1") not in told and ("disk_read_bytes_per_s", "models") not in told
    drawn = {chart.key: (chart.unit, chart.lines[0].label) for chart in charts_of(chart_values(sample))}
    assert drawn["gpu-temperature"] == ("°C", "gpu 1 temperature") and drawn["gpu-power"] == ("W", "gpu 1 power")


def test_the_page_has_a_least_axis_range_for_every_chart_unit() -> None:
    """Without one, the axis of a chart has no end, and nothing is drawn."""
    script = (DOCS.parent / "src/overspill/manager/web/static/manager.js").read_text()
    (least,) = re.findall(r"const least = \{(.*?)\};", script)
    units = {unit for _, _, unit, _ in _CHARTS} - {"share"}
    assert units == set(re.findall(r'"([^"]*)":', least))


def test_manager_counters_are_not_counted_for_a_model() -> None:
    page = 'overspill_manager_requests_total{model="a"} 5\nvllm:prompt_tokens_total{model="a b",engine="0"} 7\n'
    assert parse_counters(page, "a b") == {"prompt_tokens": 7}
    assert parse_counters(page, "a") is None


# What is documented


@pytest.fixture
def exported(place: Place) -> set[str]:
    """Names on the page of a manager with an engine that has all of Overspill's series."""
    from overspill.kv.metrics import COUNTERS, GAUGES

    page = Page()
    for kind, names in ((Counter, COUNTERS), (Gauge, GAUGES)):
        for name in names:
            page.add(kind, f"overspill_{name}", 1)  # type: ignore[arg-type]
    add(place, "a", page.text())
    with managed_here(place) as here:
        start(here, "a")
        deadline = time.monotonic() + 60
        # Until the machine was looked at.
        while "overspill_manager_ram_total_bytes" not in (text := httpx.get(f"{here.url}/metrics", timeout=60).text):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


def test_dashboard_and_alert_expressions_use_exported_series(exported: set[str]) -> None:
    panels = json.loads((DOCS / "grafana-dashboard.json").read_text())["panels"]
    shown = {target["expr"]: target for panel in panels for target in panel.get("targets", [])}
    rules = yaml.safe_load((DOCS / "prometheus-alerts.yml").read_text())["groups"][0]["rules"]
    expressions = [*shown, *(rule["expr"] for rule in rules)]
    assert len(shown) > 20 and len(rules) == 4
    for expression in expressions:
        names = set(NAME.findall(expression))
        assert names and names <= exported, (expression, names - exported)
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_the_alerts_say_what_they_are_about() -> None:
    text = (DOCS / "prometheus-alerts.yml").read_text()
    rules = {rule["alert"]: rule for rule in yaml.safe_load(text)["groups"][0]["rules"]}
    assert all({"summary", "description"} <= set(rule["annotations"]) for rule in rules.values())
    assert rules["OverspillRamLow"]["expr"].endswith(f"< {Options.reserve_bytes}")
    assert "overspill_pinning_refused" in rules["OverspillPoolNotPinned"]["expr"]


def test_the_documented_scrape_configuration_parses() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / "manager.md").read_text(), re.MULTILINE | re.DOTALL)
    told = yaml.safe_load(block)
    assert told["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:7999"]
    assert all((DOCS / Path(file).name).exists() for file in told["rule_files"])


# With a real engine


def test_a_bench_through_the_gateway_knows_which_tier_served(tmp_path: Path) -> None:
    with managed(tmp_path) as manager, manager.client() as client:
        make_chat_model(manager.models / "tiny", seed=0)
        settings = {**SETTINGS, "source": str(manager.models / "tiny")}
        added = manager.overspill("models", "add", "tiny", *flags(settings))
        assert added.returncode == 0, added.stderr
        other = manager.overspill("models", "add", "other", *flags(settings))
        assert other.returncode == 0, other.stderr
        workload = "multi-turn:conversations=8,turns=3,first=600,input=100,output=8,think_time=0.05"
        words = ("--workload", workload, "--json")
        answer = manager.overspill("bench", manager.url, "--model", "tiny", *words, "--expect", "offload", timeout=300)
        assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr
        told = json.loads(answer.stdout)["metrics"]
        assert told["tokens_from_ram"] > 0 and told["load_bytes"] > 0
        found = families(client.get("/metrics").content)
        assert values(found["overspill_hit_tokens"], "overspill_hit_tokens_total")["tiny"] > 0
        assert {"vllm:kv_cache_usage_perc", "overspill_pool_bytes", "process_resident_memory_bytes"} <= set(found)


def flags(settings: dict[str, Any]) -> list[str]:
    given = []
    for name, value in settings.items():
        given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return given
