"""The command line: examples in every help, exit codes, one sentence for every mistake."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from overspill import __version__, plan
from overspill.cli import app
from overspill.measure.workload import WORKLOADS
from overspill.processes import identity
from overspill.serve.status import Status, folder_of, write_status
from tests.command import run_overspill


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERSPILL_")}
    return {**clean, "XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200", "HF_HUB_OFFLINE": "1", **more}


def overspill(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run_overspill(*arguments, env=environment(**more))


@pytest.mark.parametrize(("ram", "code"), [("64GiB", 0), ("1GiB", 1), ("lots", 2)])
def test_a_process_exits_as_the_command_does(llama: Path, ram: str, code: int) -> None:
    """The other tests call the command in their own process."""
    words = ["plan", str(llama), "--gpu", "1GiB" if code == 1 else "24GiB", "--ram", ram]
    executed = subprocess.run(
        [sys.executable, "-c", "from overspill.cli import main; main()", *words],
        capture_output=True, text=True, timeout=120, check=False, env=environment(),
    )  # fmt: skip
    called = overspill(*words)
    assert executed.returncode == called.returncode == code
    assert (executed.stdout, executed.stderr) == (called.stdout, called.stderr)


def commands(group: Any = None, *words: str) -> Iterator[str]:
    """Every command there is, as it is typed after `overspill`."""
    group = group or typer.main.get_command(app)
    below = getattr(group, "commands", {})
    if not below:
        yield " ".join(words)
    for name, one in below.items():
        yield from commands(one, *words, name)


@pytest.mark.parametrize("words", list(commands()))
def test_every_command_has_an_example_in_its_help(words: str) -> None:
    answer = CliRunner().invoke(app, [*words.split(), "--help"])
    assert answer.exit_code == 0 and f"Example: overspill {words}" in answer.stdout


def test_a_plan_for_a_model_on_disk(llama: Path) -> None:
    answer = overspill("plan", str(llama), "--gpu", "24GiB", "--ram", "64GiB", "--max-model-len", "4k", "--json")
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["max_model_len"] == 4096 and told["spilled_kv_bytes"] == 0
    weights = sum(path.stat().st_size for path in llama.glob("*.safetensors"))
    assert 0 < told["weights_bytes"] <= weights
    text = overspill("plan", str(llama), "--gpu", "24GiB", "--ram", "64GiB")
    assert text.returncode == 0 and "everything on the GPU" in text.stdout and "assumed" in text.stdout


def test_a_servers_own_flags_are_planned_with(llama: Path) -> None:
    """A server's command with `plan` in place of `serve` was refused."""
    words = (str(llama), "--gpu", "24GiB", "--ram", "64GiB", "--json", "--max_model_len=4k", "--port", "8001")
    usual, eager = (json.loads(overspill("plan", *words, *more).stdout) for more in ((), ("--enforce-eager",)))
    assert eager["max_model_len"] == 4096 and eager["need_gpu_bytes"] < usual["need_gpu_bytes"], "without graphs"
    served = json.loads(overspill("serve", *words, "--enforce-eager", "--dry-run").stdout)["plan"]
    assert eager["vllm_args"] == served["vllm_args"]


def test_a_model_that_does_not_fit_exits_with_one(llama: Path) -> None:
    small = ("plan", str(llama), "--gpu", "1GiB", "--ram", "1GiB")
    answer = overspill(*small)
    assert answer.returncode == 1 and "does not fit" in answer.stdout
    for part in ("need: ", "have: 1 GiB of GPU memory and 1 GiB of RAM", "Smallest card", "--gpu ",
                 "process and --offload-ram need 3 GiB of RAM"):  # fmt: skip
        assert part in answer.stdout
    assert json.loads(overspill(*small, "--json").stdout)["fits"] is False


def test_a_forced_plan_goes_on_with_a_warning(llama: Path) -> None:
    tight = ("plan", str(llama), "--gpu", "2GiB", "--ram", "1GiB", "--max-num-batched-tokens", "2048")
    assert overspill(*tight).returncode == 1, "not even the engine's own process fits in 1 GiB"
    answer = overspill(*tight, "--force")
    assert answer.returncode == 0 and "warning: the plan finds no way that fits" in answer.stdout
    told = json.loads(overspill(*tight, "--json", OVERSPILL_FORCE="true").stdout)
    assert told["forced"] and not told["fits"] and told["vllm_args"]


