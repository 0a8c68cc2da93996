"""Two ranks, each with its own part of the pool; a block counts only when both have it."""

import os
from pathlib import Path

import pytest

from tests.engine import assert_same, engine, overspill, random_prompt, stock


def test_two_ranks_serve_from_ram(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By itself vLLM gives each rank a NUMA node, and most machines have one.
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    prompts = [random_prompt(seed, 600) for seed in range(3)]
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    expected = stock(llama, prompts, 12)
    with engine(llama, overspill(host_bytes="64MiB"), **settings) as spilling:
        assert_same([spilling.ask_one(p, 12) for p in prompts], expected)
        spilling.evict_gpu()
        again = [spilling.ask_one(p, 12) for p in prompts]
        assert_same(again, expected)
        assert all(a.num_cached == 576 for a in again)
        assert spilling.metric("hit_tokens") >= 3 * 576
        assert spilling.metric("pool_bytes") == 64 << 20
        # Half of the heads are on each rank, so each has as many blocks as one rank of twice the block would.
        assert spilling.scheduler.host.num_slots == (64 << 20) // 2 // (32 << 10)
        spilling.assert_nothing_is_held()
