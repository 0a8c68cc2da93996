"""One engine life: start vLLM with one system, run its workloads, report each repeat as a JSON line.

Run by offload.py in a fork of its own; a line is written as soon as it is known, so that a life
that is killed keeps what it measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import model_shape
from record import Json, say
from workloads import WORKLOADS, Client, Load, warm_up


@dataclass(frozen=True, kw_only=True)
class Life:
    """Everything a life needs to know."""

    system: str
    model: str
    workloads: list[str]
    gpu_blocks: int
    kv_transfer_config: dict[str, Any] | None
    report: str
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


class Report:
    """Appends JSON lines to the file that offload.py reads."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def add(self, line: Json) -> None:
        with self._path.open("a") as sink:
            sink.write(json.dumps(line) + "\n")


def engine_arguments(life: Life) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    transfer = KVTransferConfig(**life.kv_transfer_config) if life.kv_transfer_config else None
    graphs = {} if life.enforce_eager else {"cudagraph_capture_sizes": list(life.capture_sizes)}
    return AsyncEngineArgs(
        model=life.model, load_format=life.load_format, skip_tokenizer_init=True, dtype=life.dtype,
        max_model_len=life.max_model_len, max_num_seqs=life.max_num_seqs,
        max_num_batched_tokens=life.max_num_batched_tokens, num_gpu_blocks_override=life.gpu_blocks,
        gpu_memory_utilization=life.gpu_memory_utilization, enable_prefix_caching=True,
        enforce_eager=life.enforce_eager, kv_transfer_config=transfer, seed=life.load.seed,
        worker_extension_cls="sensitive_weights.SensitiveWeights", disable_log_stats=False, **graphs,
    )  # fmt: skip


async def live(life: Life, report: Report) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.monotonic()
    engine = AsyncLLM.from_engine_args(engine_arguments(life))
    try:
        if life.load_format == "dummy":
            await engine.collective_rpc("make_weights_sensitive", args=(life.load.seed,))
        start_seconds = time.monotonic() - began
        client = Client(
            engine, vocabulary=model_shape.vocabulary_size(Path(life.model)), seed=life.load.seed,
            offloads=life.kv_transfer_config is not None,
        )  # fmt: skip
        await warm_up(client, life.load)
        report.add(
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
        ending = time.monotonic()
        engine.shutdown()
        say(f"{life.system}: engine down after {time.monotonic() - ending:.1f} s")


async def run_workload(client: Client, life: Life, name: str, report: Report, began: float) -> None:
    slowest = 0.0
    number = 0
    if time.monotonic() - began > life.seconds:
        report.add({"event": "skipped", "workload": name, "why": "no time left"})
        return
    before = time.monotonic()
    async for repeat in WORKLOADS[name](client, life.load, life.gpu_blocks):
        taken = time.monotonic() - before
        slowest = max(slowest, taken)
        report.add({"event": "repeat", "workload": name, "number": number, **repeat})
        say(f"{life.system}: {name} {repeat['phase']} {number}: {taken:.1f} s")
        number += 1
        before = time.monotonic()
        if before - began + slowest > life.seconds:
            report.add({"event": "skipped", "workload": name, "why": f"no time left after {number} repeats"})
            break
    if not await client.forget():
        report.add({"event": "note", "workload": name, "why": "the caches could not be emptied afterwards"})


def import_engine() -> None:
    """Once, before the lives fork off."""
    import vllm.engine.arg_utils
    import vllm.v1.engine.async_llm  # noqa: F401


def run(life: Life) -> None:
    asyncio.run(live(life, Report(life.report)))
