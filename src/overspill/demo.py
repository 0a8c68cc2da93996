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
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overspill.verify.comparison import Compared, Tolerance, compare
from overspill.verify.workload import Answer

if TYPE_CHECKING:
    from overspill.verify.inprocess import Engine

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
LOGPROBS = 2
# Every bit must be the same, unless one of the two runs had less of the prompt cached and computed it in other pieces;
# with some CPUs' kernels rounding then shows in the last digits, but never in a token.
ALLOWED = Tolerance(logprob=1e-3, tie=0.0, same_pieces=True)


def start(model: Path, cache_blocks: int | None, options: dict[str, Any] | None = None, **settings: Any) -> Engine:
    """vLLM's CPU engine with a KV cache of so many blocks; with `options`, Overspill beside it."""
    from overspill.verify.inprocess import Engine

    return Engine.start(
        model, options, dtype="float32", enforce_eager=True, use_tqdm_on_load=False, block_size=BLOCK_TOKENS,
        max_num_seqs=2, num_gpu_blocks_override=cache_blocks, **settings,
    )  # fmt: skip


def difference(got: Sequence[Answer], expected: Sequence[Answer]) -> str:
    """The first thing that differs, in words; empty if nothing does."""
    if len(got) != len(expected):
        return f"there are {len(got)} answers instead of {len(expected)}"
    found = compared(got, expected)
    for first in (*found.mismatches, *found.ties):
        return f"answer {first.request} differs at its token {first.position + 1} ({first.reason})"
    if found.logprobs != LOGPROBS * found.tokens:
        return "an answer has other candidates beside its tokens"
    return ""


def compared(got: Sequence[Answer], expected: Sequence[Answer]) -> Compared:
    return compare(got, {answer.name: answer for answer in expected}, ALLOWED)


@dataclass
class Conversations:
    """They take turns, so that each comes back after the others have filled the cache."""

    histories: list[list[int]] = field(
        default_factory=lambda: [random_tokens(100 + i, FIRST_TURN) for i in range(CONVERSATIONS)]
    )
    answers: list[Answer] = field(default_factory=list)

    def turns(self, engine: Engine, count: int) -> None:
        for _ in range(count):
            for number, history in enumerate(self.histories, start=1):
                name = f"{number}/{len(self.answers) // len(self.histories) + 1}"
                answer = engine.generate(history, ANSWER, logprobs=LOGPROBS, name=name)
                self.answers.append(answer)
                history += [*answer.tokens, *random_tokens(1000 + len(self.answers), NEXT_TURN)]


def random_tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(count)]


@dataclass(frozen=True)
class Offload:
    """Answers of the three runs, and Overspill's counters before and after the damage."""

    small: list[Answer]
    large: list[Answer]
    offloaded: list[Answer]
    moved: dict[str, int]
    after_damage: dict[str, int]
    block_bytes: int

    def failure(self) -> str:
        """Why this part failed, in a sentence; empty if it did not."""
        for name, stock in (("small", self.small), ("large", self.large)):
            if differs := difference(self.offloaded, stock):
                return f"with Overspill {differs}, compared with stock vLLM and the {name} cache."
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
            *comparison_facts(self.offloaded, self.large),
            fact("damaged block", self.after_damage["corrupt_blocks"], "caught, dropped and recomputed"),
        ]
        return "\n".join(lines)


def offload(model: Path) -> Offload:
    stock = []
    length = (SMALL_CACHE - 1) * BLOCK_TOKENS
    for cache, room in ((SMALL_CACHE, "too small for them"), (LARGE_CACHE, "room for all, as reference")):
        say(f"stock vLLM, KV cache of {cache} blocks: {room}")
        with start(model, cache, max_model_len=length) as engine:
            stock.append(Conversations())
            stock[-1].turns(engine, TURNS + 1)
    say(f"with Overspill, KV cache of {SMALL_CACHE} blocks and {OFFLOAD_OPTIONS['host_bytes']} of RAM")
    with start(model, SMALL_CACHE, OFFLOAD_OPTIONS, max_model_len=length) as engine:
        offloaded = Conversations()
        offloaded.turns(engine, TURNS)
        moved = engine.counters()
        say("once more, after damaging one stored block in RAM")
        memory = engine.offload_worker.memory
        assert memory is not None
        memory.slots[0] ^= 0x11  # the first block that was stored: the beginning of the first conversation
        offloaded.turns(engine, 1)
        small, large = (conversations.answers for conversations in stock)
        return Offload(small, large, offloaded.answers, moved, engine.counters(), int(memory.slots.shape[1]))


