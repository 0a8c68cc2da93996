"""Models, runs, profiles and results, on a SQLite file and on a PostgreSQL server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from overspill.flags import without_secrets
from overspill.kv.sizes import GiB
from overspill.planning.memory import Profile
from overspill.registry import (
    ChangedMeanwhile,
    DuplicateModel,
    ModelSettings,
    Outcome,
    Registry,
    RegistryError,
    Result,
    RunEnd,
    StillRunning,
    UnknownModel,
    UnknownRecord,
    add_model,
    edit_model,
    end_lost_runs,
    end_run,
    environment_that_matters,
    get_model,
    get_result,
    import_models,
    list_models,
    list_results,
    list_runs,
    load_profile,
    needs_restart,
    open_registry,
    read_models_file,
    remove_model,
    running_runs,
    save_profile,
    save_result,
    scan_hub_cache,
    start_run,
)
from overspill.settings import MODEL_SETTINGS, SettingsError
from tests.postgresql import new_database


@pytest.fixture(params=["sqlite", "postgresql"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    url = f"sqlite:///{tmp_path}/registry.db" if request.param == "sqlite" else new_database()
    with open_registry(url) as opened:
        yield opened


# Models.


def test_a_model_comes_back_as_it_was_added(registry: Registry) -> None:
    added = add_model(
        registry, "team/qwen-3.8b_chat",
        {
            "source": "Qwen/Qwen3-8B", "max_model_len": "128k", "gpu_memory": "20GiB", "gpu_memory_utilization": "0.85",
            "at_once": "4", "ram": "64GiB", "offload_ram": "8 GiB", "weights_ram": "4GiB", "dtype": "bfloat16",
            "kv_cache_dtype": "fp8", "kv_options": " store = lazy, pin=FALSE",
            "max_num_seqs": "16", "max_num_batched_tokens": "2k", "enforce_eager": True,
            "vllm_args": ["--served-model-name", "qwen", "--seed", 7], "ttl": "10m", "notes": "für zwei\nZeilen",
        },
    )  # fmt: skip
    assert added.settings == ModelSettings(
        source="Qwen/Qwen3-8B", max_model_len=131072, gpu_memory=20 * GiB, gpu_memory_utilization=0.85, at_once=4,
        ram=64 * GiB, offload_ram=8 * GiB,
        weights_ram=4 * GiB, dtype="bfloat16", kv_cache_dtype="fp8", kv_options="store=lazy,pin=false",
        max_num_seqs=16, max_num_batched_tokens=2048, enforce_eager=True,
        vllm_args=("--served-model-name", "qwen", "--seed", "7"), ttl=600,
        notes="für zwei\nZeilen",
    )  # fmt: skip
    assert get_model(registry, added.name) == added and added.version == 1
    assert added.created_at.tzinfo is UTC and abs(datetime.now(UTC) - added.created_at) < timedelta(minutes=1)
    assert json.loads(json.dumps(added.as_json()))["ram"] == 64 * GiB


def test_unset_settings_stay_unset(registry: Registry) -> None:
    added = add_model(registry, "Qwen/Qwen3-8B", {"ram": None})
    assert added.settings == ModelSettings(source="Qwen/Qwen3-8B")
    assert added.settings.for_commands == {} and added.settings.vllm_args == ()


def test_models_are_listed_by_name(registry: Registry) -> None:
    for name in ("b", "a/z", "a", "B"):
        add_model(registry, name, {"source": "gpt2"})
    assert [model.name for model in list_models(registry)] == ["B", "a", "a/z", "b"]


def test_a_name_is_taken_once(registry: Registry) -> None:
    add_model(registry, "qwen", {"source": "gpt2"})
    with pytest.raises(DuplicateModel, match="overspill models edit qwen"):
        add_model(registry, "qwen", {"source": "gpt2"})
    assert add_model(registry, "Qwen", {"source": "gpt2"}).name == "Qwen", "names are told apart by case"


def test_an_unknown_model_names_the_nearest(registry: Registry) -> None:
    with pytest.raises(UnknownModel, match="overspill models add"):
        get_model(registry, "qwen")
    add_model(registry, "llama", {"source": "gpt2"})
    add_model(registry, "qwen3", {"source": "gpt2"})
    for action in (get_model, remove_model, lambda where, name: edit_model(where, name, {"ram": "1GiB"})):
        with pytest.raises(UnknownModel, match=r"no model 'qwen' .* did you mean qwen3\?"):
            action(registry, "qwen")
        far = "known here: llama, qwen3"
        hints = {"qwen\0": "did you mean", "qwen\udc80": "did you mean", "nope": far, "qwen " * 100: far}
        for name, hint in hints.items():
            with pytest.raises(UnknownModel, match=hint):
                action(registry, name)


def test_an_edit_changes_what_it_names_and_counts_up(registry: Registry) -> None:
    add_model(registry, "qwen", {"source": "gpt2", "ram": "8GiB", "ttl": "1h", "vllm_args": "--seed 1"})
    edit = edit_model(registry, "qwen", {"ram": "16GiB", "ttl": None, "vllm_args": None})
    assert edit.changed == ["ram", "vllm_args", "ttl"] and not edit.running and not edit.needs_restart
    assert edit.before.settings.ram == 8 * GiB and edit.after.settings == ModelSettings(source="gpt2", ram=16 * GiB)
    assert (edit.before.version, edit.after.version) == (1, 2)
    assert edit.after.updated_at > edit.after.created_at
    assert get_model(registry, "qwen") == edit.after


def test_an_edit_that_changes_nothing_is_no_new_version(registry: Registry) -> None:
    added = add_model(registry, "qwen", {"source": "gpt2", "vllm_args": ["--seed", "1"]})
    edit = edit_model(registry, "qwen", {"vllm_args": ["--seed", "1"]})
    assert edit.changed == [] and edit.after == added


def test_an_edit_of_what_somebody_else_changed_is_refused(registry: Registry) -> None:
    seen = add_model(registry, "qwen", {"source": "gpt2"})
    edit_model(registry, "qwen", {"ram": "8GiB"}, version=seen.version)
    with pytest.raises(ChangedMeanwhile, match="at version 2, and this change was for version 1"):
        edit_model(registry, "qwen", {"ram": "4GiB"}, version=seen.version)
    with pytest.raises(ChangedMeanwhile):
        remove_model(registry, "qwen", version=seen.version)
    assert get_model(registry, "qwen").settings.ram == 8 * GiB


def test_an_update_of_a_row_that_moved_on_fails(registry: Registry) -> None:
    """The counter guards every write, also those that forgot to lock the row."""
    from overspill.registry.tables import ModelRow

    add_model(registry, "qwen", {"source": "gpt2"})
    with pytest.raises(ChangedMeanwhile, match="nothing was written"), registry.writing() as session:
        row = session.query(ModelRow).one()
        session.connection().exec_driver_sql("UPDATE models SET version = 7")
        row.settings = {**row.settings, "ram": 1}
    assert get_model(registry, "qwen").settings.ram is None


def test_a_removed_model_is_gone_and_its_runs_stay(registry: Registry) -> None:
    add_model(registry, "qwen", {"source": "gpt2"})
    run = start_run(registry, "qwen", ["vllm"], pid=None)
    end_run(registry, run.id, RunEnd.STOPPED)
    remove_model(registry, "qwen")
    assert list_models(registry) == [] and [run.model for run in list_runs(registry)] == ["qwen"]


# What is refused.


BAD_SETTINGS: dict[str, tuple[dict[str, object], str]] = {
    "a size": ({"ram": "lots"}, r"--ram: 'lots' is not a size; write for example"),
    "a negative size": ({"ram": -1}, r"--ram: a size cannot be negative"),
    "a size beyond a column": ({"ram": "99999999TiB"}, r"--ram: 99999999TiB is too large"),
    "a size in a list": ({"ram": ["1GiB"]}, r"--ram: a single value is needed"),
    "a length": ({"max_model_len": "long"}, r"--max-model-len: 'long' is not a number of tokens"),
    "a length of thousands of digits": ({"max_model_len": "9" * 5000}, r"--max-model-len: 9+… is too long"),
    "no tokens": ({"max_model_len": 0}, r"--max-model-len"),
    "a dtype": ({"dtype": "int8"}, r"--dtype: 'int8' is none of auto, bfloat16"),
    "a KV dtype": ({"kv_cache_dtype": "fp7"}, r"--kv-cache-dtype: 'fp7' is none of auto"),
    "a count": ({"max_num_seqs": "0"}, r"--max-num-seqs"),
    "a switch": ({"enforce_eager": "perhaps"}, r"--enforce-eager: 'perhaps' is neither yes nor no"),
    "a duration": ({"ttl": "soon"}, r"--ttl: 'soon' is not a duration; write seconds"),
    "no duration": ({"ttl": 0}, r"--ttl"),
    "an endless duration": ({"ttl": "9" * 30}, r"--ttl"),
    "notes": ({"notes": "a\0b"}, r"--notes"),
    "notes that are not UTF-8": ({"notes": "a\udc80"}, r"--notes"),
    "flags that are not UTF-8": ({"vllm_args": ["--x", "a\udc80"]}, r"--vllm-args"),
    "long notes": ({"notes": "x" * 10_001}, r"--notes: notes are a text of at most 10000"),
    "flags that begin with none": ({"vllm_args": ["16"]}, r"--vllm-args: '16' is neither a flag"),
    "flags that are no list": ({"vllm_args": {"a": 1}}, r"--vllm-args: vLLM's flags are a list of words"),
    "an open quotation": ({"vllm_args": "--x 'y"}, r"--vllm-args.*close the quotation"),
    "a flag with a setting": ({"vllm_args": ["--max_model_len=5"]}, r"use --max-model-len \(max_model_len\)"),
    "a share of the GPU": ({"gpu_memory_utilization": 1.2}, r"--gpu-memory-utilization: 1.2 is not a share"),
    "no share of the GPU": ({"gpu_memory_utilization": "nan"}, r"--gpu-memory-utilization"),
    "none at once": ({"at_once": 0}, r"--at-once: 0 is not a whole number above 0"),
    "a share as a flag": ({"vllm_args": "--gpu-memory-utilization 0.9"}, r"use --gpu-memory-utilization"),
    "weights in RAM as a flag": ({"vllm_args": "--cpu-offload-gb 4"}, r"use --weights-ram"),
    "a secret": ({"vllm_args": ["--api-key", "x"]}, r"would put a secret into the registry; set VLLM_API_KEY"),
    "the start of a secret's flag": (
        {"vllm_args": ["--api-k=x"]},
        r"would put a secret into the registry",
    ),
    "a secret in an address": ({"vllm_args": ["--otlp-traces-endpoint", "http://u:p@h"]}, r"put a secret into the reg"),
    "a folder without a model": ({"source": "/nonexistent/model"}, r"--source: .* is not a model's folder"),
    "a source": ({"source": "https://example.org/x"}, r"--source: .* neither a folder here nor the name"),
    "traversal": ({"source": "a/../b"}, r"--source"),
    "an unknown setting": ({"max_model_length": 5}, r"no setting 'max_model_length'; did you mean max_model_len\?"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_refused_and_nothing_is_written(registry: Registry, case: str) -> None:
    settings, said = BAD_SETTINGS[case]
    with pytest.raises(SettingsError, match=said):
        add_model(registry, "new", {"source": "gpt2", **settings})
    before = add_model(registry, "old", {"source": "gpt2"})
    with pytest.raises(SettingsError, match=said):
        edit_model(registry, "old", settings)
    assert list_models(registry) == [before]


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "../etc", "a/../b", "/etc/passwd", "a/", "a//b", ".hidden", "a/.b", "-rm", "a\n", "ä", "a\0b",
     "x" * 201, 5, None],
)  # fmt: skip
def test_a_bad_name_is_refused(tmp_path: Path, name: Any) -> None:
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as opened:
        with pytest.raises(RegistryError, match="name"):
            add_model(opened, name, {"source": "gpt2"})
        assert list_models(opened) == []


def test_the_longest_name_is_kept(registry: Registry) -> None:
    assert get_model(registry, add_model(registry, "x" * 200, {"source": "gpt2"}).name).name == "x" * 200


def test_a_folder_is_kept_by_its_whole_path(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for number, source in enumerate(["./tiny", "tiny", str(tmp_path / "tiny")]):
        assert add_model(registry, f"m{number}", {"source": source}).settings.source == str(tmp_path / "tiny")


# Restarts.


def test_settings_are_kept_and_say_if_they_need_a_restart(registry: Registry) -> None:
    names = [setting.name for setting in MODEL_SETTINGS]
    assert list(add_model(registry, "qwen", {"source": "gpt2"}).as_json()) == [
        "name", *names, "version", "created_at", "updated_at",
    ]  # fmt: skip
    other: dict[str, Any] = {"vllm_args": ("--x",), "enforce_eager": True, "dtype": "half", "notes": "n", "source": "b"}
    before = ModelSettings(source="a")
    for name in names:
        after = before.changed({name: other.get(name, 7)})
        at_once = ("ttl", "keep", "preload", "notes", "aliases", "variants")
        assert needs_restart(before, after) == ([] if name in at_once else [name])
    assert needs_restart(before, before) == []


def test_editing_a_running_model_says_what_takes_a_restart(registry: Registry) -> None:
    add_model(registry, "qwen", {"source": "gpt2", "ram": "8GiB"})
    run = start_run(registry, "qwen", ["vllm"], pid=os.getpid())
    edit = edit_model(registry, "qwen", {"ram": "16GiB", "ttl": "5m"})
    assert edit.running == (run,) and edit.needs_restart == ("ram",)
    later = edit_model(registry, "qwen", {"notes": "x"})
    assert later.needs_restart == ("ram",), "still not in effect"
    assert edit_model(registry, "qwen", {"ram": "8GiB"}).needs_restart == (), "as it was started"
    with pytest.raises(StillRunning, match=f"process {os.getpid()}"):
        remove_model(registry, "qwen")
    end_run(registry, run.id, RunEnd.STOPPED, exit_code=0)
    assert edit_model(registry, "qwen", {"ram": "1GiB"}).needs_restart == ()


def test_a_running_model_is_removed_by_force(registry: Registry) -> None:
    add_model(registry, "qwen", {"source": "gpt2"})
    start_run(registry, "qwen", ["vllm"], pid=os.getpid())
    remove_model(registry, "qwen", force=True)
    assert list_models(registry) == [] and [run.model for run in running_runs(registry)] == ["qwen"]


def test_settings_for_serve() -> None:
    """Weights in RAM were a flag of vLLM's, of which the plan knew nothing."""
    settings = ModelSettings(
        source="gpt2", ram=8 * GiB, enforce_eager=False, weights_ram=GiB // 2, at_once=2, vllm_args=("--x",)
    )
    values = {"ram": 8 * GiB, "weights_ram": GiB // 2, "at_once": 2, "enforce_eager": False}
    assert settings.for_commands == values


# Runs.


def test_a_run_keeps_what_was_started_and_how_it_ended(registry: Registry, tmp_path: Path) -> None:
    add_model(registry, "qwen", {"source": "gpt2", "ram": "8GiB"})
    run = start_run(
        registry, "qwen", ["python", "-m", "vllm", "--api-key", "hush", "--port", "8000"], pid=os.getpid(),
        environ={"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_API_KEY": "hush", "HOME": "/root", "HF_TOKEN": "hush"},
        versions={"vllm": "0.32.0"}, log_file=tmp_path / "log",
    )  # fmt: skip
    assert run.argv == ["python", "-m", "vllm", "--api-key", "***", "--port", "8000"]
    assert run.environment == {"VLLM_LOGGING_LEVEL": "DEBUG"} and run.versions == {"vllm": "0.32.0"}
    assert run.settings == ModelSettings(source="gpt2", ram=8 * GiB).as_json() and run.log_file == str(tmp_path / "log")
    assert run.is_running and run.ended_at is None
    assert running_runs(registry, "qwen") == [run] == list_runs(registry)
    ended = end_run(registry, run.id, RunEnd.FAILED, exit_code=-9, detail="out of memory")
    assert (ended.end, ended.exit_code, ended.detail) == (RunEnd.FAILED, -9, "out of memory")
    assert ended.ended_at is not None and ended.ended_at >= ended.started_at and not ended.is_running
    assert running_runs(registry) == [] and list_runs(registry, "qwen") == [ended]
    with pytest.raises(RegistryError, match="has ended already: failed"):
        end_run(registry, run.id, RunEnd.STOPPED)
    for number in (4711, 10**30, -1):
        with pytest.raises(UnknownRecord, match=f"no run {number}"):
            end_run(registry, number, RunEnd.STOPPED)


def test_a_run_whose_process_died_is_found_lost(registry: Registry) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lost = start_run(registry, "qwen", ["vllm"], pid=child.pid)
    alive = start_run(registry, "qwen", ["vllm"], pid=os.getpid())
    assert [run.id for run in running_runs(registry)] == [lost.id, alive.id] and end_lost_runs(registry) == []
    child.send_signal(signal.SIGKILL)
    # Dead, and not yet waited for: a zombie serves nothing.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert [run.id for run in running_runs(registry)] == [alive.id]
    child.communicate()
    assert [(run.id, run.end) for run in end_lost_runs(registry)] == [(lost.id, RunEnd.LOST)]


def test_a_run_recorded_after_its_process_ended_is_not_running(registry: Registry) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    start_run(registry, "qwen", ["vllm"], pid=child.pid)
    assert running_runs(registry) == [] and len(end_lost_runs(registry)) == 1


def test_a_reused_pid_is_not_taken_for_the_recorded_process(registry: Registry) -> None:
    run = start_run(registry, "qwen", ["vllm"], pid=os.getpid())
    with registry.writing() as session:
        session.connection().exec_driver_sql("UPDATE runs SET process = 'another boot:1'")
    assert running_runs(registry) == [] and [lost.id for lost in end_lost_runs(registry)] == [run.id]


def test_secrets_are_not_recorded() -> None:
    environ = {"OVERSPILL_DATABASE_URL": "postgresql://u:p@h/d", "HF_TOKEN": "x", "VLLM_API_KEY": "x", "HF_HOME": "/h",
               "AWS_SECRET_ACCESS_KEY": "x", "OVERSPILL_RAM": "1GiB", "VLLM_USE_KEYS": "1"}  # fmt: skip
    assert environment_that_matters(environ) == {"HF_HOME": "/h", "OVERSPILL_RAM": "1GiB", "VLLM_USE_KEYS": "1"}
    words = ["--api_key", "a", "b", "--seed", "1", "--hf-token=x", "--ssl-keyfile-password", "y"]
    hidden = ["--api_key", "***", "***", "--seed", "1", "--hf-token=***", "--ssl-keyfile-password", "***"]
    assert without_secrets(words) == hidden
    words = ["--api-k", "a", "--hf-t=b", "--access-token", "c", "--watermark-config", "d", "--tokenizer", "e"]
    hidden = ["--api-k", "***", "--hf-t=***", "--access-token", "***", "--watermark-config", "***", "--tokenizer", "e"]
    assert without_secrets(words) == hidden
    extra = '{"eos_token": "</s>", "remote_url": "redis://u:p@h", "s3_secret_key": "x\\"y", "n": 1}'
    (shown,) = without_secrets([extra])
    assert shown == '{"eos_token": "</s>", "remote_url": "redis://***@h", "s3_secret_key": "***", "n": 1}'


def test_credentials_in_urls_are_not_recorded() -> None:
    environ = {"HF_ENDPOINT": "https://user:hunter2@mirror/x", "LMCACHE_REMOTE_URL": "redis://:pw@host:6379,b://t@h"}
    hidden = {"HF_ENDPOINT": "https://***@mirror/x", "LMCACHE_REMOTE_URL": "redis://***@host:6379,b://***@h"}
    assert environment_that_matters(environ) == hidden
    words = ["--endpoint", "http://user:pw@host/path@2", "http://host/path@2", "org/model@main"]
    assert without_secrets(words) == ["--endpoint", "http://***@host/path@2", "http://host/path@2", "org/model@main"]


def test_a_variable_of_any_bytes_is_recorded_as_text() -> None:
    assert environment_that_matters({"LD_LIBRARY_PATH": "/a:\udcff/ü"}) == {"LD_LIBRARY_PATH": "/a:\\udcff/ü"}


def test_what_no_database_can_hold_is_told_in_a_sentence(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="could not save this"):
        list_results(registry, model="\udcff")


# Profiles.


def test_a_profile_is_replaced_by_a_newer_one(registry: Registry) -> None:
    assert load_profile(registry, "llama-h200") is None
    first = Profile(non_torch_bytes=1, activation_bytes=2, graph_bytes=3, context_bytes=1 << 40)
    save_profile(registry, "llama-h200", first)
    assert load_profile(registry, "llama-h200") == first
    second = Profile(non_torch_bytes=5, activation_bytes=6, graph_bytes=7, context_bytes=8)
    save_profile(registry, "llama-h200", second)
    assert load_profile(registry, "llama-h200") == second
    with pytest.raises(RegistryError, match="graph_bytes of a profile is -1"):
        save_profile(registry, "x", Profile(non_torch_bytes=5, activation_bytes=6, graph_bytes=-1, context_bytes=8))


# Results.


def measurement(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "benchmark": "multi-turn", "model": "qwen", "config": {"ram": 8 * GiB, "label": None},
        "argv": ("overspill", "ab"), "environment": {"OMP_NUM_THREADS": "1", "HOME": "/root"},
        "versions": {"vllm": "0.32.0"}, "gpu": "H200",
        "driver": "570.1", "plan": {"fits": True}, "git_revision": "abc", "metrics": {"mean_ttft_ms": 1.5, "count": 3},
        "started_at": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2))),
    }  # fmt: skip
    return Result(**{**values, **changes})


