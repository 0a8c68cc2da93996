"""Why a context does not fit, and what would work."""

from overspill.kv.sizes import GiB, MiB, format_size
from overspill.planning.attempts import PROCESS_RAM_BYTES
from overspill.planning.card_fits import smallest_card
from overspill.planning.installed import Vllm
from overspill.planning.planner import Plan


def refusal(plan: Plan) -> str:
    """One line: need, have, what would work, and with which flag."""
    need, have = need_and_have(plan)
    return f"{plan.facts.name} does not fit with {plan.max_model_len} tokens: it needs {need}; there is {have}. " + (
        " ".join(f"{remedy}." for remedy in remedies(plan))
    )


def wrong_build(plan: Plan, vllm: Vllm) -> str | None:
    """A plan can be made for any machine; an engine needs the vLLM that is here."""
    if vllm.is_cpu == plan.platform.is_cpu:
        return None
    build, other = ("CPU", "cpu") if vllm.is_cpu else ("CUDA", "cuda")
    return (
        f"the plan is for {plan.platform.name}, and vLLM's {build} build is installed, which cannot run it; use "
        f"--device {other}, or install the other build"
    )


def need_and_have(plan: Plan) -> tuple[str, str]:
    on_gpu = f"{format_size(plan.need_gpu_bytes)} of GPU memory to be without RAM"
    in_ram = plan.least_ram_bytes
    need = on_gpu if in_ram is None else f"{on_gpu}, or {format_size(in_ram)} of RAM beside this GPU"
    if in_ram is not None and plan.wishes.weights_ram_bytes:
        need += f" with {format_size(plan.wishes.weights_ram_bytes)} of weights there, as asked"
    have = f"{format_size(plan.budget.limit_bytes.value)} of GPU memory and {format_size(plan.ram_bytes.value)} of RAM"
    return need, have


def remedies(plan: Plan) -> list[str]:
    found = []
    own = PROCESS_RAM_BYTES + (plan.wishes.offload_ram_bytes or 0)
    if plan.ram_bytes.value < own:
        found.append(f"The engine's own process and --offload-ram need {format_size(own)} of RAM alone")
    elif plan.longest_context:
        found.append(f"Longest context that fits: --max-model-len {plan.longest_context}")
    else:
        found.append("No context fits beside the weights with this RAM: use a smaller or a quantised model")
    if plan.fitting_weights_ram is not None:
        found.append(f"It would fit with --weights-ram {_written(plan.fitting_weights_ram)}")
    if plan.least_ram_bytes is None:
        found.append("No amount of RAM is enough with this GPU")
    elif plan.least_ram_bytes > plan.ram_bytes.value:
        found.append(f"Least RAM that would do: --ram {-(-plan.least_ram_bytes // GiB)}GiB")
    with_ram, alone = (smallest_card(plan.cards, alone=alone) for alone in (False, True))
    if with_ram is not None and with_ram != alone:
        found.append(f"Smallest card that would do with this RAM: --gpu {with_ram.key}")
    if alone is not None:
        # The process, and KV that is kept for later, need RAM beside any card.
        beside = f" --ram {-(-own // GiB)}GiB" if plan.ram_bytes.value < own else ""
        found.append(f"Smallest card that would do alone: --gpu {alone.key}{beside}")
    if with_ram is None and alone is None:
        found.append("No card known here is large enough")
    return found


def _written(amount: int) -> str:
    """Rounded down: an amount is rounded up to whole layers when it is read."""
    return f"{amount // MiB}MiB" if amount >= 16 * MiB else f"{amount}B" if amount else "0"
