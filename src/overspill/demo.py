"""Both jobs on a tiny model: KV that does not fit the KV cache is kept in RAM, and every answer stays the same.

    make demo
    python -m overspill.demo

Offload: conversations that take turns come back from RAM. Spill: one prompt is longer than the whole KV cache.
Runs vLLM's CPU engine in this process, without and with Overspill, and compares every token and every
log-probability. Exits 0 if all are the same and a damaged block in RAM was caught; otherwise it says in a
sentence what differs and exits 1. Then two servers, one without and one with Overspill, are measured by the same
conversations, as `overspill ab` does. Needs no GPU and no network, and takes two minutes.
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
OFFLOAD_OPTIONS = {"host_bytes": "64MiB", "store": "eager", "verify": "all", "load": "always", "reserve_bytes": 0}
# Of 5 MiB, 4 are the window through which 8 MiB are read: of this model's four layers it holds two.
SPILL_OPTIONS = {"spill_bytes": "8MiB", "resident_bytes": "5MiB", "reserve_bytes": 0}
LONG_PROMPT, LONG_TURNS = 2400, 2
CHUNK = 512  # tokens of the long prompt that are computed at once
# A prompt computed in other pieces is rounded otherwise; with some CPUs' kernels that shows in the last digits.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    """At each position, of the likeliest tokens."""
    prompt_tokens: int
    cached_tokens: int
    spilled_bytes: int = 0


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

    def __init__(
        self, model: Path, cache_blocks: int | None, options: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        from vllm import LLM

        transfer = {"kv_connector": "OverspillConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
        self._llm: Any = LLM(
            model=str(model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, use_tqdm_on_load=False,
            block_size=BLOCK_TOKENS, max_num_seqs=2, num_gpu_blocks_override=cache_blocks,
            enable_prefix_caching=True, disable_log_stats=False,
            kv_transfer_config=transfer if options else None, **settings,
        )  # fmt: skip

    def ask(self, prompt: Sequence[int]) -> Answer:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=2, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], parameters, use_tqdm=False)
        choice = output.outputs[0]
        logprobs = tuple({token: p.logprob for token, p in position.items()} for position in choice.logprobs)
        told = (output.kv_transfer_params or {}).get("overspill", {})
        cached, spilled = output.num_cached_tokens or 0, told.get("spilled_bytes", 0)
        return Answer(tuple(choice.token_ids), logprobs, len(prompt), cached, spilled)

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
class Offload:
    """Answers of the three runs, and what Overspill counted before and after the damage."""

    small: list[Answer]
    large: list[Answer]
    offloaded: list[Answer]
    moved: dict[str, int]
    after_damage: dict[str, int]
    block_bytes: int

    def failure(self) -> str:
        """Why this part failed, in a sentence; empty if it did not."""
        for name, stock in (("small", self.small), ("large", self.large)):
            difference = compare(self.offloaded, stock).difference
            if difference:
                return f"with Overspill {difference}, compared with stock vLLM and the {name} cache."
        if not self.moved["hit_tokens"] or not self.moved["load_bytes"]:
            return "nothing was loaded from RAM, so equal answers prove nothing."
        if self.moved["corrupt_blocks"]:
            return f"{self.moved['corrupt_blocks']} block(s) were corrupt before any was damaged."
        if self.after_damage["corrupt_blocks"] != 1:
            return f"one block was damaged and {self.after_damage['corrupt_blocks']} were caught."
        return ""

    def report(self) -> str:
        """The numbers of a run that did not fail."""
        before_damage = slice(0, TURNS * CONVERSATIONS)
        runs = [self.small[before_damage], self.offloaded[before_damage]]
        table = {
            "prompt tokens": [sum(answer.prompt_tokens for answer in answers) for answers in runs],
            "  computed": [sum(answer.prompt_tokens - answer.cached_tokens for answer in answers) for answers in runs],
            "  loaded from RAM": [0, self.moved["hit_tokens"]],
        }
        lines = [f"{'':18}{'stock vLLM':>12}{'Overspill':>12}"]
        lines += [f"{label:18}{stock:>12,}{ours:>12,}" for label, (stock, ours) in table.items()]
        stored, loaded = self.moved["store_bytes"], self.moved["load_bytes"]
        lines += [
            fact("moved to RAM", stored, f"bytes, {stored // self.block_bytes} blocks"),
            fact("came back", loaded, f"bytes, {loaded // self.block_bytes} blocks"),
            *compared(self.offloaded, self.large),
            fact("damaged block", self.after_damage["corrupt_blocks"], "caught, dropped and recomputed"),
        ]
        return "\n".join(lines)


def offload(model: Path) -> Offload:
    stock = []
    length = (SMALL_CACHE - 1) * BLOCK_TOKENS
    for cache, room in ((SMALL_CACHE, "too small for them"), (LARGE_CACHE, "room for all, as reference")):
        say(f"stock vLLM, KV cache of {cache} blocks: {room}")
        with Engine(model, cache, max_model_len=length) as engine:
            stock.append(Conversations())
            stock[-1].turns(engine, TURNS + 1)
    say(f"with Overspill, KV cache of {SMALL_CACHE} blocks and {OFFLOAD_OPTIONS['host_bytes']} of RAM")
    with Engine(model, SMALL_CACHE, OFFLOAD_OPTIONS, max_model_len=length) as engine:
        offloaded = Conversations()
        offloaded.turns(engine, TURNS)
        moved = counters()
        say("once more, after damaging one stored block in RAM")
        block_bytes = damage_one_block()
        offloaded.turns(engine, 1)
        after_damage = counters()
    small, large = (conversations.answers for conversations in stock)
    return Offload(small, large, offloaded.answers, moved, after_damage, block_bytes)


@dataclass(frozen=True)
class Spill:
    """Answers with all of the KV in the KV cache and with most of it in RAM, and what Overspill counted."""

    stock: list[Answer]
    spilled: list[Answer]
    streamed: dict[str, int]
    cache_blocks: int
    block_bytes: int

    def failure(self) -> str:
        """Why this part failed, in a sentence; empty if it did not."""
        difference = compare(self.spilled, self.stock).difference
        if difference:
            return f"with spill {difference}, compared with stock vLLM and a cache that holds everything."
        if not all(answer.spilled_bytes for answer in self.spilled) or not self.streamed["spill_in_bytes"]:
            return "nothing was streamed from RAM, so equal answers prove nothing."
        return ""

    def report(self) -> str:
        """The numbers of a run that did not fail."""
        room = (self.cache_blocks - 1) * BLOCK_TOKENS  # vLLM keeps one for itself
        prompt = self.spilled[0].prompt_tokens
        in_ram = max(answer.spilled_bytes for answer in self.spilled)
        streamed = self.streamed
        lines = [
            fact("prompt tokens", prompt, f"in the first turn: {prompt / room:.1f} times the KV cache of {room}"),
            fact("KV in RAM", in_ram, f"bytes, {in_ram // self.block_bytes} blocks"),
            fact("streamed in", streamed["spill_in_bytes"], f"bytes in {streamed['spilled_steps']} steps"),
            fact("written back", streamed["spill_out_bytes"], "bytes"),
            *compared(self.spilled, self.stock),
        ]
        return "\n".join(lines)


def spill(model: Path) -> Spill:
    length = LONG_PROMPT + LONG_TURNS * (ANSWER + NEXT_TURN)
    settings: dict[str, Any] = {"max_model_len": length, "max_num_batched_tokens": CHUNK}
    stock, spilled = (Conversations([random_tokens(7, LONG_PROMPT)]) for _ in range(2))
    say(f"stock vLLM, KV cache of {LARGE_CACHE} blocks: room for it, as reference")
    with Engine(model, LARGE_CACHE, **settings) as engine:
        stock.turns(engine, LONG_TURNS)
    with Engine(model, None, SPILL_OPTIONS, **settings) as engine:
        cache_blocks, block_bytes = spill_sizes()
        say(f"with Overspill, KV cache of {cache_blocks} blocks and {SPILL_OPTIONS['spill_bytes']} of RAM")
        spilled.turns(engine, LONG_TURNS)
        return Spill(stock.answers, spilled.answers, counters(), cache_blocks, block_bytes)


def spill_sizes() -> tuple[int, int]:
    """Blocks in the KV cache, and the size of a block in bytes."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    geometry = get_kv_transfer_group().spill_worker.geometry
    return geometry.num_resident, geometry.num_regions * geometry.page_bytes


