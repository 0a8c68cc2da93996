"""KV on disk with a GPU: pinned slots, direct I/O and vLLM's CUDA runner. Run with `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch

from overspill.kv.disk.segments import segment_path
from tests.engine import BLOCK, assert_identical, random_prompt
from tests.test_disk import flip, key_folder, with_disk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PROMPT = random_prompt(1, 20 * BLOCK + 5)


def test_a_restarted_engine_finds_a_prompt_on_disk(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with with_disk(llama, folder) as first:
        first.ask_one(PROMPT)
        first.forget_gpu()
        from_ram = first.ask_one(PROMPT)  # computed in the same pieces as what comes from disk
        first.drain()
    with with_disk(llama, folder) as again:
        from_disk = again.ask_one(PROMPT)
        assert from_disk.num_cached == from_ram.num_cached == 20 * BLOCK
        assert again.metric("disk_hit_tokens") == 20 * BLOCK
        again.assert_nothing_is_held()
    assert_identical([from_disk], [from_ram])


def test_a_flipped_byte_on_disk_is_recomputed(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with with_disk(llama, folder) as first:
        expected = first.ask_one(PROMPT)
        first.drain()
        stride = first.worker.memory.slot_stride  # type: ignore[union-attr]
    flip(segment_path(key_folder(folder), 0, 0), 3 * stride + 10)
    with with_disk(llama, folder) as again:
        answer = again.ask_one(PROMPT)
        assert again.metric("disk_bad_blocks") == 1
        assert answer.num_cached < 20 * BLOCK
        assert answer.tokens[0] == expected.tokens[0]
        again.assert_nothing_is_held()
