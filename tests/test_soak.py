"""Many requests with random reuse, lengths and aborts on the real engine, with pools that are far too small."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine import BLOCK, ROUNDING, Answer, Engine, engine, overspill, random_prompt

GPU_BLOCKS, HOST_BLOCKS, SLOT_BYTES = 31, 70, 64 << 10


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    max_tokens: int
    abort_after: int | None  # steps
    priority: int


def asks(count: int, seed: int) -> list[Ask]:
    """Prompts that continue a few prefixes, so that most find something in a cache."""
    draw = random.Random(seed)
    prefixes = [random_prompt(1000 * seed + i, 600) for i in range(10)]
    made = []
    for i in range(count):
        head = draw.choice(prefixes)[: draw.randrange(0, 500)]
        tail = random_prompt(seed * 100_000 + i, draw.randrange(1, 90))
        abort_after = draw.randrange(1, 12) if draw.random() < 0.12 else None
        made.append(Ask(tuple(head + tail), draw.randrange(2, 40), abort_after, i % 3))
    return made


def answer_all(running: Engine, wanted: list[Ask], seed: int) -> dict[int, Answer]:
    """Requests arrive at random; a few are aborted wherever they are."""
    draw = random.Random(seed)
    waiting = list(enumerate(wanted))[::-1]
    live: dict[str, tuple[int, int | None]] = {}
    answers: dict[int, Answer] = {}
    while waiting or live:
        while waiting and len(live) < 8 and draw.random() < 0.6:
            number, ask = waiting.pop()
            live[running.add(ask.prompt, ask.max_tokens, priority=ask.priority)] = (number, ask.abort_after)
        if not live:
            continue
        for name, answer in running.step().items():
            number, _ = live.pop(name)
            answers[number] = answer
        for name, (number, left) in list(live.items()):
            if left is None:
                continue
            live[name] = (number, left - 1)
            if left == 1:
                running.llm.llm_engine.abort_request([name])
                del live[name]
    return answers


def mismatch(got: Answer, expected: Answer) -> str:
    """Why two answers are not the same. Where rounding alone decides between two tokens, what follows may differ."""
    for position, (mine, theirs) in enumerate(zip(got.tokens, expected.tokens, strict=True)):
        a, b = got.logprobs[position], expected.logprobs[position]
        if mine != theirs:
            tied = mine in b and theirs in b and abs(b[mine] - b[theirs]) < ROUNDING
            return "" if tied else f"token {position}: {mine} != {theirs}"
        if abs(a[mine] - b[mine]) > ROUNDING:
            return f"logprob {position}: {a[mine]} != {b[mine]}"
    return ""


# Prompts in small chunks, so that many blocks are hashed in passes in which others are short of blocks.
PRIORITY = {"scheduling_policy": "priority", "long_prefill_token_threshold": 4 * BLOCK, "max_num_batched_tokens": 512}


def run(model: Path, *, count: int, seed: int, scheduling: dict[str, Any] | None = None, **options: str) -> None:
    wanted = asks(count, seed)
    with engine(model, blocks=300) as plain:
        expected = answer_all(plain, wanted, seed)
    settings = {"host_bytes": HOST_BLOCKS * SLOT_BYTES, "verify": "all", **options}
    placement = {"blocks": GPU_BLOCKS, "max_model_len": 700, **(scheduling or {})}
    with engine(model, overspill(**settings), **placement) as spilling:
        answers = answer_all(spilling, wanted, seed)
        compared = sorted(answers.keys() & expected.keys())
        assert len(compared) > 0.8 * count
        wrong = {n: reason for n in compared if (reason := mismatch(answers[n], expected[n]))}
        assert not wrong, f"{len(wrong)} of {len(compared)}: {dict(list(wrong.items())[:3])}"
        assert spilling.metric("hit_tokens") > 10 * count, "hardly anything came from RAM"
        assert spilling.metric("evicted_blocks") > 0
        assert spilling.metric("corrupt_blocks") == spilling.metric("load_failures") == 0
        spilling.assert_nothing_is_held()


def test_random_requests_on_small_pools_match_plain_answers(llama: Path) -> None:
    run(llama, count=120, seed=1, store="eager", eviction="lru")


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("eviction", ["lru", "arc"])
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_soak(llama: Path, store: str, eviction: str) -> None:
    """Two thousand requests over the four modes."""
    run(llama, count=500, seed=7, store=store, eviction=eviction)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_soak_with_priorities(llama: Path, store: str, asynchronous: bool) -> None:
    """Two thousand requests over the four modes, of which some are preempted in the pass that scheduled them."""
    run(llama, count=500, seed=11, scheduling={**PRIORITY, "async_scheduling": asynchronous}, store=store)
