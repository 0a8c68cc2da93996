"""`overspill ab`: real servers started, measured and ended; vLLM's own, and a stand-in where engines must fail."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from overspill.cli import app, main
from overspill.flags import _Known, _known_flags
from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.ab import run
from overspill.measure.experiment import Experiment
from overspill.measure.provenance import find_provenance
from overspill.measure.trial import stopped_by_signals
from overspill.processes import below, identity
from overspill.registry import Registry, RegistryUnavailable, add_model, list_results, open_registry
from overspill.tiny import make_llama

pytestmark = pytest.mark.usefixtures("nothing_is_left")

START_S = 600

# A stand-in for vLLM's server, for what an engine does badly. It says in its log what is asked of it.
STAND_IN = """
import argparse, http.server, json, os, sys, threading, time

parser = argparse.ArgumentParser()
parser.add_argument("--model"), parser.add_argument("--host"), parser.add_argument("--port", type=int)
parser.add_argument("--reply", dest="token", type=int, default=7), parser.add_argument("--slow", type=float, default=0)
parser.add_argument("--die-after", type=int, default=10**9), parser.add_argument("--refuse", action="store_true")
parser.add_argument("--from-ram", type=int, default=0), parser.add_argument("--kv-transfer-config")
parser.add_argument("--crowded", action="store_true"), parser.add_argument("--max-model-len")
parser.add_argument("--hang", type=float, default=0)
given = parser.parse_args()
if given.crowded:
    print("ValueError: Free memory on device cuda:0 (9.87/23.52 GiB) on startup is less than desired GPU memory "
          "utilization (0.92, 21.64 GiB). Decrease GPU memory utilization", flush=True)
    sys.exit(3)
if given.refuse:
    print("ValueError: no memory for so much", flush=True)
    sys.exit(3)
answered, resets = 0, 0

