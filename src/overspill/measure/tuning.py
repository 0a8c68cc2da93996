"""Definitions of tunings: goal, workload and candidates, derived from the plan, or loaded from stored results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from overspill.hardware import Hardware, detect
from overspill.kv.errors import OverspillError
from overspill.launch.launch import Launch
from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.candidates import TUNABLE, Candidate, Replan, find_candidates
from overspill.measure.compare import BY_KEY, Measure
from overspill.measure.subject import Subject, current_candidate, find_subject, registered_subject, resumed
from overspill.measure.trial import Definition
from overspill.measure.workload import WORKLOADS, Workload, parse_workload, require_fit, shortened, write_script
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.planning.setup import Setup, nothing_measured
from overspill.registry import Registry, Result
from overspill.settings import AUTO, parse_duration, parse_settings


class Goal(StrEnum):
    THROUGHPUT = "throughput"
    TTFT = "ttft"
    CONTEXT = "context"


_MEASURES = {
    Goal.THROUGHPUT: BY_KEY["output_throughput"],
    Goal.TTFT: BY_KEY["mean_ttft_ms"],
    # Measured on one request of the full length; besides its success, the time per output token counts.
    Goal.CONTEXT: BY_KEY["mean_tpot_ms"],
}
# Conversations return, so that RAM for idle KV helps if it can help at all.
_WORKLOADS = {
    Goal.THROUGHPUT: "multi-turn:conversations=24,turns=3,first=1024,input=256,think_time=0,concurrency=24",
    Goal.TTFT: "multi-turn:conversations=12,turns=3,first=2048,input=256,output=64,think_time=0.5,concurrency=4",
}
_ANSWER_TOKENS = 32


def parse_goal(text: str) -> Goal:
    try:
        return Goal(text)
    except ValueError:
        raise MeasureError(f"--goal {text!r:.40} is not known; use {', '.join(Goal)}") from None


def measure_of(goal: Goal) -> Measure:
    return _MEASURES[goal]


def choose_workload(goal: Goal, given: str | None, max_model_len: int) -> Workload:
    """The given workload, or the goal's own, shortened to fit the context."""
    if given is None:
        own = parse_workload(_WORKLOADS[goal])
        if (fitting := shortened(own, 0, max_model_len, *WORKLOADS[own.name].shortened_by)) is None:
            raise MeasureError(f"{max_model_len} tokens are too few for any workload; give a longer --max-model-len")
        return fitting
    try:
        workload = parse_workload(given)
    except MeasureError as error:
        raise MeasureError(f"--workload: {error}") from error
    require_fit(workload, 0, max_model_len)
    return workload