def test_a_plan_for_vllms_cpu_platform(llama: Path) -> None:
    """8 MiB play the GPU's memory; 4,096 tokens of a tiny model do not fit in it."""
    answer = overspill(
        "plan", str(llama), "--device", "cpu", "--gpu-memory", "8MiB", "--ram", "8GiB", "--offload-ram", "0",
        "--dtype", "float32", "--max-model-len", "4k", "--max-num-seqs", "8", "--enforce-eager", "--json",
    )  # fmt: skip
    told = json.loads(answer.stdout)
    assert (told["device"], told["gpu"], told["fits"]) == ("cpu", "CPU", True)
    arguments = told["vllm_args"]
    assert "--gpu-memory-utilization" not in arguments and "--enforce-eager" in arguments
    tables = 2 * 4 * 8 * 32
    expected = told["resident_kv_bytes"] + told["window_bytes"] + tables
    assert arguments[arguments.index("--kv-cache-memory-bytes") + 1] == str(expected)
    assert arguments[arguments.index("--dtype") + 1] == "float32"
    assert arguments[arguments.index("--max-num-seqs") + 1] == "8"
    assert told["spilled_kv_bytes"] > 0 == told["offload_bytes"]


def test_cards_are_listed_when_asked_for(llama: Path) -> None:
    answer = overspill("plan", str(llama), "--gpu", "24GiB", "--ram", "64GiB", "--cards")
    assert answer.returncode == 0 and re.search(r"rtx4090 +23\.5 GiB   on the GPU alone", answer.stdout)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no such folder": (["plan", "/nonexistent/model", "--gpu", "24GiB"], "nonexistent"),
    "more RAM than there is": (["plan", "{llama}", "--device", "cpu", "--ram", "60TiB"], "of RAM, and"),
    "no GPU memory": (["plan", "{llama}", "--gpu", "rtx4090", "--gpu-memory", "0"], "needs some GPU memory"),
    "not a size": (["plan", "{llama}", "--gpu", "24GiB", "--ram", "lots"], "--ram"),
    "negative": (["plan", "{llama}", "--gpu", "24GiB", "--ram", "-1"], "--ram"),
    "unknown card": (["plan", "{llama}", "--gpu", "rtx9999"], "rtx9999"),
    "no tokens": (["plan", "{llama}", "--gpu", "24GiB", "--max-model-len", "0"], "not a number of tokens"),
    "unknown KV dtype": (["plan", "{llama}", "--gpu", "24GiB", "--kv-cache-dtype", "fp7"], "fp7"),
    "not a link": (["plan", "{llama}", "--gpu", "24GiB", "--link", "fast"], "--link"),
    "no GPU here": (["plan", "{llama}", "--device", "cuda"], "--gpu"),
    "no such device": (["plan", "{llama}", "--device", "tpu"], "--device: 'tpu' is none of auto, cuda, cpu"),
    "a near device that was not meant": (["plan", "{llama}", "--device", "gpu"], "none of auto, cuda, cpu\n"),
    "a power": (["plan", "{llama}", "--gpu", "24GiB", "--max-model-len", "²"], "'²' is not a number of tokens"),
    "too many": (["plan", "{llama}", "--gpu", "24GiB", "--max-model-len", "9" * 23], "is too large; at most"),
    "far too many": (["plan", "{llama}", "--gpu", "24GiB", "--at-once", "9" * 5000], "is too long for a number"),
    "hardly any RAM": (["plan", "{llama}", "--gpu", "24GiB", "--ram", "1MiB"], "--ram '1MiB' is not a size from 1GiB"),
    "a GPU for the CPU": (["plan", "{llama}", "--device", "cpu", "--gpu", "24GiB"], "leave one of them out"),
    "more than the card": (["plan", "{llama}", "--gpu", "24GiB", "--gpu-memory", "48GiB"], "has 24 GiB; give at most"),
    "more than all RAM": (["plan", "{llama}", "--device", "cpu", "--gpu-memory", "900TiB"], "of RAM is available"),
    "unknown dtype": (["plan", "{llama}", "--gpu", "24GiB", "--dtype", "int8"], "--dtype: 'int8' is none of"),
    "no requests": (["plan", "{llama}", "--gpu", "24GiB", "--max-num-seqs", "0"], "--max-num-seqs: '0' is not"),
    "no chunk": (["plan", "{llama}", "--gpu", "24GiB", "--max-num-batched-tokens", "x"], "--max-num-batched-tokens"),
    "no pool": (["plan", "{llama}", "--gpu", "24GiB", "--offload-ram", "much"], "--offload-ram: 'much' is not a size"),
    "misspelt variable": (["plan", "{llama}", "--gpu", "24GiB"], "did you mean OVERSPILL_RAM?"),
    "a flag of another server": (["plan", "{llama}", "--ctx-size", "8192"], "it is --max-model-len here"),
    "a flag before the model": (["plan", "--enable-lora", "{llama}"], "the model comes first"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_two(llama: Path, name: str) -> None:
    arguments, said = MISTAKES[name]
    more = {"OVERSPILL_RAMS": "1GiB"} if name == "misspelt variable" else {}
    answer = overspill(*(argument.format(llama=llama) for argument in arguments), CUDA_VISIBLE_DEVICES="", **more)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert answer.stderr.startswith("error: ") and said in answer.stderr
    assert "Traceback" not in answer.stderr and len(answer.stderr.strip().splitlines()) == 1


IDLE = {
    "--disk-path /x": "--disk-path does nothing without --disk",
    "--elastic-weight 2": "--elastic-weight does nothing without --elastic",
    "--ram-reserve 2GiB": "--ram-reserve does nothing where RAM is stated (--ram)",
}


@pytest.mark.parametrize("given", IDLE)
def test_a_flag_without_the_one_it_belongs_to_is_reported(llama: Path, given: str) -> None:
    """It was ignored in silence."""
    words = ("plan", str(llama), "--gpu", "24GiB", "--ram", "64GiB")
    answer = overspill(*words, *given.split())
    assert answer.returncode == 0 and f"warning: {IDLE[given]}" in answer.stderr
    assert not overspill(*words, OVERSPILL_DISK_PATH="/x", OVERSPILL_RAM_RESERVE="2GiB").stderr


def test_a_flag_that_a_plan_has_no_use_for_is_named_as_given(llama: Path) -> None:
    """It was named as an option of the connector, in bytes."""
    words = ("plan", str(llama), "--gpu", "24GiB", "--ram", "64GiB", "--offload-ram", "0")
    answer = overspill(*words, "--disk", "2GiB", "--spill-threads", "3", "--kv-options", "store=lazy")
    assert "warning: --disk 2GiB --spill-threads 3 --kv-options store=lazy would do nothing here" in answer.stdout


def test_clearing_an_empty_cache_says_so(tmp_path: Path) -> None:
    """It printed nothing."""
    answer = overspill("cache", "clear", XDG_CACHE_HOME=str(tmp_path))
    assert (answer.returncode, answer.stdout) == (0, "no KV is on disk\n")


def test_config_says_where_values_come_from(tmp_path: Path) -> None:
    (tmp_path / "overspill").mkdir()
    (tmp_path / "overspill/config.toml").write_text('gpu = "rtx4090"\n')
    answer = overspill("config", "--json", XDG_CONFIG_HOME=str(tmp_path), OVERSPILL_PORT="9000")
    told = json.loads(answer.stdout)
    assert told["gpu"] == {"value": "rtx4090", "origin": "config.toml"}
    assert told["port"] == {"value": 9000, "origin": "environment"}
    assert told["host"]["origin"] == "default"
    assert "OVERSPILL_PORT" in overspill("config", OVERSPILL_PORT="9000").stdout


def test_the_commands_modules_do_not_load_the_engine() -> None:
    """A plan should take a fraction of a second."""
    loaded = "[m for m in ('torch', 'vllm') if m in sys.modules]"
    code = f"import sys, overspill.cli, overspill.launch.machine; print({loaded})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


def test_documented_flags_of_plan_match_its_help() -> None:
    page = (Path(__file__).parents[1] / "docs/plan.md").read_text()
    flags = set(re.findall(r"--[a-z-]+", overspill("plan", "--help").stdout)) - {"--help"}
    rows = re.findall(r"^\| (`--[^|]+) \|", page, re.MULTILINE)
    documented = {flag for row in rows for flag in re.findall(r"--[a-z-]+", row)}
    assert documented == flags


def test_the_help_of_bench_names_every_workload() -> None:
    told = re.sub(r"\s+", "", overspill("bench", "--help").stdout)  # lines are broken at hyphens
    assert [name for name in WORKLOADS if name not in told] == []


def test_the_version_is_told() -> None:
    answer = CliRunner().invoke(app, ["--version"])
    assert answer.exit_code == 0 and answer.stdout == f"overspill {__version__}\n"


COMMANDS = [[]] + [
    words.split()
    for words in (
        "run", "plan", "serve", "verify", "bench", "ab", "tune", "config", "ps", "stop", "park", "wake", "logs",
        "cache", "cache show", "manager", "models", "models edit", "models undo", "results", "results list", "service",
        "service print", "service manager install",
    )
]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_a_short_name_and_whole_summaries(words: list[str], tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    short, long = (run_overspill(*words, flag, env=env) for flag in ("-h", "--help"))
    assert short.returncode == long.returncode == 0 and short.stdout == long.stdout
    assert "..." not in short.stdout.partition("Commands:")[2], "a summary was cut"


def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    told = run_overspill("config", env={"HOME": str(tmp_path), "OVERSPILL_CONFIG": str(tmp_path)})
    assert told.returncode == 2 and told.stderr.startswith("error: ") and "Traceback" not in told.stderr
    (tmp_path / "file").write_text("")
    told = run_overspill("service", "remove", "m", "--folder", str(tmp_path / "file" / "units"), env={})
    assert told.returncode != 0 and told.stderr.startswith("error: ") and "Traceback" not in told.stderr


def test_overspill_alone_says_what_to_do_next(tmp_path: Path) -> None:
    told = run_overspill(env={"HOME": str(tmp_path)})
    assert told.returncode == 0 and len(told.stdout.splitlines()) <= 10
    for command in ("run", "plan", "serve", "manager"):
        assert f"overspill {command}" in told.stdout
        assert run_overspill(command, "--help", env={"HOME": str(tmp_path)}).returncode == 0
    assert "overspill --help" in told.stdout and "Usage:" not in told.stdout


def test_verify_does_not_offer_a_card_that_it_refuses(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "COLUMNS": "120"}
    assert "--gpu " not in run_overspill("verify", "--help", env=env).stdout
    assert "--gpu " in run_overspill("plan", "--help", env=env).stdout


def test_ps_forgets_servers_that_ended_badly(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    folder = folder_of(env)
    assert folder is not None
    at = {"host": platform.node(), "url": "http://127.0.0.1:8000", "started_at": "2026-01-01T00:00:00+00:00"}
    for name, pid, process in (("dead", 1, "another"), ("alive", os.getpid(), identity(os.getpid()))):
        write_status(Status(pid=pid, process=process, model=name, source=name, served_name=name, **at), folder)
    seen = run_overspill("ps", env=env).stdout
    assert "dead" in seen and "alive" in seen
    seen = run_overspill("ps", "--clear", env=env).stdout
    assert "dead" not in seen and "alive" in seen


def test_help_names_integers_sizes_and_tokens(tmp_path: Path) -> None:
    told = run_overspill("plan", "--help", env={"HOME": str(tmp_path), "COLUMNS": "120"}).stdout
    for shown in ("--max-num-seqs <int>", "--ram <size>", "--max-model-len <tokens>"):
        assert shown in told


def test_a_refusal_of_serve_is_told_once(llama: Path, tmp_path: Path) -> None:
    """Its lines came first, and then the same again in one sentence."""
    words = ["--device", "cpu", "--gpu-memory", "4MiB", "--ram", "3GiB", "--max-model-len", "32k", "--dry-run"]
    told = run_overspill("serve", str(llama), *words, env={"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)})
    assert told.returncode == 1 and told.stderr.count("of RAM in place of a GPU's memory (--gpu-memory)") == 1


def test_a_printed_plan_is_the_commands_text(llama: Path) -> None:
    """It was a dump of all its fields."""
    made = plan(str(llama), gpu="rtx4090", ram="64GiB")
    assert str(made).startswith("llama, ") and "Longest context" in str(made)
