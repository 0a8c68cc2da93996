"""Spill where layers differ: windows, chunks, shared KV, several ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from overspill.launch.machine import cpu_platform
from tests.engine import BLOCK, assert_identical, assert_same, engine, random_prompt, spilling, stock
from tests.test_hybrids import HAS_BF16

Models = Callable[[str], Path]


@pytest.mark.parametrize("name", ["gemma3", "chunked-local"])
def test_hybrid_groups_overlay_the_same_bytes(deep: Models, schedule: None, name: str) -> None:
    """Groups run in turn, and a block of one lies where a block of the other would: each fills the window by itself."""
    prompts = [random_prompt(seed, length) for seed, length in enumerate((700, 60, 400))]
    expected = stock(deep(name), prompts, 40, max_model_len=2000)
    # A turn later, when windows have moved on and their first blocks are gone.
    turns = [p + list(a.tokens) + random_prompt(7, 90) for p, a in zip(prompts, expected, strict=True)]
    expected_turns = stock(deep(name), turns, 20, max_model_len=2000)
    with engine(deep(name), spilling(resident=12, spilled=200), max_model_len=2000) as spills:
        geometry = spills.spill.geometry
        assert (geometry.num_regions, geometry.num_resident) == (4, 12)
        assert len(spills.vllm_scheduler.kv_cache_config.kv_cache_groups) == 3
        assert_same([spills.ask_one(prompts[0], 40)], expected[:1])
        assert_same(spills.ask(prompts, 40), expected)
        assert_same([spills.ask_one(turn, 20) for turn in turns], expected_turns)
        assert spills.metric("spill_in_bytes") > 0 and spills.metric("spill_out_bytes") > 0


@pytest.mark.parametrize("targets", [{3: 0}, {2: 0, 3: 1}, {2: 1, 3: 1}], ids=str)
def test_layers_that_share_kv(
    llama: Path, schedule: None, monkeypatch: pytest.MonkeyPatch, targets: dict[int, int]
) -> None:
    """They read after the layer that owns the KV, when others may have used its half of the window."""
    initialise = Attention.__init__

    def sharing_init(self: Attention, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        target = targets.get(extract_layer_index(prefix))
        if target is not None:
            kwargs["kv_sharing_target_layer_name"] = f"model.layers.{target}.self_attn.attn"
        initialise(self, *args, prefix=prefix, **kwargs)

    monkeypatch.setattr(Attention, "__init__", sharing_init)
    prompts = [random_prompt(seed, length) for seed, length in enumerate((800, 90))]
    with engine(llama, blocks=400, max_model_len=2000) as plain:
        expected = [plain.ask_one(p) for p in prompts]
    owners = 4 - len(targets)
    with engine(llama, spilling(regions=owners), max_model_len=1500) as spills:
        assert spills.spill.geometry.num_regions == owners
        assert_identical([spills.ask_one(p) for p in prompts], expected)
        assert spills.metric("spill_in_bytes") > 0


@pytest.mark.skipif(not HAS_BF16, reason="vLLM's CPU kernel for latent attention needs AVX-512 bf16")
def test_latent_attention(models: Models, schedule: None) -> None:
    prompts = [random_prompt(seed, length) for seed, length in enumerate((800, 90))]
    settings = {"dtype": "bfloat16", "max_model_len": 1500, "enable_prefix_caching": False}
    expected = stock(models("mla"), prompts, **settings)
    block = min(BLOCK, cpu_platform().latent_block_size)  # vLLM insists on 16 without AMX
    page, resident, spilled = block * (512 + 64) * 2, 320 // block, 1920 // block
    config = spilling(spill_bytes=spilled * 4 * page, resident_bytes=(resident * 4 + 2 * spilled) * page)
    with engine(models("mla"), config, **settings) as spills:
        assert (spills.spill.geometry.num_resident, spills.spill.geometry.page_bytes) == (resident, page)
        assert_identical([spills.ask_one(p) for p in prompts], expected)
        assert spills.metric("spill_in_bytes") > 0
        arena = spills.spill_worker.arena
        assert arena is not None
        name = spills.add(prompts[0], 24)
        for _ in range(3):
            spills.step()
        arena.slots[1] ^= 0x01
        assert spills.run()[name].differs_from(expected[0]), "the model does not read what is in RAM"


def test_two_ranks_spill_their_halves(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By itself vLLM gives each rank a NUMA node, and most machines have one.
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    prompts = [random_prompt(seed, length) for seed, length in enumerate((900, 70))]
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "max_model_len": 1500}
    expected = stock(llama, prompts, 12, max_model_len=1500)
    with engine(llama, spilling(), **settings) as spills:
        assert (spills.spill.geometry.num_resident, spills.spill.geometry.num_spilled) == (10, 60)
        assert_same(spills.ask(prompts, 12), expected)
        assert spills.metric("spill_in_bytes") > 0


def test_an_engine_without_prefix_caching_spills(llama: Path) -> None:
    prompt = random_prompt(1, 900)
    with engine(llama, blocks=400, enable_prefix_caching=False) as plain:
        expected = plain.ask([prompt])
    with engine(llama, spilling(), enable_prefix_caching=False) as spills:
        assert_identical(spills.ask([prompt]), expected)
        assert spills.metric("spill_in_bytes") > 0
