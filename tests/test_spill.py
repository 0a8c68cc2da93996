"""Requests longer than the GPU's KV cache, on a real engine: the same tokens and logprobs as without spill.

Copies run under two schedules: at once, and as late as a GPU's streams allow. Each test asserts that bytes moved.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from overspill.kv.spill import worker as spill_worker
from overspill.kv.spill.streams import HostStreams
from tests.engine import (
    BLOCK,
    Answer,
    Engine,
    assert_identical,
    assert_same,
    engine,
    random_prompt,
    spilling,
)
from tests.late_streams import LateStreams

RESIDENT = 10  # blocks on the GPU, one of them vLLM's null block
CAPACITY = (RESIDENT - 1) * BLOCK
MODEL_LEN = 2100


@pytest.fixture(params=["eager", "late"], autouse=True)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    streams = HostStreams if request.param == "eager" else LateStreams
    monkeypatch.setattr(spill_worker, "HostStreams", streams)
    return str(request.param)


Prompts = Sequence[list[int]]
Plain = Callable[..., list[Answer]]
Small = Callable[[], AbstractContextManager[Engine]]


@pytest.fixture(scope="module")
def plain(models: Callable[[str], Path]) -> Plain:
    """Answers of an engine whose cache holds everything, each computed alone and from nothing; asked for once."""
    known: dict[tuple[tuple[int, ...], int], Answer] = {}

    def ask(prompts: Prompts, max_tokens: int = 24) -> list[Answer]:
        keys = [(tuple(prompt), max_tokens) for prompt in prompts]
        if any(key not in known for key in keys):
            with engine(models("llama"), blocks=400, max_model_len=MODEL_LEN, enable_prefix_caching=False) as unlimited:
                for key, prompt in zip(keys, prompts, strict=True):
                    known[key] = unlimited.ask_one(prompt, max_tokens)
        return [known[key] for key in keys]

    return ask


@pytest.fixture
def small(llama: Path) -> Small:
    """Nine blocks on the GPU, sixty in RAM. One engine at a time: what is expected must be asked for before."""

    @contextmanager
    def start() -> Iterator[Engine]:
        with engine(llama, spilling(resident=RESIDENT), max_model_len=MODEL_LEN) as spills:
            yield spills
            check(spills)

    def check(spills: Engine) -> None:
        spills.drain()
        assert spills.gpu_pool.get_num_free_blocks() == len(spills.gpu_pool.blocks) - 1, "blocks leaked"
        assert spills.metric("spill_in_bytes") > 0, "nothing was streamed"
        assert spills.metric("spill_out_bytes") > 0, "nothing was written back"

    return start


@pytest.mark.parametrize("times", [2, 3, 6])
def test_a_prompt_of_several_times_the_gpu_gives_the_same_tokens(small: Small, plain: Plain, times: int) -> None:
    prompt = random_prompt(times, times * CAPACITY + 5)
    expected = plain([prompt])
    with small() as spills:
        assert_identical(spills.ask([prompt]), expected)
        assert spills.metric("spilled_steps") == 24


def test_ten_times_the_gpu(llama: Path, plain: Plain) -> None:
    prompt = random_prompt(10, 10 * 6 * BLOCK)
    expected = plain([prompt])
    with engine(llama, spilling(resident=7, spilled=70), max_model_len=MODEL_LEN) as spills:
        assert_identical(spills.ask([prompt]), expected)
        geometry = spills.spill.geometry
        assert spills.metric("spill_in_bytes") > 20 * 54 * geometry.page_bytes * geometry.num_regions


def test_long_and_short_requests_in_one_batch(small: Small, plain: Plain) -> None:
    prompts = [random_prompt(seed, length) for seed, length in enumerate((900, 40, 300, 70, 130))]
    expected = plain(prompts)
    with small() as spills:
        assert_same(spills.ask(prompts), expected)


def test_a_shared_prefix_is_streamed_once_a_step(small: Small, plain: Plain) -> None:
    prefix = random_prompt(1, 20 * BLOCK)
    prompts = [prefix + random_prompt(seed, 33) for seed in (2, 3, 4)]
    expected = plain(prompts, 16)
    with small() as spills:
        spills.ask_one(prefix, 1)
        before = spills.metric("spill_in_bytes")
        answers = spills.ask(prompts, max_tokens=16)
        assert_same(answers, expected)
        assert all(answer.num_cached >= 11 * BLOCK for answer in answers), "the prefix was not found"
        geometry = spills.spill.geometry
        thrice = 3 * 11 * 16 * geometry.page_bytes * geometry.num_regions
        assert spills.metric("spill_in_bytes") - before < thrice, "each request streamed the prefix for itself"


def test_the_next_turn_hits_its_history_in_ram_without_a_copy(small: Small, plain: Plain) -> None:
    history = random_prompt(1, 800)
    first = plain([history])[0]
    turn = history + list(first.tokens) + random_prompt(2, 50)
    second = plain([turn])[0]
    with small() as spills:
        assert_identical(spills.ask([history]), [first])
        spills.ask_one(random_prompt(9, 200))  # somebody short takes the GPU's blocks meanwhile
        written = spills.metric("spill_out_bytes")
        answer = spills.ask_one(turn)
        assert answer.num_cached >= 15 * BLOCK, "the history was computed again"
        assert_same([answer], [second])
        geometry = spills.spill.geometry
        blocks = (spills.metric("spill_out_bytes") - written) / geometry.page_bytes / geometry.num_regions
        assert blocks < 15 + 24, "what was found was written again"


def test_chunks_that_end_inside_a_block(llama: Path) -> None:
    """A block that is filled by two steps is streamed in before the second one writes, not before it reads."""
    prompt = random_prompt(5, 700)
    settings = {"max_num_batched_tokens": 75, "max_model_len": MODEL_LEN, "max_num_seqs": 4}
    with engine(llama, blocks=400, enable_prefix_caching=False, **settings) as unlimited:
        expected = unlimited.ask([prompt])
    with engine(llama, spilling(resident=RESIDENT), **settings) as spills:
        assert_identical(spills.ask([prompt]), expected)
        assert spills.metric("spill_in_bytes") > 0


def test_preempted_requests_resume_in_other_blocks(llama: Path, plain: Plain) -> None:
    """Resumed requests get new blocks in new places: what was appended to the old table would be wrong."""
    prompts = [random_prompt(seed, 230) for seed in range(4)]
    expected = plain(prompts, 90)
    with engine(llama, spilling(resident=6, spilled=32), max_model_len=900) as spills:
        answers = spills.ask(prompts, max_tokens=90)
        assert spills.preemptions() > 0, "nothing was preempted"
        assert spills.metric("spill_in_bytes") > 0
    assert_same(answers, expected)


def test_a_request_aborted_in_any_step_leaves_the_others_alone(small: Small, plain: Plain) -> None:
    kept = random_prompt(1, 500)
    expected = plain([kept], 40)
    with small() as spills:
        for steps in (1, 2, 4):
            name = spills.add(kept, 40)
            victim = spills.add(random_prompt(steps + 2, 600), 40)
            for _ in range(steps):
                spills.step()
            spills.llm.llm_engine.abort_request([victim])
            assert_same([spills.run()[name]], expected)
            assert spills.vllm_scheduler.reset_prefix_cache()


def test_several_samples_of_one_long_prompt(llama: Path, small: Small) -> None:
    """The second sample hits blocks that the first one writes in the same step."""
    parameters = SamplingParams(
        n=3, temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip

    def samples(asked: Engine) -> list[tuple[int, ...]]:
        asked.llm.llm_engine.add_request("several", {"prompt_token_ids": random_prompt(3, 700)}, parameters)
        return [tuple(choice.token_ids) for output in finished(asked) for choice in output.outputs]

    with engine(llama, blocks=400, max_model_len=MODEL_LEN) as unlimited:
        expected = samples(unlimited)
    assert len(set(expected)) == 3, "the samples should differ"
    with small() as spills:
        assert samples(spills) == expected


def test_a_hit_on_a_block_written_in_the_same_step(small: Small, plain: Plain) -> None:
    """vLLM hashes blocks when it schedules them, so the second of two equal prompts finds what the first is writing.
    Streaming RAM's old bytes over it would lose what was written."""
    prompt = random_prompt(4, 600)
    expected = plain([prompt])[0]
    with small() as spills:
        spills.ask_one(random_prompt(8, 900))  # what the arena holds before
        assert spills.vllm_scheduler.reset_prefix_cache()
        first, second = spills.ask([prompt, prompt])
        assert second.num_cached > 0, "the second did not hit what the first wrote"
        assert_same([first, second], [expected] * 2)


def test_a_spilled_request_is_logged_and_reports_its_bytes(small: Small, log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.INFO, logger="vllm")
    with small() as spills:
        name = spills.add(random_prompt(1, 800), 4)
        told = finished(spills)[0].kv_transfer_params
        assert told is not None and told["overspill"]["spilled_bytes"] > 0 and told["overspill"]["spilled_steps"] == 4
        assert name in log.text and "does not fit on the GPU" in log.text and "tokens/s" in log.text
        spills.step()
        assert spills.metric("resident_blocks_used") == 0 and spills.metric("spilled_blocks_used") == 0


def finished(spills: Engine) -> list[Any]:
    outputs = []
    while spills.llm.llm_engine.has_unfinished_requests():
        outputs += [output for output in spills.llm.llm_engine.step() if output.finished]
    return outputs
