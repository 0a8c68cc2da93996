"""The manager around its engines: what pages show, made by pure functions, and the process as users run it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from typer.testing import CliRunner

from overspill.address import free_port
from overspill.cli import app
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB, MiB
from overspill.manager import sse
from overspill.manager.needs import Memory, reckon, replan
from overspill.manager.records import announce, find_manager, withdraw
from overspill.manager.states import Snapshot, State
from overspill.manager.telemetry.engine_metrics import Metrics
from overspill.manager.telemetry.machine import CpuSample, GpuSample, ProcessSample, RamSample, Sample
from overspill.manager.telemetry.overview import Kind, engine_tiers, memory_maps
from overspill.manager.telemetry.watcher import STALE_S, EngineNumbers, Moment
from overspill.manager.web import server
from overspill.manager.web.actions import Actions, Caller
from overspill.manager.web.charts import charts_of
from overspill.manager.web.forms import changes_of, form_values
from overspill.manager.web.model_pages import Card
from overspill.manager.web.rendering import duration, element_id, fragment, shown
from overspill.manager.web.setup import limit, own_folder
from overspill.processes import identity
from overspill.registry import ModelSettings, Registry, add_model, open_registry
from overspill.registry.audit import AuditOutcome, list_audit
from overspill.settings import parse_settings
from tests.llm_script import running_script
from tests.managed import Managed, managed
from tests.managed_process import QuickPlace, managed_process
from tests.manager_process import ROOT, of_folder
from tests.model_configs import llama_3_1_8b


def snapshot(**more: Any) -> Snapshot:
    return Snapshot(
        **{"name": "a", "state": State.READY, "since": 0.0, "is_registered": True, "is_managed": True, **more}
    )


def sample(**more: Any) -> Sample:
    ram = RamSample(total_bytes=8 * GiB, available_bytes=3 * GiB, bound="", swap_used_bytes=0)
    return Sample(**{"at": 100.0, "ram": ram, "cpu": CpuSample(use=0.5, num_cpus=2), **more})


# What pages show


def test_numbers_have_units_and_what_is_not_known_is_a_dash() -> None:
    assert shown(3 * GiB, "bytes") == "3 GiB" and shown(1.5 * MiB, "bytes/s") == "1.5 MiB/s"
    assert shown(0.254, "share") == "25 %" and shown(0.0312, "s") == "31 ms"
    assert shown(12.34, "tok/s") == "12.3 tok/s" and shown(131072, "tokens") == "131,072 tokens"
    assert shown(None, "bytes") == "–" and duration(3700) == "1 h 1 min"


def test_models_have_distinct_and_valid_element_ids() -> None:
    ids = {element_id(name) for name in ("a", "A", "a/b", "a.b", "a b")}
    assert len(ids) == 5 and all(one.isalnum() and one[0].isalpha() for one in ids)


def test_memory_maps_separate_an_engine_from_other_use() -> None:
    gpu = GpuSample(
        index=0, uuid="", name="card", total_bytes=10 * GiB, used_bytes=8 * GiB, use=0.1, temperature_c=None,
        power_w=None, to_gpu_bytes_per_s=None, from_gpu_bytes_per_s=None, processes={7: 6 * GiB},
    )  # fmt: skip
    process = ProcessSample(num_processes=1, ram_bytes=2 * GiB, locked_bytes=0, cpu_cores=0.0, gpus=(6 * GiB,))
    engine = snapshot(
        pid=7, plan={"device": "cuda"},
        memory={"weights_bytes": 3 * GiB, "resident_kv_bytes": GiB, "window_bytes": GiB, "spilled_bytes": GiB},
    )  # fmt: skip
    on_gpu, in_ram = memory_maps(sample(gpus=(gpu,), processes={"a": process}), [engine])
    parts = {(part.kind, part.engine): part.num_bytes for part in on_gpu.parts}
    assert parts[Kind.WEIGHTS, "a"] == 3 * GiB and parts[Kind.ENGINE_OTHER, "a"] == GiB
    assert parts[Kind.OTHER, None] == 2 * GiB and parts[Kind.FREE, None] == 2 * GiB
    assert sum(part.num_bytes for part in on_gpu.parts) == 10 * GiB
    parts = {(part.kind, part.engine): part.num_bytes for part in in_ram.parts}
    assert parts[Kind.SPILLED_KV, "a"] == GiB and parts[Kind.FREE, None] == 3 * GiB


def test_each_gpu_shows_its_own_engines() -> None:
    """All engines were on all GPUs, and their parts on the first."""
    gpus = tuple(
        GpuSample(
            index=index, uuid="", name="card", total_bytes=24 * GiB, used_bytes=used * GiB, use=0.1, temperature_c=None,
            power_w=None, to_gpu_bytes_per_s=None, from_gpu_bytes_per_s=None, processes={},
        )
        for index, used in enumerate((18, 22))
    )  # fmt: skip
    engines = [
        snapshot(name=name, pid=7, plan={"device": "cuda", "ranks": [{"index": index} for index in on]},
                 memory={"weights_bytes": 10 * GiB * len(on)})
        for name, on in (("a", (0,)), ("b", (1,)), ("c", (0, 1)))
    ]  # fmt: skip
    processes = {
        name: ProcessSample(num_processes=1, ram_bytes=0, locked_bytes=0, cpu_cores=0.0, gpus=sizes)
        for name, sizes in (("a", (6 * GiB, 0)), ("b", (0, 10 * GiB)), ("c", (11 * GiB, 12 * GiB)), ("job", (GiB, 0)))
    }
    first, second, _ = memory_maps(sample(gpus=gpus, processes=processes), engines)
    assert [(part.engine, part.kind, part.num_bytes // GiB) for part in first.parts] == [
        ("a", Kind.WEIGHTS, 6), ("c", Kind.WEIGHTS, 10), ("c", Kind.ENGINE_OTHER, 1), ("job", Kind.JOB, 1),
        (None, Kind.FREE, 6),
    ]  # fmt: skip
    assert [(part.engine, part.kind, part.num_bytes // GiB) for part in second.parts] == [
        ("b", Kind.WEIGHTS, 10), ("c", Kind.WEIGHTS, 10), ("c", Kind.ENGINE_OTHER, 2), (None, Kind.FREE, 2),
    ]  # fmt: skip
    assert processes["c"].gpu_bytes == 23 * GiB


def test_a_map_shows_what_an_elastic_engine_holds_uses_and_was_granted() -> None:
    gpu = GpuSample(
        index=0, uuid="", name="card", total_bytes=10 * GiB, used_bytes=6 * GiB, use=0.1, temperature_c=None,
        power_w=None, to_gpu_bytes_per_s=None, from_gpu_bytes_per_s=None, processes={7: 6 * GiB},
    )  # fmt: skip
    process = ProcessSample(num_processes=1, ram_bytes=GiB, locked_bytes=0, cpu_cores=0.0, gpus=(6 * GiB,))
    engine = snapshot(
        pid=7, plan={"device": "cuda"}, memory={"weights_bytes": 2 * GiB, "resident_kv_bytes": 8 * GiB},
        kv={"granted": 5 * GiB, "held": 4 * GiB, "used": GiB, "wanted": GiB, "floor": GiB, "most": 8 * GiB},
    )  # fmt: skip
    on_gpu, _ = memory_maps(sample(gpus=(gpu,), processes={"a": process}), [engine])
    assert [(part.kind, part.num_bytes // GiB) for part in on_gpu.parts] == [
        (Kind.WEIGHTS, 2), (Kind.USED_KV, 1), (Kind.RESIDENT_KV, 3), (Kind.GRANTED_KV, 1), (Kind.FREE, 3),
    ]  # fmt: skip


def test_tiers_of_an_engine_that_has_not_told_for_long_are_stale() -> None:
    fresh, old = (
        engine_tiers(Moment(sample=sample(), engines={"a": EngineNumbers(metrics=Metrics(at=at), rates=None)}), [])[0]
        for at in (99.0, 99.0 - STALE_S)
    )
    assert not fresh.is_stale and old.is_stale


def test_charts_follow_the_numbers_that_there_are() -> None:
    names = {"cpu.use", "gpu0.used_bytes", "gpu0.total_bytes", "engine.a/b.ttft_s", "engine.c.ttft_s"}
    charts = {chart.key: chart for chart in charts_of(names)}
    assert set(charts) == {"cpu", "gpu-memory", "ttft"}
    assert [line.label for line in charts["ttft"].lines] == ["a/b TTFT", "c TTFT"]
    assert charts["gpu-memory"].lines[0].label == "gpu 0 used"


def test_a_card_offers_what_can_be_done_in_its_state() -> None:
    def offered(state: State, **more: Any) -> list[str]:
        return [one.action for one in Card(model=None, engine=snapshot(state=state, **more)).buttons]

    assert offered(State.STOPPED) == offered(State.FAILED) == ["start", "switch"]
    assert offered(State.STARTING) == ["stop"] and offered(State.READY) == ["stop", "restart"]
    assert offered(State.STOPPING) == []


def test_settings_survive_a_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = {
        "source": str(tmp_path), "max_model_len": 4096, "gpu_memory": 8 * MiB, "ram": 12 * GiB, "weights_ram": 1000,
        "gpu_memory_utilization": 0.85, "at_once": 3,
        "enforce_eager": False, "vllm_args": ["--seed", "7", "--chat-template", "a b"], "ttl": 600, "notes": "as it is",
    }  # fmt: skip
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as registry:
        model = add_model(registry, "a", given)
    shown = form_values(model)
    assert shown["gpu_memory"] == "8MiB" and shown["max_num_seqs"] == ""
    parsed = parse_settings(changes_of({**shown, "version": "1"}))
    assert ModelSettings(**parsed) == model.settings


def test_an_event_of_several_lines_stays_one_event() -> None:
    assert sse.event("x", "a\nb\r\n\nc") == "event: x\ndata: a\ndata: b\ndata: \ndata: c\n\n"


# Planning while a slider moves


def test_a_longer_context_goes_to_ram_and_then_does_not_fit(llama: Path) -> None:
    settings = ModelSettings(source=str(llama), gpu_memory=8 * MiB, ram=12 * GiB, offload_ram=0, dtype="float32")
    short, longer, longest = (replan(settings, {"max_model_len": n}, Memory()) for n in (512, 4096, 32768))
    assert short.fits and short.plan.chosen is not None and short.plan.chosen.kv.spilled_bytes == 0
    assert longer.fits and longer.plan.chosen is not None and longer.plan.chosen.kv.spilled_bytes > 0
    assert not longest.fits and f"--max-model-len {longest.plan.longest_context}" in longest.why_not
    assert longest.limit == 32768 and longest.limit / longest.step <= 512
    assert longer.as_json()["fits"] and longer.as_json()["limit"] == 32768


def test_an_engine_needs_the_weights_that_are_set_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were a flag that the plan did not know, so that engines were admitted for which there was no RAM."""
    (tmp_path / "config.json").write_text(json.dumps(llama_3_1_8b()))
    monkeypatch.setenv("OVERSPILL_GPU", "24GiB")
    asked = ModelSettings(source=str(tmp_path), ram=32 * GiB, max_model_len=32768, offload_ram=0)
    usual, moved = (reckon(asked.changed({"weights_ram": size}), Memory()) for size in (None, 8 * GiB))
    assert usual.least.ram_bytes == 3 * GiB and moved.least.ram_bytes > 11 * GiB
    assert moved.takes.ram_bytes == moved.least.ram_bytes
    chosen = replan(asked.changed({"weights_ram": 8 * GiB}), {}, Memory()).plan.chosen
    assert chosen is not None and chosen.peak_ram_bytes == moved.least.ram_bytes
    by_flags = asked.changed({"vllm_args": ("--offload-group-size", "2")})
    assert reckon(by_flags, Memory()).least.ram_bytes > 9 * GiB, "also as flags of the prefetching offloader"
    refused = reckon(asked.changed({"ram": 8 * GiB, "weights_ram": 8 * GiB}), Memory()).refused
    assert "with 8 GiB of weights there, as requested" in refused and "It would fit with --weights-ram" in refused
    small = reckon(asked.changed({"max_model_len": 8192, "gpu_memory_utilization": 0.8}), Memory())
    assert small.takes.gpu_bytes == small.least.gpu_bytes < 21 * GiB


