"""The request loads: which prompts are sent, when, and what is measured about each answer.

Times are a client's: from submitting a request to receiving its tokens, in the process that holds the
asynchronous engine. TTFT, TPOT, ITL and throughput are defined as in `vllm bench serve`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import shapes
from record import Json, spread

COUNTERS = {
    "external_tokens": "vllm:external_prefix_cache_hits",
    "local_tokens": "vllm:prefix_cache_hits",
    "prompt_tokens": "vllm:prompt_tokens",
    "preemptions": "vllm:num_preemptions",
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """Parameters of all workloads; every field is an option of the script."""

    seed: int = 0
    repeats: int = 3
    ttft_output: int = 16
    ttft_8k: int = 8_192
    ttft_64k: int = 64_000
    short_requests: int = 64
    short_input: int = 512
    short_output: int = 256
    arrival_requests: int = 24
    arrival_rate: float = 2.0
    arrival_input: int = 8192
    arrival_output: int = 1024
    arrival_repeats: int = 1
    conversations: int = 16
    turns: int = 4
    first_turn: int = 4096
    turn_input: int = 2000
    turn_output: int = 128
    turn_concurrency: int = 6
    turn_repeats: int = 2


@dataclass(frozen=True, kw_only=True)
class Life:
    """Everything that an engine of this benchmark needs to know."""

    system: str
    model: str
    workloads: list[str]
    gpu_blocks: int
    kv_transfer_config: Json | None
    seconds: float
    """Started workloads are finished; none is started that would probably end after this."""
    load: Load = field(default_factory=Load)
    max_model_len: int = 66_560
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    load_format: str = "dummy"
    dtype: str = "auto"
    enforce_eager: bool = False
    capture_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    gpu_memory_utilization: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request as the client saw it."""

    prompt_tokens: int
    tokens: list[int]
    cached_tokens: int
    ttft: float
    latency: float
    gaps: list[float]

    def sample(self) -> Json:
        return {
            "ttft": self.ttft,
            "latency": self.latency,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": len(self.tokens),
            "cached_tokens": self.cached_tokens,
        }

    @property
    def tokens_hash(self) -> str:
        return hashlib.sha256(np.array(self.tokens, dtype=np.int64).tobytes()).hexdigest()[:12]


