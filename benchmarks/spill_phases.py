"""What an engine of the spill benchmark measures: long prompts, batches of short ones, short ones beside a long one.

Each phase yields one JSON object per repeat, which is reported as soon as it is known. Runs in a child only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

import gpu
import shapes
from overspill.planning.drafts import speculative_config
from overspill.verify.workload import Answer
from record import GIB, Json, say, spread
from spill_engine import SpillEngine
from spill_plan import (
    Life,
    Load,
    arrivals_within,
    decode_tokens,
    enough_repeats,
    expected_seconds,
    phase_order,
    problems,
)

WHOLE_GPU = 0.9
# The CUDA context takes some of the rest.
MOST_OF_GPU = 0.97
# What vLLM takes beyond its share, beside the CUDA context: kernels loaded and graphs captured after it has looked.
# 0.19 to 0.43 GiB with Llama-3.1-8B on an H200: more where compiled code came from its cache, so that vLLM saw less.
UNSEEN_BYTES = 7 * GIB // 16
# The CPU platform has nothing to profile.
CPU_KV_BYTES = GIB
# The long request decodes for so many tokens before others are put beside it.
SETTLED_TOKENS = 4

Report = Callable[[Json], None]


def live(life: Life, report: Report) -> None:
    """One engine, from its start to its end."""
    began = time.monotonic()
    measured = gpu.measure()
    report({"event": "started", **measured})
    used_before = gpu.used_bytes()
    # As vLLM counts it when it divides; None on the CPU platform.
    total_bytes = int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else None
    arguments = engine_arguments(life, total_bytes, measured["context_bytes"])
    with SpillEngine.start(life.model, life.options, **arguments) as engine:
        if life.load_format == "dummy":
            engine.llm.collective_rpc("make_weights_sensitive", args=(life.load.seed,))
        start_seconds = time.monotonic() - began
        say(f"{life.name}: engine up after {start_seconds:.0f} s")
        facts = engine.facts() | engine.wait_for_arena()
        lengths = life.lengths or [facts["max_model_len"] - life.load.decode_tokens]
        warm_up(engine, life.load, lengths, life.batches if "batch" in life.phases else ())
        times = {"start_seconds": start_seconds, "warm_seconds": time.monotonic() - began}
        report({"event": "started", **times, **facts, "memory": gpu.usage(used_before)})
        clock = Clock(began + life.seconds)
        for phase, length in phase_order(life.load, lengths, life.phases):
            run_phase(engine, life, clock, phase, length, report, used_before)


def engine_arguments(life: Life, gpu_total_bytes: int | None, context_bytes: int) -> Json:
    arguments: Json = {
        "load_format": life.load_format, "dtype": life.dtype,
        "max_model_len": life.max_model_len, "max_num_seqs": life.max_num_seqs,
        "max_num_batched_tokens": life.max_num_batched_tokens, "kv_cache_dtype": life.kv_cache_dtype,
        "enforce_eager": life.enforce_eager, "seed": life.load.seed,
        "worker_extension_cls": "shapes.SensitiveWeights",
    }  # fmt: skip
    if life.positions > shapes.config_of(life.model)["max_position_embeddings"]:
        # A model of random weights has no opinion about positions; only the tables must be long enough.
        arguments["hf_overrides"] = {"max_position_embeddings": life.positions}
    if gpu_total_bytes is not None:
        # vLLM divides what it sees once its CUDA context exists, and does not count that.
        limit = None if life.gpu_bytes is None else life.gpu_bytes - context_bytes - UNSEEN_BYTES
        wanted = WHOLE_GPU if limit is None else limit / gpu_total_bytes
        arguments["gpu_memory_utilization"] = min(MOST_OF_GPU, wanted)
    if life.kv_bytes is not None:
        arguments["kv_cache_memory_bytes"] = life.kv_bytes
    elif gpu_total_bytes is None:
        arguments["kv_cache_memory_bytes"] = CPU_KV_BYTES
    if drafts := speculative_config(life.drafts):
        arguments["speculative_config"] = json.loads(drafts)
    if life.block_size is not None:
        arguments["block_size"] = life.block_size
    if not life.enforce_eager:
        arguments["cudagraph_capture_sizes"] = list(life.capture_sizes)
        if life.cudagraph_mode is not None:
            arguments["compilation_config"] = {"cudagraph_mode": life.cudagraph_mode}
    return arguments


def run_phase(
    engine: SpillEngine, life: Life, clock: Clock, phase: str, length: int | None, report: Report, used: int | None
) -> None:
    label = phase if length is None else f"{phase} {length}"
    try:
        before = time.monotonic()
        for repeat in repeats(engine, life, clock, phase, length):
            taken = time.monotonic() - before
            memory = gpu.usage(used)
            report({"event": "repeat", "phase": phase, "taken": taken, **repeat, "memory": memory})
            say(f"{life.name}: {label} {repeat['number']}: {taken:.1f} s")
            for why in problems(phase, repeat, engine.resident_tokens, life.load):
                report({"event": "failed", "phase": label, "number": repeat["number"], "why": why})
                say(f"{life.name}: {label}: FAILED: {why}")
            before = time.monotonic()
    except OutOfTime as error:
        report({"event": "skipped", "phase": label, "why": str(error)})
        say(f"{life.name}: {label} skipped: {error}")
        engine.abort()
        engine.drain()


def repeats(engine: SpillEngine, life: Life, clock: Clock, phase: str, length: int | None) -> Iterator[Json]:
    match phase, length:
        case "long", int():
            return long_prompts(engine, life.load, clock, length)
        case "batch", None:
            return batches(engine, life.load, clock, life.batches)
        case "sharing", int():
            return sharing(engine, life.load, clock, length)
    raise ValueError(f"no phase {phase} of {length}")


class OutOfTime(Exception):
    """The rest of a phase would end after the life's time."""


