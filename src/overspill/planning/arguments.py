"""A plan as arguments of `vllm serve`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overspill.planning.connector_options import read_options, used_options
from overspill.planning.device_share import DeviceShare
from overspill.planning.drafts import speculative_config
from overspill.planning.memory import gpu_budget
from overspill.planning.planner import Plan, is_elastic
from overspill.planning.ways import Way, stores_lazily
from overspill.planning.weights import PREFETCH_STEP, WeightOffload

# Variables that override the flags: vLLM's CPU platform reads this one in place of --kv-cache-memory-bytes.
CONTRADICTING_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE",)


def vllm_args(plan: Plan, way: Way) -> list[str]:
    """Flags that make vLLM follow the plan, as a list that no shell reads."""
    arguments = [
        "--max-model-len", str(plan.max_model_len),
        *_memory(plan, way),
        "--max-num-batched-tokens", str(way.max_num_batched_tokens),
        "--max-num-seqs", str(plan.max_num_seqs),
    ]  # fmt: skip
    if plan.wishes.dtype != "auto":
        arguments += ["--dtype", plan.wishes.dtype]
    if way.kv_cache_dtype != "auto":
        arguments += ["--kv-cache-dtype", way.kv_cache_dtype]
    if plan.wishes.enforce_eager:
        arguments += ["--enforce-eager"]
    if drafts := speculative_config(plan.wishes.drafts):
        arguments += ["--speculative-config", drafts]
    arguments += _ranks(plan)
    arguments += _weights(way.weights)
    if transfer := kv_transfer_config(way, plan.wishes.kv_options, elastic_options(plan, way)):
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    return arguments


def kv_transfer_config(
    way: Way, kv_options: str = "", elastic: Mapping[str, Any] | None = None
) -> dict[str, object] | None:
    """Overspill's connector with only the options it would use, since it refuses others; None if the way needs none."""
    if not (sizes := way.connector_sizes):
        return None
    options = used_options(read_options(kv_options), sizes)
    lazy = {"store": "lazy"} if stores_lazily(way, options) and not elastic else {}
    extra = {**sizes, **lazy, **options, **(elastic or {})}
    return {"kv_connector": "OverspillConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def elastic_options(plan: Plan, way: Way) -> dict[str, Any]:
    """Connector options of an elastic engine, which begins with the planned KV less the plan's doubt: missing memory
    would end the start, and memory left over is granted later."""
    if not is_elastic(plan, way):
        return {}
    sure = way.kv.resident_bytes - way.overheads.doubt_bytes
    first = max(1, min(sure, kv_cache_bytes(plan, way) - plan.wishes.ledger_held_bytes))
    return {"ledger": plan.wishes.ledger, "ledger_bytes": first, "ledger_weight": plan.wishes.elastic_weight}


def kv_cache_bytes(plan: Plan, way: Way) -> int:
    """Size of vLLM's KV cache: as planned, or, for an elastic engine, what it could have with the card to itself."""
    planned = way.kv.device_bytes
    return max(planned, _alone_bytes(plan) - _beside_kv(plan, way)) if is_elastic(plan, way) else planned


def _alone_bytes(plan: Plan) -> int:
    """Memory that vLLM would count on the card if all of it were free."""
    if plan.gpu_memory_utilization is None:
        return plan.usable_gpu_bytes.value
    gpu, wishes = replace(plan.gpu, free_bytes=plan.gpu.total_bytes), plan.wishes
    alone = gpu_budget(gpu, wishes.gpu_memory_bytes, plan.budget.context_bytes, wishes.gpu_memory_utilization)
    return alone.usable_bytes.value


def _beside_kv(plan: Plan, way: Way) -> int:
    return plan.rank.weights.total_bytes - way.weights.saved_bytes + way.overheads.total.value


def device_share(plan: Plan, way: Way) -> DeviceShare | None:
    """The engine's share of its GPU; None where vLLM has to find out what is left for KV: on several GPUs, whose memory
    for each other is too little known, with drafts, which the plan does not cover, and where --force starts a way that
    does not fit by the plan's reckoning."""
    if plan.gpu_memory_utilization is None or plan.num_ranks > 1 or plan.wishes.drafts != "off":
        return None
    share = DeviceShare(
        budget_bytes=_alone_bytes(plan) if is_elastic(plan, way) else plan.usable_gpu_bytes.value,
        non_torch_bytes=way.overheads.non_torch_bytes.value,
        graph_bytes=way.overheads.graph_bytes.value,
    )
    return share if _beside_kv(plan, way) + kv_cache_bytes(plan, way) <= share.budget_bytes else None


def _memory(plan: Plan, way: Way) -> list[str]:
    """Memory flags; on a GPU both, since with bytes alone vLLM demands its default fraction free before it loads."""
    kv_bytes = ["--kv-cache-memory-bytes", str(kv_cache_bytes(plan, way))]
    if plan.gpu_memory_utilization is None:
        return kv_bytes
    fraction = ["--gpu-memory-utilization", f"{plan.gpu_memory_utilization:.4f}"]
    return fraction if device_share(plan, way) is None else [*fraction, *kv_bytes]


def _ranks(plan: Plan) -> list[str]:
    wishes = plan.wishes
    sizes = {
        "--tensor-parallel-size": wishes.tensor_parallel_size,
        "--pipeline-parallel-size": wishes.pipeline_parallel_size,
    }
    return [word for flag, size in sizes.items() if size > 1 for word in (flag, str(size))]


def _weights(weights: WeightOffload) -> list[str]:
    # Name the backend: if it were left to vLLM, a size for the other offloader would be ignored in silence.
    if not weights.ram_bytes:
        return []
    if weights.is_uva:
        return ["--offload-backend", "uva", "--cpu-offload-gb", f"{weights.cpu_offload_gb:.4f}"]
    return [
        "--offload-backend", "prefetch",
        "--offload-group-size", str(weights.group_size),
        "--offload-num-in-group", str(weights.num_in_group),
        "--offload-prefetch-step", str(PREFETCH_STEP),
    ]  # fmt: skip
