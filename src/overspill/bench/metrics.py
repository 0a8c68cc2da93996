"""Throughput and latencies by the definitions and under the names of `vllm bench serve`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from overspill.bench.client import Answer
from overspill.bench.script import Script

LATENCIES = ("ttft", "tpot", "itl", "e2el")


def serving_metrics(answers: Iterable[Answer], *, duration: float, failed: int) -> dict[str, Any]:
    answered = list(answers)
    inputs = sum(answer.prompt_tokens for answer in answered)
    outputs = sum(answer.output_tokens for answer in answered)
    metrics: dict[str, Any] = {
        "duration": duration,
        "completed": len(answered),
        "failed": failed,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _per_second(len(answered), duration),
        "output_throughput": _per_second(outputs, duration),
        "total_token_throughput": _per_second(inputs + outputs, duration),
    }
    for name, values in latencies(answered).items():
        metrics |= summary(name, values)
    return metrics


def latencies(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Seconds. An answer of one token has no time per output token."""
    return {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [
            (answer.latency - answer.ttft) / (answer.output_tokens - 1)
            for answer in answers
            if answer.output_tokens > 1
        ],
        "itl": [gap for answer in answers for gap in answer.gaps],
        "e2el": [answer.latency for answer in answers],
    }


def summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """0 where there is nothing to sum up, as vLLM has it."""
    return {
        f"mean_{name}_ms": 1000 * mean(seconds),
        f"median_{name}_ms": 1000 * percentile(seconds, 50),
        f"std_{name}_ms": 1000 * deviation(seconds),
        f"p99_{name}_ms": 1000 * percentile(seconds, 99),
    }


def phase_metrics(script: Script, answers: Mapping[int, Answer]) -> dict[str, Any]:
    """TTFT of prompts that are new, and of those whose beginning was sent or answered before."""
    metrics: dict[str, Any] = {}
    phases = {step.phase for step in script.steps}
    for phase in sorted(phases) if len(phases) > 1 else ():
        found = [answers[step.index].ttft for step in script.steps if step.phase == phase and step.index in answers]
        told = summary("ttft", found)
        metrics[f"{phase}_completed"] = len(found)
        metrics |= {f"{phase}_{name}": value if found else None for name, value in told.items()}
    return metrics


def request_columns(script: Script, answers: Mapping[int, Answer]) -> dict[str, list[Any]]:
    """One entry for each request, in order; None for one that was not answered."""
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
    """Of the values themselves, not of what they are a sample of, as numpy.std."""
    middle = mean(values)
    return math.sqrt(mean([(value - middle) ** 2 for value in values]))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the closest two, as numpy.percentile."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    lower = int(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


def _per_second(count: int, duration: float) -> float:
    return count / duration if duration > 0 else 0.0
