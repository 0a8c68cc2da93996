"""vLLM's /metrics page: its few series that are shown, rates between two looks, engines that began anew."""

import asyncio
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from overspill.manager.telemetry.engine_metrics import SERIES, Metrics, chart_values, parse_metrics, rates, scrape
from overspill.upstream import Upstream

LABELS = ["model_name", "engine"]


class Page:
    """A page as prometheus_client writes it for vLLM: labels, help, buckets, creation times."""

    def __init__(self, model: str = "qwen", engines: tuple[str, ...] = ("0",)) -> None:
        self.registry = CollectorRegistry()
        self.labels = [(model, engine) for engine in engines]
        self.series: dict[str, Counter | Gauge | Histogram] = {}

    def add(self, kind: type[Counter] | type[Gauge] | type[Histogram], name: str, *values: float) -> "Page":
        metric = self.series.get(name) or kind(name, f"help of {name}", LABELS, registry=self.registry)
        self.series[name] = metric
        for labels, value in zip(self.labels, values):
            child = metric.labels(*labels)
            getattr(child, {Counter: "inc", Gauge: "set", Histogram: "observe"}[kind])(value)
        return self

    def text(self) -> bytes:
        return generate_latest(self.registry)


def page() -> Page:
    first = Page(model='odd "name} 1 of {braces', engines=("0", "1"))
    first.add(Gauge, "vllm:num_requests_running", 3, 2).add(Gauge, "vllm:kv_cache_usage_perc", 0.25, 0.5)
    first.add(Counter, "vllm:generation_tokens", 1000, 500).add(Counter, "vllm:prompt_tokens", 4e6, 0)
    first.add(Counter, "vllm:prefix_cache_queries", 100, 0).add(Counter, "vllm:prefix_cache_hits", 20, 0)
    first.add(Histogram, "vllm:time_to_first_token_seconds", 1.5, 0.5)
    return first.add(Counter, "overspill_hit_tokens", 64, 0).add(Gauge, "overspill_pool_bytes", 1 << 40, 0)


def test_series_are_summed_over_engines_whatever_their_labels() -> None:
    metrics = parse_metrics(page().text(), at=10.0)
    assert (metrics.requests_running, metrics.kv_cache_use) == (5, 0.5)
    assert (metrics.generation_tokens, metrics.prompt_tokens) == (1500, 4e6)
    assert (metrics.ttft_seconds, metrics.ttft_count) == (2.0, 2)
    assert (metrics.ram_hit_tokens, metrics.pool_bytes) == (64, 1 << 40)
    assert metrics.spilled_steps is None, "a series that is not there is not 0"


def test_rates_are_those_of_the_time_between() -> None:
    growing = page()
    before = parse_metrics(growing.text(), at=10.0)
    growing.add(Counter, "vllm:generation_tokens", 100, 60)
    growing.add(Counter, "vllm:prefix_cache_queries", 50).add(Counter, "vllm:prefix_cache_hits", 40)
    growing.add(Histogram, "vllm:time_to_first_token_seconds", 0.2, 0.4)
    growing.add(Counter, "overspill_spilled_steps", 3).add(Counter, "overspill_plain_steps", 1)
    between = rates(before, parse_metrics(growing.text(), at=14.0))
    assert between is not None
    assert (between.generation_tokens_per_s, between.prompt_tokens_per_s) == (40, 0)
    assert between.prefix_hit_rate == 0.8
    assert between.ttft_s == pytest.approx(0.3)
    assert between.spilled_step_share == 0.75, "series that appeared in between count from 0"
    assert (between.external_hit_rate, between.tpot_s, between.load_bytes_per_s) == (None, None, None)


def test_a_restarted_engine_has_no_rates_not_negative_ones() -> None:
    before = parse_metrics(page().text(), at=10.0)
    anew = Page().add(Counter, "vllm:generation_tokens", 7).add(Counter, "vllm:prompt_tokens", 9e6)
    after = parse_metrics(anew.text(), at=11.0)
    assert rates(before, after) is None
    anew.add(Counter, "vllm:generation_tokens", 5)
    between = rates(after, parse_metrics(anew.text(), at=12.0))
    assert between is not None and between.generation_tokens_per_s == 5


def test_no_time_gives_no_rates() -> None:
    metrics = parse_metrics(page().text(), at=10.0)
    assert rates(metrics, metrics) is None


def test_a_page_that_makes_no_sense_gives_nothing() -> None:
    garbage = b"\x00\xff vllm:num_requests_running\nvllm:num_requests_running\nvllm:num_requests_running NaN\n"
    garbage += b'vllm:generation_tokens_total{a="b"} abc\nxvllm:prompt_tokens_total 5\nvllm:prompt_tokens_totals 5\n'
    assert parse_metrics(garbage, at=1.0) == Metrics(at=1.0)


def test_charts_get_gauges_and_rates_by_the_engines_name() -> None:
    growing = page()
    before = parse_metrics(growing.text(), at=10.0)
    after = parse_metrics(growing.add(Counter, "vllm:generation_tokens", 100, 60).text(), at=14.0)
    values = chart_values(after, rates(before, after), "qwen")
    assert values["engine.qwen.requests_running"] == 5 and values["engine.qwen.generation_tokens_per_s"] == 40
    assert "engine.qwen.ttft_s" not in values, "nothing happened"
    assert chart_values(before, None, "qwen") == {
        "engine.qwen.requests_running": 5, "engine.qwen.kv_cache_use": 0.5, "engine.qwen.pool_bytes": 1 << 40,
    }  # fmt: skip


NAMES = """
import json, re, inspect
import vllm.v1.metrics.loggers as loggers
from overspill.kv.metrics import COUNTERS, GAUGES
print(json.dumps([re.findall(r'name="(vllm:[a-z_]+)"', inspect.getsource(loggers)), list(COUNTERS), list(GAUGES)]))
"""


def test_every_series_is_one_that_vllm_or_overspill_has(tmp_path: Path) -> None:
    """In a process of its own: the manager's do without vLLM."""
    import json

    script = tmp_path / "names.py"
    script.write_text(NAMES)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=True)
    of_vllm, counters, gauges = json.loads(done.stdout.splitlines()[-1])
    for series in SERIES:
        name = series.decode()
        if name.startswith("overspill_"):
            bare = name.removeprefix("overspill_")
            assert bare.removesuffix("_total") in (counters if bare.endswith("_total") else gauges), name
        else:
            assert {name, *(name.removesuffix(end) for end in ("_total", "_sum", "_count"))} & set(of_vllm), name


class _Server(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(page().text())

    def log_message(self, *_: object) -> None:
        pass


def test_scraping_a_failing_or_absent_server_returns_none() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def both() -> tuple[Metrics | None, Metrics | None, Metrics | None]:
        upstream, url = Upstream(), f"http://127.0.0.1:{server.server_port}"
        there = await scrape(upstream, url)
        _Server.status = 404
        wrong = await scrape(upstream, url)
        server.shutdown()
        server.server_close()
        return there, wrong, await scrape(upstream, url)

    there, wrong, gone = asyncio.run(both())
    assert there is not None and there.requests_running == 5
    assert (wrong, gone) == (None, None)


def test_parsing_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, overspill.manager.telemetry.overview, overspill.manager.foreign; "
        "import overspill.manager.web.access; "
        "print([name for name in ('torch', 'vllm', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
