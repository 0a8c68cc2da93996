"""Goals of a tuning: what is to be best, by which measure it is judged, and the workload that goes with it."""

from dataclasses import dataclass
from enum import StrEnum

from overspill.measure import MeasureError
from overspill.measure.compare import BY_KEY, Measure
from overspill.measure.workload import WORKLOADS, Workload, parse_workload, require_fit, write_script


class Goal(StrEnum):
    THROUGHPUT = "throughput"
    TTFT = "ttft"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    measure: Measure
    workload: str
    """Conversations return, so that RAM for idle KV is of use if it is of use at all."""


_AIMS = {
    Goal.THROUGHPUT: Aim(
        measure=BY_KEY["output_throughput"],
        workload="multi-turn:conversations=24,turns=3,first=1024,input=256,think_time=0,concurrency=24",
    ),
    Goal.TTFT: Aim(
        measure=BY_KEY["mean_ttft_ms"],
        workload="multi-turn:conversations=12,turns=3,first=2048,input=256,output=64,think_time=0.5,concurrency=4",
    ),
    # One request of the whole length; what counts beside its answer is the time for each of its tokens.
    Goal.CONTEXT: Aim(measure=BY_KEY["mean_tpot_ms"], workload="offline:requests=1"),
}
_ANSWER_TOKENS = 32


def parse_goal(text: str) -> Goal:
    try:
        return Goal(text)
    except ValueError:
        raise MeasureError(f"--goal {text!r:.40} is not known; use {', '.join(Goal)}") from None


def measure_of(goal: Goal) -> Measure:
    return _AIMS[goal].measure


def choose_workload(goal: Goal, given: str | None, max_model_len: int) -> Workload:
    """The one given, or the goal's own, made shorter where the context is."""
    if given is None:
        return shortened(parse_workload(_AIMS[goal].workload), max_model_len)
    try:
        workload = parse_workload(given)
    except MeasureError as error:
        raise MeasureError(f"--workload: {error}") from error
    require_fit(workload, 0, max_model_len)
    return workload


def shortened(workload: Workload, max_model_len: int) -> Workload:
    """All lengths by the same share, until the longest request fits."""
    names = WORKLOADS[workload.name].shortened_by
    for share in (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.01):
        lengths = {name: max(1, int(workload.parameters[name] * share)) for name in names}
        fitting = Workload(name=workload.name, parameters={**workload.parameters, **lengths})
        if write_script(fitting, 0).longest <= max_model_len:
            return fitting
    raise MeasureError(f"{max_model_len} tokens are too few for any workload; give a longer --max-model-len")


def one_prompt(length: int) -> Workload:
    """A request that fills a context."""
    output = min(_ANSWER_TOKENS, max(2, length // 8))
    return parse_workload(f"offline:requests=1,input={length - output},output={output}")


def does_return(workload: Workload) -> bool:
    """Whether something is sent again; if not, nothing can be learned about keeping it."""
    return write_script(workload, 0).known_tokens > 0
