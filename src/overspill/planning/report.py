"""A plan as JSON, and as text on one screen; every figure that is not exact says where it comes from."""

from typing import Any

from overspill.figures import Known, as_json
from overspill.hardware.stated import AS_ON
from overspill.kv.sizes import format_size
from overspill.planning.arguments import vllm_args
from overspill.planning.connector_options import read_options
from overspill.planning.planner import Plan, is_elastic, smallest_card
from overspill.planning.refusal import CPU_BUILD, need_and_have, remedies
from overspill.planning.ways import LEAST_OFFLOAD_BYTES, SHORT_TOKENS, Way, stores_lazily
from overspill.planning.weights import WeightOffload

CONCURRENCY_TOKENS = 8192


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON: the chosen way's numbers at the top, then all ways."""
    chosen = plan.chosen
    return {
        "model": plan.facts.name,
        "device": plan.platform.name,
        "gpu": plan.gpu.name,
        "tensor_parallel_size": plan.wishes.tensor_parallel_size,
        "pipeline_parallel_size": plan.wishes.pipeline_parallel_size,
        "ranks": [_rank_as_json(plan, rank, chosen) for rank in range(plan.num_ranks)],
        "max_model_len": plan.max_model_len,
        "auto": None if plan.auto is None else {**as_json(plan.auto), "why": str(plan.auto)},
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
        # On a CPU copies stay within RAM: there is no link, and none that a user could state.
        **({} if plan.platform.is_cpu else {"link_bytes_per_s": as_json(plan.gpu.link)}),
        "cpu_attention_bytes_per_s": None if plan.cpu_attention is None else as_json(plan.cpu_attention),
        "max_num_seqs": plan.max_num_seqs,
        **(_way_as_json(plan, chosen) if chosen is not None else {}),
        "ways": [
            {"name": way.name, "recommended": way is plan.recommended, **_way_as_json(plan, way)} for way in plan.ways
        ],
        **(_cards_as_json(plan) if plan.cards else {}),
    }


def _rank_as_json(plan: Plan, rank: int, way: Way | None) -> dict[str, Any]:
    gpu = plan.gpus[rank]
    return {
        "rank": rank,
        "gpu": gpu.name,
        "index": None if gpu.is_stated else gpu.index,
        "numa_node": gpu.numa_node,
        "link_bytes_per_s": gpu.link.value,
        "weights_bytes": plan.rank.weights.total_bytes,
        "ram_bytes": 0 if way is None else way.peak_ram_bytes // plan.num_ranks,
    }


def _way_as_json(plan: Plan, way: Way) -> dict[str, Any]:
    ranks = plan.num_ranks  # RAM is for all ranks, GPU memory for each
    return {
        "weights_in_ram_bytes": ranks * way.weights.ram_bytes,
        "weights_pinned_bytes": ranks * way.weights.pinned_bytes,
        "kv_cache_dtype": way.kv_cache_dtype,
        "max_num_batched_tokens": way.max_num_batched_tokens,
        "kv_bytes_per_token": way.geometry.kv_bytes_per_token,
        "kv_bytes": way.geometry.request_bytes(plan.max_model_len),
        "resident_kv_bytes": way.kv.resident_bytes,
        "window_bytes": way.kv.window_bytes,
        "spilled_kv_bytes": ranks * way.kv.spilled_bytes,
        "offload_bytes": ranks * way.offload_bytes,
        "parked_bytes": ranks * way.parked_bytes if way.parks else 0,
        "elastic": is_elastic(plan, way),
        "warm_tokens": way.warm_tokens,
        "disk_bytes": (disk_bytes := _disk_bytes(plan, way)),
        "disk_tokens": way.tokens_in(disk_bytes // ranks),
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
            {
                "card": one.card.key,
                "gpu_bytes": one.card.total_bytes,
                "alone": one.alone,
                "with_ram": one.with_ram,
                "decode_tokens_per_s": None if one.way is None else one.way.at_once_tokens_per_s.value,
                "ttft_s": None if one.way is None else one.way.ttft_s.value,
            }
            for one in plan.cards
        ],
    }


_LABEL, _VALUE = 18, 10


