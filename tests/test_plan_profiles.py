"""What engines were seen to take is kept between runs, and never stands in the way of one."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overspill.figures import assumed
from overspill.hardware import parse_gpu
from overspill.planning.profiles import Profile, fingerprint, recall, remember
from tests import model_configs as models
from tests.model_tensors import describe_config

SEEN = Profile(non_torch_bytes=300 << 20, activation_bytes=1240 << 20, graph_bytes=143 << 20, context_bytes=522 << 20)
LLAMA = describe_config(models.llama_3_1_8b())
H200 = replace(parse_gpu("h200"), uuid="GPU-1", driver_version="580.1")
CASE: dict[str, Any] = {
    "vllm_version": "0.32.0", "max_num_batched_tokens": 8192, "max_num_seqs": 64, "enforce_eager": False,
    "kv_cache_dtype": "auto",
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path)}


def files(home: dict[str, str]) -> list[Path]:
    return sorted((Path(home["XDG_CACHE_HOME"]) / "overspill/profiles").iterdir())


def test_what_is_remembered_is_recalled(home: dict[str, str]) -> None:
    key = fingerprint(LLAMA, H200, **CASE)
    assert recall(key, home) is None
    remember(key, SEEN, home)
    assert recall(key, home) == SEEN
    remember(key, replace(SEEN, graph_bytes=0), home)
    assert recall(key, home) == replace(SEEN, graph_bytes=0)
    assert [path.name for path in files(home)] == [f"{key}.json"], "and nothing half written is left"


def test_a_fingerprint_is_readable_and_changes_with_everything_that_decides() -> None:
    key = fingerprint(LLAMA, H200, **CASE)
    assert key.startswith("llamaforcausallm-nvidia-h200-vllm0.32.0-8192x64-")
    assert key == fingerprint(replace(LLAMA, name="another name"), H200, **CASE), "the same weights by another name"
    others = [
        fingerprint(describe_config(models.qwen3_8b()), H200, **CASE),
        fingerprint(replace(LLAMA, dtype="float16"), H200, **CASE),
        fingerprint(LLAMA, replace(H200, driver_version="590.1"), **CASE),
        fingerprint(LLAMA, replace(H200, total_bytes=assumed(1)), **CASE),
        *(
            fingerprint(LLAMA, H200, **{**CASE, name: value})
            for name, value in {
                "vllm_version": "0.32.1", "max_num_batched_tokens": 2048, "max_num_seqs": 8, "enforce_eager": True,
                "kv_cache_dtype": "fp8",
            }.items()
        ),
    ]  # fmt: skip
    assert len({key, *others}) == len(others) + 1


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 2}',
        lambda entry: {**entry, "graph_bytes": -1},
        lambda entry: {**entry, "graph_bytes": 1.5},
        lambda entry: {**entry, "graph_bytes": 2**60},
        lambda entry: {**entry, "fingerprint": "another"},
        lambda entry: {name: value for name, value in entry.items() if name != "context_bytes"},
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_file_is_a_warning_and_ignored(
    home: dict[str, str], damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = fingerprint(LLAMA, H200, **CASE)
    remember(key, SEEN, home)
    (path,) = files(home)
    if callable(damage):
        damage = json.dumps(damage(json.loads(path.read_text())))
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    with caplog.at_level(logging.WARNING):
        assert recall(key, home) is None
    assert "damaged" in caplog.text and str(path) in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(
    home: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "overspill").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        remember("key", SEEN, home)
        assert recall("key", home) is None
    assert "could not be kept" in caplog.text


def test_a_full_disk_is_a_warning(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    remember("key", SEEN, home)
    monkeypatch.setattr("os.replace", full)
    with caplog.at_level(logging.WARNING):
        remember("key", replace(SEEN, graph_bytes=0), home)
    assert "No space left" in caplog.text
    assert recall("key", home) == SEEN and len(files(home)) == 1, "the old one stays, and nothing beside it"


def test_a_user_without_a_home_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level(logging.WARNING):
        remember("key", SEEN, {})
    assert "XDG_CACHE_HOME" in caplog.text and recall("key", {}) is None
