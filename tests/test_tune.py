"""`overspill tune`: real servers tried in turn; vLLM's own, and a stand-in where candidates must differ or fail."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overspill.cli import app, main
from overspill.kv.errors import OverspillError
from overspill.measure import CannotMeasure
from overspill.measure.experiment import find_results
from overspill.measure.report import Report as Compared
from overspill.measure.subject import Subject, keep
from overspill.measure.tune import run
from overspill.measure.tuning import Tuning, prepare
from overspill.measure.tuning_report import TuningReport
from overspill.processes import below, identity
from overspill.registry import (
    ChangedMeanwhile,
    Registry,
    UnknownModel,
    UnknownRecord,
    add_model,
    edit_model,
    get_model,
    list_models,
    list_results,
    open_registry,
)
from overspill.tiny import make_llama

pytestmark = pytest.mark.usefixtures("nothing_is_left")

START_S = 240
# Half of 4,096 tokens' KV spills, and 1 GiB is left for idle KV.
TIGHT: dict[str, Any] = {
    "gpu_memory": "8MiB", "ram": "4200MiB", "max_model_len": "4k", "dtype": "float32", "max_num_seqs": "4",
    "enforce_eager": True,
}  # fmt: skip
SHORT = {**TIGHT, "max_model_len": "1k"}
WORKLOAD = "multi-turn:conversations=2,turns=2,first=20,input=5,output=4,think_time=0,concurrency=1"

# A stand-in for vLLM's server. STAND_IN holds words of its command line, each with how long a token takes where it
# is there, or null where it refuses to start.
STAND_IN = """
import argparse, http.server, json, os, sys, time

parser = argparse.ArgumentParser()
parser.add_argument("--model"), parser.add_argument("--host"), parser.add_argument("--port", type=int)
parser.add_argument("--max-model-len", type=int)
given, _ = parser.parse_known_args()
rules = json.loads(os.environ.get("STAND_IN", "{}"))
found = [slow for word, slow in rules.items() if word in " ".join(sys.argv)]
if None in found or given.max_model_len > int(os.environ.get("STAND_IN_LONGEST", "1000000")):
    print("ValueError: no memory for so much", flush=True)
    sys.exit(3)
slow = max(found, default=0)

