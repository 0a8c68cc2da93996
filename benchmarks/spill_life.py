"""One engine life of the spill benchmark: start vLLM, run the phases, report each repeat as a JSON line.

Run by spill.py in a fork of its own; a line is written as soon as it is known, so that a life that is killed keeps what
it measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import link
import model_shape
import spill_memory
import spill_phases
import spill_plan
from engine_life import Report
from record import GIB, Json, say
from spill_engine import Engine
from spill_phases import Clock, OutOfTime
from spill_plan import Load

LINK_SECONDS = 90.0
WHOLE_GPU = 0.9
# The CUDA context takes some of the rest.
MOST_OF_GPU = 0.97
# What vLLM takes beyond its share, beside the CUDA context: kernels loaded and graphs captured after it has looked.
# 0.19 to 0.43 GiB with Llama-3.1-8B on an H200: more where compiled code came from its cache, so that vLLM saw less.
UNSEEN_BYTES = 7 * GIB // 16
# The CPU platform has nothing to profile.
CPU_KV_BYTES = GIB


@dataclass(frozen=True, kw_only=True)
class Life:
    """Everything a life needs to know."""

    name: str
    model: str
    report: str
    seconds: float
    """Nothing is begun that would probably end after this."""
    lengths: Sequence[int]
    """Empty: the longest that fits."""
    phases: Sequence[str]
    batches: Sequence[int] = (1, 8, 64)
    load: Load = field(default_factory=Load)
    max_model_len: int
    """-1: the longest that fits."""
    positions: int
    """As many as the longest request of any life has, so that no life is limited by the model's own."""
    kv_transfer_config: dict[str, Any] | None
    gpu_bytes: int | None
    """GPU memory for everything; None takes the whole GPU."""
    kv_bytes: int | None = None
    """GPU memory for KV, instead of what vLLM finds free."""
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    load_format: str = "dummy"
    block_size: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = False
    cudagraph_mode: str | None = None
    capture_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)


