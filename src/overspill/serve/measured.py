"""What a start measured, kept for the next plan."""

from overspill.figures import Origin
from overspill.hardware.gpu import Gpu
from overspill.planning.installed import Vllm
from overspill.planning.planner import Plan
from overspill.planning.profiles import Profile, fingerprint, remember
from overspill.planning.ways import Way
from overspill.serve.report import Report


def profile_of(report: Report) -> Profile | None:
    """None where vLLM did not profile."""
    sizes = (report.non_torch_bytes, report.activation_bytes, report.graph_bytes, report.context_bytes)
    non_torch, activation, graph, context = sizes
    if non_torch is None or activation is None or graph is None or context is None:
        return None
    return Profile(non_torch_bytes=non_torch, activation_bytes=activation, graph_bytes=graph, context_bytes=context)


def remember_profile(plan: Plan, way: Way, report: Report, vllm: Vllm) -> None:
    if (profile := profile_of(report)) is None:
        return
    remember(
        fingerprint(
            plan.facts, plan.gpu, vllm_version=vllm.version, max_num_batched_tokens=way.max_num_batched_tokens,
            max_num_seqs=plan.max_num_seqs, enforce_eager=plan.wishes.enforce_eager,
            kv_cache_dtype=way.kv_cache_dtype,
        ),
        profile,
        measured_link(plan.gpu),
    )  # fmt: skip


def measured_link(gpu: Gpu) -> tuple[int, int] | None:
    """Bytes per second to the device and back; None where they are not measured."""
    rates = (gpu.link.h2d_bytes_per_second, gpu.link.d2h_bytes_per_second)
    if any(rate.origin is not Origin.MEASURED for rate in rates):
        return None
    return rates[0].value, rates[1].value
