"""Differences between the plan and the started engine, decided from their figures alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from overspill.figures import Origin
from overspill.kv.sizes import format_size
from overspill.planning.memory import SLACK_BYTES, Profile
from overspill.planning.planner import Plan
from overspill.planning.ways import Way
from overspill.serve.engine_report import HostMemoryReport, Report

# Accuracy the plan promises for memory (docs/plan.md). Rounding to blocks and sizes measured anew at every start
# stay below it; a mechanism that did not work at all is far above.
_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    what: str
    planned: str
    happened: str
    remedy: str
    stops: bool
    """Whether the user would not get what was planned, so that serve stops the engine; else it is only reported."""

    def __str__(self) -> str:
        return f"{self.what}: planned {self.planned}, got {self.happened}. {self.remedy}"


def differences(plan: Plan, way: Way, report: Report) -> list[Difference]:
    """Differences in one worker's report; empty if everything is as planned."""
    return [
        *_context(plan, report),
        *_shortfalls(way, report),
        *_kv(plan, way, report),
        *_excess(plan, way, report),
        *_pinning("pool", "host_bytes", report.pool),
        *_pinning("arena", "spill_bytes", report.arena),
    ]


def confirmations(way: Way, report: Report, *, on_cpu: bool, elastic: bool = False) -> list[str]:
    """Lines on what a worker holds and where: weights, KV, the spill arena and the offload pool."""
    device = "in vLLM's memory" if on_cpu else "on the GPU"
    lines = []
    if report.weights_bytes is not None:
        lines.append(f"weights: {format_size(report.weights_bytes)} {device}")
    if way.weights.ram_bytes and report.weights_in_ram_bytes is not None:
        lines.append(f"weights in RAM: {format_size(report.weights_in_ram_bytes)}, by {report.offloader}")
    if report.kv_bytes is not None:
        most = "up to " if elastic else ""
        lines.append(f"KV cache: {most}{format_size(_on_device(report))} {device}")
    if report.spilled_bytes:
        window = format_size(report.window_bytes or 0)
        lines.append(f"spill: {format_size(report.spilled_bytes)} in RAM, through a window of {window}")
    if report.pool is not None:
        lines.append(f"idle KV: a pool of {format_size(report.pool.num_bytes)} in RAM")
    return lines


def _on_device(report: Report) -> int:
    kv = report.kv_bytes or 0
    return report.resident_bytes if report.resident_bytes is not None else kv


def _is_less(got: int, planned: int) -> bool:
    return got < planned * (1 - _TOLERANCE)


def _context(plan: Plan, report: Report) -> Iterator[Difference]:
    if report.max_model_len is not None and report.max_model_len != plan.max_model_len:
        yield Difference(
            what="longest context",
            planned=f"{plan.max_model_len:,} tokens",
            happened=f"{report.max_model_len:,}",
            remedy=f"Use --max-model-len {report.max_model_len}.",
            stops=report.max_model_len < plan.max_model_len,
        )


def _shortfalls(way: Way, report: Report) -> Iterator[Difference]:
    """Mechanisms that moved less than planned, or nothing."""
    mechanisms = (
        ("weights in RAM", way.weights.ram_bytes, report.weights_in_ram_bytes, f" ({report.offloader})",
         "vLLM's offloader did not reach these layers; set VLLM_USE_V2_MODEL_RUNNER=0, or take a smaller model."),
        ("KV that can spill to RAM", way.kv.spilled_bytes, report.spilled_bytes, "",
         "Requests longer than the GPU's KV cache would not run; see vLLM's log for what spill says."),
        ("offload pool", way.offload_bytes, report.pool.num_bytes if report.pool else 0, "",
         "Conversations would not be kept in RAM; see vLLM's log for what offload says."),
    )  # fmt: skip
    for what, planned, got, by, remedy in mechanisms:
        if planned and _is_less(got or 0, planned):
            happened = f"{format_size(got or 0)}{by}"
            yield Difference(what=what, planned=format_size(planned), happened=happened, remedy=remedy, stops=True)


def _kv(plan: Plan, way: Way, report: Report) -> Iterator[Difference]:
    """Yield a difference for less KV than planned. It stops nothing while the overheads are a guess: they are measured
    now, and the context fits, or vLLM would not have started."""
    if report.kv_bytes is None or not _is_less(got := _on_device(report), planned := way.kv.resident_bytes):
        return
    is_guess = _is_guess(way)
    if is_guess:
        remedy = _MEASURED_NOW
    elif report.excess_bytes is None:
        remedy = "Something else took memory while vLLM started; end it, or give less with --gpu-memory."
    else:
        remedy = "The engine takes more memory beside KV than an earlier one did; give more with --gpu-memory."
    yield Difference(
        what="KV cache", planned=format_size(planned), happened=format_size(got), remedy=remedy, stops=not is_guess
    )


_MEASURED_NOW = (
    "What the engine takes beside KV was assumed and has now been measured: the next plan uses the measurement."
)


def _is_guess(way: Way) -> bool:
    return way.overheads.total.origin is Origin.ASSUMED


def _excess(plan: Plan, way: Way, report: Report) -> Iterator[Difference]:
    """Yield a difference for GPU memory beyond the budget: graphs are captured after KV has its memory, and whatever
    exceeds the plan's slack for late allocations is taken from a neighbour."""
    if (excess := report.excess_bytes or 0) <= SLACK_BYTES:
        return
    budget, is_guess = plan.usable_gpu_bytes.value, _is_guess(way)
    yield Difference(
        what="GPU memory",
        planned=format_size(budget),
        happened=f"{format_size(budget + excess)}, of which {format_size(report.graph_bytes or 0)} for CUDA graphs",
        remedy=_MEASURED_NOW
        if is_guess
        else "Give it fewer --max-num-seqs, --enforce-eager, or less KV with --gpu-memory.",
        stops=not is_guess,
    )


def _pinning(name: str, option: str, memory: HostMemoryReport | None) -> Iterator[Difference]:
    """Yield a difference if pinning was refused, not while it is unfinished: it continues while the engine serves."""
    if memory is not None and memory.refused:
        yield Difference(
            what=f"pinned {name}",
            planned=format_size(memory.num_bytes),
            happened=f"{format_size(memory.pinned_bytes)} ({memory.refused})",
            remedy=f"Raise the limit with ulimit -l unlimited, or give less RAM with --ram ({option}).",
            stops=True,
        )


def profile_of(report: Report) -> Profile | None:
    """The measured memory profile; None where vLLM did not profile."""
    sizes = (report.non_torch_bytes, report.activation_bytes, report.graph_bytes, report.context_bytes)
    non_torch, activation, graph, context = sizes
    if non_torch is None or activation is None or graph is None or context is None:
        return None
    return Profile(non_torch_bytes=non_torch, activation_bytes=activation, graph_bytes=graph, context_bytes=context)
