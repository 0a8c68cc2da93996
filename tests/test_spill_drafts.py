"""Speculation by n-grams with spilled KV.

In a process of its own: the drafter loads numba, after which vLLM 0.32.0 cannot start a second engine in the process.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.engine import Answer, Engine, assert_same, engine, random_prompt, sampling, spilling

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def answers(model: Path) -> tuple[list[Answer], float, float]:
    """Of an engine with room for all, and of spilling ones under both schedules; drafts taken, and bytes streamed."""
    from vllm.triton_utils import dispatcher

    from overspill.kv.spill import worker
    from tests.late_streams import LateStreams

    prompt = random_prompt(1, 600)
    found = []
    settings = {"max_model_len": 2000, "speculative_config": NGRAM}
    with engine(model, blocks=400, **settings) as unlimited:
        found.append(ask(unlimited, prompt))
        accepted = _accepted()
    dispatcher._rebind_kernels = lambda overrides: None  # the first engine did
    streamed = []
    for streams in (worker.HostStreams, LateStreams):
        worker.HostStreams = streams  # type: ignore[misc]
        with engine(model, spilling(), **settings) as spills:
            found.append(ask(spills, prompt))
            streamed.append(spills.metric("spill_in_bytes"))
    return found, accepted, min(streamed)


def ask(asked: Engine, prompt: list[int]) -> Answer:
    """Few tokens to choose from, so that what followed one before is often what follows it now."""
    parameters = sampling(90)
    parameters.allowed_token_ids = [5, 6, 7]
    asked.llm.llm_engine.add_request("drafted", {"prompt_token_ids": prompt}, parameters)
    return asked.run()["drafted"]


def _accepted() -> float:
    from prometheus_client import REGISTRY

    names = "vllm:spec_decode_num_accepted_tokens_total"
    return sum(s.value for metric in REGISTRY.collect() for s in metric.samples if s.name == names)


def test_drafts_are_written_and_taken_back(llama: Path) -> None:
    """Rejected drafts leave the next position inside, or before, the block that was written last."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        (expected, *got), accepted, streamed = pool.submit(answers, llama).result()
    assert 10 < accepted < 80, "drafts should be taken, and some of them not"
    assert streamed > 0
    assert_same(got, [expected] * 2)
