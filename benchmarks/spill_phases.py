"""What a life of the spill benchmark measures: long prompts, batches of short ones, short ones beside a long one.

Each phase yields one JSON object per repeat, as soon as it is known.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from record import Json, spread
from spill_engine import Engine, Request, difference
from spill_plan import Load, decode_tokens, enough_repeats, expected_seconds

# The long request decodes for so many tokens before others are put beside it.
SETTLED_TOKENS = 4


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


def warm_up(engine: Engine, load: Load, lengths: Sequence[int], batches: Sequence[int]) -> None:
    """Load kernels, compile what is compiled on first use: a long prompt, spilled if it can be, and every batch."""
    length = min(load.warm_up_tokens, *lengths)
    long = engine.add(engine.prompt("warm", 0, length), 4, logprobs=True)
    engine.run(lambda: long.is_done)
    for batch in batches:
        short = [engine.add(engine.prompt("warm-batch", i, load.batch_input), 8) for i in range(batch)]
        engine.run(partial(all_done, short))
    engine.forget()


def long_prompts(engine: Engine, load: Load, clock: Clock, length: int) -> Iterator[Json]:
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


def long_prompt(engine: Engine, load: Load, length: int, number: int) -> Json:
    engine.forget()
    prompt = engine.prompt(f"long-{length}", number, length)
    before = engine.counters()
    request = engine.add(prompt, decode_tokens(load, length), logprobs=True)
    engine.run(lambda: bool(request.tokens))
    prefilled = engine.counters()
    engine.run(lambda: request.is_done)
    after = engine.counters()
    return {
        "ttft": request.ttft,
        "gaps": request.gaps,
        "cached_tokens": request.cached_tokens,
        "prefill": difference(prefilled, before),
        "decode": difference(after, prefilled),
        "tokens": request.tokens,
        "logprobs": request.logprobs,
        "runners_up": request.runners_up,
        "runner_up_logprobs": request.runner_up_logprobs,
    }


def batches(engine: Engine, load: Load, clock: Clock, sizes: Sequence[int]) -> Iterator[Json]:
    """Short requests that begin together and stay on the GPU: what spill costs when nothing is spilled."""
    slowest = 0.0
    # In turns, so that a change of the machine's mood meets every size.
    for number in range(load.batch_repeats):
        for size in sizes:
            clock.require(slowest)
            engine.forget()
            kind = f"batch-{size}-{number}"
            prompts = [engine.prompt(kind, i, load.batch_input) for i in range(size)]
            before, began = engine.counters(), time.perf_counter()
            requests = [engine.add(prompt, load.batch_output) for prompt in prompts]
            engine.run(partial(all_done, requests))
            seconds = time.perf_counter() - began
            slowest = max(slowest, seconds)
            yield {
                "batch": size,
                "number": number,
                "seconds": seconds,
                **times(requests),
                "spill": difference(engine.counters(), before),
                "tokens_hashes": [tokens_hash(request.tokens) for request in requests],
            }


def sharing(engine: Engine, load: Load, clock: Clock, length: int) -> Iterator[Json]:
    """Short requests alone, then the same beside a long one that decodes, at the default `spill_share` and at 1.

    In this order, for then a server has seen what short requests need when the long one comes.
    """
    clock.require(expected_seconds(length, clock.taken) + 2 * load.sharing_seconds)
    engine.forget()
    for number in range(load.sharing_repeats):
        yield {"share": "alone", "number": number, **beside(engine, load, None, f"alone-{number}")}
    long = engine.add(engine.prompt("sharing-long", 0, length), load.sharing_long_output)
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
        engine.stop([long])


def beside(engine: Engine, load: Load, long: Request | None, kind: str) -> Json:
    """Short requests until they are done or the time is over, and the long one's pace while they generate."""
    if long is not None:
        # What an earlier share put off is over once it has run again.
        seen = len(long.tokens)
        engine.run(lambda: len(long.tokens) > seen or long.is_done)
    prompts = [engine.prompt(kind, i, load.sharing_input) for i in range(load.sharing_requests)]
    before = engine.counters()
    short = [engine.add(prompt, load.sharing_output) for prompt in prompts]
    in_time = engine.run(partial(all_done, short), load.sharing_seconds)
    spilled = sum(engine.is_spilled(request) for request in short)
    engine.stop(short)
    result: Json = {
        "requests": len(short),
        "all_done": in_time,
        **times(short),
        "requests_spilled": spilled,
        "spill": difference(engine.counters(), before),
    }
    if long is not None:
        start = max((request.arrivals[0] for request in short if request.arrivals), default=0.0)
        end = min((request.arrivals[-1] for request in short if request.arrivals), default=0.0)
        result["long_tokens"] = arrivals_within(long.arrivals, start, end)
        result["long_seconds"] = end - start
        result["long_is_done"] = long.is_done
    return result


def problems(phase: str, repeat: Json, resident_tokens: int | None, load: Load) -> list[str]:
    """What would make the numbers of a repeat say something else than its table claims."""
    found = []
    if phase == "long":
        if repeat["cached_tokens"]:
            found.append(f"the prompt was not cold: {repeat['cached_tokens']} tokens were cached")
        if resident_tokens is not None and repeat["length"] > resident_tokens:
            for name in ("spilled_steps", "spill_in_bytes"):
                if not repeat["decode"][name]:
                    found.append(f"{repeat['length']} tokens do not fit on the GPU, and {name} is 0 in decode")
    if phase == "batch" and resident_tokens is not None:
        tokens = repeat["batch"] * (load.batch_input + load.batch_output)
        if repeat["spill"]["spilled_steps"]:
            found.append(f"{repeat['batch']} requests, {tokens} tokens in all, spilled; {resident_tokens} fit")
    return found


def all_done(requests: Sequence[Request]) -> bool:
    return all(request.is_done for request in requests)


def times(requests: Sequence[Request]) -> Json:
    tokens = [len(request.tokens) for request in requests]
    return {
        "ttft": spread([request.ttft for request in requests if request.arrivals]),
        "tpot": spread([request.tpot for request in requests if request.tpot is not None]),
        "itl": spread([gap for request in requests for gap in request.gaps]),
        "output_tokens": {"min": min(tokens), "max": max(tokens), "sum": sum(tokens)},
    }


def arrivals_within(arrivals: Sequence[float], start: float, end: float) -> int:
    return sum(start < at <= end for at in arrivals)


def tokens_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.array(tokens, dtype=np.int64).tobytes()).hexdigest()[:12]