def test_a_plan_on_the_page_says_what_ram_makes_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_3_1_8b()))
    monkeypatch.setenv("OVERSPILL_GPU", "24GiB")
    settings = ModelSettings(source=str(tmp_path), ram=64 * GiB, max_model_len=131072, vllm_args=("-tp", "2"))
    planned = replan(settings, {"at_once": 2, "max_model_len": 65536}, Memory())
    told = planned.as_json()
    alone, warm = told["longest_on_gpu_tokens"], told["warm_tokens"]
    assert 0 < alone < told["longest_context"] and warm > 0
    html = fragment("planned.html", planned=planned, plan=planned.plan, save_url="", is_first=False)
    assert f"Longest context, 2 at once: {alone:,} tokens on the GPU alone" in html and f"{warm:,} tokens" in html
    assert "2 answers together" in html and "Weights on each of 2 GPUs" in html
    assert len(told["ranks"]) == 2 and len(replan(settings, {"vllm_args": ()}, Memory()).as_json()["ranks"]) == 1


def test_more_ram_than_the_machine_has_is_refused_unstarted(llama: Path) -> None:
    settings = ModelSettings(source=str(llama), gpu_memory=8 * MiB, ram=1 << 45, max_model_len=512, dtype="float32")
    with pytest.raises(OverspillError, match="--ram 32 TiB beside 8 MiB"):
        replan(settings, {}, Memory())
    assert "--ram 32 TiB beside 8 MiB" in reckon(settings, Memory()).refused


