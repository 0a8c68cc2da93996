"""Refusals: why a context does not fit, and what would work."""

from collections.abc import Iterator

from overspill.kv.sizes import GiB, MiB, format_size
from overspill.planning.attempts import PROCESS_RAM_BYTES
from overspill.planning.memory import card_bytes
from overspill.planning.planner import Plan, smallest_card
from overspill.planning.weights import least_for_weights

CPU_BUILD = (
    "Planned for vLLM's CPU build, where --gpu-memory is RAM in place of a GPU's memory; to plan for a card, use --gpu "
    "rtx4090 and leave --device cpu out"
)


def refusal(plan: Plan) -> str:
    """The refusal in one line: need, have, what would work, and with which flag."""
    need, have = need_and_have(plan)
    return f"{plan.facts.name} does not fit with {plan.max_model_len} tokens: it needs {need}; there is {have}. " + (
        " ".join(f"{remedy}." for remedy in remedies(plan))
    )


def need_and_have(plan: Plan) -> tuple[str, str]:
    need, have, in_ram = plan.need_gpu_bytes, plan.budget.limit_bytes.value, plan.least_ram_bytes
    if plan.platform.is_cpu:
        needed = f"{format_size(need)} of RAM in place of a GPU's memory (--gpu-memory)"
        beside, there = "beside that", f"{format_size(have)} of that"
    else:
        each = "" if plan.num_ranks == 1 else f" on each of {plan.num_ranks} GPUs"
        needed = f"{format_size(need)} of GPU memory{each} to need no RAM"
        beside, there = "beside this GPU" if not each else "beside these", f"{format_size(have)} of GPU memory{each}"
    if in_ram is not None:
        needed += f", or {format_size(in_ram)} of RAM {beside}"
    if in_ram is not None and plan.wishes.weights_ram_bytes:
        needed += f" with {format_size(plan.wishes.weights_ram_bytes)} of weights there, as requested"
    return needed, f"{there} and {format_size(plan.ram_bytes.value)} of RAM" + (
        " beside it" if plan.platform.is_cpu else ""
    )


def remedies(plan: Plan) -> list[str]:
    found = [*_contexts(plan)]
    if (at_once := plan.wishes.at_once) > 1:
        found.append(f"This is for {at_once:,} requests of the full length at once; fewer need less: --at-once")
    if plan.fitting_weights_ram is not None:
        found.append(f"It would fit with --weights-ram {_written(plan.fitting_weights_ram)}")
    found += _amounts_of_ram(plan)
    if plan.wishes.parks and plan.least_ram_bytes is not None:
        found.append("Without --park it needs no RAM for a copy of the weights")
    if (way := plan.lossy) is not None:
        found.append(
            f"It would fit with --kv-cache-dtype {way.kv_cache_dtype}, which rounds KV and so may change answers"
        )
    return [*found, *((CPU_BUILD,) if plan.platform.is_cpu else _cards(plan))]


def _contexts(plan: Plan) -> Iterator[str]:
    own = _own_ram_bytes(plan)
    if plan.ram_bytes.value < own:
        yield f"The engine's own process and --offload-ram need {format_size(own)} of RAM alone"
    elif plan.longest_context > plan.advised_context:
        yield f"Longest context that the model was made for: --max-model-len {plan.advised_context}"
    elif plan.longest_context:
        yield f"Longest context that fits: --max-model-len {plan.longest_context}"
    elif plan.platform.is_cpu:
        yield "No context fits beside the weights: give more with --gpu-memory, or use a smaller or a quantised model"
    elif _whole_weights(plan) is None:
        yield "No context fits beside the weights with this RAM: use a smaller or a quantised model"


def _amounts_of_ram(plan: Plan) -> Iterator[str]:
    least = plan.least_ram_bytes
    if least is not None:
        if least > plan.ram_bytes.value:
            yield f"Least RAM that would do: --ram {-(-least // GiB)}GiB"
    elif plan.platform.is_cpu:
        yield "No amount of --ram is enough with so little --gpu-memory"
    elif (why := _whole_weights(plan)) is not None:
        yield f"No amount of RAM is enough with this GPU: {why}"
    else:
        yield "No amount of RAM is enough with this GPU"


def _whole_weights(plan: Plan) -> str | None:
    """Why weights cannot move to RAM and what they need, where all must fit on the GPU first and do not; else None."""
    least = least_for_weights(plan.rank)
    if plan.platform.is_cpu or least <= plan.usable_gpu_bytes.value:
        return None
    needed = card_bytes(least, plan.budget.context_bytes.value, plan.wishes.gpu_memory_utilization)
    return (
        f"vLLM runs {plan.facts.architecture} through Transformers, which creates all layers on the GPU before any can "
        f"move to RAM, so the weights ({format_size(plan.rank.weights.total_bytes)}) must fit there once. That needs "
        f"{format_size(needed)} of GPU memory"
    )


def _cards(plan: Plan) -> Iterator[str]:
    with_ram, alone = (smallest_card(plan.cards, alone=alone) for alone in (False, True))
    if plan.wishes.weights_ram_bytes or plan.wishes.offload_groups is not None:
        alone = None  # nothing is to lie on the card alone
    if with_ram is not None and with_ram != alone:
        yield f"Smallest card that would do with this RAM: --gpu {with_ram.key}"
    if alone is not None:
        # The process and idle KV need RAM beside any card.
        own = _own_ram_bytes(plan)
        beside = f" --ram {-(-own // GiB)}GiB" if plan.ram_bytes.value < own else ""
        yield f"Smallest card that would do alone: --gpu {alone.key}{beside}"
    if with_ram is None and alone is None:
        yield "No card known here is large enough"


def _own_ram_bytes(plan: Plan) -> int:
    parked = plan.num_ranks * plan.rank.weights.total_bytes if plan.wishes.parks else 0
    return plan.num_ranks * PROCESS_RAM_BYTES + (plan.wishes.offload_ram_bytes or 0) + parked


def _written(amount: int) -> str:
    """The amount as a flag's value, rounded down, since reading it rounds up to whole layers."""
    return f"{amount // MiB}MiB" if amount >= 16 * MiB else f"{amount}B" if amount else "0"