def plan_as_text(plan: Plan) -> str:
    lines = [f"{plan.facts.name}, {plan.max_model_len:,} tokens"]
    if plan.auto is not None and str(plan.auto) not in plan.warnings:
        lines.append(f"{plan.auto}.")
    lines += [f"warning: {warning}" for warning in plan.warnings]
    if plan.recommended is None:
        need, have = need_and_have(plan)
        what = "any known method" if plan.lossy is None else "any exact method"
        lines += [f"does not fit by {what}", f"need: {need}", f"have: {have}", *remedies(plan)]
    elif plan.platform.is_cpu:
        lines.append(CPU_BUILD)
    if (chosen := plan.chosen) is not None:
        lines += ["", *_division(plan, chosen), *_link(plan), "", *_ways(plan, chosen), *_concurrency(plan, chosen)]
    elif plan.ways:
        lines += ["", *_link(plan), "", *_ways(plan, None)]
    if plan.wishes.cards:
        lines += ["", *_cards(plan)]
    return "\n".join(lines)


def plan_in_short(plan: Plan) -> list[str]:
    """The chosen way in a few lines: what it is, what it takes, how fast it will be, and warnings."""
    way = plan.chosen
    assert way is not None
    device = "RAM in place of a GPU" if plan.platform.is_cpu else plan.gpu.name
    beside = f" and {format_size(way.peak_ram_bytes)} of RAM" if way.ram_bytes else ""
    speed = way.decode_tokens_per_s.value
    lines = [
        f"{plan.facts.name}, {plan.max_model_len:,} tokens: {way_name(plan, way)}",
        f"takes {format_size(plan.budget.limit_bytes.value)} of {device}{beside}; answers at about "
        f"{speed:.{0 if speed >= 10 else 1}f} tokens/s where the context is full",
    ]
    auto = [f"{plan.auto}"] if plan.auto is not None and str(plan.auto) not in plan.warnings else []
    return [*lines, *auto, *(f"warning: {warning}" for warning in plan.warnings)]


# For plans printed from Python; set here, since the planner does not depend on their text.
Plan.__str__ = plan_as_text  # type: ignore[method-assign, assignment]


def _division(plan: Plan, way: Way) -> list[str]:
    overheads, budget = way.overheads, plan.budget
    on_gpu = plan.rank.weights.total_bytes - way.weights.saved_bytes
    is_cpu, ranks, disk_bytes = plan.platform.is_cpu, plan.num_ranks, _disk_bytes(plan, way)
    device = "Memory" if is_cpu else "GPU"
    rows = [
        (device if ranks == 1 else f"{device} of each rank", budget.limit_bytes.value, budget.limit_bytes.note),
        ("  CUDA context", budget.context_bytes.value, _origin(budget.context_bytes)),
        ("  for vLLM", 0 if is_cpu else budget.usable_bytes.value, budget.usable_bytes.note),
        ("  weights", on_gpu, _weights_note(plan, way)),
        ("  KV resident", way.kv.resident_bytes, way.kv_cache_dtype if way.kv_cache_dtype != "auto" else ""),
        ("  window", way.kv.window_bytes, "for KV that is in RAM"),
        ("  activations", overheads.activation_bytes.value, _origin(overheads.activation_bytes)),
        ("  CUDA graphs", overheads.graph_bytes.value, _origin(overheads.graph_bytes)),
        ("  libraries", overheads.non_torch_bytes.value, _origin(overheads.non_torch_bytes)),
        ("RAM", plan.ram_bytes.value, plan.ram_bytes.note),
        (
            "  weights",
            ranks * way.weights.ram_bytes,
            f"read over the link in every step; take {_pinned(way.weights, ranks)}",
        ),
        (
            "  KV spilled",
            ranks * way.kv.spilled_bytes,
            f"of requests that do not fit {'in memory' if is_cpu else 'on the GPU'}",
        ),
        ("  idle KV", ranks * way.offload_bytes, _idle_note(plan, way)),
        ("  weights' copy", ranks * way.parked_bytes if way.parks else 0, "while the engine is parked"),
        *([("Disk", disk_bytes, "for idle KV that RAM drops, and for the next start")] if disk_bytes else ()),
    ]
    return [
        f"{label:{_LABEL}}{format_size(size):>{_VALUE}}   {note}".rstrip()
        for label, size, note in rows
        if size or not label.startswith(" ")
    ]


