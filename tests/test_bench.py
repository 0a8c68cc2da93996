"""`overspill bench` against vLLM's real server on the CPU, and against one that can be killed in the middle."""

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill.address import free_port
from overspill.measure import CannotMeasure
from overspill.measure.measurement import _PATIENCE_S, Outcome, measure, part_from_json
from overspill.measure.metrics import read_counters, serving_metrics
from overspill.measure.progress import Progress
from overspill.measure.provenance import Provenance
from overspill.measure.target import Answer, Target, find_target
from overspill.measure.workload import WORKLOADS, parse_workload
from overspill.registry import Result, get_result, list_results, open_registry
from tests.command import run_overspill
from tests.test_serve import (
    Serve,
    model,  # noqa: F401 (a fixture)
    serving,
)

SMALL = {
    "overhead": "overhead:requests=6,rate=20,input=200,output=5",
    "multi-turn": "multi-turn:conversations=8,turns=3,first=600,input=100,output=8,think_time=0.05",
    "shared-prefix": "shared-prefix:groups=3,requests=3,prefix=600,suffix=20,output=4",
    "long-context": "long-context:prompts=3,input=3000,output=3",
    "offline": "offline:requests=16,input=64,output=4",
    "edit": "edit:requests=2,input=64,output=8",
    "write": "write:requests=2,input=64,output=8",
}
INPUT_TOKENS = {
    "overhead": 6 * 200, "multi-turn": 8 * (600 + 708 + 816), "shared-prefix": 9 * 620, "long-context": 6 * 3000,
    "offline": 16 * 64, "edit": 2 * 64, "write": 2 * 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:  # noqa: F811
    with serving(model, folder=tmp_path_factory.mktemp("server")) as running:
        running.wait_for("/v1 serves")
        yield running


@pytest.fixture(scope="module")
def target(server: Serve) -> Target:
    return find_target(f"http://127.0.0.1:{server.port}")


def environment(state: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERSPILL_")}
    return {**clean, "XDG_STATE_HOME": str(state), "XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200", **more}


Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """The command, in this process, with a registry of its own."""
    from overspill.cli import app, main

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.delenv("OVERSPILL_API_KEY", raising=False)
        for name, value in {"XDG_STATE_HOME": str(tmp_path), **more}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main(lambda: app(["bench", *words]))
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), out, err)

    return run


