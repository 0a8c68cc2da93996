"""Attention on the CPU to a part of the spilled blocks: which part, and that the parts make the whole."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.kv.spill import far, scheduler
from overspill.kv.spill.far import FarAttention, Rows, shared_parts
from overspill.kv.spill.steps import Span, Stretch, far_stretch, group_step
from tests.engine import BLOCK, Answer, Engine, assert_same, engine, random_prompt, spilling

MODEL_LEN = 2100
SHARE = 0.6


# Which blocks.


def test_the_cpu_gets_a_share_of_the_longest_spilled_stretch() -> None:
    ids = np.array([30, 31, 3, 32, 33, 34, 35, 4, 36])
    assert far_stretch(ids, 9, 10, 0.5) == (3, 6)
    assert far_stretch(ids, 9, 10, 1.0) == (3, 7), "a stretch has no gaps"
    assert far_stretch(ids, 5, 10, 1.0) == (0, 2), "blocks that are written stay out"
    assert far_stretch(ids[:0], 0, 10, 1.0) == (0, 0)
    assert far_stretch(np.array([1, 2]), 2, 10, 1.0) == (0, 0)


def test_a_block_that_another_request_reads_is_streamed() -> None:
    first = Span(np.array([10, 11, 12, 1]), 13, 13, 14, far=Stretch(0, np.array([0, 1])))
    second = Span(np.array([11, 2]), 5, 5, 6)
    step = group_step([first, second], block_size=4, num_resident=10)
    assert step is not None and (step.reads, step.far) == ([(1, 3)], [(0, 1)])


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), min_size=1, max_size=5))
def test_shared_blocks_are_read_once_and_every_query_keeps_its_own(tables: list[list[int]]) -> None:
    found = shared_parts([(np.array(blocks), [query]) for query, blocks in enumerate(tables)])
    for query, blocks in enumerate(tables):
        assert [int(block) for part, queries in found if query in queries for block in part] == blocks
    starts = {tuple(blocks[: n + 1]) for blocks in tables for n in range(len(blocks))}
    assert sum(len(part) for part, _ in found) == len(starts), "as many as there are different beginnings"


def test_tables_and_lengths_lose_the_stretch() -> None:
    rows = Rows(np.array([1, 0]), np.array([2, 0]), [])
    tables = torch.tensor([[7, 8, 9, 5, 0], [4, 3, 0, 0, 0], [1, 1, 1, 1, 1]])
    shorter, lengths = rows.shortened(tables, torch.tensor([15, 8, 0]), 4)
    assert shorter[:2, :2].tolist() == [[7, 5], [4, 3]] and lengths.tolist() == [7, 8, 0]
    assert tables[0].tolist() == [7, 8, 9, 5, 0], "vLLM's own stay"


# Engines.


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have little KV."""
    monkeypatch.setattr(scheduler, "_LEAST_FAR_BYTES", 1)
    monkeypatch.setattr(scheduler.SpillScheduler, "far_share", lambda self: SHARE)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    shared = random_prompt(7, 16 * BLOCK)
    return [shared + random_prompt(8, 150), shared + random_prompt(9, 90), random_prompt(2, 40), random_prompt(3, 900)]


@pytest.fixture(scope="module")
def expected(models: Callable[[str], Path], prompts: list[list[int]]) -> list[Answer]:
    with engine(models("llama"), blocks=400, max_model_len=MODEL_LEN, enable_prefix_caching=False) as plain:
        return [plain.ask_one(prompt) for prompt in prompts]


@pytest.fixture
def spills(models: Callable[[str], Path], small_parts: None) -> Iterator[Engine]:
    with engine(models("llama"), spilling(resident=10, spilled=120), max_model_len=MODEL_LEN) as running:
        yield running


def test_the_cpus_part_and_the_rest_make_the_whole(
    spills: Engine, prompts: list[list[int]], expected: list[Answer]
) -> None:
    assert_same([spills.ask_one(prompt) for prompt in prompts], expected)
    alone = spills.metric("spill_far_bytes")
    assert alone > 0 and spills.metric("spill_in_bytes") > 0
    assert_same(spills.ask(prompts), expected)
    assert spills.metric("spill_far_bytes") > alone