def test_a_result_comes_back_with_everything_needed_to_repeat_it(registry: Registry) -> None:
    run = start_run(registry, "qwen", ["vllm"], pid=None)
    saved = save_result(registry, measurement(run_id=run.id, experiment="e", label="a", repeat=2, is_complete=False))
    assert get_result(registry, saved.id) == saved
    assert saved.started_at == datetime(2026, 1, 2, 1, 4, 5, 678901, tzinfo=UTC) and saved.started_at.tzinfo is UTC
    assert saved.config == {"ram": 8 * GiB, "label": None} and saved.metrics == {"mean_ttft_ms": 1.5, "count": 3}
    assert saved.environment == {"OMP_NUM_THREADS": "1"} and not saved.is_complete and saved.argv == ["overspill", "ab"]
    assert json.loads(json.dumps(saved.as_json()))["run_id"] == run.id


def test_results_are_listed_newest_first_and_by_what_they_are_of(registry: Registry) -> None:
    with pytest.raises(UnknownRecord, match=r"no result 1 .* none yet"):
        get_result(registry, 1)
    ids = [
        save_result(registry, measurement(**each)).id
        for each in ({}, {"model": "llama"}, {"benchmark": "overhead"}, {"experiment": "e"})
    ]
    assert [result.id for result in list_results(registry)] == ids[::-1]
    assert [result.id for result in list_results(registry, model="llama")] == [ids[1]]
    assert [result.id for result in list_results(registry, benchmark="multi-turn", model="qwen")] == [ids[3], ids[0]]
    assert [result.id for result in list_results(registry, experiment="e", limit=5)] == [ids[3]]
    assert len(list_results(registry, limit=2)) == 2
    for number in (999, 10**30):
        with pytest.raises(UnknownRecord, match=f"no result {number} .* newest is {ids[-1]}"):
            get_result(registry, number)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metrics": {"ttft": float("nan")}}, "metrics of a result cannot be kept as JSON"),
        ({"metrics": {"ttft": object()}}, "metrics of a result cannot be kept as JSON"),
        ({"config": {"a": "x\0y"}}, "config of a result cannot be kept: .* NUL"),
        ({"argv": ("a\udc80",)}, "argv of a result cannot be kept"),
        ({"started_at": datetime(2026, 1, 1)}, "no time zone"),
        ({"run_id": 4711}, "FOREIGN KEY|foreign key"),
    ],
)
def test_a_result_that_a_database_would_not_keep_is_refused(
    registry: Registry, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RegistryError, match=said):
        save_result(registry, measurement(**changes))
    assert list_results(registry) == []


