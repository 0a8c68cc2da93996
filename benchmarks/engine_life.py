"""One engine of the offload benchmark: start vLLM with one system, run its workloads, report each repeat at once.

Runs in a child only, with vLLM's engine core in a process of its own, as a server has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

import shapes
from record import Json, say
from workloads import WORKLOADS, Client, Life, warm_up

Report = Callable[[Json], None]


def engine_arguments(life: Life) -> Any:
    transfer = KVTransferConfig(**life.kv_transfer_config) if life.kv_transfer_config else None
    graphs = {} if life.enforce_eager else {"cudagraph_capture_sizes": list(life.capture_sizes)}
    return AsyncEngineArgs(
        model=life.model, load_format=life.load_format, skip_tokenizer_init=True, dtype=life.dtype,
        max_model_len=life.max_model_len, max_num_seqs=life.max_num_seqs,
        max_num_batched_tokens=life.max_num_batched_tokens, num_gpu_blocks_override=life.gpu_blocks,
        gpu_memory_utilization=life.gpu_memory_utilization, enable_prefix_caching=True,
        enforce_eager=life.enforce_eager, kv_transfer_config=transfer, seed=life.load.seed,
        worker_extension_cls="shapes.SensitiveWeights", disable_log_stats=False, **graphs,
    )  # fmt: skip


def live(life: Life, report: Report) -> None:
    asyncio.run(_live(life, report))


async def _live(life: Life, report: Report) -> None:
    began = time.monotonic()
    engine = AsyncLLM.from_engine_args(engine_arguments(life))
    try:
        if life.load_format == "dummy":
            await engine.collective_rpc("make_weights_sensitive", args=(life.load.seed,))
        start_seconds = time.monotonic() - began
        prompts = shapes.Prompts(shapes.config_of(life.model)["vocab_size"], life.load.seed)
        client = Client(engine, prompts, offloads=life.kv_transfer_config is not None)
        await warm_up(client, life.load)
        report(
            {
                "event": "started",
                "start_seconds": start_seconds,
                "warm_seconds": time.monotonic() - began,
                "block_tokens": client.block_tokens,
                "async_scheduling": bool(engine.vllm_config.scheduler_config.async_scheduling),
            }
        )
        say(f"{life.system}: engine up after {start_seconds:.0f} s")
        for name in life.workloads:
            await run_workload(client, life, name, report, began)
    finally:
        engine.shutdown()


async def run_workload(client: Client, life: Life, name: str, report: Report, began: float) -> None:
    slowest = 0.0
    number = 0
    if time.monotonic() - began > life.seconds:
        report({"event": "skipped", "workload": name, "why": "no time left"})
        return
    before = time.monotonic()
    async for repeat in WORKLOADS[name](client, life.load, life.gpu_blocks):
        taken = time.monotonic() - before
        slowest = max(slowest, taken)
        report({"event": "repeat", "workload": name, "number": number, **repeat})
        say(f"{life.system}: {name} {repeat['phase']} {number}: {taken:.1f} s")
        number += 1
        before = time.monotonic()
        if before - began + slowest > life.seconds:
            report({"event": "skipped", "workload": name, "why": f"no time left after {number} repeats"})
            break
    if not await client.forget():
        report({"event": "note", "workload": name, "why": "the caches could not be emptied afterwards"})
