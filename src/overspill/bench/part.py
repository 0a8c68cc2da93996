"""A part of a measurement: what was answered and counted, and how it is kept until the rest is measured."""

import base64
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from overspill.bench.client import Answer
from overspill.bench.counters import total
from overspill.bench.errors import BenchError
from overspill.bench.memory import Sample, thinned
from overspill.bench.prompts import Vocabulary
from overspill.bench.script import Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    vocabulary: Vocabulary
    """What prompts were drawn from."""
    duration: float
    answers: Mapping[int, Answer]
    """By the index of the request."""
    counters: Mapping[str, int | float | None]
    samples: list[Sample]


def joined(earlier: Part, later: Part) -> Part:
    """As if the later one had followed at once."""
    shift = earlier.duration
    moved = {index: replace(each, started_s=each.started_s + shift) for index, each in later.answers.items()}
    return Part(
        vocabulary=later.vocabulary,
        duration=shift + later.duration,
        answers={**earlier.answers, **moved},
        counters=total(earlier.counters, later.counters),
        samples=[*earlier.samples, *(replace(each, t=round(each.t + shift, 2)) for each in later.samples)],
    )


def part_as_json(part: Part, script: Script) -> dict[str, Any]:
    """In columns, times between tokens packed: there may be a million of them."""
    answers = dict(sorted(part.answers.items()))
    found = list(answers.values())
    return {
        "vocabulary": [part.vocabulary.low, part.vocabulary.high],
        "duration": part.duration,
        "counters": dict(part.counters),
        "samples": [each.as_json() for each in thinned(part.samples)],
        "index": list(answers),
        "prompt_tokens": [each.prompt_tokens for each in found],
        "output_tokens": [each.output_tokens for each in found],
        "started_s": [each.started_s for each in found],
        "ttft": [each.ttft for each in found],
        "latency": [each.latency for each in found],
        "digest": [each.digest for each in found],
        "gaps": [len(each.gaps) for each in found],
        "packed_gaps": _packed(array("f", (gap for each in found for gap in each.gaps))),
        "tokens": {str(index): answers[index].tokens for index in _needed(script, answers)},
    }


def part_from_json(kept: Mapping[str, Any]) -> Part:
    try:
        gaps = iter(_unpacked(kept["packed_gaps"]))
        columns = (kept[name] for name in ("prompt_tokens", "output_tokens", "started_s", "ttft", "latency", "digest"))
        answers: dict[int, Answer] = {}
        for index, num_gaps, *values in zip(kept["index"], kept["gaps"], *columns):
            prompt_tokens, output_tokens, started_s, ttft, latency, digest = values
            tokens = kept["tokens"].get(str(index))
            answers[index] = Answer(
                prompt_tokens=prompt_tokens, output_tokens=output_tokens, started_s=started_s, ttft=ttft,
                latency=latency, gaps=tuple(next(gaps) for _ in range(num_gaps)),
                tokens=None if tokens is None else tuple(tokens), digest=digest,
            )  # fmt: skip
        return Part(
            vocabulary=Vocabulary(*kept["vocabulary"]), duration=kept["duration"], answers=answers,
            counters=kept["counters"], samples=[Sample(**each) for each in kept["samples"]],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, StopIteration, RuntimeError, zlib.error) as error:
        raise BenchError(f"what was kept of the first part cannot be read ({error!r:.80}); measure it anew") from error


def _needed(script: Script, answers: Mapping[int, Answer]) -> list[int]:
    """Answers that a request still to be sent begins with."""
    needed: list[int] = []
    for chain in script.chains:
        if any(step.continues and step.index not in answers for step in chain.steps):
            needed += [step.index for step in chain.steps if step.index in answers]
    return needed


def _packed(numbers: "array[float]") -> str:
    return base64.b64encode(zlib.compress(numbers.tobytes())).decode()


def _unpacked(text: str) -> "array[float]":
    numbers = array("f")
    numbers.frombytes(zlib.decompress(base64.b64decode(text)))
    return numbers