@contextlib.contextmanager
def begun(state: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "overspill", "bench", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(state),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def results(state: Path) -> list[Result]:
    with open_registry(environ={"XDG_STATE_HOME": str(state)}) as registry:
        return list_results(registry)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_real_prompts_goodput_and_the_servers_flags(server: Serve, bench: Bench, tmp_path: Path) -> None:
    """What a server was started with was known by a hand-written label only."""
    file = tmp_path / "chats.json"
    said = [("t5 t6 t7 t8 t9", "t3 t4 t5 t6"), ("t9 t8 t7 t6", "t3 t3 t3 t3 t3")]
    messages = [{"from": who, "value": text} for turn in said for who, text in zip(("human", "gpt"), turn)]
    file.write_text(json.dumps([{"conversations": messages}] * 3))
    home = {"XDG_STATE_HOME": server.home["XDG_STATE_HOME"]}
    flags = ["--prompts", str(file), "--workload", "file:turns=2,conversations=3", "--goodput", "ttft:60000,tpot:60000"]
    done = bench(f"http://127.0.0.1:{server.port}", *flags, **home)
    assert done.returncode == 0, done.stderr
    assert "goodput" in done.stdout and "6 requests within the limits, 100 %" in done.stdout
    with open_registry(environ=home) as registry:
        (result,) = list_results(registry, benchmark="file")
    assert result.metrics["total_input_tokens"] == 3 * (5 + 5 + 4 + 4) and result.metrics["total_output_tokens"] == 27
    assert result.config["goodput"] == "ttft:60000,tpot:60000" and result.config["digest"]
    assert "--max-model-len" in result.config["server"] and str(server.port) in result.config["server"]
    assert result.plan is not None and result.plan["max_model_len"] == 4096
    strict = bench(f"http://127.0.0.1:{server.port}", *flags[:5], "ttft:0.001", **home)
    assert strict.returncode == 0 and "0 requests within the limits, 0 %" in strict.stdout
    told = run_overspill("results", "compare", str(result.id), str(result.id + 1), env=home)
    assert "Goodput is by different limits" in told.stdout and "--max-model-len" in told.stdout


def answered_by(server: Serve) -> int:
    """Requests that vLLM has finished, whole."""
    return counted(server, r'request_success_total{.*finished_reason="length".*}')


def is_idle(server: Serve) -> bool:
    return counted(server, "num_requests_(?:running|waiting){.*}") == 0


def counted(server: Serve, series: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^vllm:{series} (\S+)$", text, re.MULTILINE)
    assert found
    return int(sum(map(float, found)))


# Measured.


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_measured(target: Target, name: str) -> None:
    workload = parse_workload(SMALL[name])
    told = []
    outcome = measure(target, workload, seed=1, on_progress=told.append)
    metrics = outcome.metrics
    assert outcome.is_complete and outcome.problem is None and outcome.notes == ()
    count = len(outcome.answers)
    assert metrics["completed"] == count == told[-1].done == told[-1].total and metrics["failed"] == 0
    assert metrics["total_input_tokens"] == metrics["prompt_tokens"] == INPUT_TOKENS[name]
    assert metrics["total_output_tokens"] == count * workload.parameters["output"]
    # A short answer may be there as a whole when a busy machine comes to read it.
    assert len(metrics["ttfts"]) == count and all(
        0 < ttft <= latency for ttft, latency in zip(metrics["ttfts"], metrics["latencies"])
    )
    assert all(metrics[f"{each}_{which}_ms"] > 0 for each in ("mean", "median", "p99") for which in ("ttft", "e2el"))
    assert metrics["peak_ram_bytes"] > 100 << 20 and metrics["ram_of"] == "server" and metrics["samples"]
    is_new = name in ("overhead", "offline", "edit", "write")
    assert (metrics["tokens_from_ram"] + metrics["tokens_from_gpu_cache"] > 0) is not is_new
    assert ("returning_median_ttft_ms" in metrics) is not is_new
    json.dumps(metrics, allow_nan=False)


def test_returning_conversations_hit_ram_with_the_same_answers(target: Target) -> None:
    """One request at a time, so that the two runs differ only in where the KV comes from."""
    workload = parse_workload(
        "multi-turn:conversations=6,turns=2,first=1000,input=50,output=8,concurrency=1,think_time=0"
    )
    first, again = (measure(target, workload, seed=2) for _ in range(2))
    assert first.metrics["tokens_from_ram"] > 0 and first.metrics["load_bytes"] > 0
    assert first.metrics["tokens_from_ram"] < again.metrics["tokens_from_ram"] + again.metrics["tokens_from_gpu_cache"]
    assert first.answers == again.answers and len(set(first.answers)) == 12
    assert not first.notes and "from an earlier run with this seed" in again.notes[0]


def test_another_seed_asks_something_else(target: Target) -> None:
    workload = parse_workload("offline:requests=2,input=32,output=6")
    assert measure(target, workload, seed=3).answers != measure(target, workload, seed=4).answers


def test_vllms_own_benchmark_says_the_same_of_its_samples(
    server: Serve,
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    words = f"""--base-url http://127.0.0.1:{server.port} --model tiny --tokenizer {model} --dataset-name random
        --random-input-len 100 --random-output-len 9 --num-prompts 12 --max-concurrency 4 --ignore-eos --disable-tqdm
        --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 90,99
        --save-result --save-detailed --result-dir {tmp_path} --result-filename result.json"""
    main(parser.parse_args(words.split()))
    told: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert told["completed"] == 12
    columns = ("input_lens", "output_lens", "start_times", "ttfts", "latencies", "itls")
    answers = [
        Answer(prompt_tokens=length, output_tokens=output, started_s=start, ttft=ttft, latency=latency,
               gaps=tuple(gaps), tokens=None, digest="")
        for length, output, start, ttft, latency, gaps in zip(*(told[name] for name in columns))
    ]  # fmt: skip
    ours = serving_metrics(answers, duration=told["duration"], failed=told["failed"])
    assert len(ours) == 28
    assert ours == pytest.approx({name: told[name] for name in ours}, rel=1e-9)


# The command.


def test_the_command_prints_saves_and_checks_the_tier(bench: Bench, server: Serve, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}/v1"
    common = ("--label", "with offload", "--experiment", "turns", "--seed", "11")
    answer = bench(url, "--workload", SMALL["multi-turn"], "--expect", "offload", *common)
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"^requests +24 answered, 0 failed, in \S+ s$", answer.stdout, re.MULTILINE)
    assert re.search(r"^prompt tokens +16,992: [1-9][\d,]* from RAM, ", answer.stdout, re.MULTILINE)
    for name in ("TTFT", "TPOT", "ITL", "E2EL", "TTFT cold", "TTFT returning"):
        assert re.search(rf"^{name}( +\d[\d,.]*){{5}}$", answer.stdout, re.MULTILINE), name
    (saved,) = results(tmp_path)
    assert f"saved as result {saved.id}" in answer.stdout
    assert saved.is_complete and (saved.benchmark, saved.model) == ("multi-turn", "tiny")
    assert (saved.label, saved.experiment) == ("with offload", "turns")
    assert saved.config["parameters"]["turns"] == 3 and saved.config["seed"] == 11
    assert saved.versions["server"] and saved.versions["overspill"]
    assert saved.metrics["tokens_from_ram"] > 0 and len(saved.metrics["answers"]) == 24 and "part" not in saved.metrics
    assert saved.argv[:3] == ["overspill", "bench", url.removesuffix("/v1")]
    assert parse_workload(saved.argv[4]) == parse_workload(SMALL["multi-turn"])


@pytest.mark.parametrize("tier", ["offload", "spill"])
def test_a_tier_that_was_not_used_fails_the_command(bench: Bench, server: Serve, tmp_path: Path, tier: str) -> None:
    url = f"http://127.0.0.1:{server.port}"
    small = ("--workload", "offline:requests=2,input=32,output=4", "--seed", "12" if tier == "spill" else "13")
    answer = bench(url, *small, "--expect", tier)
    assert answer.returncode == 1 and f"error: {tier} was not used" in answer.stderr
    assert results(tmp_path)[0].is_complete


def test_json_has_everything(bench: Bench, server: Serve, tmp_path: Path) -> None:
    words = ("--workload", SMALL["long-context"], "--json", "--expect", "spill", "--seed", "14")
    answer = bench(f"http://127.0.0.1:{server.port}", *words)
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["id"] == results(tmp_path)[0].id and told["is_complete"] and told["errors"] == []
    assert told["metrics"]["spilled_steps"] > 0 and told["metrics"]["cold_completed"] == 3
    assert len(told["answers"]) == 6 and told["answers"][:3] == told["answers"][3:]


def test_ctrl_c_keeps_finished_answers_and_resume_sends_the_rest(
    bench: Bench,
    server: Serve,
    tmp_path: Path,
) -> None:
    url, before = f"http://127.0.0.1:{server.port}", answered_by(server)
    words = (url, "--workload", "overhead:requests=40,rate=10,input=64,output=4", "--seed", "20")
    with begun(tmp_path, *words) as process:
        wait_for(lambda: answered_by(server) >= before + 8)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in err
    (part,) = results(tmp_path)
    done = part.metrics["completed"]
    assert not part.is_complete and 3 < done < 40 and part.metrics["prompt_tokens"] >= done * 64
    assert f"it was stopped; {done} of 40 requests were answered; to resume: " in err and f"{done} answered" in out
    wait_for(lambda: is_idle(server))
    before = answered_by(server)
    again = bench(url, "--resume", str(part.id))
    assert again.returncode == 0, again.stderr
    # What was left, and the short request that tries the server.
    assert answered_by(server) - before == 40 - done + 1
    whole = results(tmp_path)[0]
    assert whole.is_complete and whole.metrics["completed"] == 40 and whole.config["resumes"] == part.id
    assert whole.metrics["duration"] > part.metrics["duration"] and "measured in parts" in whole.metrics["notes"][0]
    kept = [(one, other) for one, other in zip(part.metrics["answers"], whole.metrics["answers"]) if one]
    assert len(kept) == done and all(one == other for one, other in kept) and all(whole.metrics["answers"])
    refused = bench(url, "--resume", str(whole.id))
    assert refused.returncode == 2 and "is complete; there is nothing to resume" in refused.stderr


# A server that can be killed.


class Killable:
    def __init__(self, folder: Path, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self._log = folder / f"asked-{self.port}-{time.monotonic_ns()}"
        self._log.touch()
        program = Path(__file__).with_name("openai_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), "--port", str(self.port), "--log", str(self._log), *flags]
        )
        wait_for(self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            return True
        return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self) -> list[str]:
        """The prompts that came, but for the first, which only tries the server."""
        return self._log.read_text().split()[1:]

    def is_tried(self) -> bool:
        return bool(self._log.read_text())

    def end(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[Callable[..., Killable]]:
    started: list[Killable] = []

    def start(*flags: str, port: int | None = None) -> Killable:
        started.append(Killable(tmp_path, *flags, port=port))
        return started[-1]

    yield start
    for each in started:
        each.end()


TURNS = "multi-turn:conversations=6,turns=4,first=30,input=10,output=8,think_time=0.02,concurrency=2"


def test_a_killed_server_loses_no_answer_and_another_resumes(
    bench: Bench, killable: Callable[..., Killable], tmp_path: Path
) -> None:
    whole = measure(find_target(killable().url), parse_workload(TURNS), seed=5)
    assert whole.is_complete and len(set(whole.answers)) == 24
    first = killable("--pause", "0.05")
    with begun(tmp_path, first.url, "--workload", TURNS, "--seed", "5") as process:
        wait_for(lambda: len(first.asked()) >= 11)
        first.end()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in err
    (part,) = results(tmp_path)
    done = part.metrics["completed"]
    assert not part.is_complete and 6 < done < 24 and f"{done} answered, 0 failed" in out
    assert f"the server at {first.url} is gone" in err and f"{done} of 24 requests were answered" in err
    assert part.metrics["tokens_from_ram"] is None and "reports no counters" in part.metrics["notes"][0]
    second = killable(port=first.port)
    again = bench(second.url, "--resume", str(part.id))
    assert again.returncode == 0, again.stderr
    assert len(second.asked()) == 24 - done and len({*first.asked(), *second.asked()}) == 24
    # Each turn is asked with all that was said before it, so the answers tell that nothing of it was lost.
    assert results(tmp_path)[0].metrics["answers"] == whole.answers


def test_sigterm_keeps_what_is_finished(killable: Callable[..., Killable], tmp_path: Path) -> None:
    server = killable("--pause", "0.05")
    with begun(tmp_path, server.url, "--workload", TURNS) as process:
        wait_for(lambda: len(server.asked()) >= 5)
        process.terminate()
        _, err = process.communicate(timeout=120)
    (part,) = results(tmp_path)
    assert process.returncode == 1 and "it was stopped; " in err and "Traceback" not in err
    assert not part.is_complete and 0 < part.metrics["completed"] < 24


def stopped_after(least: int, url: str, resume: dict[str, Any] | None = None) -> Outcome:
    """A measurement that a thread stops once more than so many requests are answered."""
    stop = threading.Event()

    def on_progress(at: Progress) -> None:
        if at.done > least:
            stop.set()

    return measure(find_target(url), parse_workload(TURNS), seed=5, stop=stop, on_progress=on_progress, resume=resume)


@pytest.fixture
def _quick_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.measure.measurement._PROGRESS_S", 0.1)


@pytest.mark.usefixtures("_quick_progress")
def test_a_stop_returns_a_part_that_can_be_resumed(killable: Callable[..., Killable]) -> None:
    server = killable("--pause", "0.02")
    outcome = stopped_after(3, server.url)
    assert not outcome.is_complete and "it was stopped" in str(outcome.problem)
    assert 3 < outcome.metrics["completed"] < 24
    whole = measure(find_target(killable().url), parse_workload(TURNS), seed=5)
    part = json.loads(json.dumps(outcome.part))
    rest = measure(find_target(server.url), parse_workload(TURNS), seed=5, resume=part)
    assert rest.is_complete and rest.answers == whole.answers


def test_a_stop_ends_the_run_while_the_first_request_hangs(killable: Callable[..., Killable]) -> None:
    """The request that tries a server had neither a time limit nor an eye on `stop`."""
    server, stop = killable("--pause", "60"), threading.Event()

    def stop_when_asked() -> None:
        wait_for(server.is_tried)
        stop.set()

    stopping = threading.Thread(target=stop_when_asked)
    stopping.start()
    with pytest.raises(CannotMeasure, match=r"it was stopped before the server at \S+ had answered"):
        measure(find_target(server.url), parse_workload(TURNS), stop=stop)
    stopping.join()


@pytest.mark.usefixtures("_quick_progress")
def test_a_resumed_measurement_keeps_its_first_part(killable: Callable[..., Killable]) -> None:
    server = killable("--pause", "0.02")
    kept = stopped_after(3, server.url).part
    resumed = stopped_after(8, server.url, kept).part
    assert kept is not None and resumed is not None
    first, later = part_from_json(kept), part_from_json(resumed)
    assert set(first.answers) < set(later.answers)
    assert later.duration > first.duration


def incomplete(bench: Bench, killable: Callable[..., Killable], state: Path) -> tuple[Killable, Result]:
    """A server, and a result of which half is missing; the server is gone."""
    server = killable("--fail", str(30 + 8 + 10))
    assert bench(server.url, "--workload", TURNS, "--seed", "5").returncode == 1
    server.end()
    return server, results(state)[0]


def test_resume_uses_only_the_server_of_the_first_part(
    bench: Bench, killable: Callable[..., Killable], tmp_path: Path
) -> None:
    """Without an address, resume used port 8000, and it silently accepted another server."""
    first, part = incomplete(bench, killable, tmp_path)
    other = killable()
    refused = bench(other.url, "--resume", str(part.id))
    assert refused.returncode == 2 and f"was measured at {first.url}, not at {other.url}" in refused.stderr
    again = killable(port=first.port)
    answer = bench("--resume", str(part.id))
    assert answer.returncode == 0, answer.stderr
    assert len(again.asked()) == 18 and other.asked() == []
    assert results(tmp_path)[0].config["url"] == first.url


def test_a_resume_with_another_version_of_the_server_is_refused(
    bench: Bench, killable: Callable[..., Killable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"server": "0.32.0"}
    monkeypatch.setattr(
        "overspill.measure.bench.server_provenance",
        lambda target: Provenance(gpu=None, driver=None, versions={**versions}, git_revision=None),
    )
    first, part = incomplete(bench, killable, tmp_path)
    killable(port=first.port)
    versions["server"] = "0.33.0"
    refused = bench("--resume", str(part.id))
    assert refused.returncode == 1 and "was 0.32.0, and is 0.33.0. Serve as before, or " in refused.stderr
    versions.clear()
    assert bench("--resume", str(part.id)).returncode == 0, "one that does not tell is not refused"


def test_a_server_that_tells_no_token_ids_is_measured_too(killable: Callable[..., Killable], tmp_path: Path) -> None:
    server = killable("--no-ids")
    outcome = measure(find_target(server.url), parse_workload(TURNS), seed=5)
    assert outcome.is_complete and outcome.metrics["total_output_tokens"] == 24 * 8 and len(set(outcome.answers)) == 24
    assert any("reports no token ids" in note for note in outcome.notes)


OFFLINE = "offline:requests=4,input=50,output=5"


def test_prompt_tokens_are_counted_where_the_server_does_not(killable: Callable[..., Killable]) -> None:
    outcome = measure(find_target(killable("--no-usage").url), parse_workload(OFFLINE))
    assert outcome.metrics["total_input_tokens"] == 4 * 50 and outcome.metrics["total_output_tokens"] == 4 * 5


def test_answers_of_another_length_are_told(killable: Callable[..., Killable]) -> None:
    outcome = measure(find_target(killable("--most", "3").url), parse_workload(OFFLINE))
    assert outcome.is_complete and outcome.metrics["total_output_tokens"] == 4 * 3
    assert any("4 of 4 answers do not have the length" in note for note in outcome.notes)


def test_a_stream_that_is_over_need_not_end(killable: Callable[..., Killable]) -> None:
    """As OpenAI's client ends at [DONE], too."""
    outcome = measure(find_target(killable("--pause-at-end", "3600").url), parse_workload(OFFLINE))
    assert outcome.is_complete and outcome.metrics["total_output_tokens"] == 4 * 5


def test_an_adapter_is_measured_if_it_is_named(killable: Callable[..., Killable]) -> None:
    url = killable("--adapters", "lora").url
    assert find_target(url).model == "tiny" and find_target(url, "lora").model == "lora"


def test_a_hung_server_delays_the_end_of_a_stopped_run_by_little(
    killable: Callable[..., Killable], monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = []

    def read(target: Target, **how: float) -> dict[str, float] | None:
        patience.append(how)
        return read_counters(target, **how)

    monkeypatch.setattr("overspill.measure.measurement.read_counters", read)
    server, stop = killable("--pause", "0.02"), threading.Event()

    def hang(progress: Progress) -> None:
        if progress.done > 3 and not stop.is_set():
            server.process.send_signal(signal.SIGSTOP)
            stop.set()

    monkeypatch.setattr("overspill.measure.measurement._PROGRESS_S", 0.1)
    outcome = measure(find_target(server.url), parse_workload(TURNS), seed=5, stop=stop, on_progress=hang)
    assert not outcome.is_complete and outcome.metrics["completed"] > 3 and outcome.part is not None
    assert patience == [{}, {"timeout_s": _PATIENCE_S}]


def test_a_resumed_measurement_expects_what_the_first_part_did(
    bench: Bench, killable: Callable[..., Killable], tmp_path: Path
) -> None:
    server = killable("--fail", str(30 + 8 + 10))
    assert bench(server.url, "--workload", TURNS, "--seed", "5", "--expect", "offload").returncode == 1
    server.end()
    (part,) = results(tmp_path)
    again = bench(killable(port=server.port).url, "--resume", str(part.id))
    assert again.returncode == 1 and "whether offload was used is not known" in again.stderr


def test_failed_requests_are_counted_and_followups_not_sent(
    bench: Bench, killable: Callable[..., Killable], tmp_path: Path
) -> None:
    server = killable("--fail", str(30 + 8 + 10))  # the second turns
    answer = bench(server.url, "--workload", TURNS, "--seed", "5")
    assert answer.returncode == 1
    assert "6 of 24 requests failed, and 12 more were not sent; the first: status 429: too much" in answer.stderr
    (part,) = results(tmp_path)
    assert (part.metrics["completed"], part.metrics["failed"], part.is_complete) == (6, 6, False)
    server.end()
    assert bench(killable(port=server.port).url, "--resume", str(part.id)).returncode == 0
    assert results(tmp_path)[0].is_complete


def test_a_request_refused_for_good_ends_the_run(
    bench: Bench, killable: Callable[..., Killable], tmp_path: Path
) -> None:
    answer = bench(killable("--refuse", "48").url, "--workload", TURNS)
    assert (
        answer.returncode == 1
        and "the server refused a request: status 400: this prompt is not welcome" in answer.stderr
    )
    answer = bench(killable("--refuse", "30").url, "--workload", TURNS)
    assert answer.returncode == 1 and "refused the first request" in answer.stderr and answer.stdout == ""


def test_the_key_comes_from_the_environment_and_is_not_saved(
    bench: Bench, killable: Callable[..., Killable], tmp_path: Path
) -> None:
    server = killable("--key", "hush-hush")
    small = (server.url, "--workload", "offline:requests=2,input=9,output=2")
    assert bench(*small, OVERSPILL_API_KEY="hush-hush").returncode == 0
    assert bench(*small, "--api-key", "hush-hush").returncode == 0
    assert "hush-hush" not in json.dumps([each.as_json() for each in results(tmp_path)])


def test_an_unwritable_registry_is_an_error_but_prints_numbers(
    bench: Bench, killable: Callable[..., Killable], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    small = (killable().url, "--workload", "offline:requests=2,input=9,output=2")
    answer = bench(*small, XDG_STATE_HOME=str(tmp_path / "file"))
    assert answer.returncode == 1 and "2 answered" in answer.stdout and "saved" not in answer.stdout
    assert (
        "The result will be printed, not saved" in answer.stderr
        and "error: the result was not saved: " in answer.stderr
    )


def test_a_disk_filling_up_is_an_error_but_prints_numbers(killable: Callable[..., Killable], tmp_path: Path) -> None:
    """Files may not grow any more, which looks like a full disk to SQLite."""
    server = killable("--pause", "0.5")
    with begun(tmp_path, server.url, "--workload", "offline:requests=2,input=9,output=8") as process:
        wait_for(lambda: len(server.asked()) == 2)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (8192, 8192))
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "2 answered" in out and "warning" not in err and "Traceback" not in err
    assert "error: the result was not saved: " in err and "Make room on the disk" in err
    assert results(tmp_path) == []


# Mistakes.


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("others")
    made = {
        "two": Killable(folder, "--models", "qwen,llama"),
        "locked": Killable(folder, "--key", "secret"),
        "strange": Killable(folder, "--models", "-"),
    }
    yield {name: each.url for name, each in made.items()} | {"nobody": f"http://127.0.0.1:{free_port()}"}
    for each in made.values():
        each.end()


BAD: dict[str, tuple[list[str], int, str]] = {
    "no server": (["{nobody}"], 1, "no server answers at {nobody}"),
    "not an address": (["ftp://host"], 2, "is not the address of a server"),
    "not an OpenAI server": (["{strange}"], 1, "but not like an OpenAI server: /v1/models gave status 404"),
    "no key": (["{locked}"], 1, "refuses to answer without a key; give --api-key, or OVERSPILL_API_KEY"),
    "a wrong key": (["{locked}", "--api-key", "wrong"], 1, "refuses this key; give another --api-key"),
    "a wrong model": (["{two}", "--model", "qwem"], 2, "serves qwen, llama, and not 'qwem'; did you mean qwen?"),
    "several models": (["{two}"], 2, "serves qwen, llama; name one of them with --model"),
    "too long": (["{two}", "--model", "qwen", "--workload", "overhead"], 1,
                 "needs 9,216 tokens; the server takes 4,096. Use --workload overhead:input=3072, or serve with "
                 "--max-model-len 9216"),
    "a wrong workload": (["{two}", "--workload", "ofline"], 2, "did you mean offline?"),
    "a wrong parameter": (["{two}", "--workload", "offline:inputs=3"], 2, "did you mean input?"),
    "a wrong tier": (["{two}", "--expect", "disk"], 2, "--expect 'disk' is not a tier; write offload or spill"),
    "no such result": (["{two}", "--resume", "77"], 2, "there is no result 77 in the registry"),
    "another seed for a resumed one": (["{two}", "--resume", "1", "--seed", "3"], 2, "--seed cannot be given with"),
    "not a seed": (["{two}", "--seed", "x"], 2, "--seed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_sentence(others: dict[str, str], bench: Bench, name: str) -> None:
    words, code, told = BAD[name]
    answer = bench(*(word.format(**others) for word in words))
    assert (answer.returncode, answer.stdout) == (code, "") and told.format(**others) in answer.stderr, answer.stderr
    assert "Traceback" not in answer.stderr and ("error: " in answer.stderr or code == 2)


def test_a_result_of_something_else_cannot_be_resumed(
    bench: Bench, killable: Callable[..., Killable], tmp_path: Path
) -> None:
    from datetime import UTC, datetime

    from overspill.registry import Result, save_result

    with open_registry(environ={"XDG_STATE_HOME": str(tmp_path)}) as registry:
        other = Result(
            benchmark="verify", model="a", config={}, argv=(), metrics={}, started_at=datetime.now(UTC),
            is_complete=False,
        )  # fmt: skip
        result_id = save_result(registry, other).id
        assert get_result(registry, result_id).benchmark == "verify"
    answer = bench(killable().url, "--resume", str(result_id))
    assert answer.returncode == 2 and "is not of overspill bench, so it cannot be resumed" in answer.stderr
