"""A plan in the words of `vllm serve`."""

import json

from overspill.plan.planner import Plan, Way
from overspill.plan.weights import PREFETCH_STEP


def vllm_args(plan: Plan, way: Way) -> list[str]:
    """The flags that make vLLM do it; a list, for no shell to read."""
    arguments = [
        "--max-model-len", str(plan.max_model_len),
        "--gpu-memory-utilization", f"{plan.gpu_memory_utilization:.3f}",
        "--max-num-batched-tokens", str(way.max_num_batched_tokens),
        "--max-num-seqs", str(plan.max_num_seqs),
    ]  # fmt: skip
    if way.kv_cache_dtype != "auto":
        arguments += ["--kv-cache-dtype", way.kv_cache_dtype]
    if way.weights.ram_bytes:
        # Named: with the backend left to vLLM, a size for the other offloader would be ignored in silence.
        arguments += [
            "--offload-backend", "prefetch",
            "--offload-group-size", str(way.weights.group_size),
            "--offload-num-in-group", str(way.weights.num_in_group),
            "--offload-prefetch-step", str(PREFETCH_STEP),
        ]  # fmt: skip
    if transfer := kv_transfer_config(way):
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    return arguments


def kv_transfer_config(way: Way) -> dict[str, object] | None:
    """Overspill's connector, as far as the way uses it."""
    sizes = {"host_bytes": way.offload_bytes, "spill_bytes": way.kv.spilled_bytes}
    given = {name: size for name, size in sizes.items() if size}
    if not given:
        return None
    return {"kv_connector": "OverspillConnector", "kv_role": "kv_both", "kv_connector_extra_config": given}
