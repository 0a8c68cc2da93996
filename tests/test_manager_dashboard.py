"""The dashboard: what engines do now comes first, tables and tiles agree, and charts show only what there is."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overspill.manager.job_commands import JobKind
from overspill.manager.jobs import JobState
from overspill.manager.states import Snapshot, State, Traffic
from overspill.manager.telemetry.engine_metrics import Metrics, Rates
from overspill.manager.telemetry.machine import CpuSample, DiskSample, RamSample, Sample, chart_values
from overspill.manager.telemetry.overview import overview
from overspill.manager.telemetry.watcher import STALE_S, EngineNumbers, Moment, Ring
from tests.chromium import Watched, chromium, needs_chromium
from tests.managed_here import Here, managed_here
from tests.manager_process import Place
from tests.pages import old_job, program, save

if TYPE_CHECKING:
    from playwright.sync_api import Page

METRICS = (
    "vllm:num_requests_running 4\nvllm:num_requests_waiting 8\nvllm:prefix_cache_queries_total 1000\n"
    "vllm:prefix_cache_hits_total 610\nvllm:external_prefix_cache_hits_total 200\nvllm:kv_cache_usage_perc 0.42\n"
)


def snapshot(name: str, state: State, **more: Any) -> Snapshot:
    return Snapshot(name=name, state=state, since=0.0, is_registered=True, is_managed=True, **more)


def sample(**more: Any) -> Sample:
    ram = RamSample(total_bytes=8, available_bytes=3, bound="", swap_used_bytes=0)
    return Sample(**{"at": 100.0, "ram": ram, "cpu": CpuSample(use=0.5, num_cpus=2), **more})


def test_the_headline_says_what_runs_and_how_fast() -> None:
    numbers = {
        name: EngineNumbers(
            metrics=Metrics(at=at, requests_running=2), rates=Rates(seconds=1, generation_tokens_per_s=20)
        )
        for name, at in (("a", 100.0), ("b", 100.0), ("old", 99.0 - STALE_S))
    }
    engines = [
        snapshot("c", State.FAILED, error="x"), snapshot("a", State.READY), snapshot("b", State.READY),
        snapshot("old", State.STOPPED),
    ]  # fmt: skip
    now = overview(Moment(sample=sample(), engines=numbers), engines)
    assert now.headline == "2 ready, 1 failed" and now.tokens_per_s == 40 and now.running == 4
    assert [line.name for line in now.lines] == ["a", "b", "c"] and now.stopped == ("old",)
    assert overview(None, []).headline == "No models yet"


def test_an_engine_counts_what_waits_before_it_and_in_it() -> None:
    metrics = Metrics(
        at=100.0, requests_running=4, requests_waiting=8, prefix_queries=10, prefix_hits=5, external_hits=2
    )
    numbers = {"a": EngineNumbers(metrics=metrics, rates=None)}
    engine = snapshot("a", State.READY, traffic=Traffic(in_flight=12, waiting=1))
    (line,) = overview(Moment(sample=sample(), engines=numbers), [engine]).lines
    assert (line.running, line.queued, line.gpu_hits, line.ram_hits) == (4, 9, 0.5, 0.2)
    (unknown,) = overview(Moment(sample=sample()), [engine]).lines
    assert (unknown.running, unknown.queued, unknown.tokens_per_s) == (12, 1, None)


def test_one_disk_is_charted_once() -> None:
    def disk(device: int) -> DiskSample:
        return DiskSample(
            folder="/", total_bytes=9, free_bytes=5, read_bytes_per_s=1, write_bytes_per_s=2, device=device
        )

    def names(**disks: DiskSample) -> set[str]:
        return {name for name in chart_values(sample(disks=disks)) if name.endswith("free_bytes")}

    assert names(models=disk(1), logs=disk(1)) == {"disk.models and logs.free_bytes"}
    assert names(models=disk(1), logs=disk(2)) == {"disk.models.free_bytes", "disk.logs.free_bytes"}


def test_names_are_those_with_a_value_in_the_range() -> None:
    ring = Ring(10)
    ring.append(1.0, {"gone": 1.0, "a": 1.0})
    ring.append(2.0, {"a": 2.0})
    assert set(ring.names()) == {"gone", "a"} and ring.names(after=1.5) == ["a"]


@pytest.fixture
def here(place: Place) -> Iterator[Here]:
    metrics = place.folder / "metrics"
    metrics.write_text(METRICS)
    place.add("a", behaviour={"metrics_file": str(metrics)})
    place.add("bad", behaviour={"dies_at_start": True})
    place.add("idle")
    ttfts = {"ttfts": [0.1, 0.2], "p99_ttft_ms": 200.0, "mean_ttft_ms": 150.0, "output_throughput": 5.0}
    for label in ("first", "second"):
        number = save(place, experiment="mine", label=label, metrics=ttfts)
    old_job(place, JobKind.BENCH, JobState.FAILED, f"error: too slow\nsaved as result {number}\n")
    with managed_here(place) as one:
        yield one


@pytest.fixture
def page(here: Here) -> "Iterator[Page]":
    with chromium() as browser:
        watched = Watched(browser, here.url)
        yield watched.page(viewport={"width": 1280, "height": 900})
        assert watched.problems == [] and watched.elsewhere == []
        watched.close()


def pixels(page: "Page", colour: str) -> int:
    """Of one colour on the first chart's canvas."""
    counted: int = page.evaluate(
        """colour => {
            const canvas = document.querySelector(".chart canvas");
            const probe = document.createElement("canvas").getContext("2d");
            probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
            const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) count += data[i] === r && data[i + 1] === g && data[i + 2] === b;
            return count;
        }""",
        colour,
    )
    return counted


