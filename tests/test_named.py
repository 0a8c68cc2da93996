"""A model's name: a folder, a model of the registry with its settings, or a repository."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill.kv.errors import OverspillError
from overspill.launch.reference import NoRegistry, look_up
from overspill.registry import add_model, open_registry
from overspill.settings import GivenBy, resolve
from tests.command import run_overspill
from tests.model_configs import llama_3_1_8b

SETTINGS = {"max_model_len": "2k", "ram": "6GiB", "dtype": "float32", "enforce_eager": True, "vllm_args": ["--seed", 7]}
Overspill = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def registered(home: dict[str, str], llama: Path) -> dict[str, str]:
    """`small` and `some/model` are the tiny model."""
    with open_registry(environ=home) as registry:
        for name in ("small", "some/model"):
            add_model(registry, name, {"source": str(llama), **SETTINGS})
    return home


@pytest.fixture
def run(home: dict[str, str], tmp_path: Path) -> Overspill:
    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERSPILL_")}
        env = {**clean, **home, "XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200", **more}
        return run_overspill(*arguments, env=env, cwd=tmp_path)

    return run


def test_flags_override_the_registry_and_it_the_environment(registered: dict[str, str]) -> None:
    named = look_up("small", registered)
    values = named.applied(resolve({"ram": "8GiB"}, {"OVERSPILL_MAX_MODEL_LEN": "4k", "OVERSPILL_PORT": "9000"}))
    assert (values["ram"].value, values["ram"].origin) == (8 << 30, GivenBy.FLAG)
    assert (values["max_model_len"].value, values["max_model_len"].origin) == (2048, GivenBy.REGISTRY)
    assert (values["port"].value, values["port"].origin) == (9000, GivenBy.ENVIRONMENT)
    assert named.vllm_args == ("--seed", "7")
    (note,) = named.notes(values)
    assert "small is a model of the registry" in note and "--max-model-len 2048 --dtype float32" in note
    assert "--ram" not in note and note.endswith("-- --seed 7")


def test_a_folder_with_a_registered_name_is_taken_and_reported(
    registered: dict[str, str], run: Overspill, llama: Path, tmp_path: Path
) -> None:
    """It was taken in silence, without the registry's settings."""
    (tmp_path / "small").symlink_to(llama)
    told = run("plan", "small", "--gpu", "rtx4090", "--ram", "64GiB", "--json")
    assert f"warning: small is a folder here, and is used; the registry's small ({llama})" in told.stderr
    assert json.loads(told.stdout)["max_model_len"] != 2048
    assert run("plan", "./small", "--gpu", "rtx4090", "--ram", "64GiB").stderr == ""


@pytest.mark.usefixtures("registered")
def test_a_misspelt_name_of_the_registry_is_reported(run: Overspill) -> None:
    """It was said to be neither a folder nor in the hub's cache, and nothing of the registry."""
    told = run("plan", "smal", "--gpu", "rtx4090", "--ram", "64GiB", HF_HUB_OFFLINE="1")
    assert told.returncode == 2 and "error: smal is neither a folder nor in the cache" in told.stderr
    hint = "there is no model 'smal' in the registry; did you mean small? So smal is treated as a repository"
    assert f"warning: {hint}\n" in told.stderr
    assert "registry" not in run("plan", "other/model", "--gpu", "rtx4090", HF_HUB_OFFLINE="1").stderr


def test_a_plan_says_where_its_ram_was_stated(
    registered: dict[str, str], run: Overspill, llama: Path, tmp_path: Path
) -> None:
    """RAM of the registry was `stated with --ram`, and a mistake in config.toml that of a flag."""
    words = ("plan", "small", "--gpu", "rtx4090")
    assert "stated in registry: small" in run(*words).stdout
    assert "stated with --ram" in run(*words, "--ram", "8GiB").stdout
    file = tmp_path / "config.toml"
    file.write_text("ram = 3\n")
    told = run("plan", str(llama), "--gpu", "rtx4090", OVERSPILL_CONFIG=str(file))
    assert told.returncode == 2 and f"{file}: ram" in told.stderr and "3" in told.stderr


def test_a_card_by_its_size_says_whose_speeds_are_assumed(registered: dict[str, str], run: Overspill) -> None:
    assert "as on an NVIDIA L4, the slowest of that size" in run("plan", "small", "--gpu", "24GiB").stdout
    assert "the slowest of that size" not in run("plan", "small", "--gpu", "rtx4090").stdout