class Handler(http.server.BaseHTTPRequestHandler):
    def tell(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        served = {"id": given.model, "root": given.model, "max_model_len": given.max_model_len}
        self.tell(json.dumps({"data": [served]}).encode() if self.path == "/v1/models" else b"{}")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        pieces = [{"choices": [{"text": "x", "token_ids": [7]}]}] * asked["max_tokens"]
        pieces.append({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": len(pieces)}})
        for piece in pieces:
            time.sleep(slow)
            self.wfile.write(f"data: {json.dumps(piece)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()
"""
NO_POOL, LAZY = "no RAM for idle KV", "stored lazily"
# By what their commands hold: with a pool, with a lazy one.
POOL, LAZILY = "host_bytes", '"store": "lazy"'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tune") / "tiny")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return path


@pytest.fixture
def stand_in(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(
        "overspill.launch.launch.server_command",
        lambda model, vllm: [sys.executable, str(program), "--model", model],
    )
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STAND_IN", json.dumps({POOL: 0.25}))  # more than a busy machine delays
    return monkeypatch


def environment(folder: Path) -> dict[str, str]:
    left_out = ("OVERSPILL_", "VLLM_ENABLE_V1_MULTIPROCESSING")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {
        **clean, "XDG_CONFIG_HOME": "/nonexistent", "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "200",
        "OVERSPILL_DATABASE_URL": f"sqlite:///{folder}/registry.db", "VLLM_LOGGING_LEVEL": "INFO",
    }  # fmt: skip


def asked(registry: Registry, model: Path | str, **changes: Any) -> tuple[Tuning, Subject]:
    how: dict[str, Any] = {"goal": "throughput", "name": None, "given": TIGHT, "most": 3, "repeats": 1}
    if changes.get("goal") != "context":
        how["workload"] = WORKLOAD
    return prepare(registry, None, model=str(model), **{**how, **changes})


def go(registry: Registry, made: tuple[Tuning, Subject], told: list[str] | None = None, **how: Any) -> TuningReport:
    return run(*made, registry, (told if told is not None else []).append, **how)


def stored(registry: Registry) -> list[tuple[str | None, int | None, bool]]:
    return [(one.label, one.repeat, one.is_complete) for one in reversed(list_results(registry))]


def test_the_best_candidate_is_kept_and_trials_are_comparable(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    definition, subject = asked(registry, model)
    report = go(registry, (definition, subject), told)
    assert stored(registry) == [("plan", 1, True), (NO_POOL, 1, True), (LAZY, 1, True)]
    assert report.winner is not None and report.winner.label == NO_POOL, report.as_text()
    assert "worse than no RAM for idle KV" in report.as_text() and "Best: no RAM for idle KV\n" in report.as_text()
    assert not list_models(registry), "until it is kept"
    kept = keep(registry, subject, report.winner, definition.given)
    settings = get_model(registry, "tiny").settings
    assert settings.source == str(model) and settings.offload_ram == 0 and settings.max_num_batched_tokens == 2048
    assert settings.max_model_len == 4096 and settings.gpu_memory == 8 << 20 and settings.enforce_eager is True
    assert "added to the registry: tiny" in kept.as_text() and "  offload_ram: 0 B" in kept.as_text()
    assert any(line.startswith(f"[2] {NO_POOL}, repeat 1: starting vLLM; about ") for line in told)
    compared = Compared.of_results(find_results(registry, [report.experiment]))
    assert [column.label for column in compared.comparison.columns] == ["plan", NO_POOL, LAZY]
    assert compared.is_complete and "--offload-ram 0" in compared.as_text() and not compared.warnings
    one = list_results(registry)[0]
    assert one.plan is not None and one.versions["overspill"] and "--kv-transfer-config" in one.argv
    assert one.config["candidate"]["label"] == LAZY and Path(one.config["log_file"]).exists()


def test_clearly_worse_ones_are_measured_once_and_the_rest_again(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    stand_in.setenv("STAND_IN", json.dumps({POOL: 0.6, LAZILY: 1.8}))
    # A busy machine may delay one of the equally fast by a third, but not by two thirds.
    stand_in.setattr("overspill.measure.search.MARGINS", (1.6, 1.6))
    # Slow tokens, and few of them.
    workload = WORKLOAD.replace("conversations=2", "conversations=1").replace("output=4", "output=2")
    given = {**TIGHT, "offload_ram": "64MiB"}
    report = go(registry, asked(registry, model, repeats=2, most=3, given=given, workload=workload))
    runs = [(label, repeat) for label, repeat, _ in stored(registry)]
    assert runs.count((LAZY, 1)) == 1 and (LAZY, 2) not in runs and ("plan", 2) in runs
    assert all(label != NO_POOL for label, _ in runs), "what is given is not varied"
    assert report.winner is not None and report.winner.label != LAZY


def test_a_failed_start_is_reported_and_other_candidates_run(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    stand_in.setenv("STAND_IN", json.dumps({LAZILY: None}))
    report = go(registry, asked(registry, model))
    assert stored(registry)[-1] == (LAZY, 1, False) and report.winner is not None
    why = r"vLLM ended with exit code 3 after \d+ s while starting vLLM: ValueError: no memory for so much"
    assert re.search(why, report.as_text())


def test_without_a_successful_start_there_is_no_best(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    stand_in.setenv("STAND_IN", json.dumps({"--model": None}))
    report = go(registry, asked(registry, model, most=2))
    assert report.winner is None and "No candidate could be measured to the end." in report.as_text()


def test_a_change_of_the_model_meanwhile_is_not_overwritten(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    add_model(registry, "mine", {"source": str(model), "notes": "before"})
    definition, subject = asked(registry, "mine", most=2)
    report = go(registry, (definition, subject))
    edit_model(registry, "mine", {"notes": "after", "offload_ram": "2GiB"})
    assert report.winner is not None
    with pytest.raises(ChangedMeanwhile):
        keep(registry, subject, report.winner, definition.given)
    settings = get_model(registry, "mine").settings
    assert settings.notes == "after" and settings.offload_ram == 2 << 30 and settings.gpu_memory is None


def test_current_settings_are_tried_and_user_flags_are_kept(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    plain = {name: value for name, value in TIGHT.items() if name != "ram"}
    words = ["--block-size", "128"]
    add_model(registry, "mine", {"source": str(model), "offload_ram": "64MiB", "vllm_args": words, **plain})
    definition, subject = asked(registry, "mine", given={"ram": "4200MiB"}, most=3)
    assert [each.label for each in definition.candidates] == ["plan", "as it is", NO_POOL]
    report = go(registry, (definition, subject))
    assert report.winner is not None and all("--block-size" in one.argv for one in list_results(registry))
    kept = keep(registry, subject, report.winner, definition.given)
    settings = get_model(registry, "mine").settings
    assert settings.offload_ram == 0 and settings.vllm_args == ("--block-size", "128") and settings.max_num_seqs == 4
    assert "  offload_ram: 64 MiB -> 0 B" in kept.as_text() and kept.edit is not None


def test_a_stop_keeps_what_is_measured_and_resume_does_the_rest(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()

    def stopping(line: str) -> None:
        if line.startswith("[2]") and "starting" in line:
            stop.set()

    definition, subject = asked(registry, model)
    first = run(definition, subject, registry, stopping, stop=stop)
    assert stored(registry) == [("plan", 1, True), (NO_POOL, 1, False)] and first.is_interrupted
    assert f"overspill tune --resume {first.experiment}" in first.as_text()
    again, same = prepare(registry, first.experiment, model=None, name=None, goal=None, given={})
    assert again == definition and same == subject
    second = run(again, same, registry, print, resume=first.experiment)
    assert stored(registry)[2:] == [(NO_POOL, 1, True), (LAZY, 1, True)], "and the first is not measured again"
    assert second.winner is not None and second.winner.label == NO_POOL and not second.is_interrupted


def test_a_tuning_of_a_model_changed_since_is_not_resumed(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    """The model was read anew: trials with old and new flags were ranked together, and the change overwritten."""
    settings = {name: value for name, value in TIGHT.items() if name != "ram"}
    add_model(registry, "mine", {"source": str(model), **settings})
    definition, subject = asked(registry, "mine", given={"ram": "4200MiB"}, most=2)
    report = go(registry, (definition, subject))
    edit_model(registry, "mine", {"max_num_seqs": 8, "offload_ram": "2GiB", "vllm_args": ["--block-size", "32"]})
    again: dict[str, Any] = {"model": None, "name": None, "goal": None, "given": {}}
    with pytest.raises(ChangedMeanwhile) as refused:
        prepare(registry, report.experiment, **again)
    for part in ("version 1 to 2", "max_num_seqs: 4 -> 8", "offload_ram: - -> 2 GiB", "vllm_args: - -> --block-size 32",
                 "overspill models edit mine --max-num-seqs 4 --unset vllm_args --unset offload_ram",
                 "start anew, without --resume"):  # fmt: skip
        assert part in str(refused.value)
    edit_model(registry, "mine", {"max_num_seqs": 4, "offload_ram": None, "vllm_args": None, "notes": "as it was"})
    same, now = prepare(registry, report.experiment, **again)
    assert same == definition and now == replace(subject, version=3), "taken back"
    # While it goes on, a change is seen when the best is kept.
    edit_model(registry, "mine", {"max_num_seqs": 8})
    assert report.winner is not None
    with pytest.raises(ChangedMeanwhile):
        keep(registry, now, report.winner, same.given)


def test_the_time_that_is_given_is_kept_to(model: Path, registry: Registry, stand_in: pytest.MonkeyPatch) -> None:
    stand_in.setenv("STAND_IN", json.dumps({"--model": 1}))
    report = go(registry, asked(registry, model), budget_s=6)
    assert stored(registry) == [("plan", 1, False)] and report.is_out_of_time and report.winner is None
    assert "The time of --budget is used up" in report.as_text() and not report.is_interrupted


def test_the_longest_context_that_starts_is_found(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    stand_in.setenv("STAND_IN_LONGEST", "700")
    definition, subject = asked(registry, model, goal="context", most=None, repeats=None, given=SHORT)
    assert definition.longest == 1024, "not more than was asked for"
    report = go(registry, (definition, subject))
    assert report.winner is not None and report.winner.settings["max_model_len"] == 640
    assert stored(registry)[:2] == [("1024 tokens", 1, False), ("512 tokens", 1, True)]
    keep(registry, subject, report.winner, definition.given)
    assert get_model(registry, "tiny").settings.max_model_len == report.winner.settings["max_model_len"]


def test_a_context_that_is_too_slow_is_not_taken(model: Path, registry: Registry, stand_in: pytest.MonkeyPatch) -> None:
    stand_in.setenv("STAND_IN", json.dumps({"--max-model-len 1024": 0.5}))
    made = asked(registry, model, goal="context", most=None, repeats=None, given={**SHORT, "min_speed": "5"})
    report = go(registry, made)
    assert all(complete for _, _, complete in stored(registry)), "it answers, and not fast enough"
    assert report.winner is not None and report.winner.settings["max_model_len"] == 896
    assert "too slow: " in report.as_text() and "at least 5 is required" in report.as_text()


def test_all_candidates_have_the_device_and_it_is_not_kept(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    """A model has no such setting, so there was no flag."""
    definition, subject = asked(registry, model, most=1, device="cpu")
    report = go(registry, (definition, subject))
    assert report.winner is not None
    (result,) = list_results(registry)
    assert "--device cpu" in str(result.config), result.config
    keep(registry, subject, report.winner, definition.given)
    with pytest.raises(OverspillError, match="GPU"):
        asked(registry, model, device="cuda")


def test_what_does_not_fit_is_refused_before_anything_starts(model: Path, registry: Registry) -> None:
    with pytest.raises(CannotMeasure, match="does not fit with 32768 tokens"):
        asked(registry, model, given={**TIGHT, "max_model_len": "32k", "ram": "3GiB"})
    assert not list_results(registry)


def test_resuming_a_tuning_without_a_stored_model_warns(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch
) -> None:
    definition, subject = asked(registry, model, most=1)
    report = go(registry, (replace(definition, subject=None), subject))
    again, now = prepare(registry, report.experiment, model=None, name=None, goal=None, given={})
    assert again.subject is None and now == subject
    told: list[str] = []
    assert go(registry, (again, now), told, resume=report.experiment).winner == report.winner
    assert any("make sure that nobody has changed them since" in line for line in told)


# The command.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a model: overspill tune MODEL"),
        (["MODEL", "--goal", "speed"], "use throughput, ttft, context"),
        (["MODEL", "--budget", "soon"], "--budget: 'soon' is not a duration"),
        (["MODEL", "--repeats", "0"], "--repeats 0 is not possible"),
        (["MODEL", "--seed", "-1"], "--seed -1 is negative"),
        (["MODEL", "--workload", "multi-trun"], "did you mean multi-turn?"),
        (["MODEL", "--goal", "context", "--workload", "offline"], "leave out --workload"),
        (["MODEL", "--goal", "context", "--repeats", "5", "--candidates", "2"], "once; leave out --repeats"),
        (["MODEL", "--goal", "context", "--candidates", "2"], "leave out --candidates"),
        (["MODEL", "--min-speed", "5"], "--min-speed is for --max-model-len auto"),
        (["MODEL", "--device", "gpu"], "--device: 'gpu' is none of auto, cuda, cpu"),
        (["MODEL", "--ram", "1GiX"], "--ram: '1GiX' is not a size"),
        (["MODEL", "--name", "a b"], "is not a name for a model"),
        (["--resume", "tune-nothing"], "there is no tuning 'tune-nothing'"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_starts_nothing(
    words: list[str], message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(lambda: app(["tune", *(str(model) if word == "MODEL" else word for word in words)]))
    told = capsys.readouterr()
    assert ended.value.code == 2 and message in told.err, told.err
    assert told.err.count("\n") == 1 and not told.out


def test_nothing_else_may_be_given_with_resume(
    model: Path, registry: Registry, stand_in: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = go(registry, asked(registry, model, most=1))
    with pytest.raises(SystemExit):
        main(lambda: app(["tune", "--resume", report.experiment, "--candidates", "2"]))
    assert "--candidates cannot be given with --resume" in capsys.readouterr().err
    with pytest.raises(UnknownRecord):
        prepare(registry, "ab-other", model=None, name=None, goal=None, given={})


# As `overspill`, with the stand-in in place of vLLM.
WITH_STAND_IN = """
import sys
from overspill.launch import launch
program = sys.argv.pop(1)
launch.server_command = lambda model, vllm: [sys.executable, program, "--model", model]
from overspill.cli import main
main()
"""
FLAGS = [
    "--gpu-memory",
    "8MiB",
    "--ram",
    "4200MiB",
    "--max-model-len",
    "4k",
    "--dtype",
    "float32",
    "--max-num-seqs",
    "4",
]


def test_a_ctrl_c_leaves_no_process_and_no_change(model: Path, program: Path, tmp_path: Path) -> None:
    err = tmp_path / "err"
    words = [sys.executable, "-c", WITH_STAND_IN, str(program), "tune", str(model), *FLAGS]
    slow = {**environment(tmp_path), "STAND_IN": json.dumps({"--model": 0.5})}
    with err.open("wb") as told:
        command = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=told, env=slow)
    started: dict[int, str | None] = {}
    deadline = time.monotonic() + START_S
    try:
        while "[1] plan, repeat 1: ready" not in err.read_text():
            assert command.poll() is None and time.monotonic() < deadline, err.read_text()
            started |= {pid: identity(pid) for pid in below(command.pid)}
            time.sleep(0.1)
        # A server that is ready is there until its measurement ends, and its guard as long.
        started |= {pid: identity(pid) for pid in below(command.pid)}
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=60) == 1, err.read_text()
    finally:
        if command.poll() is None:
            command.kill()
            command.wait()
    known = {pid: one for pid, one in started.items() if one is not None}
    assert len(known) >= 2, "a guard and a server"
    assert not [pid for pid, one in known.items() if identity(pid) == one]
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as registry:
        assert stored(registry) == [("plan", 1, False)] and not list_models(registry)


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """vLLM's own engine, two candidates; the folder with its registry, and what was printed."""
    folder = tmp_path_factory.mktemp("tuned")
    with open_folder(folder) as registry:
        settings = {name: value for name, value in TIGHT.items() if name != "ram"}
        add_model(registry, "tiny", {"source": str(model), "vllm_args": ["--skip-tokenizer-init"], **settings})
    workload = "multi-turn:conversations=3,turns=2,first=1200,input=40,output=8,think_time=0,concurrency=1"
    words = ["--ram", "4200MiB", "--candidates", "2", "--repeats", "1", "--keep", "--workload", workload, "--json"]
    answer = subprocess.run(
        [sys.executable, "-m", "overspill", "tune", "tiny", *words], capture_output=True, text=True, check=False,
        timeout=START_S, env=environment(folder),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert isinstance(told, dict)
    return folder, told


def open_folder(folder: Path) -> contextlib.AbstractContextManager[Registry]:
    return open_registry(f"sqlite:///{folder}/registry.db")


def test_vllms_engine_is_tuned_and_the_registry_holds_the_best(tuned: tuple[Path, dict[str, Any]]) -> None:
    folder, told = tuned
    assert [each["label"] for each in told["candidates"]] == ["plan", NO_POOL]
    assert all(each["repeats"] == 1 and each["output_throughput"] > 0 for each in told["candidates"])
    with open_folder(folder) as registry:
        kept, results = get_model(registry, "tiny"), list_results(registry)
    assert kept.version == 2 and kept.as_json() == told["kept"]["model"]
    settings = kept.as_json()
    for name, value in told["winner"]["settings"].items():
        assert settings[name] == value
    assert settings["offload_ram"] == (0 if told["winner"]["label"] == NO_POOL else None)
    assert settings["max_num_batched_tokens"] == 2048 and settings["vllm_args"] == ["--skip-tokenizer-init"]
    assert "max_num_batched_tokens" in told["kept"]["changed"] and "ram" in told["kept"]["changed"]
    pools = {one.label: '"host_bytes"' in " ".join(one.argv) for one in results}
    assert pools == {"plan": True, NO_POOL: False}, "they were started as they are called"
    assert all('"spill_bytes"' in " ".join(one.argv) and one.metrics["completed"] == 6 for one in results)


@pytest.mark.parametrize(
    ("how", "why"), [(["--dry-run"], "."), ([], ": one run of each does not show which is better")]
)
def test_a_dry_run_and_one_repeat_measure_and_change_nothing(
    tuned: tuple[Path, dict[str, Any]], program: Path, how: list[str], why: str
) -> None:
    """One run of each changed a setting of the user's."""
    folder, _ = tuned
    with open_folder(folder) as registry:
        before, measured = get_model(registry, "tiny"), len(list_results(registry))
    words = ["tune", "tiny", "--candidates", "2", "--repeats", "1", "--workload", WORKLOAD, *how]
    answer = subprocess.run(
        [sys.executable, "-c", WITH_STAND_IN, str(program), *words], capture_output=True, text=True, check=False,
        timeout=START_S, env={**environment(folder), "STAND_IN": json.dumps({POOL: 0.02})},
    )  # fmt: skip
    assert answer.returncode == 0 and f"Nothing was kept{why}" in answer.stdout, answer.stderr
    assert re.search(r"^Best: ", answer.stdout, re.MULTILINE)
    with open_folder(folder) as registry:
        assert get_model(registry, "tiny") == before and len(list_results(registry)) == measured + 2
        with pytest.raises(UnknownModel):
            get_model(registry, "other")
