"""`overspill service`: a plan becomes units, nothing is written where it was not asked for, mistakes are sentences."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from overspill.kv.options import Options
from overspill.planning.attempts import PROCESS_RAM_BYTES
from overspill.service.definition import SERVER_RAM_BYTES
from overspill.service.units import TEMPLATE
from tests.command import run_overspill

GiB = 1 << 30
# As much as plays a GPU's memory here that a context of 4,096 tokens spills.
SMALL = ("--device", "cpu", "--gpu-memory", "8MiB", "--dtype", "float32", "--max-model-len", "4k", "--offload-ram", "0")


@pytest.fixture(scope="module")
def llama(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what may be a tokenizer; the tests' own model has none."""
    folder = tmp_path_factory.mktemp("service") / "llama"
    shutil.copytree(llama, folder)
    (folder / "tokenizer.json").touch()
    return folder


def overspill(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OVERSPILL_", "XDG_", "SUDO_"))}
    env = {**clean, "XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200", **environment}
    return run_overspill(*arguments, env=env)


def printed(*arguments: str, **environment: str) -> dict[str, object]:
    answer = overspill("service", "print", *arguments, "--json", **environment)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize("command", ["print", "install", "remove"])
def test_every_command_has_an_example_in_its_help(command: str) -> None:
    answer = overspill("service", command, "--help")
    assert answer.returncode == 0 and f"Example: overspill service {command}" in answer.stdout


def test_print_shows_both_units_and_writes_nothing(llama: Path, tmp_path: Path) -> None:
    answer = overspill("service", "print", str(llama), *SMALL, "--folder", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert f"# {tmp_path}/{TEMPLATE}\n" in answer.stdout and "\nMemoryMax=" in answer.stdout
    assert not list(tmp_path.iterdir())


def test_memory_max_is_plan_engine_reserve_and_server(llama: Path) -> None:
    told = printed(str(llama), *SMALL)
    plan = json.loads(overspill("plan", str(llama), *SMALL, "--json").stdout)
    assert plan["spilled_kv_bytes"] > 0
    ram = plan["spilled_kv_bytes"] + PROCESS_RAM_BYTES
    assert told["memory_max_bytes"] == ram + (8 << 20) + Options.reserve_bytes + SERVER_RAM_BYTES
    assert f"MemoryMax={told['memory_max_bytes']}\n" in str(list(told["files"].values())[1])  # type: ignore[attr-defined]


def test_the_command_of_a_unit_plans_the_same_again(llama: Path) -> None:
    """Whatever RAM is free by then."""
    command = printed(str(llama), *SMALL)["command"]
    assert isinstance(command, list) and command[:5] == [sys.executable, "-m", "overspill", "serve", str(llama)]
    first = json.loads(overspill("plan", str(llama), *SMALL, "--json").stdout)
    again = json.loads(overspill(*command[3:], "--dry-run", "--json").stdout)["plan"]
    assert first["ram_bytes"]["value"] != again["ram_bytes"]["value"]
    for name in ("vllm_args", "spilled_kv_bytes", "offload_bytes", "resident_kv_bytes"):
        assert first[name] == again[name], name


def test_environment_and_file_settings_are_written_to_the_unit(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "overspill").mkdir()
    (tmp_path / "overspill/config.toml").write_text("port = 9001\n")
    command = printed(str(llama), *SMALL, XDG_CONFIG_HOME=str(tmp_path), OVERSPILL_HOST="127.0.0.2")["command"]
    assert isinstance(command, list)
    assert command[command.index("--port") + 1] == "9001" and command[command.index("--host") + 1] == "127.0.0.2"


def test_a_service_of_ones_own_has_ones_own_folders(llama: Path, tmp_path: Path) -> None:
    """Its status and its runs were written elsewhere, where `ps` and the manager did not see them."""
    state = str(tmp_path / "state")
    unit = overspill("service", "print", str(llama), *SMALL, XDG_STATE_HOME=state).stdout
    assert f"XDG_STATE_HOME={state}" in unit and "XDG_CONFIG_HOME=/nonexistent" in unit


def test_ram_that_is_given_stays_the_limit_of_the_plan(llama: Path) -> None:
    told = printed(str(llama), *SMALL, "--ram", "6GiB")
    command = told["command"]
    assert isinstance(command, list) and command[command.index("--ram") + 1] == "6GiB"
    assert told["memory_max_bytes"] == 6 * GiB + (8 << 20) + Options.reserve_bytes + SERVER_RAM_BYTES


def test_vllms_own_flags_come_last_and_contradictions_are_told(llama: Path) -> None:
    own = ("--kv-cache-memory-bytes", "1G", "--seed", "7")
    answer = overspill("service", "print", str(llama), *SMALL, "--json", "--", *own, "--max-num-seqs", "3")
    command = json.loads(answer.stdout)["command"]
    assert tuple(command[-4:]) == own and command[command.index("--max-num-seqs") + 1] == "3"
    assert "warning: --kv-cache-memory-bytes 1G replaces the plan's" in answer.stderr


def test_a_unit_keeps_variables_for_files_and_gpus_but_no_secret(llama: Path) -> None:
    given = {"HF_HOME": "/models/100%", "CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "hf_secret"}
    told = json.dumps(printed(str(llama), *SMALL, **given)["files"])
    assert "HF_HOME=/models/100%%" in told and "CUDA_VISIBLE_DEVICES=1" in told
    assert "hf_secret" not in told


KEY = 'k"e$y\\1%'


def test_a_key_goes_into_a_file_that_only_its_owner_reads(llama: Path, tmp_path: Path) -> None:
    """It stood in the unit, which everybody may read."""
    where = ("--folder", str(tmp_path), "--name", "tiny", "--system", "--run-as", "root")
    answer = overspill("service", "install", str(llama), *SMALL, *where, "--", "--api-key", KEY, "--seed", "7")
    assert answer.returncode == 0, answer.stderr
    drop_in = tmp_path / "overspill@tiny.service.d"
    secrets = drop_in / "secrets.env"
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and "e$y" in path.read_text().replace("\\", "")]
    assert holding == [secrets] and stat.S_IMODE(secrets.stat().st_mode) == 0o600
    unit = (drop_in / "overspill.conf").read_text()
    assert f"EnvironmentFile={secrets}\n" in unit and "--seed 7" in unit and "--api-key" not in unit
    # As a shell reads it, which systemd.exec(5) follows.
    read = subprocess.run(
        ["sh", "-c", '. "$0"; printf %s "$VLLM_API_KEY"', secrets], capture_output=True, text=True, check=True
    )
    assert read.stdout == KEY
    # Without a key the file goes, and with the service too.
    assert overspill("service", "install", str(llama), *SMALL, *where).returncode == 0
    assert not secrets.exists() and "EnvironmentFile" not in (drop_in / "overspill.conf").read_text()
    assert overspill("service", "install", str(llama), *SMALL, *where, "--", "--api-key", KEY).returncode == 0
    answer = overspill("service", "remove", str(llama), "--folder", str(tmp_path), "--name", "tiny", "--system")
    assert answer.returncode == 0 and f"removed {secrets}" in answer.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_key_is_not_printed_with_the_units(llama: Path, as_json: tuple[str, ...]) -> None:
    answer = overspill("service", "print", str(llama), *SMALL, *as_json, "--", "--api-key", "hunter2")
    assert answer.returncode == 0 and "VLLM_API_KEY=***" in answer.stdout
    assert "hunter2" not in answer.stdout + answer.stderr


@pytest.mark.parametrize("flags", [["--api-key", "a1", "b2"], ["--otlp-traces-endpoint", "http://a1:b2@host"]])
def test_a_secret_that_no_variable_holds_is_refused(llama: Path, tmp_path: Path, flags: list[str]) -> None:
    answer = overspill("service", "install", str(llama), *SMALL, "--folder", str(tmp_path), "--", *flags)
    assert answer.returncode == 2 and f"{flags[0]} would put a secret into a unit" in answer.stderr
    assert "b2" not in answer.stderr and not list(tmp_path.iterdir())


def test_a_folder_is_named_by_its_whole_path(llama: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "overspill", "service", "print", llama.name, *SMALL, "--json"],
        cwd=llama.parent, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert str(llama) in json.loads(answer.stdout)["command"]


def test_install_and_remove_in_a_folder(llama: Path, tmp_path: Path) -> None:
    where = ("--folder", str(tmp_path), "--name", "tiny")
    answer = overspill("service", "install", str(llama), *SMALL, *where)
    assert answer.returncode == 0, answer.stderr
    assert "systemctl --user daemon-reload" in answer.stdout and "enable --now overspill@tiny.service" in answer.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["overspill@.service", "overspill@tiny.service.d"]
    answer = overspill("service", "remove", str(llama), *where)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("removed ") == 2 and not list(tmp_path.iterdir())


def test_a_users_units_go_to_the_users_folder(llama: Path, tmp_path: Path) -> None:
    answer = overspill("service", "install", str(llama), *SMALL, XDG_CONFIG_HOME=str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "systemd/user" / TEMPLATE).is_file()
    assert "loginctl enable-linger" in answer.stdout


def test_what_does_not_fit_exits_with_one_and_says_what_would(llama: Path, tmp_path: Path) -> None:
    small = ("--device", "cpu", "--gpu-memory", "4MiB", "--ram", "3GiB", "--max-model-len", "32k")
    answer = overspill("service", "install", str(llama), *small, "--folder", str(tmp_path))
    assert answer.returncode == 1 and "does not fit with 32768 tokens: it needs" in answer.stderr
    assert "--max-model-len" in answer.stderr and not list(tmp_path.iterdir())
    assert "--force" not in answer.stderr, "which overwrites units here"
    long = overspill("service", "print", str(llama), *SMALL, "--max-model-len", "128k", "--gpu-memory", "1GiB")
    assert long.returncode == 1 and "was made for" in long.stderr and "--force" not in long.stderr


def test_a_model_without_a_tokenizer_is_refused_as_serve_does(llama: Path, tmp_path: Path) -> None:
    """A unit was written for it, which could never start."""
    shutil.copytree(llama, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    refused = overspill("service", "print", str(tmp_path / "bare"), *SMALL)
    assert refused.returncode == 1 and "there is no tokenizer in" in refused.stderr
    assert overspill("service", "print", str(tmp_path / "bare"), *SMALL, "--", "--skip-tokenizer-init").returncode == 0


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no such folder": (["install", "/nonexistent/model", *SMALL], "nonexistent"),
    "not a size": (["install", "{llama}", *SMALL, "--ram", "lots"], "--ram"),
    "more RAM than there is": (["install", "{llama}", *SMALL, "--ram", "60TiB"], "of RAM, and"),
    "an empty size": (["install", "{llama}", *SMALL, "--ram", ""], "--ram"),
    "not a port": (["install", "{llama}", *SMALL, "--port", "99999"], "--port"),
    "unknown device": (["install", "{llama}", "--device", "tpu"], "--device"),
    "no GPU": (["install", "{llama}", "--device", "cuda"], "GPU"),
    "name too long": (["install", "{llama}", *SMALL, "--name", "-" * 80], "--name"),
    "name not UTF-8": (["install", "{llama}", *SMALL, "--name", "\udcff"], "UTF-8"),
    "no such user": (["install", "{llama}", *SMALL, "--system", "--run-as", "nobody-of-that-name"], "--run-as"),
    "a user in user mode": (["install", "{llama}", *SMALL, "--run-as", "root"], "--system"),
    "now without systemd": (["install", "{llama}", *SMALL, "--now"], "--now"),
    "a file as folder": (["install", "{llama}", *SMALL, "--folder", "{llama}/config.json"], "--folder"),
    "the model as a flag": (["install", "{llama}", *SMALL, "--", "--model", "x"], "--model"),
    "a flag without a dash": (["install", "{llama}", *SMALL, "--", "seed"], "seed"),
    "nothing to remove": (["remove", "{llama}"], "nothing is installed there"),
    "remove without a name": (["remove", ""], "--name"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_two(llama: Path, tmp_path: Path, name: str) -> None:
    arguments, said = MISTAKES[name]
    given = [argument.replace("{llama}", str(llama)) for argument in arguments]
    answer = overspill("service", *given, XDG_CONFIG_HOME=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert answer.stderr.startswith("error: ") and said in answer.stderr
    assert "Traceback" not in answer.stderr and len(answer.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.service"))


@pytest.mark.parametrize("arguments", [["install"], ["print", "{llama}", "--ramm", "3GiB"], ["start", "{llama}"]])
def test_what_the_command_line_does_not_know_exits_with_two(llama: Path, arguments: list[str]) -> None:
    answer = overspill("service", *(argument.format(llama=llama) for argument in arguments))
    assert answer.returncode == 2 and "Traceback" not in answer.stderr


def test_documented_flags_match_the_help() -> None:
    page = (Path(__file__).parents[1] / "docs/service.md").read_text()
    told = "".join(overspill("service", command, "--help").stdout for command in ("print", "install", "remove"))
    flags = set(re.findall(r"(?<!\w)--[a-z][a-z-]+", told)) - {"--help"}
    documented = set(re.findall(r"(?<!\w)--[a-z][a-z-]+", "".join(re.findall(r"^\|.*\|", page, re.MULTILINE))))
    assert documented == flags


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0B"), (3 * GiB, "3GiB"), (1 << 40, "1TiB"), (1536 << 20, "1536MiB"), (7, "7B")]
)
def test_sizes_are_written_exactly(size: int, text: str) -> None:
    from overspill.kv.sizes import exact_size, parse_size

    assert exact_size(size) == text and parse_size(text) == size
