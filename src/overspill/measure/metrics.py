"""Metrics: throughput and latencies as `vllm bench serve` defines and names them, and the server's counters."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.target import Answer, Target, ask
from overspill.measure.workload import Script

Counters = Mapping[str, float]
Counted = Mapping[str, int | float | None]

LATENCIES = ("ttft", "tpot", "itl", "e2el")
_VLLM = {
    "vllm:external_prefix_cache_hits_total": "tokens_from_ram",
    "vllm:prefix_cache_hits_total": "tokens_from_gpu_cache",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_preemptions_total": "preemptions",
}
SERVED = tuple(_VLLM.values())
_DRAFTS = {  # only from servers with speculative decoding
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}
_SPILL = ("spilled_steps", "spill_in_bytes", "spill_out_bytes")
# The manager's /metrics has all its engines' counters, distinguished by this label; vLLM's own has no such label.
_MODEL = "model"
_OF_THE_MANAGER = "overspill_manager_"


def read_counters(target: Target, **how: float) -> Counters | None:
    """Counters from /metrics; None if the server has none, or is gone. `how` is as for `ask`."""
    try:
        answer = ask(target, "/metrics", **how)
    except CannotMeasure:
        return None
    return parse_counters(answer.text, target.model) if answer.status_code == 200 else None


def parse_counters(text: str, model: str) -> Counters | None:
    """vLLM's and Overspill's counters by their names in results, summed over a server's engines; of a manager's
    servers only the one that serves this model counts."""
    found: dict[str, float] = {}
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:  # another program's page
        return None
    for sample in samples:
        name = (_VLLM | _DRAFTS).get(sample.name)
        if name is None and sample.name.startswith("overspill_") and sample.name.endswith("_total"):
            name = sample.name.removeprefix("overspill_").removesuffix("_total")
        is_of_model = sample.labels.get(_MODEL) in (None, model)
        if name is not None and is_of_model and not sample.name.startswith(_OF_THE_MANAGER):
            found[name] = found.get(name, 0.0) + sample.value
    return found or None


def difference(before: Counters | None, after: Counters | None) -> dict[str, int | float | None]:
    """Growth of each counter; None for one that is missing or was reset."""
    names = dict.fromkeys((*SERVED, *_SPILL, *(after or {})))
    if before is None or after is None:
        return dict.fromkeys(names)
    found: dict[str, int | float | None] = {}
    for name in names:
        grown = after.get(name, -1.0) - before.get(name, 0.0)
        found[name] = None if grown < 0 else int(grown) if grown.is_integer() else grown
    return found


def total(one: Counted, other: Counted) -> dict[str, int | float | None]:
    """Counters of two parts of a measurement, added; None where one part lacks the counter."""
    known: dict[str, int | float | None] = {}
    for name in dict.fromkeys((*one, *other)):
        first, second = one.get(name), other.get(name)
        known[name] = None if first is None or second is None else first + second
    return known


def serving_metrics(answers: Iterable[Answer], *, duration: float, failed: int) -> dict[str, Any]:
    answered = list(answers)
    inputs = sum(answer.prompt_tokens for answer in answered)
    outputs = sum(answer.output_tokens for answer in answered)
    per_second = 1 / duration if duration > 0 else 0.0
    # In seconds. An answer of one token has no time per output token.
    latencies = {
        "ttft": [answer.ttft for answer in answered],
        "tpot": [(one.latency - one.ttft) / (one.output_tokens - 1) for one in answered if one.output_tokens > 1],
        "itl": [gap for answer in answered for gap in answer.gaps],
        "e2el": [answer.latency for answer in answered],
    }
    metrics: dict[str, Any] = {
        "duration": duration,
        "completed": len(answered),
        "failed": failed,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(answered) * per_second,
        "output_throughput": outputs * per_second,
        "total_token_throughput": (inputs + outputs) * per_second,
    }
    for name, values in latencies.items():
        metrics |= summary(name, values)
    return metrics


Limits = Mapping[str, float]
"""Upper limits in milliseconds, by name of the latency."""
_LIMITED = ("ttft", "tpot", "e2el")


def parse_limits(text: str) -> Limits:
    """Parse `ttft:500,tpot:50`, the limits of `vllm bench serve --goodput`."""
    limits: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, given = part.partition(":")
        try:
            limit = float(given)
        except ValueError:
            limit = math.nan
        if name not in _LIMITED or not 0 < limit < math.inf or name in limits:
            raise MeasureError(
                f"--goodput {text!r:.60} is not limits in milliseconds; write for example ttft:500,tpot:50, of "
                f"{', '.join(_LIMITED)}"
            )
        limits[name] = limit
    if not limits:
        raise MeasureError("--goodput is empty; write for example ttft:500,tpot:50")
    return limits


def limits_as_text(limits: Limits) -> str:
    return ",".join(f"{name}:{limit:g}" for name, limit in limits.items())


def goodput_metrics(metrics: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """Count, rate and share of requests within all limits, with unanswered ones outside; the rate has vLLM's name."""
    requests = list(zip(metrics["ttfts"], metrics["latencies"], metrics["output_lens"], strict=True))
    good = sum(_keeps(ttft, latency, tokens, limits) for ttft, latency, tokens in requests if ttft is not None)
    duration = metrics["duration"]
    return {
        "good_requests": good,
        "request_goodput": good / duration if duration > 0 else 0.0,
        "goodput_percent": 100 * good / len(requests) if requests else 0.0,
    }


def _keeps(ttft: float, latency: float, tokens: int, limits: Limits) -> bool:
    # An answer of one token has no time per output token, so none that is too long.
    took = {"ttft": ttft, "tpot": (latency - ttft) / (tokens - 1) if tokens > 1 else 0.0, "e2el": latency}
    return all(1000 * took[name] <= limit for name, limit in limits.items())


def summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Statistics in milliseconds; 0 for no values, as in vLLM."""
    return {
        f"mean_{name}_ms": 1000 * mean(seconds),
        f"median_{name}_ms": 1000 * percentile(seconds, 50),
        f"std_{name}_ms": 1000 * deviation(seconds),
        f"p90_{name}_ms": 1000 * percentile(seconds, 90),
        f"p99_{name}_ms": 1000 * percentile(seconds, 99),
    }


def phase_metrics(script: Script, answers: Mapping[int, Answer]) -> dict[str, Any]:
    """TTFT of new prompts, and of prompts whose beginning was sent or answered before."""
    metrics: dict[str, Any] = {}
    phases = {step.phase for step in script.steps}
    for phase in sorted(phases) if len(phases) > 1 else ():
        found = [answers[step.index].ttft for step in script.steps if step.phase == phase and step.index in answers]
        metrics[f"{phase}_completed"] = len(found)
        metrics |= {f"{phase}_{name}": value if found else None for name, value in summary("ttft", found).items()}
    return metrics


def request_columns(script: Script, answers: Mapping[int, Answer]) -> dict[str, list[Any]]:
    """Lists with one entry per request, in order; None for unanswered requests."""
    found = [answers.get(step.index) for step in script.steps]
    return {
        "input_lens": [each and each.prompt_tokens for each in found],
        "output_lens": [each and each.output_tokens for each in found],
        "ttfts": [each and round(each.ttft, 6) for each in found],
        "latencies": [each and round(each.latency, 6) for each in found],
        "start_times": [each and round(each.started_s, 6) for each in found],
    }


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """Population standard deviation, not the sample's, as in numpy.std."""
    middle = mean(values)
    return math.sqrt(mean([(value - middle) ** 2 for value in values]))


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile, interpolated linearly between the closest two values, as in numpy.percentile."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    lower = int(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)
