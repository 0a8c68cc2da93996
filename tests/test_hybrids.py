"""Models whose layers keep different things: sliding windows, chunks, recurrent state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import Answer, Engine, assert_same, engine, overspill, random_prompt, stock

Models = Callable[[str], Path]

HAS_BF16 = torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2") and torch.cpu._is_avx512_bf16_supported()

# vLLM's CPU scan of Mamba-2 returns one state per sequence, so its chunks must not be longer than a block.
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "chunked-local": {},
    "mamba-hybrid": {"max_num_batched_tokens": 32},
    "gdn-hybrid": {"dtype": "bfloat16"},
}
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "gdn-hybrid" and not HAS_BF16, reason="vLLM's CPU kernel for gated delta nets needs AVX-512 bf16"
        ),
    )
    for name in SETTINGS
]


def settings(name: str) -> dict[str, Any]:
    return {"blocks": 150, **SETTINGS[name]}


NUM_TOKENS = 12  # of an answer: enough to fill the last block of these prompts


def ask_all(running: Engine, prompts: list[list[int]], max_tokens: int = NUM_TOKENS) -> list[Answer]:
    return [running.ask_one(p, max_tokens) for p in prompts]


@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize("name", NAMES)
def test_a_returning_prompt_comes_from_ram(models: Models, name: str, store: str) -> None:
    prompts = [random_prompt(seed, 600) for seed in range(3)]
    expected = stock(models(name), prompts, NUM_TOKENS, **settings(name))
    # A turn later: the prompt, its answer, and more.
    longer = [p + list(a.tokens) + random_prompt(9, 50) for p, a in zip(prompts, expected, strict=True)]
    expected_longer = stock(models(name), longer, NUM_TOKENS, **settings(name))
    with engine(models(name), overspill(store=store, verify="all"), **settings(name)) as spilling:
        assert_same(ask_all(spilling, prompts), expected)
        if store == "lazy":
            # Push everything towards eviction.
            ask_all(spilling, [random_prompt(50 + i, 900) for i in range(6)], 1)
        spilling.forget_gpu()
        loaded = spilling.metric("hit_tokens")
        again = ask_all(spilling, prompts)
        assert_same(again, expected)
        assert spilling.metric("hit_tokens") - loaded == sum(a.num_cached for a in again) > 0
        assert all(a.num_cached >= 480 for a in again)
        spilling.forget_gpu()
        assert_same(ask_all(spilling, longer), expected_longer)
        spilling.assert_nothing_is_held()


@pytest.mark.parametrize("name", NAMES)
def test_damage_shows_so_the_comparison_means_something(models: Models, name: str) -> None:
    prompt = random_prompt(1, 600)
    with engine(models(name), overspill(verify="off"), **settings(name)) as spilling:
        before = spilling.ask_one(prompt, NUM_TOKENS)
        spilling.forget_gpu()
        assert spilling.worker.memory is not None
        dtype = torch.bfloat16 if name == "gdn-hybrid" else torch.float32
        slots = torch.from_numpy(spilling.worker.memory.slots).view(dtype)
        slots.copy_(torch.randn(slots.shape, generator=torch.Generator().manual_seed(0)).to(dtype))
        after = spilling.ask_one(prompt, NUM_TOKENS)
        assert after.num_cached > 0 and after.differs_from(before)


@pytest.mark.parametrize("name", NAMES)
def test_several_at_once_on_a_small_gpu(models: Models, name: str) -> None:
    prompts = [random_prompt(seed % 3, 300) + random_prompt(seed, 60) for seed in range(6)]
    with engine(models(name), **{**settings(name), "blocks": 400}) as plain:
        expected = [plain.ask(prompts, NUM_TOKENS) for _ in range(2)]
    with engine(models(name), overspill(verify="all"), **settings(name)) as spilling:
        for answers in expected:
            assert_same(spilling.ask(prompts, NUM_TOKENS), answers)
            spilling.forget_gpu()
        assert spilling.metric("hit_tokens") > 0
        spilling.assert_nothing_is_held()