def test_a_text_that_looks_like_nul_is_kept(registry: Registry) -> None:
    saved = save_result(registry, measurement(config={"a": r"\u0000"}))
    assert get_result(registry, saved.id).config == {"a": r"\u0000"}


# Imports.


def test_a_file_is_imported_once_and_reports_each_model(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        """
        models:
          qwen: &qwen
            source: Qwen/Qwen3-8B
            max_model_len: 128k
            ram: 64GiB
            vllm_args: [--block-size, 32]
          qwen-short:
            <<: *qwen
            max_model_len: 8192
          gpt2:
          bad name: {}
          bad-size: {ram: lots}
          bad-key: {rams: 1GiB}
          bad-settings: 5
          7: {}
        """
    )
    outcomes = {each.name: each for each in import_models(registry, read_models_file(file))}
    assert [outcomes[name].outcome for name in ("qwen", "qwen-short", "gpt2")] == [Outcome.ADDED] * 3
    assert get_model(registry, "qwen-short").settings == ModelSettings(
        source="Qwen/Qwen3-8B", max_model_len=8192, ram=64 * GiB, vllm_args=("--block-size", "32")
    )
    assert get_model(registry, "gpt2").settings == ModelSettings(source="gpt2")
    invalid = {name: each.detail for name, each in outcomes.items() if each.outcome is Outcome.INVALID}
    assert set(invalid) == {"bad name", "bad-size", "bad-key", "bad-settings", "models.7"}
    assert all(detail.startswith(f"{file}: models.") for detail in invalid.values()), invalid
    assert "ram: 'lots' is not a size" in invalid["bad-size"] and "did you mean ram?" in invalid["bad-key"]

    before = list_models(registry)
    again = import_models(registry, read_models_file(file))
    assert {each.outcome for each in again} == {Outcome.UNCHANGED, Outcome.INVALID} and list_models(registry) == before

    edit_model(registry, "qwen", {"ram": "1GiB", "ttl": "5m"})
    changed = {each.name: each for each in import_models(registry, read_models_file(file))}
    assert (changed["qwen"].outcome, changed["qwen"].detail) == (Outcome.CHANGED, "ram")
    assert get_model(registry, "qwen").settings.ttl == 300, "the file says nothing about it"


