"""A plan on one screen: a label, a value, and where it comes from, line by line."""

from overspill.figures import Known
from overspill.kv.sizes import format_size
from overspill.plan.planner import Plan, Way

_LABEL, _VALUE = 18, 10


def plan_as_text(plan: Plan) -> str:
    lines = [f"{plan.facts.name}, {plan.max_model_len:,} tokens"]
    best = plan.recommended
    if best is None:
        lines += [
            "does not fit by any way that is known here",
            f"longest context that fits: {plan.longest_context:,} tokens",
        ]
        return "\n".join(lines)
    lines += _division(plan, best)
    lines.append("")
    lines.append(f"{'':2}{'way':50}{'decode':>12}{'first token':>14}{'in RAM':>11}")
    for way in plan.ways:
        mark = "*" if way is best else " "
        speed, wait = way.decode_tokens_per_s.value, way.ttft_s.value
        lines.append(f"{mark} {way.name:50}{speed:>8.1f} t/s{wait:>12.1f} s{format_size(way.ram_bytes):>11}")
    lines.append(f"* recommended. Speeds are {best.decode_tokens_per_s.origin}, at the full context, for one request.")
    if plan.longest_context > plan.max_model_len:
        lines.append(f"Longest context that fits: {plan.longest_context:,} tokens.")
    return "\n".join(lines)


def _division(plan: Plan, way: Way) -> list[str]:
    overheads = way.overheads
    on_gpu = plan.facts.weights.total_bytes - way.weights.saved_bytes
    rows = [
        ("GPU", plan.usable_gpu_bytes.value, f"usable, {plan.usable_gpu_bytes.note}"),
        ("  weights", on_gpu, _weights_note(plan, way)),
        ("  KV resident", way.kv.resident_bytes, way.kv_cache_dtype if way.kv_cache_dtype != "auto" else ""),
        ("  window", way.kv.window_bytes, "for KV that is in RAM"),
        ("  activations", overheads.activation_bytes.value, _origin(overheads.activation_bytes)),
        ("  CUDA graphs", overheads.graph_bytes.value, _origin(overheads.graph_bytes)),
        ("  CUDA itself", overheads.non_torch_bytes.value, _origin(overheads.non_torch_bytes)),
        ("RAM", plan.ram_bytes.value, plan.ram_bytes.note),
        ("  weights", way.weights.ram_bytes, "read over the link in every step"),
        ("  KV spilled", way.kv.spilled_bytes, "of requests that do not fit on the GPU"),
        ("  KV offloaded", way.offload_bytes, "of conversations that are kept warm"),
    ]
    return [
        f"{label:{_LABEL}}{format_size(size):>{_VALUE}}   {note}".rstrip()
        for label, size, note in rows
        if size or not label.startswith(" ")
    ]


def _weights_note(plan: Plan, way: Way) -> str:
    note = f"{plan.facts.weights.source}, {format_size(plan.facts.weights.total_bytes)} in all"
    return f"{note}; a slot for those in RAM included" if way.weights.ram_bytes else note


def _origin(figure: Known[int]) -> str:
    return f"{figure.origin}, {figure.note}" if figure.note else str(figure.origin)
