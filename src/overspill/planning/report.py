"""A plan as JSON: bytes are integers, and every figure that is not exact says where it comes from."""

from typing import Any

from overspill.figures import as_json
from overspill.planning.arguments import vllm_args
from overspill.planning.card_fits import smallest_card
from overspill.planning.planner import Plan
from overspill.planning.ways import SHORT_TOKENS, Way

CONCURRENCY_TOKENS = 8192


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The chosen way's numbers at the top, then all ways."""
    chosen = plan.chosen
    return {
        "model": plan.facts.name,
        "device": plan.platform.name,
        "gpu": plan.gpu.name,
        "max_model_len": plan.max_model_len,
        "at_once": plan.wishes.at_once,
        "longest_context": plan.longest_context,
        "longest_on_gpu_tokens": plan.longest_on_gpu,
        "warm_tokens": chosen.warm_tokens if chosen is not None else 0,
        "least_ram_bytes": plan.least_ram_bytes,
        "need_gpu_bytes": plan.need_gpu_bytes,
        "fits": plan.recommended is not None,
        "forced": plan.recommended is None and chosen is not None,
        "warnings": list(plan.warnings),
        "weights_bytes": plan.facts.weights.total_bytes,
        "weights_origin": str(plan.facts.weights.source),
        "gpu_bytes": as_json(plan.budget.limit_bytes),
        "used_gpu_bytes": as_json(plan.budget.used_bytes),
        "context_bytes": as_json(plan.budget.context_bytes),
        "usable_gpu_bytes": as_json(plan.usable_gpu_bytes),
        "gpu_memory_utilization": plan.gpu_memory_utilization,
        "ram_bytes": as_json(plan.ram_bytes),
        # Copies within RAM, on a CPU: no link, and none that a user could state.
        **({} if plan.platform.is_cpu else {"link_bytes_per_s": as_json(plan.gpu.link.h2d_bytes_per_second)}),
        "max_num_seqs": plan.max_num_seqs,
        **(_way_as_json(plan, chosen) if chosen is not None else {}),
        "ways": [
            {"name": way.name, "recommended": way is plan.recommended, **_way_as_json(plan, way)} for way in plan.ways
        ],
        **(_cards_as_json(plan) if plan.cards else {}),
    }


def _way_as_json(plan: Plan, way: Way) -> dict[str, Any]:
    return {
        "weights_in_ram_bytes": way.weights.ram_bytes,
        "weights_pinned_bytes": way.weights.pinned_bytes,
        "kv_cache_dtype": way.kv_cache_dtype,
        "max_num_batched_tokens": way.max_num_batched_tokens,
        "kv_bytes_per_token": way.geometry.kv_bytes_per_token,
        "kv_bytes": way.geometry.request_bytes(plan.max_model_len),
        "resident_kv_bytes": way.kv.resident_bytes,
        "window_bytes": way.kv.window_bytes,
        "spilled_kv_bytes": way.kv.spilled_bytes,
        "offload_bytes": way.offload_bytes,
        "warm_tokens": way.warm_tokens,
        "overheads": as_json(way.overheads),
        "decode_tokens_per_s": way.decode_tokens_per_s.value,
        "ttft_s": way.ttft_s.value,
        "at_once_tokens_per_s": way.at_once_tokens_per_s.value,
        "speed_origin": str(way.decode_tokens_per_s.origin),
        "concurrency": {
            str(length): way.requests_at_once(length) for length in concurrency_lengths(plan.max_model_len)
        },
        "short_requests": {
            "tokens": min(SHORT_TOKENS, plan.max_model_len),
            "num": way.short_requests,
            "decode_tokens_per_s": way.short_tokens_per_s.value,
        },
        "is_exact": way.is_exact,
        "vllm_args": vllm_args(plan, way),
    }


def concurrency_lengths(max_model_len: int) -> list[int]:
    return sorted({max_model_len, min(CONCURRENCY_TOKENS, max_model_len)}, reverse=True)


def _cards_as_json(plan: Plan) -> dict[str, Any]:
    alone, with_ram = (smallest_card(plan.cards, alone=alone) for alone in (True, False))
    return {
        "smallest_card_alone": alone.key if alone else None,
        "smallest_card_with_ram": with_ram.key if with_ram else None,
        "cards": [
            {"card": one.card.key, "gpu_bytes": one.card.total_bytes, "alone": one.alone, "with_ram": one.with_ram}
            for one in plan.cards
        ],
    }
