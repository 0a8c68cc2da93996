"""A plan in the words of `vllm serve`."""

import json

from overspill.planning.connector_options import read_options, used_options
from overspill.planning.device_share import DeviceShare
from overspill.planning.drafts import speculative_config
from overspill.planning.planner import Plan
from overspill.planning.ways import Way
from overspill.planning.weights import PREFETCH_STEP, WeightOffload

# With these set, vLLM would not do what the flags say: its CPU platform takes the first for --kv-cache-memory-bytes.
CONTRADICTING_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE",)


def vllm_args(plan: Plan, way: Way) -> list[str]:
    """The flags that make vLLM do it; a list, for no shell to read."""
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
    if transfer := kv_transfer_config(way, plan.wishes.kv_options):
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    return arguments


def kv_transfer_config(way: Way, kv_options: str = "") -> dict[str, object] | None:
    """Overspill's connector, as far as the way uses it; it refuses options that would do nothing."""
    if not (sizes := way.connector_sizes):
        return None
    extra = {**sizes, **used_options(read_options(kv_options), sizes)}
    return {"kv_connector": "OverspillConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def device_share(plan: Plan, way: Way) -> DeviceShare | None:
    """What the engine may take of its GPU; None where vLLM has to find out what is left for KV: on several GPUs, where
    too little is known of what they take for each other, with drafts, which the plan is not for, and where --force
    starts what does not fit by the plan's reckoning."""
    if plan.gpu_memory_utilization is None or plan.num_ranks > 1 or plan.wishes.drafts != "off":
        return None
    share = DeviceShare(
        budget_bytes=plan.usable_gpu_bytes.value,
        non_torch_bytes=way.overheads.non_torch_bytes.value,
        graph_bytes=way.overheads.graph_bytes.value,
    )
    weights = plan.rank.weights.total_bytes - way.weights.saved_bytes
    return share if weights + way.overheads.total.value + way.kv.device_bytes <= share.budget_bytes else None


def _memory(plan: Plan, way: Way) -> list[str]:
    """On a GPU both flags: with the bytes alone, vLLM would still demand its default fraction free before it loads."""
    kv_bytes = ["--kv-cache-memory-bytes", str(way.kv.device_bytes)]
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
    # The backend is named: were it left to vLLM, a size for the other offloader would be ignored in silence.
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
