"""What engines were seen to take is kept between runs in the registry, and never stands in the way of one."""

import logging
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overspill.figures import assumed
from overspill.hardware import parse_gpu
from overspill.launch.profiles import Remembered, remember
from overspill.planning.memory import Profile, fingerprint
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
    return {"XDG_STATE_HOME": str(tmp_path)}


def database(home: dict[str, str]) -> Path:
    return Path(home["XDG_STATE_HOME"]) / "overspill/registry.db"


def recall(key: str, home: dict[str, str]) -> Profile | None:
    return Remembered(home).recall(key)


def test_what_is_remembered_is_recalled(home: dict[str, str]) -> None:
    key = fingerprint(LLAMA, H200, **CASE)
    remember(key, SEEN, environ=home)
    assert recall(key, home) == SEEN and recall(f"{key}x", home) is None
    remember(key, replace(SEEN, graph_bytes=0), environ=home)
    assert recall(key, home) == replace(SEEN, graph_bytes=0)


def test_asking_makes_no_registry(home: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert recall("key", home) is None
    assert not list(Path(home["XDG_STATE_HOME"]).iterdir()) and not caplog.text


def test_a_fingerprint_is_readable_and_changes_with_every_input() -> None:
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


def test_a_locked_registry_is_one_warning_and_asked_once(
    home: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    remember("key", SEEN, environ=home)
    with closing(sqlite3.connect(database(home), isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")  # without it, readers do not wait for a writer
        other.execute("BEGIN EXCLUSIVE")
        other.execute("UPDATE profiles SET graph_bytes = 1")
        remembered = Remembered(home)
        with caplog.at_level(logging.WARNING):
            assert remembered.recall("key") is None and remembered.recall("another") is None
        other.execute("ROLLBACK")
    assert caplog.text.count("plans use assumed sizes") == 1 and "another program has been writing" in caplog.text
    assert recall("key", home) == SEEN


@pytest.mark.parametrize(
    "url", ["postgresql://me:hush@127.0.0.1:1/db", "sqlite:////proc/none.db", "nonsense", "sqlite:////dev/null"]
)
def test_an_unusable_registry_is_a_warning_without_its_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        remember("key", SEEN, environ={"OVERSPILL_DATABASE_URL": url})
        recall("key", {"OVERSPILL_DATABASE_URL": url})
    assert "could not be saved" in caplog.text and "hush" not in caplog.text


def test_a_damaged_record_is_a_warning_and_ignored(home: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    remember("key", SEEN, environ=home)
    with closing(sqlite3.connect(database(home))) as connection:
        connection.execute("UPDATE profiles SET graph_bytes = -1")
        connection.commit()
    with caplog.at_level(logging.WARNING):
        assert recall("key", home) is None
    assert "sizes of" in caplog.text


def test_a_user_without_a_home_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level(logging.WARNING):
        remember("key", SEEN, environ={})
    assert "XDG_STATE_HOME" in caplog.text and recall("key", {}) is None
