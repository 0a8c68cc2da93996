"""vLLM's engine in this very process, stepped by hand: who asks, when tokens arrive, what was streamed meanwhile.

In one process, so that the benchmark can wait for the arena, set `spill_share` between repeats, and add short requests
at the moment a long one decodes. Times are taken when a step returns, for every system alike.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from record import Json

COUNTERS = ("spill_in_bytes", "spill_out_bytes", "spilled_steps", "plain_steps")


@dataclass(slots=True)
class Request:
    """One request as its user sees it. Greedy: `tokens` were the likeliest, `runners_up` the next likeliest."""

    name: str
    began: float
    internal_name: str = ""
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runners_up: list[int] = field(default_factory=list)
    runner_up_logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    spilled_bytes: int = 0
    is_done: bool = False

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]

    @property
    def tpot(self) -> float | None:
        """As `vllm bench serve` defines it; also of a request that was stopped on the way."""
        if len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)

    def take(self, output: Any, now: float) -> None:
        choice = output.outputs[0]
        self.is_done = output.finished
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        # Told at the end, of requests that had KV in RAM.
        self.spilled_bytes = (output.kv_transfer_params or {}).get("overspill", {}).get("spilled_bytes", 0)
        for token in choice.token_ids:
            self.arrivals.append(now)
            self.tokens.append(token)
        for token, likely in zip(choice.token_ids, choice.logprobs or ()):
            others = [(other.logprob, i) for i, other in likely.items() if i != token]
            second, runner_up = max(others, default=(float("-inf"), -1))
            self.logprobs.append(likely[token].logprob)
            self.runners_up.append(runner_up)
            self.runner_up_logprobs.append(second)


class Engine:
    def __init__(self, llm: Any, *, vocabulary: int, seed: int) -> None:
        self._llm = llm
        self._vocabulary = vocabulary
        self._seed = seed
        self._count = itertools.count()
        self._requests: dict[str, Request] = {}
        self._collectors = _collectors()

    @property
    def core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def spill(self) -> Any | None:
        """The scheduler's side of spill; None without it."""
        return getattr(self.core.scheduler.connector, "spill_scheduler", None)

    @property
    def share(self) -> float | None:
        """`spill_share`, which may be changed between repeats; None without spill."""
        return None if self.spill is None else self.spill.share

    @share.setter
    def share(self, share: float | None) -> None:
        if self.spill is not None:
            self.spill.share = share

    @property
    def block_tokens(self) -> int:
        return int(self._llm.llm_engine.vllm_config.cache_config.block_size)

    @property
    def resident_tokens(self) -> int | None:
        """Tokens that fit on the GPU with spill on; block 0 is vLLM's own."""
        return None if self.spill is None else (self.spill.geometry.num_resident - 1) * self.block_tokens

    def facts(self) -> Json:
        """What the engine made of its settings."""
        config = self._llm.llm_engine.vllm_config
        cache = self.core.scheduler.kv_cache_config
        kv_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors)
        facts: Json = {
            "max_model_len": config.model_config.max_model_len,
            "block_tokens": self.block_tokens,
            "num_blocks": cache.num_blocks,
            "capacity_tokens": (cache.num_blocks - 1) * self.block_tokens,
            "kv_bytes_per_token": kv_bytes // (cache.num_blocks * self.block_tokens),
            "kv_cache_layout": str(getattr(cache, "kv_cache_layout", None)),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
        }
        if self.spill is not None:
            geometry = self.spill.geometry
            facts |= {
                "resident_tokens": self.resident_tokens,
                "resident_bytes": geometry.num_regions * geometry.resident_bytes,
                "window_bytes": geometry.num_halves * geometry.half_bytes,
                "arena_bytes": geometry.num_regions * geometry.half_bytes,
                "spill_share": self.spill.share,
            }
        return facts

    def wait_for_arena(self) -> Json:
        """RAM is filled and registered in the background; the first spilled request would wait for it."""
        if self.spill is None:
            return {}
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        arena = get_kv_transfer_group().spill_worker.arena
        began = time.monotonic()
        arena.wait_until_prepared()
        return {
            "arena_wait_seconds": time.monotonic() - began,
            "arena_pinned_bytes": arena.pinned_bytes,
            "arena_pinning_refused": arena.pinning_refused,
        }

    def prompt(self, kind: str, number: int, tokens: int) -> list[int]:
        """The same for every system: it depends on its name only."""
        random = np.random.default_rng([self._seed, zlib.crc32(kind.encode()), number])
        lowest = min(1000, self._vocabulary // 8)
        ids: list[int] = random.integers(lowest, self._vocabulary - lowest, tokens).tolist()
        return ids

    def add(self, prompt: list[int], max_tokens: int, *, logprobs: bool = False) -> Request:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            logprobs=2 if logprobs else None, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        request = Request(f"request-{next(self._count)}", time.perf_counter())
        self._requests[request.name] = request
        asked = {"prompt_token_ids": prompt}
        request.internal_name = self._llm.llm_engine.add_request(request.name, asked, parameters)
        return request

    def step(self) -> None:
        outputs = self._llm.llm_engine.step()
        now = time.perf_counter()
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is not None:
                request.take(output, now)
                if request.is_done:
                    del self._requests[request.name]

    def run(self, until: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Step until it is so; False if the time was over first."""
        deadline = time.perf_counter() + seconds
        while not until():
            if time.perf_counter() > deadline:
                return False
            if not self._requests:
                raise RuntimeError("nothing runs any more, and what was waited for has not happened")
            self.step()
        return True

    def stop(self, requests: Sequence[Request]) -> None:
        """Abort those that still run; once nothing does, let the step in flight end."""
        names = [request.name for request in requests if self._requests.pop(request.name, None) is not None]
        self._llm.llm_engine.abort_request(names)
        if not self._requests:
            self.drain()

    def stop_all(self) -> None:
        self.stop(list(self._requests.values()))

    def is_spilled(self, request: Request) -> bool:
        """Whether some of its KV is in RAM, or was when it ended."""
        if self.spill is None:
            return False
        return bool(request.spilled_bytes) if request.is_done else self.spill.is_spilled(request.internal_name)

    def drain(self) -> None:
        for _ in range(1000):
            if not self.core.scheduler.has_requests() and not self.core.batch_queue:
                return
            self._llm.llm_engine.step()
        raise RuntimeError("the engine still has work after 1000 steps, without any request")

    def forget(self) -> None:
        """Empty the prefix cache: every prompt is cold. What ended last may still hold blocks for a moment.

        What other requests have needed is forgotten too: a long prompt would leave them that much of the GPU.
        """
        for _ in range(20):
            self.drain()
            if self._llm.llm_engine.reset_prefix_cache():
                if self.spill is not None:
                    self.spill.placement.others_recently.forget()
                return
            time.sleep(0.05)
        raise RuntimeError("the prefix cache could not be emptied: blocks are still held")

    def counters(self) -> dict[str, int]:
        """Spill's counters up to the step that returned last; zeros without spill."""
        values = dict.fromkeys(COUNTERS, 0)
        for name, collector in self._collectors.items():
            for metric in collector.collect():
                values[name] += sum(int(s.value) for s in metric.samples if s.name.endswith("_total"))
        return values


def _collectors() -> dict[str, Any]:
    """The series themselves: collecting the whole registry takes as long as a decode step."""
    from prometheus_client import REGISTRY

    by_name = REGISTRY._names_to_collectors
    return {name: by_name[f"overspill_{name}_total"] for name in COUNTERS if f"overspill_{name}_total" in by_name}


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}