def _disk_bytes(plan: Plan, way: Way) -> int:
    """Disk for idle KV; 0 without a pool in RAM, since every block on disk passes through it."""
    return int(read_options(plan.wishes.kv_options).get("disk_bytes") or 0) if way.offload_bytes else 0


def _idle_note(plan: Plan, way: Way) -> str:
    note = "of conversations that wait"
    if stores_lazily(way, read_options(plan.wishes.kv_options)) and not is_elastic(plan, way):
        note += ", when the GPU drops them: it holds more"
    is_half = not plan.wishes.ram_given and plan.wishes.offload_ram_bytes is None
    if is_half and 2 * plan.num_ranks * (way.offload_bytes + LEAST_OFFLOAD_BYTES) > plan.ram_bytes.value:
        note += "; half of the RAM, --offload-ram sets it"
    return note


def _pinned(weights: WeightOffload, ranks: int) -> str:
    taken = f"{format_size(ranks * weights.pinned_bytes)} pinned"
    if weights.loading_bytes == weights.pinned_bytes:
        return taken
    return f"{taken}, {format_size(ranks * weights.loading_bytes)} while they are loaded"


def _link(plan: Plan) -> list[str]:
    """Rates that limit everything in RAM. Empty on a CPU, whose copies stay within RAM."""
    if plan.platform.is_cpu:
        return []
    return [_rate("link", plan.gpu.link, "--link"), *_gpus(plan), *_cpu_attention(plan)]


def _gpus(plan: Plan) -> list[str]:
    """How ranks reach each other and RAM. GPUs behind one switch share a link, which cannot be detected here."""
    if plan.num_ranks == 1:
        return []
    between = "PCIe, if no switch is shared" if plan.gpu.nvlink is None else "NVLink"
    lines = [f"{'between GPUs':{_LABEL}}{plan.gpu.peer_link.value / 1e9:>{_VALUE - 5}.1f} GB/s   {between}"]
    for rank, gpu in enumerate(plan.gpus):
        if not gpu.is_stated:
            node = "NUMA node not known" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}"
            lines.append(f"{f'rank {rank}':{_LABEL}}{f'GPU {gpu.index}':>{_VALUE}}   {gpu.name}, {node}")
    return lines


def _cpu_attention(plan: Plan) -> list[str]:
    """Rate of CPU attention, where a way spills KV and the CPU may attend to it."""
    ways = (*plan.ways, *([plan.forced] if plan.forced is not None else []))
    if plan.cpu_attention is None or not any(way.kv.spilled_bytes for way in ways):
        return []
    if not plan.cpu_attention.value:
        return [f"{'CPU attention':{_LABEL}}{'none':>{_VALUE}}   all spilled KV streams: {plan.cpu_attention.note}"]
    return [_rate("CPU attention", plan.cpu_attention, "--cpu-attention")]


def _rate(label: str, figure: Known[int], flag: str) -> str:
    rate = f"{figure.value / 1e9:.1f} GB/s"
    how = "" if flag in figure.note else f"; {flag} states another"
    return f"{label:{_LABEL}}{rate:>{_VALUE}}   {_origin(figure)}{how}"


def _ways(plan: Plan, chosen: Way | None) -> list[str]:
    """Table of ways; `chosen` is None where all of them round KV without being requested."""
    ways = plan.ways or ((chosen,) if chosen is not None else ())
    lines = [f"{'':2}{'way':56}{'decode':>12}{'first token':>14}{'in RAM':>11}"]
    for way in ways:
        mark = "*" if way is chosen else " "
        speed, wait = way.at_once_tokens_per_s.value, way.ttft_s.value
        name, in_ram = way_name(plan, way), way.ram_bytes - plan.num_ranks * way.offload_bytes
        lines.append(f"{mark} {name:56}{speed:>8.1f} t/s{wait:>12.1f} s{format_size(in_ram):>11}")
    if chosen is None:
        what = "None is used unless requested"
    else:
        what = "* recommended" if plan.recommended is chosen else "* forced"
    at_once = plan.wishes.at_once
    whose = "for one request" if at_once == 1 else f"decode of {at_once} requests together"
    lines.append(f"{what}. Speeds are {ways[0].decode_tokens_per_s.origin}, at the full context, {whose}.")
    sheet = plan.gpu.memory_bytes_per_second
    if sheet is not None and sheet.note.startswith(AS_ON):
        lines.append(f"The GPU computes and reads its memory {sheet.note}; name a card for its own speeds.")
    return lines