def import_engine() -> None:
    """Once, before the lives fork off."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On the CPU platform it would override what a life asks for.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    import vllm.entrypoints.llm  # noqa: F401


def engine_arguments(life: Life, gpu_total_bytes: int | None, context_bytes: int) -> Json:
    from vllm.config import KVTransferConfig

    arguments: Json = {
        "model": life.model, "load_format": life.load_format, "skip_tokenizer_init": True, "dtype": life.dtype,
        "max_model_len": life.max_model_len, "max_num_seqs": life.max_num_seqs,
        "max_num_batched_tokens": life.max_num_batched_tokens, "kv_cache_dtype": life.kv_cache_dtype,
        "enable_prefix_caching": True, "enforce_eager": life.enforce_eager, "seed": life.load.seed,
        "worker_extension_cls": "spill_weights.SpillWeights", "disable_log_stats": False,
    }  # fmt: skip
    if life.positions > max_positions(Path(life.model)):
        # A model of random weights has no opinion about positions; only the tables must be long enough.
        arguments["hf_overrides"] = {"max_position_embeddings": life.positions}
    if life.kv_transfer_config is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**life.kv_transfer_config)
    if gpu_total_bytes is not None:
        # vLLM divides what it sees once its CUDA context exists, and does not count that.
        limit = None if life.gpu_bytes is None else life.gpu_bytes - context_bytes - UNSEEN_BYTES
        wanted = WHOLE_GPU if limit is None else limit / gpu_total_bytes
        arguments["gpu_memory_utilization"] = min(MOST_OF_GPU, wanted)
    if life.kv_bytes is not None:
        arguments["kv_cache_memory_bytes"] = life.kv_bytes
    elif gpu_total_bytes is None:
        arguments["kv_cache_memory_bytes"] = CPU_KV_BYTES
    if life.block_size is not None:
        arguments["block_size"] = life.block_size
    if not life.enforce_eager:
        arguments["cudagraph_capture_sizes"] = list(life.capture_sizes)
        if life.cudagraph_mode is not None:
            arguments["compilation_config"] = {"cudagraph_mode": life.cudagraph_mode}
    return arguments


def max_positions(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["max_position_embeddings"])


def measure_gpu() -> Json:
    """Link and CUDA context, in a fork that is over before the engine starts: its own context would count."""
    context = multiprocessing.get_context("fork")
    answers, answer = context.Pipe(duplex=False)
    child = context.Process(target=_send_gpu, args=(answer, spill_memory.gpu_used_bytes()))
    child.start()
    answer.close()
    try:
        measured: Json = answers.recv() if answers.poll(LINK_SECONDS) else {"link": None, "context_bytes": 0}
    except EOFError:
        measured = {"link": None, "context_bytes": 0}
    child.join(10)
    if child.exitcode is None:
        child.kill()
    return measured


def _send_gpu(answer: Connection, used_before: int | None) -> None:
    import torch

    context_bytes = 0
    if torch.cuda.is_available() and used_before is not None:
        torch.zeros(1, device="cuda")
        # By NVML both times: it counts what the driver keeps for itself as used, and CUDA does not.
        context_bytes = max(0, (spill_memory.gpu_used_bytes() or 0) - used_before)
    answer.send({"link": link.measure(), "context_bytes": context_bytes})


def run(life: Life) -> None:
    report = Report(life.report)
    began = time.monotonic()
    gpu = measure_gpu()
    report.add({"event": "started", **gpu})
    gpu_bytes_before = spill_memory.gpu_used_bytes()
    llm = start(life, gpu["context_bytes"])
    try:
        engine = Engine(llm, vocabulary=model_shape.vocabulary_size(Path(life.model)), seed=life.load.seed)
        start_seconds = time.monotonic() - began
        say(f"{life.name}: engine up after {start_seconds:.0f} s")
        facts = engine.facts() | engine.wait_for_arena()
        lengths = life.lengths or [facts["max_model_len"] - life.load.decode_tokens]
        spill_phases.warm_up(engine, life.load, lengths, life.batches if "batch" in life.phases else ())
        report.add(
            {
                "event": "started",
                "start_seconds": start_seconds,
                "warm_seconds": time.monotonic() - began,
                **facts,
                "memory": spill_memory.usage(gpu_bytes_before),
            }
        )
        clock = Clock(began + life.seconds)
        for phase, length in spill_plan.phase_order(life.load, lengths, life.phases):
            run_phase(engine, life, clock, phase, length, report, gpu_bytes_before)
    finally:
        ending = time.monotonic()
        stop(llm)
        say(f"{life.name}: engine down after {time.monotonic() - ending:.1f} s")


def start(life: Life, context_bytes: int) -> Any:
    from vllm import LLM

    if life.kv_transfer_config is not None:
        # Where Overspill is on the path but not installed, vLLM does not find its plugin.
        from overspill.kv.plugin import register

        register()
    llm = LLM(**engine_arguments(life, gpu_total_bytes(), context_bytes))
    if life.load_format == "dummy":
        llm.collective_rpc("make_weights_sensitive", args=(life.load.seed,))
    return llm


def stop(llm: Any) -> None:
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    llm.llm_engine.engine_core.shutdown()
    ensure_kv_transfer_shutdown()


def gpu_total_bytes() -> int | None:
    """As vLLM counts it when it divides; None on the CPU platform."""
    import torch

    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else None


def run_phase(
    engine: Engine, life: Life, clock: Clock, phase: str, length: int | None, report: Report, gpu_before: int | None
) -> None:
    label = phase if length is None else f"{phase} {length}"
    try:
        before = time.monotonic()
        for repeat in repeats(engine, life, clock, phase, length):
            taken = time.monotonic() - before
            memory = spill_memory.usage(gpu_before)
            report.add({"event": "repeat", "phase": phase, "taken": taken, **repeat, "memory": memory})
            say(f"{life.name}: {label} {repeat['number']}: {taken:.1f} s")
            for why in spill_phases.problems(phase, repeat, engine.resident_tokens, life.load):
                report.add({"event": "failed", "phase": label, "number": repeat["number"], "why": why})
                say(f"{life.name}: {label}: FAILED: {why}")
            before = time.monotonic()
    except OutOfTime as error:
        report.add({"event": "skipped", "phase": label, "why": str(error)})
        say(f"{life.name}: {label} skipped: {error}")
        engine.stop_all()


def repeats(engine: Engine, life: Life, clock: Clock, phase: str, length: int | None) -> Iterator[Json]:
    match phase, length:
        case "long", int():
            return spill_phases.long_prompts(engine, life.load, clock, length)
        case "batch", None:
            return spill_phases.batches(engine, life.load, clock, life.batches)
        case "sharing", int():
            return spill_phases.sharing(engine, life.load, clock, length)
    raise ValueError(f"no phase {phase} of {length}")