def fact(label: str, number: int, text: str) -> str:
    return f"{label:18}{number:>12,} {text}"


def compared(got: Sequence[Answer], expected: Sequence[Answer]) -> list[str]:
    same = compare(got, expected)
    rounded = same.logprobs - same.identical_logprobs
    how = f"compared, {rounded} differ by rounding" if rounded else "compared, all identical"
    return [fact("tokens", same.tokens, "compared, all identical"), fact("log-probabilities", same.logprobs, how)]


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
    print("Overspill demo: a tiny Llama on vLLM's CPU engine", flush=True)
    with tempfile.TemporaryDirectory(prefix="overspill-demo-") as folder:
        from overspill.tiny import make_llama

        model = make_llama(Path(folder) / "llama")
        for title, part in (
            (f"Offload: {CONVERSATIONS} conversations take turns", offload),
            ("Spill: one conversation is longer than the KV cache", spill),
        ):
            print(f"\n{title}", flush=True)
            outcome: Offload | Spill = part(model)
            why = outcome.failure()
            if why:
                print(f"FAILED: {why}", file=sys.stderr)
                return 1
            print(f"\n{outcome.report()}", flush=True)
        why = compare_servers(model, Path(folder))
        if why:
            print(f"FAILED: {why}", file=sys.stderr)
            return 1
    print("\nok: every answer is the one that stock vLLM gives")
    return 0


def compare_servers(model: Path, folder: Path) -> str:
    """A/B: what returns is loaded instead of computed, and how much sooner it begins. Empty if all is well."""
    from overspill.measure.ab import EXAMPLE_MEASURES, run_example

    print("\nA/B: two servers, the same long conversations", flush=True)
    told: list[str] = []
    report = run_example(model, folder, told.append)
    print(f"\n{report.as_table(*EXAMPLE_MEASURES)}", flush=True)
    return "\n".join(["the servers could not be compared:", *told]) if report.exit_code else ""


if __name__ == "__main__":
    sys.exit(main())
