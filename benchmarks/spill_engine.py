"""The in-process engine as the benchmarks of spill and of plans use it: its sizes, its arena, and prompts by name.

In one process, so that a benchmark can wait for the arena, set `spill_share` between repeats, and add short requests
at the moment a long one decodes. Loads vLLM: imported in children only.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from prometheus_client import REGISTRY
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

import shapes
from overspill.kv.spill.worker import SpillWorker
from overspill.verify.inprocess import Engine
from overspill.verify.workload import Answer
from record import Json
from spill_plan import WAYS

COUNTERS = ("spill_in_bytes", "spill_out_bytes", "spill_far_bytes", "spilled_steps", "graphed_steps", "plain_steps")


class SpillEngine(Engine):
    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        config = self._vllm.vllm_config
        self.block_tokens = int(config.cache_config.block_size)
        self.prompts = shapes.Prompts(config.model_config.get_vocab_size(), config.model_config.seed or 0)

    def close(self) -> None:
        # All of it, now: an engine that is collected later takes the next one's state with it.
        self.llm = None
        gc.collect()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def spill_worker(self) -> SpillWorker | None:
        return self._connector.spill_worker

    def generate(
        self, prompt: Sequence[int], max_tokens: int, *, logprobs: int | None = None, name: str = ""
    ) -> Answer:
        """One prompt, until its last token."""
        answer = self.add(prompt, max_tokens, logprobs=logprobs, name=name)
        self.run(lambda: answer.is_done)
        return answer

    @property
    def share(self) -> float | None:
        """`spill_share`, which may be changed between repeats; None without spill."""
        return None if self.spill_scheduler is None else self.spill_scheduler.share

    @share.setter
    def share(self, share: float | None) -> None:
        if self.spill_scheduler is not None and share is not None:
            self.spill_scheduler.share = share

    @property
    def ways(self) -> list[str]:
        """In which decode can run with spilled KV, the engine's own first: graphs with a part of the attention on the
        CPU, graphs that stream everything, and vLLM's pieces, as all steps ran before there were such graphs."""
        if self.spill_scheduler is None or self.spill_worker is None:
            return ["gpu"]
        if self.spill_worker.graphs is None:
            return ["pieces"]
        return list(WAYS if self.spill_worker.far is not None else WAYS[1:])

    @contextmanager
    def way(self, name: str) -> Iterator[None]:
        if name == "gpu":
            yield
            return
        scheduler, worker = self.spill_scheduler, self.spill_worker
        assert scheduler is not None and worker is not None
        groups, graphs = scheduler.far_groups, worker.graphs
        scheduler.far_groups = groups if name == "shared" else frozenset()
        worker.graphs = None if name == "pieces" else graphs
        try:
            yield
        finally:
            scheduler.far_groups, worker.graphs = groups, graphs

    @property
    def resident_tokens(self) -> int | None:
        """Tokens that fit on the GPU with spill on; block 0 is vLLM's own."""
        spill = self.spill_scheduler
        return None if spill is None else (spill.geometry.num_resident - 1) * self.block_tokens

    def facts(self) -> Json:
        """What the engine made of its settings."""
        config = self._vllm.vllm_config
        cache = self.scheduler.kv_cache_config
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
        if self.spill_scheduler is not None:
            geometry, loan = self.spill_scheduler.geometry, self.spill_scheduler.placement.loan
            block_bytes = geometry.num_regions * geometry.page_bytes
            facts |= {
                "resident_tokens": self.resident_tokens,
                "resident_bytes": geometry.num_regions * geometry.resident_bytes,
                "window_bytes": geometry.num_halves * geometry.half_bytes,
                "lent_bytes": 0 if loan is None else (geometry.num_resident - loan.units.num_fixed) * block_bytes,
                "arena_bytes": geometry.num_regions * geometry.half_bytes,
                "spill_share": self.spill_scheduler.share,
            }
        return facts

    def wait_for_arena(self) -> Json:
        """RAM is filled and registered in the background; the first spilled request would wait for it."""
        if self.spill_scheduler is None:
            return {}
        assert self.spill_worker is not None and self.spill_worker.arena is not None
        arena = self.spill_worker.arena
        began = time.monotonic()
        arena.wait_until_prepared()
        return {
            "arena_wait_seconds": time.monotonic() - began,
            "arena_pinned_bytes": arena.pinned_bytes,
            "arena_pinning_refused": arena.pinning_refused,
        }

    def is_spilled(self, request: Answer) -> bool:
        """Whether some of its KV is in RAM, or was when it ended."""
        if self.spill_scheduler is None:
            return False
        return bool(request.spilled_bytes) if request.is_done else self.spill_scheduler.is_spilled(request.request)

    def forget(self) -> None:
        """Empty the prefix cache: every prompt is cold. What ended last may still hold blocks for a moment."""
        for _ in range(20):
            self.drain()
            if self._vllm.reset_prefix_cache():
                return
            time.sleep(0.05)
        raise RuntimeError("the prefix cache could not be emptied: blocks are still held")

    def stop(self, *requests: Answer) -> None:
        """Abort those that still run; once nothing does, let the step in flight end."""
        self.abort(*requests)
        if not self.is_busy:
            self.drain()

    def spill_counters(self) -> dict[str, int]:
        """Up to the step that returned last; zeros without spill. By name: collecting the whole registry takes as long
        as a decode step."""
        found = dict.fromkeys(COUNTERS, 0)
        for name in COUNTERS:
            collector = REGISTRY._names_to_collectors.get(f"overspill_{name}_total")
            for metric in collector.collect() if collector is not None else ():
                values = [sample.value for sample in metric.samples if sample.name == f"overspill_{name}_total"]
                found[name] += int(sum(values))
        return found