def way_name(plan: Plan, way: Way) -> str:
    """The way's name as users see it: without a GPU nothing is on one."""
    return way.name.replace("on the GPU", "in memory") if plan.platform.is_cpu else way.name


def _concurrency(plan: Plan, way: Way) -> list[str]:
    fitting = ", ".join(
        f"{min(way.requests_at_once(length), plan.max_num_seqs)} of {length:,} tokens"
        for length in concurrency_lengths(plan.max_model_len)
    )
    lines = [f"Requests that fit at once: {fitting}."]
    if way.short_requests > 1:
        tokens = min(SHORT_TOKENS, plan.max_model_len)
        speed = way.short_tokens_per_s.value
        lines.append(f"{way.short_requests} at once of {tokens:,} tokens: {speed:,.0f} t/s together.")
    lines.append(longest_as_text(plan))
    if way.warm_tokens:
        disk_tokens = way.tokens_in(_disk_bytes(plan, way) // plan.num_ranks)
        disk = f"; the disk, over restarts: {disk_tokens:,}" if disk_tokens else ""
        lines.append(f"Idle KV that RAM holds: {way.warm_tokens:,} tokens{disk}.")
    elif plan.wishes.offload_ram_bytes is None:
        useful = min(way.kv.resident_bytes, 2 * way.front_bytes)
        least = format_size(plan.num_ranks * max(LEAST_OFFLOAD_BYTES, useful))
        lines.append(
            f"No idle KV is kept: less than {least} of RAM is left, and most of what would fit there is still on the "
            "GPU."
        )
    if way.ram_bytes and plan.least_ram_bytes is not None:
        lines.append(f"Least RAM for this context: {format_size(plan.least_ram_bytes)}, the engine's process included.")
    return lines


def longest_as_text(plan: Plan) -> str:
    """Sentence on the longest context with and without RAM."""
    each = "" if plan.wishes.at_once == 1 else f", {plan.wishes.at_once} at once"
    alone = f"{plan.longest_on_gpu:,} tokens" if plan.longest_on_gpu else "none"
    gpu = "memory" if plan.platform.is_cpu else "GPU"
    return f"Longest context{each}: {alone} on the {gpu} alone, {plan.longest_context:,} tokens with this RAM."


def cards_as_text(plan: Plan) -> str:
    """The table of cards alone, for a machine without a GPU."""
    ram = format_size(plan.ram_bytes.value)
    head = f"{plan.facts.name}, {plan.max_model_len:,} tokens, with {ram} of RAM ({plan.ram_bytes.note})"
    return "\n".join([head, "There is no GPU here; --gpu plans for one of these.", "", *_cards(plan)])


def cards_as_json(plan: Plan) -> dict[str, Any]:
    same = {"model": plan.facts.name, "max_model_len": plan.max_model_len, "ram_bytes": as_json(plan.ram_bytes)}
    return {**same, **_cards_as_json(plan)}


def _cards(plan: Plan) -> list[str]:
    lines = [f"{'card':18}{'memory':>10}   {'this context fits':20}{'decode':>12}{'first token':>14}"]
    for one in plan.cards:
        how = "on the GPU alone" if one.alone else "with this RAM" if one.with_ram else "-"
        speeds = ""
        if one.way is not None:
            speeds = f"{one.way.at_once_tokens_per_s.value:>8.1f} t/s{one.way.ttft_s.value:>12.1f} s"
        lines.append(f"{one.card.key:18}{format_size(one.card.total_bytes):>10}   {how:20}{speeds}".rstrip())
    whose = "for one request" if plan.wishes.at_once == 1 else f"decode of {plan.wishes.at_once} requests together"
    return [*lines, f"Speeds are assumed, at the full context, {whose}."]


def _weights_note(plan: Plan, way: Way) -> str:
    each = "" if plan.num_ranks == 1 else f", {format_size(plan.rank.weights.total_bytes)} for each rank"
    note = f"{plan.facts.weights.source}, {format_size(plan.facts.weights.total_bytes)} in all{each}"
    return f"{note}; a slot for those in RAM included" if way.weights.slot_bytes else note


def _origin(figure: Known[int]) -> str:
    return f"{figure.origin}, {figure.note}" if figure.note else str(figure.origin)