def test_a_requests_share_follows_when_speeds_change(
    spills: Engine, prompts: list[list[int]], expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []

    def noted(*args: Any) -> tuple[int, int]:
        shares.append(args[-1])
        return far_stretch(*args)

    monkeypatch.setattr(scheduler, "far_stretch", noted)
    speeds = iter([0.6] * 8 + [0.62] * 8 + [0.2] * 1000)
    monkeypatch.setattr(scheduler.SpillScheduler, "far_share", lambda self: next(speeds))
    assert_same([spills.ask_one(prompts[0])], expected[:1])
    assert [round(share, 1) for share in shares] == [0.6, 0.2], "and not for a difference that rounding makes"


def test_the_cpu_gets_no_block_that_another_request_writes(
    models: Callable[[str], Path], small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM hashes a block when the step that fills it is planned, so a request may hit it in that very step. RAM has
    the block only after the step, and the CPU read what was there before."""
    monkeypatch.setattr(scheduler.SpillScheduler, "far_share", lambda self: 0.9)
    prompt, settings = random_prompt(3, 7 * BLOCK - 4), {"max_model_len": MODEL_LEN, "async_scheduling": False}
    with engine(models("llama"), blocks=400, enable_prefix_caching=False, **settings) as plain:
        first = plain.ask_one(prompt, 8 * BLOCK)
        known = [*prompt, *first.tokens][: 13 * BLOCK]
        second = plain.ask_one([*known, 7], 8)
    with engine(models("llama"), spilling(resident=4, spilled=120), **settings) as running:
        slots, buffer = running.spill_worker.arena, running.spill_worker.buffer
        assert slots is not None and buffer is not None
        slots.slots.view(np.float32)[:] = 50.0  # as after other requests
        buffer.tensor().view(torch.float32).fill_(50.0)
        writer = running.add(prompt, 8 * BLOCK)
        while running.vllm_scheduler.requests[next(iter(running.vllm_scheduler.requests))].num_tokens < len(known):
            running.step()
        reader = running.add([*known, 7], 8)
        done = running.run()
        assert done[reader].num_cached == len(known)
        assert_same([done[writer], done[reader]], [first, second])


FAULTS: dict[str, Callable[[Any], Any]] = {
    "a part that is dropped": lambda attend: lambda self, *args: _with_lse(attend(self, *args), -torch.inf),
    "a wrong log-sum-exp": lambda attend: lambda self, *args: _with_lse(attend(self, *args), 1.0),
}


def _with_lse(result: tuple[torch.Tensor, torch.Tensor], by: float) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = result
    return output, lse + by


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_merge_changes_the_answer(
    spills: Engine, prompts: list[list[int]], expected: list[Answer], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FarAttention, "attend", FAULTS[fault](FarAttention.attend))
    with pytest.raises(AssertionError):
        assert_same([spills.ask_one(prompts[0])], expected[:1])


def test_a_wrong_block_in_the_cpus_list_changes_the_answer(
    spills: Engine, prompts: list[list[int]], expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = far.shared_parts
    monkeypatch.setattr(
        far, "shared_parts", lambda parts: [(blocks[::-1] // 2, queries) for blocks, queries in right(parts)]
    )
    with pytest.raises(AssertionError):
        assert_same([spills.ask_one(prompts[0])], expected[:1])


def test_gpu_leaves_nothing_to_the_cpu(
    models: Callable[[str], Path], small_parts: None, prompts: list[list[int]], expected: list[Answer]
) -> None:
    config = spilling(resident=10, spilled=120, spill_compute="gpu")
    with engine(models("llama"), config, max_model_len=MODEL_LEN) as running:
        assert_same([running.ask_one(prompts[0])], expected[:1])
        assert running.metric("spill_far_bytes") == 0 and running.metric("spill_in_bytes") > 0


def test_layers_of_another_backend_are_streamed(
    models: Callable[[str], Path], small_parts: None, prompts: list[list[int]], expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Such as FlashInfer's, which merges nothing."""
    from overspill.kv.spill import vllm_worker

    monkeypatch.setattr(vllm_worker, "override_backend", lambda *args: None)
    clear_backends()
    try:
        with engine(models("llama"), spilling(resident=10, spilled=120), max_model_len=MODEL_LEN) as running:
            assert_same([running.ask_one(prompts[0])], expected[:1])
            assert running.metric("spill_far_bytes") == 0 and running.metric("spill_in_bytes") > 0
    finally:
        clear_backends()


def clear_backends() -> None:
    """What an engine before this one in the process has registered."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum["CPU_ATTN"].clear_override()
    selector._cached_get_attn_backend.cache_clear()