class Client:
    """Sends token ids to an AsyncLLM and times what comes back."""

    def __init__(self, engine: Any, prompt: shapes.Prompts, *, offloads: bool) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self.prompt = prompt
        self.offloads = offloads
        self.block_tokens = int(engine.vllm_config.cache_config.block_size)

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        tokens: list[int] = []
        arrivals: list[float] = []
        cached = 0
        began = time.perf_counter()
        name = f"request-{next(self._ids)}"
        async for output in self._engine.generate(TokensPrompt(prompt_token_ids=prompt), parameters, name):
            arrivals.append(time.perf_counter())
            tokens.extend(output.outputs[0].token_ids)
            cached = output.num_cached_tokens or cached
        if len(tokens) != max_tokens:
            raise RuntimeError(f"{name}: {len(tokens)} tokens came back, {max_tokens} were asked for")
        return Answer(
            prompt_tokens=len(prompt), tokens=tokens, cached_tokens=cached,
            ttft=arrivals[0] - began, latency=arrivals[-1] - began,
            gaps=[later - earlier for earlier, later in itertools.pairwise(arrivals)],
        )  # fmt: skip

    async def forget(self) -> bool:
        """Empty the GPU's prefix cache and the host pool, so that workloads do not see each other."""
        for _ in range(20):
            # A store still in flight makes a reset fail; it is over a moment later.
            await asyncio.sleep(0.25)
            if await self._engine.reset_prefix_cache(reset_connector=self.offloads):
                return True
        return False

    async def counters(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        # Statistics of the last step arrive behind its tokens.
        await asyncio.sleep(0.05)
        values = dict.fromkeys(COUNTERS, 0.0)
        for metric in REGISTRY.collect():
            for key, name in COUNTERS.items():
                if metric.name == name:
                    values[key] += sum(s.value for s in metric.samples if s.name.endswith("_total"))
        return values


async def warm_up(client: Client, load: Load) -> None:
    """Load kernels, compile what is compiled on first use, fill caches that are not the KV cache."""
    await client.ask(client.prompt("warm", 0, load.first_turn), 8)
    await asyncio.gather(
        *(client.ask(client.prompt("warm", i + 1, 128), 16) for i in range(load.short_requests)),
    )
    await client.forget()


Repeat = Json
"""What one repeat yields: raw samples, counters, and a summary where it makes sense."""


async def counted(client: Client, work: Awaitable[Json]) -> Repeat:
    before = await client.counters()
    began = time.perf_counter()
    result = await work
    seconds = time.perf_counter() - began
    after = await client.counters()
    return {"seconds": seconds, **result, "counters": {key: after[key] - before[key] for key in after}}


def prompts_to_evict(prompt_blocks: int, gpu_blocks: int) -> int:
    """How many prompts in turns it takes until each is gone from an LRU cache when it comes back.

    Only full blocks count: vLLM hands a partly filled one to the next request at once.
    """
    return -(-gpu_blocks // prompt_blocks) + 1


async def ttft(client: Client, load: Load, tokens: int, gpu_blocks: int) -> AsyncIterator[Repeat]:
    """One request at a time; prompts in turns, so that each was evicted from the GPU since its last turn."""
    count = prompts_to_evict(tokens // client.block_tokens, gpu_blocks)
    prompts = [client.prompt(f"ttft-{tokens}", i, tokens) for i in range(count)]

    async def single(i: int) -> Json:
        answer = await client.ask(prompts[i], load.ttft_output)
        return {"prompt": i, **answer.sample(), "tokens_hash": answer.tokens_hash}

    async def in_turns() -> Json:
        return {"samples": [await single(i) for i in range(len(prompts))]}

    async def twice_each() -> Json:
        return {"samples": [await single(i) for i in range(len(prompts)) for _ in range(2)]}

    # The second answer comes from the GPU's own cache: the same computation as after a load, in the same engine,
    # and so the reference that tokens from RAM must equal bit for bit.
    yield {"phase": "reference", **await counted(client, twice_each())}
    # Without offload every pass does the same computation again, and a long prompt's takes seconds.
    passes = load.repeats if client.offloads or tokens < load.ttft_64k else 1
    for _ in range(passes):
        yield {"phase": "measured", **await counted(client, in_turns())}


async def short(client: Client, load: Load) -> AsyncIterator[Repeat]:
    """Many short requests at once, all fresh: what the connector costs when nothing is reused."""
    for repeat in range(load.repeats):
        asked = [
            (client.prompt(f"short-{repeat}", i, load.short_input), load.short_output, 0.0)
            for i in range(load.short_requests)
        ]
        yield {"phase": "measured", **await counted(client, open_loop(client, asked))}


async def arrivals(client: Client, load: Load) -> AsyncIterator[Repeat]:
    """Fresh long prompts at a fixed rate, whether or not earlier ones are done."""
    for repeat in range(load.arrival_repeats):
        asked = [
            (
                client.prompt(f"arrivals-{repeat}", i, load.arrival_input),
                load.arrival_output,
                i / load.arrival_rate,
            )
            for i in range(load.arrival_requests)
        ]
        yield {"phase": "measured", **await counted(client, open_loop(client, asked))}
        await client.forget()


async def open_loop(client: Client, asked: Sequence[tuple[list[int], int, float]]) -> Json:
    began = time.perf_counter()

    async def at(prompt: list[int], max_tokens: int, offset: float) -> Answer:
        await asyncio.sleep(max(0.0, began + offset - time.perf_counter()))
        return await client.ask(prompt, max_tokens)

    answers = await asyncio.gather(*(at(*request) for request in asked))
    return serving(answers, time.perf_counter() - began)


async def multiturn(client: Client, load: Load) -> AsyncIterator[Repeat]:
    """Conversations in turns: each comes back after the others have pushed it out of the GPU."""
    for repeat in range(load.turn_repeats):
        yield {"phase": "measured", **await counted(client, conversations(client, load, repeat))}
        await client.forget()


async def conversations(client: Client, load: Load, repeat: int) -> Json:
    history = [client.prompt(f"talk-{repeat}", i, load.first_turn) for i in range(load.conversations)]
    turns = iter([(turn, i) for turn in range(load.turns) for i in range(load.conversations)])
    free = [asyncio.Lock() for _ in history]
    answers: list[Answer] = []
    places: list[tuple[int, int]] = []

    async def user() -> None:
        for turn, i in turns:
            async with free[i]:
                if turn:
                    history[i] += client.prompt(f"talk-{repeat}-{i}", turn, load.turn_input)
                answer = await client.ask(history[i], load.turn_output)
                history[i] += answer.tokens
                answers.append(answer)
                places.append((turn, i))

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(load.turn_concurrency)))
    result = serving(answers, time.perf_counter() - began)
    result["samples"] |= {"turn": [turn for turn, _ in places], "conversation": [i for _, i in places]}
    return result


def serving(answers: Sequence[Answer], seconds: float) -> Json:
    """Throughput and latencies of a batch of requests, by `vllm bench serve`'s definitions."""
    tpots = [(a.latency - a.ttft) / (len(a.tokens) - 1) for a in answers if len(a.tokens) > 1]
    output_tokens = sum(len(a.tokens) for a in answers)
    prompt_tokens = sum(a.prompt_tokens for a in answers)
    return {
        "requests": len(answers),
        "duration": seconds,
        "requests_per_second": len(answers) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "total_tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "cached_tokens": sum(a.cached_tokens for a in answers),
        "ttft": spread([a.ttft for a in answers]),
        "tpot": spread(tpots),
        "itl": spread([gap for a in answers for gap in a.gaps]),
        # Columns, not rows: hundreds of requests per file.
        "samples": {key: [a.sample()[key] for a in answers] for key in answers[0].sample()},
    }


Workload = Callable[[Client, Load, int], AsyncIterator[Repeat]]
WORKLOADS: dict[str, Workload] = {
    "ttft-8k": lambda client, load, gpu_blocks: ttft(client, load, load.ttft_8k, gpu_blocks),
    "ttft-64k": lambda client, load, gpu_blocks: ttft(client, load, load.ttft_64k, gpu_blocks),
    "short": lambda client, load, gpu_blocks: short(client, load),
    "multiturn": lambda client, load, gpu_blocks: multiturn(client, load),
    "arrivals": lambda client, load, gpu_blocks: arrivals(client, load),
}
GROUPS = {"ttft": ("ttft-8k", "ttft-64k"), "overhead": ("short", "arrivals")}