def test_what_list_prints_can_be_imported(registry: Registry, tmp_path: Path) -> None:
    add_model(registry, "qwen", {"source": "gpt2", "ram": "8GiB", "vllm_args": "--seed 1", "enforce_eager": False})
    file = tmp_path / "models.json"
    told = [{**model.as_json(), "running": False} for model in list_models(registry)]
    file.write_text(json.dumps({"models": told}))
    with open_registry(f"sqlite:///{tmp_path}/other.db") as other:
        assert [each.outcome for each in import_models(other, read_models_file(file))] == [Outcome.ADDED]
        assert get_model(other, "qwen").settings == get_model(registry, "qwen").settings


def test_importing_the_hub_cache_keeps_existing_models_unchanged(registry: Registry, tmp_path: Path) -> None:
    for name in ("models--Qwen--Qwen3-8B", "models--gpt2", "models--org--mine"):
        (tmp_path / name / "snapshots/abc").mkdir(parents=True)
        (tmp_path / name / "snapshots/abc/config.json").write_text("{}")
    (tmp_path / "models--org--partial/snapshots").mkdir(parents=True)
    (tmp_path / "models--a--b--c").mkdir()
    (tmp_path / "datasets--org--data").mkdir()
    (tmp_path / "version.txt").write_text("1")
    mine = add_model(registry, "org/mine", {"source": "gpt2", "ram": "8GiB"})
    outcomes = {each.name: each.outcome for each in import_models(registry, scan_hub_cache(tmp_path))}
    assert outcomes == {
        "Qwen/Qwen3-8B": Outcome.ADDED, "gpt2": Outcome.ADDED, "org/mine": Outcome.UNCHANGED,
        "org/partial": Outcome.INVALID, "a/b/c": Outcome.INVALID,
    }  # fmt: skip
    assert get_model(registry, "org/mine") == mine
    again = {each.outcome for each in import_models(registry, scan_hub_cache(tmp_path))}
    assert again == {Outcome.UNCHANGED, Outcome.INVALID}


