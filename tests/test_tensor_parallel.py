"""Two ranks, tensor-parallel or stages, each with its own part of the pool; a block counts when both have it."""

import os
from pathlib import Path
from typing import Any

import pytest

from overspill.tiny import make_llama
from tests.engine import assert_same, engine, overspill, random_prompt, stock

# vLLM's CPU worker makes the buffer that a second stage receives into only where it compiles.
STAGES = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager", "cudagraph_mode": "NONE"},
}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself vLLM gives each rank a NUMA node, and most machines have one."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")


@pytest.mark.parametrize("division", [{"tensor_parallel_size": 2}, STAGES], ids=["tensor", "pipeline"])
def test_two_ranks_serve_from_ram(llama: Path, division: dict[str, Any]) -> None:
    prompts = [random_prompt(seed, 600) for seed in range(3)]
    settings = {**division, "distributed_executor_backend": "mp"}
    expected = stock(llama, prompts, 12)
    with engine(llama, overspill(host_bytes="64MiB"), **settings) as spilling:
        assert_same([spilling.ask_one(p, 12) for p in prompts], expected)
        spilling.evict_gpu()
        again = [spilling.ask_one(p, 12) for p in prompts]
        assert_same(again, expected)
        assert all(a.num_cached == 576 for a in again)
        assert spilling.metric("hit_tokens") >= 3 * 576
        assert spilling.metric("pool_bytes") == 64 << 20
        # Half of the heads, or layers, are on each rank: as many blocks as one rank of twice the block would have.
        assert spilling.scheduler.host.num_slots == (64 << 20) // 2 // (32 << 10)
        spilling.assert_nothing_is_held()


def test_stages_that_differ_are_refused(tmp_path: Path) -> None:
    """Slots are counted by the first stage's blocks; the second one's pool would have others."""
    three = make_llama(tmp_path / "three", layers=3)
    with (
        pytest.raises(RuntimeError, match=r"this one holds KV of [12]"),  # as vLLM passes a worker's error on
        engine(three, overspill(), **STAGES, distributed_executor_backend="mp"),
    ):
        pass
