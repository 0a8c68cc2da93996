"""KV on disk, on the real engine: found again after a restart, after a kill, and never wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine import BLOCK, Answer, Engine, assert_same, engine, overspill, random_prompt, stock

PROMPT = random_prompt(1, 20 * BLOCK + 5)


def on_disk(folder: Path, **extra: Any) -> Any:
    return overspill(disk_bytes="64MiB", disk_path=str(folder), **extra)


@contextmanager
def with_disk(model: Path, folder: Path, *, blocks: int = 40, **extra: Any) -> Iterator[Engine]:
    with engine(model, on_disk(folder, **extra), blocks=blocks) as running:
        disk = running.scheduler.disk
        assert disk is not None and disk.wait_until_open(30)
        yield running


def fill(model: Path, folder: Path, prompts: list[list[int]], **extra: Any) -> list[Answer]:
    """Ask, and stop: all of it is on disk then."""
    with with_disk(model, folder, **extra) as running:
        answers = [running.ask_one(prompt) for prompt in prompts]
        running.drain()
        return answers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_a_restarted_engine_finds_a_prompt_on_disk(llama: Path, folder: Path) -> None:
    expected = fill(llama, folder, [PROMPT])
    with with_disk(llama, folder) as again:
        assert not again.scheduler.host.num_cached
        answer = again.ask_one(PROMPT)
        assert answer.num_cached == 20 * BLOCK
        assert again.metric("disk_hit_tokens") == 20 * BLOCK
        assert again.metric("disk_read_bytes") > 0
        again.assert_nothing_is_held()
    assert_same([answer], expected)
    assert_same([answer], stock(llama, [PROMPT]))