@needs_chromium
def test_engines_come_first_and_hardware_last(page: "Page", here: Here) -> None:
    with program(here) as client:
        client.post("/api/engines/start/bad")
        assert client.post("/v1/completions", json={"model": "a", "prompt": "x"}).is_success
    page.goto("/")
    page.locator(".headline", has_text="1 ready, 1 failed").wait_for()
    engine = page.locator(".engine", has_text="Running")
    for fact in ("Running4", "Queued8", "Hits on GPU61 %", "Hits in RAM20 %", "KV in use42 %"):
        engine.filter(has_text=fact).wait_for()
    page.locator(".headline", has_text="4 running, 8 queued").wait_for()
    page.locator(".engine.failed", has_text="the weights are broken").wait_for()
    page.locator("#panels p", has_text="Stopped:").get_by_role("link", name="idle").wait_for()
    page.locator("table.requests").get_by_role("cell", name="a", exact=True).wait_for()
    page.locator(".chart canvas").first.wait_for()
    # At one moment: events replace parts of the page.
    tops = page.evaluate(
        "places => places.map(place => document.querySelector(place)?.getBoundingClientRect().top)",
        [".engines", ".map", "table.requests", "#charts"],
    )
    assert None not in tops and tops == sorted(tops)
    legends = page.locator(".chart", has=page.get_by_role("heading", name="Requests")).locator(".u-legend")
    legends.filter(has_text=re.compile(r"a running:?\s*4")).filter(has_text=re.compile(r"a waiting:?\s*8")).wait_for()


@needs_chromium
def test_charts_are_there_however_many_models_there_are(page: "Page", here: Here) -> None:
    """With five models of usual names the address of their numbers was too long, and all charts went."""
    assert here.application is not None
    history, now = here.application.watching.history, time.time()
    for second in range(3):
        values = {f"engine.meta-llama/Llama-{number}-70B-Instruct-FP8.{one}": 1.0 for number in range(20)
                  for one in ("ttft_s", "requests_running", "generation_tokens_per_s")}  # fmt: skip
        history.by_second.append(now - 3 + second, values)
    page.goto("/")
    page.wait_for_selector(".chart canvas")
    assert page.locator(".chart").count() >= 3


@needs_chromium
def test_a_range_of_the_whole_day_is_charted(page: "Page", here: Here) -> None:
    assert here.application is not None
    history, now = here.application.watching.history, time.time()
    for minute in range(23 * 60):
        history.by_minute.append(now - 60 * (23 * 60 - minute), {"cpu.use": 0.25, "engine.old.ttft_s": 0.5})
    page.goto("/")
    page.locator(".chart canvas").first.wait_for()
    assert page.get_by_text("old TTFT").count() == 0  # nothing of it in the last 15 minutes
    page.get_by_label("Range").select_option("24 h")
    page.get_by_text("old TTFT").wait_for()
    page.get_by_label("Range").select_option("15 min")
    page.get_by_text("old TTFT").wait_for(state="detached")


@needs_chromium
def test_a_single_point_is_seen_and_no_colour_comes_twice(page: "Page", here: Here) -> None:
    assert here.application is not None
    ring, now = here.application.watching.history.by_minute, time.time()
    values = {f"engine.e{number}.generation_tokens_per_s": 10.0 for number in range(9)}
    for hours, row in ((3, {}), (2, values), (1, {})):  # once, between gaps
        ring.append(now - 3600 * hours, row)
    page.goto("/")
    page.get_by_label("Range").select_option("6 h")
    page.get_by_text("e8 answers").wait_for()
    colours = page.evaluate("charts.list[0].plot.series.slice(1).map(one => one.stroke())")
    assert len(colours) == len(set(colours)) == 9
    deadline = time.monotonic() + 30
    while pixels(page, colours[-1]) <= 5:  # drawn with the next frame, or a busy machine's tenth
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)


@needs_chromium
def test_an_empty_manager_leads_to_adding_a_model(tmp_path: Path, place: Place) -> None:
    with managed_here(place) as empty, program(empty) as client:
        answer = client.get("/", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/add")


AXE = Path(__file__).parent / "vendor/axe-core-4.14.0.min.js"
PATHS = (
    "/", "/models", "/add", "/add?source=org/none", "/try", "/activity", "/runs", "/logs", "/found", "/keys", "/audit",
    "/api", "/nowhere", "/login", "/runs/jobs/1", "/results/1", "/compare?ids=mine",
)  # fmt: skip


@needs_chromium
def test_axe_finds_nothing_on_any_page(here: Here) -> None:
    with program(here) as client, chromium() as browser:
        client.post("/api/engines/start/bad")
        assert client.post("/v1/completions", json={"model": "a", "prompt": "x"}).is_success
        schemes: tuple[tuple[Any, int], ...] = (("light", 1440), ("dark", 390))
        # The page's own policy lets no script in from outside, not even the test's.
        contexts = [
            browser.new_context(
                base_url=here.url, color_scheme=scheme, bypass_csp=True, viewport={"width": width, "height": 900}
            )
            for scheme, width in schemes
        ]
        pages = [context.new_page() for context in contexts]
        found = []
        for path in PATHS:
            for page in pages:
                page.goto(path)
            pages[0].wait_for_timeout(300)
            for page in pages:
                page.eval_on_selector_all("main details", "all => all.forEach(one => { one.open = true; })")
            pages[0].wait_for_timeout(700)
            for page, (scheme, _) in zip(pages, schemes, strict=True):
                page.add_script_tag(path=AXE)
                told = page.evaluate("axe.run({ resultTypes: ['violations'] })")  # of passes one node is described
                assert len(told["passes"]) > 10, path
                found += [(path, scheme, one["id"], one["nodes"][0]["html"][:200]) for one in told["violations"]]
        for context in contexts:
            context.close()
        assert found == []
