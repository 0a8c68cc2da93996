"""The main job on a tiny model: conversations that do not fit the KV cache come back from RAM, unchanged.

    make demo
    python -m overspill.demo

Runs vLLM's CPU engine in this process, without and with Overspill, and compares every token and every
log-probability. Exits 0 if all are the same and a damaged block in RAM was caught; otherwise it says in a
sentence what differs and exits 1. Needs no GPU and no network, and takes less than a minute.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Read when torch and vLLM are imported. One process and one thread: a tiny model gains nothing from more.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
CONVERSATIONS, TURNS = 6, 4
FIRST_TURN, NEXT_TURN, ANSWER = 200, 70, 24  # tokens
BLOCK_TOKENS = 32
SMALL_CACHE, LARGE_CACHE = 20, 160  # blocks: room for one conversation, and for all
OPTIONS = {"host_bytes": "64MiB", "store": "eager", "verify": "all", "load": "always", "reserve_bytes": 0}
# A prompt computed in other pieces is rounded otherwise; with some CPUs' kernels that shows in the last digits.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    """At each position, of the likeliest tokens."""
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Comparison:
    """What was compared, and the first thing that differs."""

    tokens: int = 0
    logprobs: int = 0
    identical_logprobs: int = 0
    difference: str = ""


def compare(got: Sequence[Answer], expected: Sequence[Answer]) -> Comparison:
    """Tokens must be equal. So must every bit of a log-probability, unless one of the two runs had less of the
    prompt cached and computed it in other pieces; then it may differ by rounding."""
    result = Comparison()
    if len(got) != len(expected):
        result.difference = f"there are {len(got)} answers instead of {len(expected)}"
    for number, (mine, theirs) in enumerate(zip(got, expected), start=1):
        if mine.tokens != theirs.tokens or len(mine.logprobs) != len(theirs.logprobs):
            result.difference = result.difference or f"answer {number} has other tokens"
            continue
        result.tokens += len(mine.tokens)
        allowed = 0.0 if mine.cached_tokens == theirs.cached_tokens else ROUNDING
        for place, (a, b) in enumerate(zip(mine.logprobs, theirs.logprobs), start=1):
            gaps = [abs(a[token] - b[token]) if token in a and token in b else float("inf") for token in a | b]
            result.logprobs += len(gaps)
            result.identical_logprobs += gaps.count(0.0)
            if not all(gap <= allowed for gap in gaps):  # a NaN is no equal either
                worst = f"answer {number} has other log-probabilities at its token {place} (by {max(gaps):.3g})"
                result.difference = result.difference or worst
    return result


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

        # All of it, now: an engine that is collected later takes the next one's state with it.
        self._llm = None
        gc.collect()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


@dataclass
class Conversations:
    """They take turns, so that each comes back after the others have filled the cache."""

    histories: list[list[int]] = field(
        default_factory=lambda: [random_tokens(100 + i, FIRST_TURN) for i in range(CONVERSATIONS)]
    )
    answers: list[Answer] = field(default_factory=list)

    def turns(self, engine: Engine, count: int) -> None:
        for _ in range(count):
            for history in self.histories:
                answer = engine.ask(history)
                self.answers.append(answer)
                history += [*answer.tokens, *random_tokens(1000 + len(self.answers), NEXT_TURN)]


def random_tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(count)]


def counters() -> dict[str, int]:
    """Overspill's series, as a server shows them on /metrics."""
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    ours = [sample for sample in samples if sample.name.startswith("overspill_")]
    return {s.name.removeprefix("overspill_").removesuffix("_total"): int(s.value) for s in ours}