def test_a_setting_that_is_taken_back_is_not_planned_with(llama: Path) -> None:
    settings = ModelSettings(source=str(llama), gpu_memory=8 * MiB, ram=12 * GiB, max_model_len=512, dtype="float32")
    assert replan(settings, {}, Memory()).plan.max_model_len == 512
    assert replan(settings, {"max_model_len": None}, Memory()).plan.max_model_len == 32768


# The process


def test_a_manager_is_found_by_its_file_only_while_it_lives(tmp_path: Path) -> None:
    assert find_manager(tmp_path) is None
    announce(tmp_path, "http://127.0.0.1:1")
    found = find_manager(tmp_path)
    assert found is not None and found.pid == os.getpid()
    text = (tmp_path / "manager.json").read_text()
    (tmp_path / "manager.json").write_text(text.replace(found.process, "another boot:1"))
    assert find_manager(tmp_path) is None
    withdraw(tmp_path)
    assert find_manager(tmp_path) is None


def test_the_audit_log_records_an_unexpected_error_as_failed(registry: Registry) -> None:
    """Any error but ours and a client that left was written down as done."""

    async def run() -> None:
        actions = Actions(registry, None, None, None, None, None, None)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="Too many open files"):
            async with actions.audited(Caller(who="key x", address="127.0.0.1"), "stop", "qwen"):
                raise OSError(24, "Too many open files")
        (entry,) = list_audit(registry)
        assert entry.outcome is AuditOutcome.FAILED
        assert entry.detail == "OSError: [Errno 24] Too many open files"

    asyncio.run(run())