class Handler(http.server.BaseHTTPRequestHandler):
    def tell(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/v1/models":
            return self.tell(json.dumps({"data": [{"id": given.model, "root": given.model}]}).encode())
        counted = f"vllm:prompt_tokens_total {answered * 10}\\n"
        if given.kv_transfer_config:
            counted += f"vllm:external_prefix_cache_hits_total {answered * given.from_ram}\\n"
        self.tell(counted.encode() if self.path == "/metrics" else b"{}", "text/plain")

    def do_POST(self):
        global answered, resets
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.startswith("/reset_prefix_cache"):
            resets += 1
            print("reset", self.path, flush=True)
            return self.tell(json.dumps({"success": resets % 2 == 0}).encode())
        answered += 1
        if answered > given.die_after:
            print("EngineDeadError: on purpose", flush=True)
            os._exit(4)
        if given.hang:
            print("hangs", flush=True)
            time.sleep(given.hang)
            print("goes on", flush=True)
        time.sleep(given.slow)
        pieces = [{"choices": [{"text": "x", "token_ids": [given.token]}]}] * json.loads(body)["max_tokens"]
        pieces.append({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": len(pieces)}})
        said = "".join(f"data: {json.dumps(piece)}\\n\\n" for piece in pieces) + "data: [DONE]\\n\\n"
        self.tell(said.encode(), "text/event-stream")

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("ab") / "tiny")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(
        "overspill.measure.launch.server_command",
        lambda model, vllm: [sys.executable, str(program), "--model", model],
    )
    for flag in re.findall(r'"(--[a-z-]+)"', STAND_IN):  # as if they were vLLM's
        monkeypatch.setitem(_known_flags(), flag, _Known("", is_many=True))


def asked(model: Path, *texts: str, **changes: Any) -> Experiment:
    workload = "multi-turn:conversations=2,turns=2,first=20,input=5,output=4,think_time=0,concurrency=1"
    values: dict[str, Any] = {
        "model": str(model), "configurations": tuple(zip("abcdef", texts)), "workload": workload, "repeats": 2,
    }  # fmt: skip
    return Experiment(**{**values, **changes})


def stored(registry: Registry) -> list[tuple[str | None, int | None, bool]]:
    return [(one.label, one.repeat, one.is_complete) for one in reversed(list_results(registry))]


def test_repeats_are_measured_in_turn_and_saved_with_everything(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    told: list[str] = []
    native = "offload = overspill-eager:1MiB --from-ram 5"
    report = run(asked(model, "none", native, expects="offload"), registry, told.append, logs=tmp_path / "logs")
    assert stored(registry) == [("none", 1, True), ("offload", 1, True), ("offload", 2, True), ("none", 2, True)]
    assert report.is_complete and report.exit_code == 0, report.as_text()
    assert sorted(path.name for path in (tmp_path / "logs").glob("*.log")) == [
        "none-1.log", "none-2.log", "offload-1.log", "offload-2.log"
    ]  # fmt: skip
    one = list_results(registry)[1]
    assert one.metrics["completed"] == 4 and one.metrics["load_s"] > 0 and one.metrics["tokens_from_ram"] == 20
    assert list_results(registry)[0].metrics["tokens_from_ram"] == 0
    assert "--kv-transfer-config" in one.argv and one.versions["overspill"] and one.plan is None
    assert one.config["seed"] == 1 and one.config["parameters"]["turns"] == 2
    assert Experiment.from_json(one.config["experiment"]) == asked(model, "none", native, expects="offload")
    assert "All 8 answers of offload are those of none." in report.as_text()
    assert any(line.startswith("[2/4] offload, repeat 1 of 2: starting vLLM; ") for line in told)


def test_differing_answers_are_reported_but_not_a_failure(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    report = run(asked(model, "none", "other = vllm --reply 8", repeats=1), registry, str, logs=tmp_path)
    assert report.exit_code == 0 and "4 of 4 answers of other differ from those of none" in report.as_text()


def test_a_failed_start_is_reported_and_other_configurations_run(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    told: list[str] = []
    report = run(asked(model, "none", "broken = vllm --refuse"), registry, told.append, logs=tmp_path / "logs")
    assert stored(registry) == [("none", 1, True), ("broken", 1, False), ("none", 2, True)], "and not tried twice"
    assert not report.is_complete and report.exit_code == 1
    first = (
        r"broken failed: vLLM ended with exit code 3 after \d+ s while starting vLLM: ValueError: no memory for so much"
    )
    assert re.match(f"{first}\n\nExperiment ab-", report.as_text()), "which one failed, and why, before all else"
    assert re.search(f'<h1>Experiment .*</h1>\n<p class="problem">{first}</p>', report.as_html())
    assert any("ValueError: no memory for so much" in line and "broken-1.log" in line for line in told)


def test_a_failed_comparison_ends_with_an_error(
    model: Path, stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of the manager shows the last error as its reason, and there was none."""
    monkeypatch.setenv("OVERSPILL_DATABASE_URL", f"sqlite:///{tmp_path}/registry.db")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = [str(model), "--a", "broken = vllm --refuse", "--b", "worse = vllm --refuse", "--repeats", "1"]
    with pytest.raises(SystemExit) as ended:
        main(lambda: app(["ab", *words]))
    *_, first, second = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and first.startswith("error: broken failed: vLLM ended with exit code 3 after ")
    assert second.startswith("error: worse failed: ") and second.endswith(": ValueError: no memory for so much")


def test_advice_without_a_plan_names_flags_vllm_accepts(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    """The advice was --gpu-memory, which is refused without a plan."""
    report = run(asked(model, "none", "full = vllm --crowded"), registry, str, logs=tmp_path / "logs")
    told = report.as_text()
    assert "give less with --gpu-memory-utilization 0.41" in told and "--gpu-memory 9.87GiB" not in told


def test_unusable_registry_settings_are_reported_once_per_label(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERSPILL_DATABASE_URL", f"sqlite:///{tmp_path}/registry.db")
    settings = {"gpu_memory": 128 << 20, "ram": 5 << 30, "offload_ram": 1 << 30, "max_model_len": 4096}
    add_model(registry, "mine", {"source": str(model), **settings})
    told: list[str] = []
    definition = asked(model, "none", "other = vllm --reply 7", repeats=1)
    run(dataclasses.replace(definition, model="mine"), registry, told.append, logs=tmp_path / "logs")
    for label in ("none", "other"):
        (line,) = [line for line in told if line.startswith(f"warning: {label}: ")]
        assert "--gpu-memory, --ram, --offload-ram of mine in the registry are not used" in line
        assert "--max-model-len" not in line and "--gpu-memory-utilization" in line
    assert all("not used" in one.config["warnings"][0] for one in list_results(registry))


def test_a_dying_server_keeps_finished_requests_and_other_runs(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    report = run(asked(model, "dying = vllm --die-after 3", "none"), registry, str, logs=tmp_path / "logs")
    assert stored(registry) == [("dying", 1, False), ("none", 1, True), ("none", 2, True)]
    died = list_results(registry)[-1]
    assert died.metrics["completed"] == 2, "one request is a try before the measurement"
    assert "is gone" in died.metrics["problem"] and "vLLM ended with exit code 4" in died.metrics["problem"]
    assert "EngineDeadError: on purpose" in died.metrics["problem"] and "dying-1.log" in died.metrics["problem"]
    assert report.exit_code == 1


def test_kept_engines_start_once_and_retry_a_refused_cache_reset(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    report = run(
        asked(model, "none", "ram = overspill-lazy:1MiB", keeps_engines=True), registry, str, logs=tmp_path / "logs"
    )
    assert stored(registry) == [("none", 1, True), ("none", 2, True), ("ram", 1, True), ("ram", 2, True)]
    assert sorted(path.name for path in (tmp_path / "logs").glob("*.log")) == ["none-1.log", "ram-1.log"]
    asked_for = (tmp_path / "logs" / "none-1.log").read_text().splitlines()
    assert asked_for == ["reset /reset_prefix_cache?reset_external=true"] * 2, "the first was refused"
    assert ["load_s" in one.metrics for one in list_results(registry)] == [False, True, False, True]
    assert report.is_complete
    assert "With --keep, the repeats of a configuration share one start of its engine" in report.as_text()


def test_stop_keeps_finished_repeats_and_resume_runs_the_rest(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    stop = threading.Event()

    def stopping(line: str) -> None:
        if line.startswith("[2/2]") and "ready" in line:
            stop.set()

    slow = asked(model, "none", "slow = vllm --slow 0.05", repeats=1)
    first = run(slow, registry, stopping, logs=tmp_path, stop=stop)
    assert stored(registry) == [("none", 1, True), ("slow", 1, False)] and not first.is_complete
    assert "slow is not complete: interrupted" in first.as_text() and first.experiment is not None
    told: list[str] = []
    second = run(first.definition or pytest.fail(), registry, told.append, resume=first.experiment, logs=tmp_path)
    assert not [line for line in told if "warning" in line]
    assert second.is_complete and second.experiment == first.experiment
    assert stored(registry)[2:] == [("slow", 1, True)]
    assert sum(one.is_complete for one in list_results(registry, experiment=second.experiment)) == 2


def test_resume_warns_if_engines_start_differently(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    first = run(asked(model, "none", "b = vllm", repeats=1), registry, str, logs=tmp_path)
    other = asked(model, "none --reply 9", "b = vllm", repeats=1)  # as if the registry's model had got a flag
    told: list[str] = []
    run(other, registry, told.append, resume=first.experiment, logs=tmp_path)
    assert [line for line in told if "warning" in line] == [
        "warning: none is not started as in its earlier repeats: its command differs, with --reply 9"
    ]


def test_resume_warns_of_another_version_variable_or_gpu(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the command was compared, and an updated vLLM on another card has the same."""
    first = run(asked(model, "none", "b = vllm", repeats=1), registry, str, logs=tmp_path)
    known = find_provenance()
    other = dataclasses.replace(known, gpu="H200", versions={**known.versions, "torch": "99"})
    monkeypatch.setattr("overspill.measure.ab.find_provenance", lambda: other)
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "OTHER")
    told: list[str] = []
    run(first.definition or pytest.fail(), registry, told.append, resume=first.experiment, logs=tmp_path)
    warnings = [line for line in told if "warning" in line]
    assert [line.split()[1] for line in warnings] == ["none", "b"]
    for line in warnings:
        assert f"torch is 99, was {known.versions['torch']}; " in line and "GPU is H200, was none" in line
        assert "variable VLLM_ATTENTION_BACKEND is OTHER, was not set" in line and "command" not in line


def test_resume_refuses_a_folder_of_the_same_name_elsewhere(
    registry: Registry, stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("here", "there"):
        make_llama(tmp_path / place / "tiny")
    monkeypatch.chdir(tmp_path / "here")
    definition = asked(Path("tiny"), "none", "b = vllm", repeats=1)
    first = run(definition, registry, str, logs=tmp_path / "logs")
    assert first.is_complete and str(tmp_path / "here" / "tiny") in list_results(registry)[0].argv
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(MeasureError, match=f"measured {tmp_path}/here/tiny, and tiny is {tmp_path}/there/tiny here"):
        run(definition, registry, str, resume=first.experiment, logs=tmp_path / "logs")


def test_resume_refuses_an_experiment_already_being_measured(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    """A second engine was started for the same repeat, and the log of the first was emptied."""
    refusals: list[str] = []
    definition = asked(model, "none", "b = vllm", repeats=1)

    def resuming(line: str) -> None:
        if line.startswith("[2/2]") and "ready" in line:
            (name,) = {one.experiment for one in list_results(registry)}
            with pytest.raises(CannotMeasure) as refused:
                run(definition, registry, str, resume=name, logs=tmp_path)
            refusals.append(str(refused.value))

    report = run(definition, registry, resuming, logs=tmp_path)
    assert [
        f"experiment {report.experiment} is being measured by process {os.getpid()}" in each for each in refusals
    ] == [True]
    assert stored(registry) == [("none", 1, True), ("b", 1, True)] and report.is_complete
    assert run(definition, registry, str, resume=report.experiment, logs=tmp_path).is_complete, "and then it is"


def test_a_signal_ends_the_run_while_the_first_request_hangs(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    """The request that tries a server had neither a time limit nor an eye on signals."""
    log = tmp_path / "stuck-1.log"

    def interrupt() -> None:
        while "hangs" not in log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    def watching(line: str) -> None:
        if "ready" in line:
            threading.Thread(target=interrupt, daemon=True).start()

    with stopped_by_signals() as stop:
        report = run(asked(model, "stuck = vllm --hang 60", "none"), registry, watching, logs=tmp_path, stop=stop)
    assert stored(registry) == [("stuck", 1, False)] and "stuck is not complete: interrupted" in report.as_text()
    assert log.read_text().split("\n") == ["hangs", ""], "and did not wait for the answer"


def test_a_stop_before_anything_is_measured_says_so(model: Path, registry: Registry, stand_in: None) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(CannotMeasure, match="before anything was measured"):
        run(asked(model, "none", "vllm"), registry, str, stop=stop)


def test_a_full_disk_ends_the_engine_and_keeps_what_was_saved(
    model: Path, registry: Registry, stand_in: None, tmp_path: Path
) -> None:
    with registry.engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TRIGGER full BEFORE INSERT ON results WHEN (SELECT count(*) FROM results) >= 1 "
                "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
            )
        )
    told: list[str] = []
    with pytest.raises(RegistryUnavailable, match="Make room on the disk"):
        run(asked(model, "none", "b = vllm", repeats=1), registry, told.append, logs=tmp_path)
    assert stored(registry) == [("none", 1, True)]
    resume = re.search(r"to resume: overspill ab --resume (\S+)$", told[-1])
    assert resume is not None
    with registry.engine.begin() as connection:
        connection.execute(text("DROP TRIGGER full"))
    report = run(asked(model, "none", "b = vllm", repeats=1), registry, str, resume=resume[1], logs=tmp_path)
    assert report.is_complete and len(stored(registry)) == 2


def test_an_absent_or_unused_tier_is_reported(model: Path, registry: Registry, stand_in: None, tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="--expect spill: no configuration has this tier"):
        run(asked(model, "none", "ram = overspill-lazy:1MiB", expects="spill"), registry, str)
    unused = asked(model, "none", "ram = overspill-lazy:1MiB", expects="offload", repeats=1)
    report = run(unused, registry, str, logs=tmp_path)
    assert report.is_complete and report.exit_code == 1 and "ram: offload was not used" in report.as_text()


def test_engines_of_lmcache_cannot_be_kept(
    model: Path, registry: Registry, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.measure.launch.require_usable", lambda peer, on_cpu: None)
    with pytest.raises(MeasureError, match="LMCache's cache cannot be emptied"):
        run(asked(model, "none", "lmcache:1GiB", keeps_engines=True), registry, str)


# The command.


def environment(folder: Path) -> dict[str, str]:
    left_out = ("OVERSPILL_", "VLLM_ENABLE_V1_MULTIPROCESSING")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {
        **clean, "XDG_CONFIG_HOME": "/nonexistent", "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "200",
        "OVERSPILL_DATABASE_URL": f"sqlite:///{folder}/registry.db", "VLLM_LOGGING_LEVEL": "INFO",
    }  # fmt: skip


def overspill(folder: Path, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "overspill", *words], capture_output=True, text=True, timeout=timeout, check=False,
        env=environment(folder),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a model: overspill ab MODEL"),
        (["MODEL"], "there is nothing to compare"),
        (["MODEL", "--a", "none"], "there is nothing to compare"),
        (["MODEL", "--a", "none", "--b", ""], "a configuration is empty"),
        (["MODEL", "--a", "none", "--c", "vllm"], "--b is missing, and --c is given"),
        (["MODEL", "--a", "none", "--b", "natve:1GiB"], "did you mean native?"),
        (["MODEL", "--a", "none", "--b", "vllm", "--repeats", "0"], "--repeats 0 is not possible"),
        (["MODEL", "--a", "none", "--b", "vllm", "--workload", "multi-trun"], "did you mean multi-turn?"),
        (["MODEL", "--a", "none", "--b", "vllm", "--expect", "disk"], "is not a tier"),
        (["MODEL", "--a", "none", "--b", "vllm", "--common", "--ram 1GiB"], "--ram is a setting of Overspill's plan"),
        (["MODEL", "--a", "none", "--b", "vllm", "--html", "/nonexistent/x.html"], "there is no folder /nonexistent"),
        (["MODEL", "--a", "none", "--b", "vllm", "--json", "/tmp"], "/tmp is a folder"),
        (["MODEL", "--a", "none", "--b", "--ram 1GiX"], "--ram: '1GiX' is not a size"),
        (["--resume", "ab-nothing"], "there is no experiment 'ab-nothing'"),
    ],
    ids=lambda value: " ".join(value[1:]) or "nothing" if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_starts_nothing(
    words: list[str], message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(lambda: app(["ab", *(str(model) if word == "MODEL" else word for word in words)]))
    told = capsys.readouterr()
    assert ended.value.code == 2 and message in told.err, told.err
    assert told.err.count("\n") == 1 and not told.out


TINY = (
    "--skip-tokenizer-init --dtype float32 --enforce-eager --block-size 32 --max-num-seqs 2 --max-model-len 1k "
    "--num-gpu-blocks-override 33"
)
WORKLOAD = "multi-turn:conversations=4,turns=2,first=600,input=40,output=8,think_time=0,concurrency=1"


@pytest.fixture(scope="module")
def interrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[int, str | None]]:
    """An experiment that got Ctrl-C while its second engine started: its folder, its name, and all it ever started."""
    folder = tmp_path_factory.mktemp("interrupted")
    words = [
        "ab", str(model), "--a", "none", "--b", "ram = overspill-eager:64MiB,load=always,reserve_bytes=0",
        "--common", TINY, "--workload", WORKLOAD, "--repeats", "2", "--keep", "--expect", "offload",
    ]  # fmt: skip
    err = folder / "err"
    with err.open("wb") as told:
        command = subprocess.Popen(
            [sys.executable, "-m", "overspill", *words], stdout=subprocess.DEVNULL, stderr=told, env=environment(folder)
        )
    started: dict[int, str | None] = {}
    deadline = time.monotonic() + START_S
    try:
        while "[3/4] ram, repeat 1 of 2: starting vLLM" not in err.read_text() or len(below(command.pid)) < 2:
            assert command.poll() is None and time.monotonic() < deadline, err.read_text()
            started |= {pid: identity(pid) for pid in below(command.pid)}
            time.sleep(0.2)
        started |= {pid: identity(pid) for pid in below(command.pid)}
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=60) == 1, err.read_text()
    finally:
        if command.poll() is None:
            command.kill()
            command.wait()
    name = re.search(r"experiment (ab-\S+):", err.read_text())
    assert name is not None
    return folder, name[1], {pid: known for pid, known in started.items() if known is not None}


def open_folder(folder: Path) -> contextlib.AbstractContextManager[Registry]:
    return open_registry(f"sqlite:///{folder}/registry.db")


def test_ctrl_c_leaves_no_process_and_keeps_finished_repeats(
    interrupted: tuple[Path, str, dict[int, str | None]],
) -> None:
    folder, name, started = interrupted
    assert len(started) > 3, "a guard, a server and its engine, twice"
    assert not [pid for pid, known in started.items() if identity(pid) == known]
    with open_folder(folder) as registry:
        assert stored(registry) == [("none", 1, True), ("none", 2, True), ("ram", 1, False)]
        assert list_results(registry)[0].metrics["problem"] == "interrupted"
        assert {one.experiment for one in list_results(registry)} == {name}


def test_another_experiment_is_not_resumed_under_its_name(interrupted: tuple[Path, str, dict[int, str | None]]) -> None:
    folder, name, _ = interrupted
    answer = overspill(folder, "ab", "--resume", name, "--repeats", "5")
    assert answer.returncode == 2 and "another --repeats: 2, not 5" in answer.stderr


def test_a_resumed_comparison_completes_and_reports_ram_hits(
    interrupted: tuple[Path, str, dict[int, str | None]], model: Path
) -> None:
    folder, name, _ = interrupted
    page, told = folder / "report.html", folder / "report.json"
    answer = overspill(
        folder, "ab", str(model), "--resume", name, "--html", str(page), "--json", str(told), timeout=START_S
    )
    assert answer.returncode == 0, answer.stderr + answer.stdout
    with open_folder(folder) as registry:
        results = list_results(registry, experiment=name)[::-1]
    finished = [one for one in results if one.is_complete]
    assert [(one.label, one.repeat) for one in finished] == [("none", 1), ("none", 2), ("ram", 1), ("ram", 2)]
    from_ram = {one.label: one.metrics["tokens_from_ram"] for one in finished}
    assert from_ram["none"] == 0 and from_ram["ram"] > 0
    assert all(one.metrics["tokens_from_ram"] > 0 for one in finished if one.label == "ram"), "in both repeats"
    assert all(one.metrics["completed"] == 8 and one.metrics["peak_ram_bytes"] > 0 for one in finished)
    assert all("api_server" in " ".join(one.argv) and one.versions["torch"] for one in finished)
    report = json.loads(told.read_text())
    assert report["is_complete"] and report["answers"] == [{"label": "ram", "compared": 16, "same": 16}]
    ratio = next(each for each in report["measures"] if each["key"] == "mean_ttft_ms")["ratios"][1]
    assert 0 < ratio["low"] < ratio["value"] < ratio["high"] and ratio["basis"] == "over repeats, paired"
    assert "All 16 answers of ram are those of none." in answer.stdout and "from RAM" in answer.stdout
    html = page.read_text()
    assert html.startswith("<!DOCTYPE html>") and html.rstrip().endswith("</html>") and "<svg" in html
    assert "http://" not in html and "https://" not in html and "<script" not in html
