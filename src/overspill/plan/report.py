"""A plan as JSON: bytes are integers, and every figure that is not exact says where it comes from."""

from typing import Any

from overspill.figures import as_json
from overspill.model.kv import kv_geometry
from overspill.model.settings import CacheSettings
from overspill.plan.arguments import vllm_args
from overspill.plan.planner import Plan, Way


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The recommended way's numbers at the top, then all ways."""
    best = plan.recommended
    return {
        "model": plan.facts.name,
        "max_model_len": plan.max_model_len,
        "longest_context": plan.longest_context,
        "fits": best is not None,
        "weights_bytes": plan.facts.weights.total_bytes,
        "weights_origin": str(plan.facts.weights.source),
        "usable_gpu_bytes": as_json(plan.usable_gpu_bytes),
        "ram_bytes": as_json(plan.ram_bytes),
        **(_way_as_json(plan, best) if best is not None else {}),
        "ways": [{"name": way.name, "recommended": way is best, **_way_as_json(plan, way)} for way in plan.ways],
    }


def _way_as_json(plan: Plan, way: Way) -> dict[str, Any]:
    settings = CacheSettings(kv_cache_dtype=way.kv_cache_dtype, max_num_batched_tokens=way.max_num_batched_tokens)
    geometry = kv_geometry(plan.facts, settings)
    return {
        "weights_in_ram_bytes": way.weights.ram_bytes,
        "kv_cache_dtype": way.kv_cache_dtype,
        "kv_bytes_per_token": geometry.kv_bytes_per_token,
        "kv_bytes": geometry.request_bytes(plan.max_model_len),
        "resident_kv_bytes": way.kv.resident_bytes,
        "window_bytes": way.kv.window_bytes,
        "spilled_kv_bytes": way.kv.spilled_bytes,
        "offload_bytes": way.offload_bytes,
        "overheads": as_json(way.overheads),
        "decode_tokens_per_s": way.decode_tokens_per_s.value,
        "ttft_s": way.ttft_s.value,
        "speed_origin": str(way.decode_tokens_per_s.origin),
        "is_exact": way.is_exact,
        "vllm_args": vllm_args(plan, way),
    }
