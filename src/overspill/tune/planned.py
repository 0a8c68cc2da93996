"""What is to be tried, found from the plan: a definition, and nothing started yet."""

from collections.abc import Mapping, Sequence
from typing import Any

from overspill.hardware import Hardware, detect
from overspill.launch.launch import Launch
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.planning.setup import Setup, nothing_measured
from overspill.tune.candidates import TUNABLE, Replan, find_candidates
from overspill.tune.definition import Definition
from overspill.tune.errors import CannotTune
from overspill.tune.goals import Goal, choose_workload, does_return, one_prompt
from overspill.tune.subject import Subject, current_candidate


def define(
    subject: Subject,
    *,
    model: str,
    goal: Goal,
    given: Mapping[str, Any],
    workload: str | None = None,
    seed: int = 0,
    repeats: int = 3,
    allow_fp8: bool = False,
    least_tokens_per_s: float = 0.0,
    most: int | None = None,
) -> Definition:
    """Finds what is to be tried; starts nothing. Raises if nothing fits."""
    hardware = detect()
    plan = _replan(subject, given, hardware)({})
    pinned = {name: value for name, value in _memory(plan).items() if given.get(name) is None}
    replan = _replan(subject, {**pinned, **given}, hardware)
    if goal is Goal.CONTEXT:
        longest, dtype = _longest(plan, replan, allow_fp8=allow_fp8)
        return Definition(
            model=model, name=subject.name, goal=goal, workload=one_prompt(longest).as_text(), seed=seed, repeats=1,
            given=given, pinned=pinned, longest=longest, least_tokens_per_s=least_tokens_per_s, kv_cache_dtype=dtype,
            subject=subject,
        )  # fmt: skip
    plan = replan({})
    _require_fit(plan, allow_fp8=allow_fp8)
    sent = choose_workload(goal, workload, plan.max_model_len)
    fixed = subject.fixed | {name for name in TUNABLE if given.get(name) is not None}
    candidates = find_candidates(
        plan, replan, fixed=fixed, returns=does_return(sent), allow_fp8=allow_fp8,
        current=current_candidate(subject, replan, given, plan.max_model_len),
    )  # fmt: skip
    return Definition(
        model=model, name=subject.name, goal=goal, workload=sent.as_text(), seed=seed, repeats=repeats, given=given,
        pinned=pinned, candidates=candidates[:most], subject=subject,
    )  # fmt: skip


def _replan(subject: Subject, given: Mapping[str, Any], hardware: Hardware) -> Replan:
    def replan(settings: Mapping[str, Any]) -> Plan:
        return Launch.of(subject.named, {**given, **settings}, found=hardware).plan

    return replan


def _memory(plan: Plan) -> dict[str, int]:
    """What candidates may use: found once, since what is free changes while they are tried."""
    found = {"ram": plan.ram_bytes.value}
    return {**found, "gpu_memory": plan.gpu.total_bytes.value} if plan.platform.is_cpu else found


def _require_fit(plan: Plan, *, allow_fp8: bool) -> None:
    way = plan.chosen or plan.lossy
    if way is None:
        raise CannotTune(refusal(plan))
    if not way.is_exact and not allow_fp8:
        longest = f", or --max-model-len {plan.advised_context}" if plan.advised_context else ""
        raise CannotTune(
            f"{plan.max_model_len} tokens fit with KV in {way.kv_cache_dtype} only, which may change answers; "
            f"use --allow-fp8{longest}"
        )


def _longest(plan: Plan, replan: Replan, *, allow_fp8: bool) -> tuple[int, str | None]:
    """Where to begin, and the KV dtype that it needs if that is not the model's."""
    exact = _bounded(plan, plan.longest_context)
    if allow_fp8 and any(dtype != "auto" for dtype in _dtypes(plan)):
        small = replan({"kv_cache_dtype": "fp8"})
        if (length := _bounded(small, small.longest_context)) > exact:
            return length, "fp8"
    if not exact:
        raise CannotTune(refusal(plan))
    return exact, None


def _bounded(plan: Plan, length: int) -> int:
    """By what was asked for, and by what the model was made for."""
    return min(length, plan.wishes.max_model_len or plan.facts.max_position_embeddings)


def _dtypes(plan: Plan) -> Sequence[str]:
    setup = Setup(
        facts=plan.facts, gpu=plan.gpu, ram_bytes=plan.ram_bytes, wishes=plan.wishes, platform=plan.platform,
        profiles=nothing_measured,
    )  # fmt: skip
    return [dtype for dtype, _ in setup.kv_cache_dtypes]