def damage_one_block() -> int:
    """Flip bits of the first block that was stored: the beginning of the first conversation. Its size in bytes."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    slots = get_kv_transfer_group().worker.memory.slots
    slots[0] ^= 0x11
    return int(slots.shape[1])


@dataclass(frozen=True)
class Outcome:
    """Answers of the three runs, and what Overspill counted before and after the damage."""

    small: list[Answer]
    large: list[Answer]
    offloaded: list[Answer]
    moved: dict[str, int]
    after_damage: dict[str, int]
    block_bytes: int


def run(model: Path) -> Outcome:
    stock = []
    for cache, room in ((SMALL_CACHE, "too small for them"), (LARGE_CACHE, "room for all, as reference")):
        say(f"stock vLLM, KV cache of {cache} blocks: {room}")
        with Engine(model, cache) as engine:
            stock.append(Conversations())
            stock[-1].turns(engine, TURNS + 1)
    say(f"with Overspill, KV cache of {SMALL_CACHE} blocks and {OPTIONS['host_bytes']} of RAM")
    with Engine(model, SMALL_CACHE, OPTIONS) as engine:
        offloaded = Conversations()
        offloaded.turns(engine, TURNS)
        moved = counters()
        say("once more, after damaging one stored block in RAM")
        block_bytes = damage_one_block()
        offloaded.turns(engine, 1)
        after_damage = counters()
    small, large = (conversations.answers for conversations in stock)
    return Outcome(small, large, offloaded.answers, moved, after_damage, block_bytes)


def failure(outcome: Outcome) -> str:
    """Why the demo failed, in a sentence; empty if it did not."""
    for name, stock in (("small", outcome.small), ("large", outcome.large)):
        difference = compare(outcome.offloaded, stock).difference
        if difference:
            return f"with Overspill {difference}, compared with stock vLLM and the {name} cache."
    if not outcome.moved["hit_tokens"] or not outcome.moved["load_bytes"]:
        return "nothing was loaded from RAM, so equal answers prove nothing."
    if outcome.moved["corrupt_blocks"]:
        return f"{outcome.moved['corrupt_blocks']} block(s) were corrupt before any was damaged."
    if outcome.after_damage["corrupt_blocks"] != 1:
        return f"one block was damaged and {outcome.after_damage['corrupt_blocks']} were caught."
    return ""


def report(outcome: Outcome) -> str:
    """The numbers of a run that did not fail."""
    before_damage = slice(0, TURNS * CONVERSATIONS)
    runs = [outcome.small[before_damage], outcome.offloaded[before_damage]]
    moved, same = outcome.moved, compare(outcome.offloaded, outcome.large)
    table = {
        "prompt tokens": [sum(answer.prompt_tokens for answer in answers) for answers in runs],
        "  computed": [sum(answer.prompt_tokens - answer.cached_tokens for answer in answers) for answers in runs],
        "  loaded from RAM": [0, moved["hit_tokens"]],
    }
    rounded = same.logprobs - same.identical_logprobs
    facts = {
        "moved to RAM": (moved["store_bytes"], f"bytes, {moved['store_bytes'] // outcome.block_bytes} blocks"),
        "came back": (moved["load_bytes"], f"bytes, {moved['load_bytes'] // outcome.block_bytes} blocks"),
        "tokens": (same.tokens, "compared, all identical"),
        "log-probabilities": (
            same.logprobs,
            f"compared, {rounded} differ by rounding" if rounded else "compared, all identical",
        ),
        "damaged block": (outcome.after_damage["corrupt_blocks"], "caught, dropped and recomputed"),
    }
    lines = [f"{'':18}{'stock vLLM':>12}{'Overspill':>12}"]
    lines += [f"{label:18}{stock:>12,}{ours:>12,}" for label, (stock, ours) in table.items()]
    lines += [f"{label:18}{number:>12,} {text}" for label, (number, text) in facts.items()]
    return "\n".join(lines)


def say(line: str) -> None:
    print(f"- {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m overspill.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    os.environ.update(ENVIRONMENT)
    # vLLM, torch and transformers warn of things that do not matter here; errors are still shown.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(f"Overspill demo: {CONVERSATIONS} conversations take turns; a tiny Llama on vLLM's CPU engine", flush=True)
    with tempfile.TemporaryDirectory(prefix="overspill-demo-") as folder:
        from overspill.tiny import make_llama

        outcome = run(make_llama(Path(folder) / "llama"))
    why = failure(outcome)
    if why:
        print(f"FAILED: {why}", file=sys.stderr)
        return 1
    print(f"\n{report(outcome)}\n\nok: every answer is the one that stock vLLM gives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