@dataclass(slots=True)
class Clock:
    """The life's time, and how long each length has taken so far."""

    deadline: float
    taken: dict[int, float] = field(default_factory=dict)

    def require(self, seconds: float) -> None:
        left = self.deadline - time.monotonic()
        if seconds > left:
            raise OutOfTime(f"{left:.0f} s left, about {seconds:.0f} s needed")


def warm_up(engine: SpillEngine, load: Load, lengths: Sequence[int], batches: Sequence[int]) -> None:
    """Load kernels, compile what is compiled on first use: a long prompt, spilled if it can be, and every batch."""
    engine.generate(engine.prompts("warm", 0, min(load.warm_up_tokens, *lengths)), 4, logprobs=2)
    for batch in batches:
        short = [engine.add(engine.prompts("warm-batch", i, load.batch_input), 8) for i in range(batch)]
        engine.run(partial(all_done, short))
    engine.forget()


def long_prompts(engine: SpillEngine, load: Load, clock: Clock, length: int) -> Iterator[Json]:
    """One cold prompt at a time, and some tokens after it."""
    began = time.monotonic()
    for number in itertools.count():
        last = clock.taken.get(length, 0.0)
        if enough_repeats(number, load.repeats, time.monotonic() - began, last, load.length_seconds):
            return
        clock.require(expected_seconds(length, clock.taken))
        before = time.monotonic()
        yield {"length": length, "number": number, **long_prompt(engine, load, length, number)}
        clock.taken[length] = time.monotonic() - before


def long_prompt(engine: SpillEngine, load: Load, length: int, number: int) -> Json:
    engine.forget()
    prompt = engine.prompts(f"long-{length}", number, length)
    before = engine.spill_counters()
    wanted = decode_tokens(load, length)
    request = engine.add(prompt, wanted * len(engine.ways), logprobs=2)
    engine.run(lambda: bool(request.tokens))
    prefilled = engine.spill_counters()
    ways: Json = {}
    for name in engine.ways:
        first, counters = len(request.gaps), engine.spill_counters()
        with engine.way(name):
            engine.run(partial(has_tokens, request, len(request.tokens) + wanted))
        ways[name] = {"gaps": request.gaps[first:], "decode": difference(engine.spill_counters(), counters)}
    own = ways[engine.ways[0]]
    seconds = [
        max(((logprob, other) for other, logprob in likely.items() if other != token), default=(float("-inf"), -1))
        for token, likely in zip(request.tokens, request.logprobs)
    ]
    return {
        "ttft": request.ttft,
        "gaps": own["gaps"],
        "cached_tokens": request.cached_tokens,
        "prefill": difference(prefilled, before),
        "decode": own["decode"],
        "ways": ways,
        "tokens": request.tokens[:wanted],
        "logprobs": [likely[token] for token, likely in zip(request.tokens, request.logprobs)][:wanted],
        "runners_up": [runner_up for _, runner_up in seconds][:wanted],
        "runner_up_logprobs": [logprob for logprob, _ in seconds][:wanted],
    }