def test_the_stop_reason_is_logged_and_shown_on_the_card(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    place = QuickPlace(tmp_path)
    place.add("a")
    with managed_process(place) as manager, manager.client() as client:
        assert client.post("/api/engines/start/a").json()["stop_reason"] == ""
        assert client.post("/api/engines/stop/a").json()["stop_reason"] == "it was stopped by local"
        assert "Why: it was stopped by local" in client.get("/models").text
        assert "Overspill: a is being stopped: it was stopped by local\n" in manager.out.read_text()


def test_limits_are_sizes_and_without_them_there_are_none() -> None:
    assert limit(None, None) is None
    given = limit("4GiB", None)
    assert given is not None and given.ram_bytes == 4 * GiB and given.gpu_bytes > 1 << 50


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with managed(tmp_path_factory.mktemp("app")) as running:
        yield running


def test_an_unknown_host_header_is_refused(manager: Managed) -> None:
    assert httpx.get(manager.url + "/", headers={"host": "evil.example"}, timeout=60).status_code == 421
    assert httpx.get(manager.url + "/", headers={"host": "localhost"}, timeout=60).status_code == 303


def test_the_grafana_dashboard_shows_series_that_exist(manager: Managed) -> None:
    from overspill.manager.telemetry.engine_metrics import SERIES

    text = (Path(__file__).parents[1] / "docs/grafana-dashboard.json").read_text()
    shown = set(re.findall(r"overspill_\w+[a-z]", text))
    deadline = time.monotonic() + 60
    # Until the machine was looked at.
    while "overspill_manager_ram_total_bytes" not in (told := httpx.get(f"{manager.url}/metrics", timeout=60).text):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ours = set(re.findall(r"# TYPE (\w+) ", told))
    engines = {name.decode() for name in SERIES}
    assert len(shown) > 15 and shown <= ours | engines, shown - ours - engines
    page = (Path(__file__).parents[1] / "docs/manager.md").read_text()
    for name in ours:
        assert f"`{name.removeprefix('overspill_manager_')}`" in page, name


def test_a_second_manager_of_the_same_user_is_refused(manager: Managed) -> None:
    second = manager.overspill("manager", "--port", str(free_port()))
    assert second.returncode == 1 and f"a manager is already running (process {manager.process.pid})" in second.stderr


def test_a_found_server_is_watched_and_stopped_only_by_its_name(manager: Managed, tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text((Path(__file__).parent / "vllm_lookalike.py").read_text())
    server = subprocess.Popen(
        [sys.executable, program, "serve", "Qwen/Qwen3-8B", "--api-key", "geheim"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "LOOKALIKE": json.dumps(["--models", "qwen"])},
    )  # fmt: skip
    with server, manager.client() as client:
        try:
            assert server.stdout is not None and server.stdout.readline()
            deadline = time.monotonic() + 60
            while True:
                (found,) = [one for one in client.get("/api/found").json() if one["pid"] == server.pid]
                if found["models"] or time.monotonic() > deadline:  # it has a second or two to tell them
                    break
            assert found["name"] == "Qwen/Qwen3-8B" and found["models"] == ["qwen"]
            page = httpx.get(f"{manager.url}/found", timeout=30).text
            assert f"This ends process {server.pid}" in page and "geheim" not in page
            place = f"/api/found/{server.pid}"
            assert client.post(f"{place}/watch").status_code == 200
            assert "Stop watching it" in httpx.get(f"{manager.url}/found/list", timeout=30).text
            wrong = client.post(f"{place}/stop", json={"identity": found["identity"], "confirm_name": "qwen"})
            assert wrong.status_code == 400 and server.poll() is None
            right = {"identity": found["identity"], "confirm_name": "Qwen/Qwen3-8B"}
            assert client.post(f"{place}/stop", json=right).status_code == 200
            assert server.wait(timeout=60) is not None
            told = [(one["action"], one["outcome"]) for one in client.get("/api/audit").json()]
            assert told[:2] == [("stop found server", "done"), ("stop found server", "refused")]
        finally:
            server.kill()


def test_an_engine_of_a_running_script_cannot_be_stopped(manager: Managed, tmp_path: Path) -> None:
    with running_script(tmp_path) as (process, engine), manager.client() as client:
        (found,) = [one for one in client.get("/api/found").json() if one["pid"] == engine]
        page = httpx.get(f"{manager.url}/found", timeout=30).text
        assert f"the engine of process {process.pid}" in page and f"Stop process {engine}" not in page
        right = {"identity": found["identity"], "confirm_name": found["name"]}
        refused = client.post(f"/api/found/{engine}/stop", json=right)
        assert refused.status_code == 400 and "batch.py" in refused.json()["error"]["message"]
        os.kill(engine, 0)  # it lives


def test_the_manager_exits_while_a_client_watches(manager: Managed) -> None:
    with httpx.stream("GET", manager.url + "/events/dashboard", timeout=30) as events:
        lines = events.iter_lines()
        assert next(lines)
        manager.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.TransportError):
            for _ in lines:
                pass
    assert manager.process.wait(timeout=120) == 0
    assert find_manager(own_folder({"XDG_STATE_HOME": str(manager.folder / "state")})) is None


def test_a_killed_manager_does_not_block_the_next(tmp_path: Path) -> None:
    with managed(tmp_path) as first:
        first.process.kill()
        first.process.wait(timeout=10)
        second = Managed(tmp_path, port=first.port)
        try:
            second.wait_until_it_answers()
            assert httpx.get(second.url + "/api/status", timeout=60).json()["pid"] == second.process.pid
            assert second.end() == 0
        finally:
            second.clean_up()


def test_the_manager_command_runs_on_uvloop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway is tested on the same event loop."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    loops = []

    async def run(*given: Any) -> None:
        loops.append(asyncio.get_running_loop())

    monkeypatch.setattr(server, "run", run)
    answer = CliRunner().invoke(app, ["manager"])
    assert answer.exit_code == 0, answer.output
    (loop,) = loops
    assert isinstance(loop, uvloop.Loop)


def test_closing_the_terminal_ends_the_manager_and_its_engines(tmp_path: Path) -> None:
    """It died at once, and its engines went on without anybody to stop them."""
    place = QuickPlace(tmp_path)
    place.add("a")
    port = free_port()
    terminal, own = os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "tests.managed_process", str(tmp_path), str(port)], cwd=ROOT,
        stdin=own, stdout=own, stderr=own, env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )  # fmt: skip
    os.close(own)
    try:
        with os.fdopen(os.dup(terminal)) as lines:
            assert "the manager is at" in next(lines)
        assert httpx.post(f"http://127.0.0.1:{port}/api/engines/start/a", timeout=60).status_code == 200
        (engine,) = place.starts("a")
        os.close(terminal)
        # Not killed by the signal, and what it could not say any more is no reason to leave an engine behind.
        assert process.wait(timeout=120) >= 0
        assert identity(engine) is None
    finally:
        process.kill()
        process.wait()
        for pid in of_folder(tmp_path):
            os.kill(pid, signal.SIGKILL)


def test_with_nohup_the_manager_outlives_its_terminal(tmp_path: Path) -> None:
    place = QuickPlace(tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        started = managed_process(place)
    finally:
        signal.signal(signal.SIGHUP, before)
    with started as running, running.client() as client:
        os.kill(running.pid, signal.SIGHUP)
        time.sleep(0.3)
        assert client.get("/api/status").json()["pid"] == running.pid
