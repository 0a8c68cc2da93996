"""The main job on a tiny model: conversations that do not fit the KV cache come back from RAM, unchanged.

    python -m overspill.demo

Runs vLLM's CPU engine in this process, without and with Overspill, and compares every token and every
log-probability. Exits 0 if all are the same and a damaged block in RAM was caught, 1 with a sentence otherwise.
Needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

# Read when torch and vLLM are imported. One process and one thread: a tiny model gains nothing from more.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
CONVERSATIONS, TURNS, FIRST_TURN, NEXT_TURN, ANSWER = 6, 4, 200, 70, 24  # counts, then tokens
BLOCK_TOKENS = 32
SMALL_CACHE, LARGE_CACHE = 20, 100  # blocks: fewer and more than the conversations fill
OPTIONS = {"host_bytes": "64MiB", "store": "eager", "verify": "all", "load": "always", "reserve_bytes": 0}


@dataclass(frozen=True)
class Answer:
    """What one request returned: the likeliest tokens' log-probabilities at each position beside the tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    prompt_tokens: int
    cached_tokens: int


def first_difference(got: Sequence[Answer], expected: Sequence[Answer]) -> str:
    """Where two runs differ in a token or in a bit of a log-probability; empty if nowhere."""
    if len(got) != len(expected):
        return f"{len(got)} answers instead of {len(expected)}"
    for number, (mine, theirs) in enumerate(zip(got, expected), start=1):
        if mine.tokens != theirs.tokens:
            return f"answer {number}: tokens {mine.tokens} instead of {theirs.tokens}"
        if mine.logprobs != theirs.logprobs:
            pairs = enumerate(zip(mine.logprobs, theirs.logprobs))
            place = next((i for i, (a, b) in pairs if a != b), len(theirs.logprobs))
            return f"answer {number}: log-probabilities differ at token {place}"
    return ""


class Engine:
    """vLLM's CPU engine with a KV cache of so many blocks; with `options`, Overspill beside it."""

    def __init__(self, model: Path, cache_blocks: int, options: dict[str, Any] | None = None) -> None:
        from vllm import LLM

        transfer = {"kv_connector": "OverspillConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
        self._llm: Any = LLM(
            model=str(model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, use_tqdm_on_load=False,
            max_model_len=(SMALL_CACHE - 1) * BLOCK_TOKENS, block_size=BLOCK_TOKENS, max_num_seqs=2,
            num_gpu_blocks_override=cache_blocks, enable_prefix_caching=True, disable_log_stats=False,
            kv_transfer_config=transfer if options else None,
        )  # fmt: skip

    def ask(self, prompt: Sequence[int]) -> Answer:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=2, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], parameters, use_tqdm=False)
        choice = output.outputs[0]
        logprobs = tuple({token: p.logprob for token, p in position.items()} for position in choice.logprobs)
        return Answer(tuple(choice.token_ids), logprobs, len(prompt), output.num_cached_tokens or 0)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        # Before the next engine of this process begins: one that dies later takes the next one's state with it.
        self._llm = None
        gc.collect()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


class Conversations:
    """They take turns: each comes back after the others have filled the cache."""

    def __init__(self) -> None:
        self._histories = [random_tokens(100 + i, FIRST_TURN) for i in range(CONVERSATIONS)]
        self.answers: list[Answer] = []

    def turn(self, engine: Engine) -> None:
        for i, history in enumerate(self._histories):
            answer = engine.ask(history)
            self.answers.append(answer)
            history += [*answer.tokens, *random_tokens(1000 * len(self.answers) + i, NEXT_TURN)]


def random_tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(count)]