def test_a_registered_repository_is_never_taken_for_a_folder(
    home: dict[str, str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_registry(environ=home) as registry:
        add_model(registry, "far", {"source": "some/model"})
    assert look_up("far", home).source == "some/model"
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model").symlink_to(llama)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OverspillError, match=r"a folder of that name is in .*; run this somewhere else"):
        look_up("far", home)


def test_a_folder_overrides_the_registry_and_it_a_repository(
    registered: dict[str, str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look_up("some/model", registered).source == str(llama)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    assert look_up("small", registered).is_registered, "a folder of something else is no model"
    (tmp_path / "small/config.json").write_text("{}")
    assert look_up("small", registered).source == "small" and not look_up("small", registered).is_registered
    assert not look_up("other/model", registered).is_registered


def test_without_a_registry_none_is_made(home: dict[str, str], run: Overspill, llama: Path) -> None:
    assert look_up("gpt2", home).source == "gpt2"
    answer = run("plan", str(llama), "--device", "cpu", "--dtype", "float32")
    assert answer.returncode == 0 and not Path(home["XDG_STATE_HOME"]).exists()


def test_an_unavailable_registry_stops_only_registered_names(llama: Path, run: Overspill) -> None:
    broken = {"OVERSPILL_DATABASE_URL": "postgresql://me:hush@127.0.0.1:1/db"}
    assert look_up(str(llama), broken).warning == ""
    named = look_up("Qwen/Qwen3-8B", broken)
    assert named.source == "Qwen/Qwen3-8B" and "127.0.0.1:1" in named.warning and "hush" not in named.warning
    with pytest.raises(NoRegistry):
        look_up("small", broken)
    answer = run("plan", "small", "--device", "cpu", **broken)
    assert answer.returncode == 1 and "refused" in answer.stderr and "Traceback" not in answer.stderr
    answer = run("plan", str(llama), "--device", "cpu", "--dtype", "float32", **broken)
    assert answer.returncode == 0 and answer.stderr == ""


def test_a_plan_by_name_says_what_came_from_the_registry(registered: dict[str, str], run: Overspill) -> None:
    answer = run("plan", "small", "--device", "cpu", "--json")
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["max_model_len"] == 2048 and "small is a model of the registry" in answer.stderr
    assert told["settings"]["max_model_len"] == {"value": 2048, "origin": "registry"}
    assert told["settings"]["device"] == {"value": "cpu", "origin": "flag"} and "port" not in told["settings"]
    shorter = json.loads(run("plan", "small", "--device", "cpu", "--max-model-len", "1k", "--json").stdout)
    assert shorter["max_model_len"] == 1024 and "--enforce-eager" in shorter["vllm_args"]
    graphs = json.loads(run("plan", "small", "--device", "cpu", "--no-enforce-eager", "--json").stdout)
    assert "--enforce-eager" not in graphs["vllm_args"]


def test_registered_settings_are_used_in_the_plan(home: dict[str, str], run: Overspill) -> None:
    """Weights in RAM were left out of the plan, and a second GPU was not mentioned."""
    folder = Path(home["XDG_STATE_HOME"]).parent / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_3_1_8b()))
    given = {"ram": "32GiB", "weights_ram": "8GiB", "gpu_memory_utilization": 0.85, "at_once": 2,
             "max_model_len": "64k", "tensor_parallel_size": 2}  # fmt: skip
    with open_registry(environ=home) as registry:
        add_model(registry, "both", {"source": str(folder), **given})
    told = json.loads(run("plan", "both", "--gpu", "24GiB", "--json").stdout)
    assert 8 << 30 <= told["weights_in_ram_bytes"] < 9 << 30 and told["gpu_memory_utilization"] == 0.85
    ram = told["weights_pinned_bytes"] + told["spilled_kv_bytes"] + told["offload_bytes"]
    assert ram + (3 << 30) <= 32 << 30 and told["at_once"] == 2 and told["concurrency"]["65536"] >= 2
    assert len(told["ranks"]) == told["tensor_parallel_size"] == 2
    assert told["settings"]["weights_ram"] == {"value": 8 << 30, "origin": "registry"}
    text = run("plan", "both", "--gpu", "24GiB")
    assert "GPU of each rank" in text.stdout and "--weights-ram 8GiB" in text.stderr
    fewer = json.loads(run("plan", "both", "--gpu", "24GiB", "--weights-ram", "0", "--json").stdout)
    assert fewer["weights_in_ram_bytes"] == 0 and fewer["settings"]["weights_ram"]["origin"] == "flag"


def test_a_model_by_name_is_served_by_that_name_with_its_flags(
    registered: dict[str, str], run: Overspill, llama: Path
) -> None:
    told = json.loads(run("serve", "small", "--device", "cpu", "--dry-run", "--json").stdout)
    words = told["command"]
    assert words[words.index("--model") + 1] == str(llama)
    names = words.index("--served-model-name")
    assert words[names + 1 : names + 3] == ["small", str(llama)] and words[-2:] == ["--seed", "7"]
    own = json.loads(
        run("serve", "small", "--device", "cpu", "--dry-run", "--json", "--served-model-name", "mine").stdout
    )["command"]
    assert own[own.index("--served-model-name") + 1] == "mine" and own.count("--served-model-name") == 1


def test_a_service_by_name_holds_what_the_registry_says_now(
    registered: dict[str, str], run: Overspill, llama: Path, tmp_path: Path
) -> None:
    units = ("--folder", str(tmp_path / "units"))
    bare = ("--", "--skip-tokenizer-init")
    answer = run("service", "install", "small", "--device", "cpu", "--port", "9100", *units, *bare)
    assert answer.returncode == 0, answer.stderr
    unit = (tmp_path / "units/overspill@small.service.d/overspill.conf").read_text()
    assert f"serve {llama} --max-model-len 2048 " in unit and "--enforce-eager" in unit
    assert f"--served-model-name small {llama} --seed 7" in unit
    again = run("service", "install", str(llama), "--device", "cpu", "--port", "9100", "--ram", "6GiB", *units, *bare)
    assert "warning: port 9100 is also used by overspill@small.service" in again.stderr
    assert "port" not in run("service", "install", "small", "--device", "cpu", "--port", "9101", *units, *bare).stderr
    assert run("service", "remove", "small", *units).returncode == 0


def test_python_takes_the_same_names(registered: dict[str, str], llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.setenv("XDG_STATE_HOME", registered["XDG_STATE_HOME"])
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert overspill.plan("small", device="cpu").max_model_len == 2048
    given: dict[str, Any] = overspill.engine_args("small", device="cpu", max_model_len="1k")
    assert given["model"] == str(llama) and given["seed"] == 7 and given["max_model_len"] == 1024
    assert overspill.engine_args("small", device="cpu", seed=8)["seed"] == 8