def one_prompt(length: int) -> Workload:
    """Workload of one request that fills a context of this length."""
    output = min(_ANSWER_TOKENS, max(2, length // 8))
    return parse_workload(f"offline:requests=1,input={length - output},output={output}")


def does_return(workload: Workload) -> bool:
    """Whether any prompt repeats earlier tokens; if none does, nothing can be learned about keeping KV."""
    return write_script(workload, 0).known_tokens > 0


_NOT_OF_CONTEXT = {
    "workload": "sends one prompt of the length that is tried; leave out --workload",
    "repeats": "tries each length once; leave out --repeats",
    "most": "tries lengths, each chosen by the result of the last one; leave out --candidates, and give --budget to "
    "end it in time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning(Definition):
    COMMAND: ClassVar[str] = "tune"
    KEY: ClassVar[str] = "tuning"
    MOST_REPEATS: ClassVar[int] = 100

    name: str
    """Model's name in the registry, now or once the best is kept."""
    goal: Goal
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings given in the command: not varied, and saved with the best."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """Memory and device when candidates were planned, so that all are planned alike; not saved with the best."""
    candidates: tuple[Candidate, ...] = ()
    """Candidates to try; empty for `context`."""
    longest: int = 0
    """Length that a search for `context` begins with."""
    least_tokens_per_s: float = 0.0
    kv_cache_dtype: str | None = None
    """KV dtype smaller than the model's, for `context` if allowed and needed; else None."""
    subject: Subject | None = None
    """The model when the tuning began; None in tunings stored by versions that did not record it."""

    def of_length(self, length: int) -> Candidate:
        settings: dict[str, Any] = {"max_model_len": length}
        if self.kv_cache_dtype is not None:
            settings["kv_cache_dtype"] = self.kv_cache_dtype
        return Candidate(label=f"{length} tokens", settings=settings, is_exact=self.kv_cache_dtype is None)

    def tried(self, results: Sequence[Result]) -> Sequence[Candidate]:
        """Candidates, or for `context` the lengths tried so far, longest first."""
        if self.goal is not Goal.CONTEXT:
            return self.candidates
        return [self.of_length(length) for length in sorted({length_of(one) for one in results}, reverse=True)]


def length_of(result: Result) -> int:
    return int(result.config["candidate"]["settings"]["max_model_len"])


def parse_budget(text: str) -> float:
    try:
        return float(parse_duration(text))
    except OverspillError as error:
        raise MeasureError(f"--budget: {error}") from error


def prepare(
    registry: Registry, resume: str | None, *, model: str | None, name: str | None, goal: str | None,
    given: Mapping[str, Any], **how: Any,
) -> tuple[Tuning, Subject]:  # fmt: skip
    """The tuning to run and the model in its current state; arguments are None if not given."""
    settings = {key: value for key, value in given.items() if value is not None}
    how = {key: value for key, value in how.items() if value is not None}
    if resume is not None:
        stored, results = Tuning.load(registry, resume)
        if extra := [*settings, *how, *(key for key, value in (("name", name), ("goal", goal)) if value is not None)]:
            flag = {"most": "candidates"}.get(extra[0], extra[0]).replace("_", "-")
            raise MeasureError(f"--{flag} cannot be given with --resume: it is that of {resume}; leave it out")
        if model not in (None, stored.model):
            raise MeasureError(f"{resume} is a tuning of {stored.model}, and not of {model}; leave out the model")
        if stored.subject is None:
            return stored, find_subject(registry, stored.model, stored.name, opens=_opens(stored.goal))
        now = registered_subject(registry, stored.name)
        return stored, resumed(stored.subject, now, stored.given, stored.tried(results))
    if model is None:
        raise MeasureError("name a model: overspill tune MODEL --goal throughput")
    if model.startswith("-"):
        raise MeasureError(f"the model comes first; {model!r:.60} is a flag")
    aim = parse_goal(goal or Goal.THROUGHPUT)
    if aim is Goal.CONTEXT and (extra := [key for key in _NOT_OF_CONTEXT if key in how]):
        raise MeasureError(f"--goal context {_NOT_OF_CONTEXT[extra[0]]}")
    parsed = parse_settings(settings)
    if aim is Goal.CONTEXT:  # this goal measures what `auto` predicts
        how["least_tokens_per_s"] = parsed.get("min_speed", 0.0)
        predicted = {"min_speed"} | ({"max_model_len"} if parsed.get("max_model_len") == AUTO else set())
        settings = {key: value for key, value in settings.items() if key not in predicted}
    subject = find_subject(registry, model, name, opens=_opens(aim))
    return define(subject, model=model, goal=aim, given=settings, **how), subject


def _opens(goal: Goal) -> tuple[str, ...]:
    return ("max_model_len",) if goal is Goal.CONTEXT else ()


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
    device: str | None = None,
) -> Tuning:
    """Find the candidates to try, without starting any; raises if nothing fits."""
    hardware = detect()
    on = {} if device is None else {"device": device}
    plan = _replan(subject, {**on, **given}, hardware)({})
    if plan.auto is not None:
        given = {**given, "max_model_len": plan.max_model_len}
        given.pop("min_speed", None)
    # Memory that candidates may use, determined once: free memory changes while they are tried.
    memory = {"ram": plan.ram_bytes.value}
    memory |= {"gpu_memory": plan.gpu.total_bytes.value} if plan.platform.is_cpu else {}
    pinned = on | {name: value for name, value in memory.items() if given.get(name) is None}
    replan = _replan(subject, {**pinned, **given}, hardware)
    way, alike = plan.chosen, replan({}).chosen
    if way is not None and alike is not None and alike.offload_bytes > way.offload_bytes:
        # A plan uses all of a given amount of RAM, but only half of free RAM: candidates get what a server would.
        pinned["offload_ram"] = way.num_ranks * way.offload_bytes
        replan = _replan(subject, {**pinned, **given}, hardware)
    if goal is Goal.CONTEXT:
        longest, dtype = _longest(plan, replan, allow_fp8=allow_fp8)
        return Tuning(
            model=model, name=subject.name, goal=goal, workload=one_prompt(longest).as_text(), seed=seed, repeats=1,
            given=given, pinned=pinned, longest=longest, least_tokens_per_s=least_tokens_per_s, kv_cache_dtype=dtype,
            subject=subject,
        )  # fmt: skip
    plan = replan({})
    _require_fit(plan, allow_fp8=allow_fp8)
    sent = choose_workload(goal, workload, plan.max_model_len)
    candidates = find_candidates(
        plan, replan, fixed=subject.fixed | {name for name in TUNABLE if given.get(name) is not None},
        returns=does_return(sent), allow_fp8=allow_fp8,
        current=current_candidate(subject, replan, given, plan.max_model_len),
    )  # fmt: skip
    return Tuning(
        model=model, name=subject.name, goal=goal, workload=sent.as_text(), seed=seed, repeats=repeats, given=given,
        pinned=pinned, candidates=candidates[:most], subject=subject,
    )  # fmt: skip


def _replan(subject: Subject, given: Mapping[str, Any], hardware: Hardware) -> Replan:
    def replan(settings: Mapping[str, Any]) -> Plan:
        return Launch.of(subject.named, {**given, **settings}, found=hardware).plan

    return replan


def _require_fit(plan: Plan, *, allow_fp8: bool) -> None:
    way = plan.chosen or plan.lossy
    if way is None:
        raise CannotMeasure(refusal(plan))
    if not way.is_exact and not allow_fp8:
        longest = f", or --max-model-len {plan.advised_context}" if plan.advised_context else ""
        raise CannotMeasure(
            f"{plan.max_model_len} tokens fit with KV in {way.kv_cache_dtype} only, which may change answers; "
            f"use --allow-fp8{longest}"
        )


def _longest(plan: Plan, replan: Replan, *, allow_fp8: bool) -> tuple[int, str | None]:
    """Length to begin with, and the KV dtype it needs; None for the model's own."""
    exact = _bounded(plan)
    setup = Setup(
        facts=plan.rank, gpu=plan.gpu, ram_bytes=plan.ram_bytes, wishes=plan.wishes, platform=plan.platform,
        profiles=nothing_measured,
    )  # fmt: skip
    can_be_smaller = allow_fp8 and any(dtype != "auto" for dtype, _ in setup.kv_cache_dtypes)
    if can_be_smaller and (length := _bounded(replan({"kv_cache_dtype": "fp8"}))) > exact:
        return length, "fp8"
    if not exact:
        raise CannotMeasure(refusal(plan))
    return exact, None


def _bounded(plan: Plan) -> int:
    """Longest context that fits, at most the user's wish or else the model's limit."""
    return min(plan.longest_context, plan.wishes.max_model_len or plan.facts.max_position_embeddings)