def has_tokens(request: Answer, wanted: int) -> bool:
    return request.is_done or len(request.tokens) >= wanted


def batches(engine: SpillEngine, load: Load, clock: Clock, sizes: Sequence[int]) -> Iterator[Json]:
    """Short requests that begin together and stay on the GPU: what spill costs when nothing is spilled."""
    slowest = 0.0
    # In turns, so that a change of the machine's mood meets every size.
    for number in range(load.batch_repeats):
        for size in sizes:
            clock.require(slowest)
            engine.forget()
            kind = f"batch-{size}-{number}"
            prompts = [engine.prompts(kind, i, load.batch_input) for i in range(size)]
            before, began = engine.spill_counters(), time.perf_counter()
            requests = [engine.add(prompt, load.batch_output) for prompt in prompts]
            engine.run(partial(all_done, requests))
            seconds = time.perf_counter() - began
            slowest = max(slowest, seconds)
            yield {
                "batch": size,
                "number": number,
                "seconds": seconds,
                **times(requests),
                "spill": difference(engine.spill_counters(), before),
                "tokens_hashes": [tokens_hash(request.tokens) for request in requests],
            }


def sharing(engine: SpillEngine, load: Load, clock: Clock, length: int) -> Iterator[Json]:
    """Short requests alone, then the same beside a long one that decodes, at the default `spill_share` and at 1.

    In this order, for then a server has seen what short requests need when the long one comes.
    """
    clock.require(expected_seconds(length, clock.taken) + 2 * load.sharing_seconds)
    engine.forget()
    for number in range(load.sharing_repeats):
        yield {"share": "alone", "number": number, **beside(engine, load, None, f"alone-{number}")}
    long = engine.add(engine.prompts("sharing-long", 0, length), load.sharing_long_output)
    engine.run(lambda: len(long.tokens) >= SETTLED_TOKENS)
    default = engine.share
    try:
        for share in (None,) if default is None else (default, 1.0):
            engine.share = share
            # At full share every token of the short ones takes as long as one of the long one: once is enough.
            for number in range(1 if share == 1.0 else load.sharing_repeats):
                clock.require(load.sharing_seconds)
                yield {"share": share, "number": number, **beside(engine, load, long, f"sharing-{share}-{number}")}
    finally:
        engine.share = default
        engine.stop(long)


def beside(engine: SpillEngine, load: Load, long: Answer | None, kind: str) -> Json:
    """Short requests until they are done or the time is over, and the long one's pace while they generate."""
    if long is not None:
        # What an earlier share put off is over once it has run again.
        seen = len(long.tokens)
        engine.run(lambda: len(long.tokens) > seen or long.is_done)
    prompts = [engine.prompts(kind, i, load.sharing_input) for i in range(load.sharing_requests)]
    before = engine.spill_counters()
    short = [engine.add(prompt, load.sharing_output) for prompt in prompts]
    in_time = engine.run(partial(all_done, short), load.sharing_seconds)
    spilled = sum(engine.is_spilled(request) for request in short)
    engine.stop(*short)
    result: Json = {
        "requests": len(short),
        "all_done": in_time,
        **times(short),
        "requests_spilled": spilled,
        "spill": difference(engine.spill_counters(), before),
    }
    if long is not None:
        start = max((request.arrivals[0] for request in short if request.arrivals), default=0.0)
        end = min((request.arrivals[-1] for request in short if request.arrivals), default=0.0)
        result["long_tokens"] = arrivals_within(long.arrivals, start, end)
        result["long_seconds"] = end - start
        result["long_is_done"] = long.is_done
    return result


def all_done(requests: Sequence[Answer]) -> bool:
    return all(request.is_done for request in requests)


def times(requests: Sequence[Answer]) -> Json:
    tokens = [len(request.tokens) for request in requests]
    return {
        "ttft": spread([request.ttft for request in requests if request.arrivals]),
        "tpot": spread([request.tpot for request in requests if request.tpot is not None]),
        "itl": spread([gap for request in requests for gap in request.gaps]),
        "output_tokens": {"min": min(tokens), "max": max(tokens), "sum": sum(tokens)},
    }


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}


def tokens_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.array(tokens, dtype=np.int64).tobytes()).hexdigest()[:12]
