"""Overspill on PYTHONPATH only, as on a machine onto which it was copied: nothing tells vLLM of its plugins."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from overspill.address import free_port
from overspill.launch.vllm import Vllm, server_command, unpacked_vllm
from overspill.registry import list_runs, open_registry

ROOT = Path(__file__).parents[1]
# Ends vLLM once it answers, as whoever started it would.
SERVED = """
import os, signal, subprocess, sys, threading
serve = subprocess.Popen([sys.executable, "-m", "overspill", "serve", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
threading.Timer(240, serve.kill).start()
print(serve.stdout.readline(), end="", flush=True)
serve.send_signal(signal.SIGTERM)
os._exit(serve.wait())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Every package of this environment but Overspill, for an interpreter that has none."""
    site = tmp_path / "site"
    site.mkdir()
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if "overspill" not in entry.name and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OVERSPILL_", "VLLM_"))}
    return {
        **kept, "PYTHONPATH": f"{ROOT / 'src'}:{site}", "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    interpreter = os.path.realpath(sys.executable)
    return subprocess.run(
        [interpreter, *arguments], capture_output=True, text=True, timeout=600, check=False, env=environment,
        cwd=environment["XDG_STATE_HOME"].rpartition("/")[0],
    )  # fmt: skip


def test_a_model_is_served_with_our_plugins(environment: dict[str, str], llama: Path, tmp_path: Path) -> None:
    hidden = python(environment, "-c", "from importlib.metadata import version; version('overspill')")
    assert "PackageNotFoundError" in hidden.stderr, "Overspill is installed here, and nothing would be tested"
    flags = ["--device", "cpu", "--gpu-memory", "8MiB", "--ram", "6GiB", "--offload-ram", "64MiB", "--dtype", "float32"]
    more = ["--max-model-len", "4k", "--max-num-seqs", "4", "--enforce-eager", "--port", str(free_port()), "--quiet"]
    answer = python(environment, "-c", SERVED, str(llama), *flags, *more, "--skip-tokenizer-init")
    assert answer.returncode == 0, answer.stderr
    assert "/v1 serves" in answer.stdout and "for spilled KV and 64 MiB for idle KV" in answer.stdout
    assert "as planned: idle KV: a pool of 64 MiB in RAM" in answer.stderr
    with open_registry(environ=environment) as registry:
        assert [str(run.end) for run in list_runs(registry)] == ["stopped"]


@pytest.mark.parametrize("is_registered", [False, True])
def test_commands_work_without_the_registrys_packages(
    environment: dict[str, str], llama: Path, is_registered: bool
) -> None:
    for package in ("sqlalchemy", "alembic"):
        (Path(environment["PYTHONPATH"].rpartition(":")[2]) / package).unlink()
    if is_registered:
        environment["OVERSPILL_DATABASE_URL"] = "sqlite:////tmp/registry.db"
    flags = ["--device", "cpu", "--dtype", "float32", "--ram", "6GiB"]
    answer = python(environment, "-m", "overspill", "plan", str(llama), *flags)
    assert answer.returncode == 0 and answer.stderr == "", answer.stderr
    answer = python(environment, "-m", "overspill", "serve", str(llama), *flags, "--dry-run")
    assert answer.returncode == 0 and "--max-model-len" in answer.stdout, answer.stderr
    answer = python(environment, "-m", "overspill", "plan", "qwen", *flags)
    assert ("the registry cannot be used: No module named 'sqlalchemy'" in answer.stderr) == is_registered


def test_a_vllm_without_metadata_is_known_by_its_files(tmp_path: Path) -> None:
    assert unpacked_vllm(tmp_path) is None
    (tmp_path / "_version.py").write_text("__version__ = version = '0.32.0+cu130'\n__version_tuple__ = (0, 32, 0)\n")
    assert unpacked_vllm(tmp_path) == Vllm("0.32.0", is_cpu=True, has_command=False)
    (tmp_path / "cumem_allocator.abi3.so").write_bytes(b"")
    found = unpacked_vllm(tmp_path)
    assert found == Vllm("0.32.0", is_cpu=False, has_command=False)
    assert server_command("m", found)[-3:] == ["vllm.entrypoints.openai.api_server", "--model", "m"]
    assert server_command("m", Vllm("0.32.0", is_cpu=False))[-3:] == ["vllm.entrypoints.cli.main", "serve", "m"]