@dataclass(frozen=True)
class Spill:
    """Answers with all of the KV in the KV cache and with most of it in RAM, and Overspill's counters."""

    stock: list[Answer]
    spilled: list[Answer]
    streamed: dict[str, int]
    cache_blocks: int
    block_bytes: int

    def failure(self) -> str:
        """Why this part failed, in a sentence; empty if it did not."""
        if differs := difference(self.spilled, self.stock):
            return f"with spill {differs}, compared with stock vLLM and a cache that holds everything."
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
            *comparison_facts(self.spilled, self.stock),
        ]
        return "\n".join(lines)


def spill(model: Path) -> Spill:
    length = LONG_PROMPT + LONG_TURNS * (ANSWER + NEXT_TURN)
    settings: dict[str, Any] = {"max_model_len": length, "max_num_batched_tokens": CHUNK}
    stock, spilled = (Conversations([random_tokens(7, LONG_PROMPT)]) for _ in range(2))
    say(f"stock vLLM, KV cache of {LARGE_CACHE} blocks: room for it, as reference")
    with start(model, LARGE_CACHE, **settings) as engine:
        stock.turns(engine, LONG_TURNS)
    with start(model, None, SPILL_OPTIONS, **settings) as engine:
        assert engine.spill_worker is not None and engine.spill_worker.geometry is not None
        geometry = engine.spill_worker.geometry
        say(f"with Overspill, KV cache of {geometry.num_resident} blocks and {SPILL_OPTIONS['spill_bytes']} of RAM")
        spilled.turns(engine, LONG_TURNS)
        block_bytes = geometry.num_regions * geometry.page_bytes
        return Spill(stock.answers, spilled.answers, engine.counters(), geometry.num_resident, block_bytes)


def fact(label: str, number: int, text: str) -> str:
    return f"{label:18}{number:>12,} {text}"


def comparison_facts(got: Sequence[Answer], expected: Sequence[Answer]) -> list[str]:
    same = compared(got, expected)
    rounded = same.logprobs - same.identical_logprobs
    how = f"compared, {rounded} differ by rounding" if rounded else "compared, all identical"
    return [fact("tokens", same.tokens, "compared, all identical"), fact("log-probabilities", same.logprobs, how)]


def compare_servers(model: Path, folder: Path) -> str:
    """A/B: what returns is loaded instead of computed, and how much sooner it begins. Empty if all is well."""
    from overspill.measure.ab import EXAMPLE_MEASURES, run_example

    print("\nA/B: two servers, the same long conversations", flush=True)
    lines: list[str] = []
    report = run_example(model, folder, lines.append)
    print(f"\n{report.as_table(*EXAMPLE_MEASURES)}", flush=True)
    return "\n".join(["the servers could not be compared:", *lines]) if report.exit_code else ""


def say(line: str) -> None:
    print(f"- {line}", flush=True)


def run(folder: Path) -> str:
    """Why it failed, in a sentence; empty if it did not."""
    from overspill.tiny import make_llama

    model = make_llama(folder / "llama")
    for title, part in (
        (f"Offload: {CONVERSATIONS} conversations take turns", offload),
        ("Spill: one conversation is longer than the KV cache", spill),
    ):
        print(f"\n{title}", flush=True)
        outcome: Offload | Spill = part(model)
        if why := outcome.failure():
            return why
        print(f"\n{outcome.report()}", flush=True)
    return compare_servers(model, folder)


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
        why = run(Path(folder))
    if why:
        print(f"FAILED: {why}", file=sys.stderr)
        return 1
    print("\nok: every answer is the one that stock vLLM gives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
