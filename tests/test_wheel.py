"""The wheel that `pip install overspill` gets, in an environment with its dependencies and without this checkout."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from pathlib import Path

import pytest

from overspill.address import free_port

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
SETTINGS = ["--device", "cpu", "--dtype", "float32", "--ram", "6GiB"]


def build_wheel(folder: Path, **changed: str) -> Path:
    shutil.copytree(
        ROOT, folder / "checkout",
        ignore=shutil.ignore_patterns(".*", "*.egg-info", "*.so", "build", "__pycache__", "results"),
    )  # fmt: skip
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "checkout")]
    subprocess.run(build, check=True, env=os.environ | changed)
    (wheel,) = folder.glob("overspill-*.whl")
    shutil.rmtree(folder / "checkout")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path) -> Path:
    """An interpreter whose environment holds nothing but the wheel; dependencies are linked from this one."""
    folder = wheel.parent
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    purelib = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site).iterdir():
            if "overspill" not in entry.name and not (target := Path(purelib, entry.name)).exists():
                target.symlink_to(entry)
    subprocess.run([*PIP, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    return python


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OVERSPILL_", "VLLM_", "PYTHON"))}
    return {**kept, "XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}


def overspill(python: Path, folder: Path, *arguments: str) -> str:
    answer = subprocess.run(
        [python.parent / "overspill", *arguments], cwd=folder, env=environment(folder), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_the_wheel_stands_alone(python: Path, tmp_path: Path) -> None:
    where = [python, "-c", "import overspill; print(overspill.__file__)"]
    found = subprocess.check_output(where, cwd=tmp_path, env=environment(tmp_path), text=True)
    assert Path(found.strip()).is_relative_to(python.parents[1])


def test_the_wheel_has_attention_for_its_platform(wheel: Path, python: Path, tmp_path: Path) -> None:
    assert f"-py3-none-linux_{platform.machine()}.whl" in wheel.name
    code = "from overspill.kv.attention.library import load; print(*load().kernels)"
    kernels = subprocess.check_output([python, "-c", code], cwd=tmp_path, env=environment(tmp_path), text=True)
    assert {"neon", "avx2"} & set(kernels.split())


def test_without_a_compiler_the_wheel_says_what_is_missing(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CXX="/no/compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "content")
    code = "from overspill.kv.attention.library import load; load()"
    answer = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path / "content")}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "AttentionUnavailable: attention on the CPU was not built" in answer.stderr
    assert "install a C++ compiler" in answer.stderr


def test_commands_find_migrations_and_unit_templates(python: Path, tmp_path: Path, llama: Path) -> None:
    assert "added tiny" in overspill(python, tmp_path, "models", "add", "tiny", "--source", str(llama))
    assert "tiny" in overspill(python, tmp_path, "models", "list")
    assert "Longest context: " in overspill(python, tmp_path, "plan", "tiny", *SETTINGS)
    unit = overspill(python, tmp_path, "service", "print", "tiny", *SETTINGS, "--", "--skip-tokenizer-init")
    assert "ExecStart=" in unit and str(python.parent) in unit


def test_the_manager_finds_its_pages(python: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [python.parent / "overspill", "manager", "--port", str(port)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as manager:
        try:
            assert manager.stdout is not None
            line = next(line for line in manager.stdout if f":{port}" in line)
            assert "http://" in line
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as page:
                text = page.read().decode()
            assert "<title>" in text and "htmx" in text
        finally:
            manager.terminate()
            manager.wait(timeout=60)