BAD_FILES: dict[str, tuple[str, str | bytes, str]] = {
    "broken YAML": ("m.yaml", "models: [", r"is not YAML: line 1: "),
    "a tab": ("m.yaml", "models:\n\tqwen: {}", r"is not YAML: line 2: "),
    "broken JSON": ("m.json", '{"models": ', r"is not JSON: Expecting value: line 1"),
    "not text": ("m.yaml", b"\xff\xfe\x00", r"is not UTF-8 text"),
    "empty": ("m.yaml", "", r"has no `models`; write `models:`"),
    "a list": ("m.yaml", "- a", r"has no `models`"),
    "another key": ("m.yaml", "models: {}\nmodel: {}", r"'model' is not known beside `models`"),
    "models that are a word": ("m.yaml", "models: qwen", r"neither a mapping nor a list"),
    "a name twice": ("m.yaml", "models:\n  a: {}\n  a: {}", r"line 3: 'a' is there twice"),
    "a name twice in JSON": ("m.json", '{"models": {"a": {}, "a": {}}}', r"'a' is there twice"),
    "an object": (
        "m.yaml",
        "models: !!python/object/apply:os.system [id]",
        r"is not YAML: line 1: could not determine",
    ),
    "nested": ("m.json", '{"models":' + "[" * 100_000, r"is nested too deeply|is not JSON"),
    "nested YAML": ("m.yaml", "models: " + "[" * 5_000, r"is nested too deeply"),
    "a control character": ("m.yaml", "models: \x01", r"is not YAML"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_none_of_models_is_refused(tmp_path: Path, case: str) -> None:
    name, content, said = BAD_FILES[case]
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RegistryError, match=said) as told:
        read_models_file(file)
    assert str(file) in str(told.value) and len(str(told.value)) < 400


def test_nested_yaml_references_do_not_blow_up_the_report(registry: Registry, tmp_path: Path) -> None:
    """A list of references to lists of references: a few lines that print as gigabytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    inner = "\n".join(f"    {line}" for line in lines)
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n  x:\n{inner}\n  y:\n    ram: *a11\n  z:\n    vllm_args: *a11\n")
    for each in import_models(registry, read_models_file(file)):
        assert each.outcome is Outcome.INVALID and len(each.detail) < 400
