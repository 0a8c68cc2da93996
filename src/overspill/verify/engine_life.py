"""What an engine is started with, for a reference and for each scenario."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from overspill.planning.arguments import vllm_args
from overspill.planning.memory import KvSplit
from overspill.planning.planner import Plan
from overspill.verify.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLife:
    model: str
    flags: tuple[str, ...]
    """As `vllm serve` takes them."""
    options: Mapping[str, Any] | None
    """Of Overspill's connector; None without it."""
    keep_blocks: int | None = None
    """KV blocks that requests may use; the rest is taken from them before the first."""
    random_weights: bool = False
    """In place of the model's."""


def reference_life(plan: Plan, stage: Stage, model: str) -> EngineLife:
    """vLLM by the same settings, without a connector."""
    return EngineLife(model=model, flags=_flags(plan, stage, blocks=stage.reference_blocks), options=None)


def offload_life(plan: Plan, stage: Stage, model: str, options: Mapping[str, Any]) -> EngineLife:
    return EngineLife(
        model=model,
        flags=_flags(plan, stage, blocks=stage.pool_blocks),
        options={**_always(), "host_bytes": stage.host_bytes, **options},
        keep_blocks=stage.work_blocks,
    )


def spill_life(plan: Plan, stage: Stage, model: str, options: Mapping[str, Any], *, offload: bool) -> EngineLife:
    assert stage.spill is not None
    sizes = {"spill_bytes": stage.spill.spill_bytes, "resident_bytes": stage.spill.resident_bytes}
    pool = {**_always(), "host_bytes": stage.host_bytes, **options} if offload else {"reserve_bytes": 0}
    memory = stage.spill.resident_bytes + stage.table_bytes
    return EngineLife(model=model, flags=_flags(plan, stage, memory_bytes=memory), options={**pool, **sizes})


def _always() -> dict[str, Any]:
    """Every hit is loaded, even where recomputing is faster, and every block is checked."""
    return {"load": "always", "verify": "all", "reserve_bytes": 0}


def _flags(plan: Plan, stage: Stage, *, blocks: int | None = None, memory_bytes: int = 0) -> tuple[str, ...]:
    """The plan's, but for the size of the KV cache and the lengths."""
    assert plan.chosen is not None
    if blocks is not None:
        memory_bytes = blocks * stage.block_bytes
    way = replace(
        plan.chosen,
        max_num_batched_tokens=stage.max_num_batched_tokens,
        offload_bytes=0,
        kv=KvSplit(resident_bytes=memory_bytes, window_bytes=0, spilled_bytes=0),
    )
    flags = vllm_args(replace(plan, max_model_len=stage.max_model_len), way)
    return (*flags, *(("--num-gpu-blocks-override", str(blocks)) if blocks is not None else ()))
