"""From what was answered and counted to metrics, and to what a reader of them must know."""

from typing import Any

from overspill.bench.counters import TIERS
from overspill.bench.memory import peak, thinned
from overspill.bench.metrics import phase_metrics, request_columns, serving_metrics
from overspill.bench.outcome import Outcome
from overspill.bench.part import Part, part_as_json
from overspill.bench.script import Script
from overspill.bench.target import Target


def find(
    target: Target, script: Script, part: Part, problem: str | None, failed: int, *, is_resumed: bool = False
) -> Outcome:
    steps, answers = script.steps, part.answers
    in_order = [answers[step.index] for step in steps if step.index in answers]
    is_complete = len(answers) == len(steps)
    metrics: dict[str, Any] = serving_metrics(in_order, duration=part.duration, failed=failed)
    metrics |= phase_metrics(script, answers)
    metrics |= part.counters
    metrics |= {
        "peak_gpu_bytes": peak(each.gpu_bytes for each in part.samples),
        "peak_ram_bytes": peak(each.ram_bytes for each in part.samples),
        "peak_machine_ram_bytes": peak(each.machine_ram_bytes for each in part.samples),
        "ram_of": None if not part.samples else "server" if target.pid is not None else "machine",
        "samples": [each.as_json() for each in thinned(part.samples)],
    }
    metrics |= request_columns(script, answers)
    return Outcome(
        metrics=metrics,
        is_complete=is_complete,
        problem=None if is_complete else problem,
        answers=[answers[step.index].digest if step.index in answers else "" for step in steps],
        notes=tuple(_notes(script, part, metrics, is_resumed=is_resumed)),
        part=None if is_complete else part_as_json(part, script),
    )


def _notes(script: Script, part: Part, metrics: dict[str, Any], *, is_resumed: bool) -> list[str]:
    notes = []
    if is_resumed:
        notes.append("measured in parts: what the server held in its caches before the break may have been lost")
    unknown = [name for name in TIERS if metrics[name] is None]
    if len(unknown) == len(TIERS):
        notes.append("the server did not tell its counters (/metrics), so nobody knows which tier served the tokens")
    elif "tokens_from_ram" not in unknown and "tokens_from_gpu_cache" not in unknown:
        served = metrics["tokens_from_ram"] + metrics["tokens_from_gpu_cache"]
        # A request that was preempted finds what it had computed itself.
        if served > script.known_tokens and not metrics["preemptions"]:
            notes.append(
                f"{served - script.known_tokens:,} tokens of new prompts were in the server's caches, from an earlier "
                "run with this seed; use another --seed, or start the server anew"
            )
    if any(answer.tokens is None for answer in part.answers.values()) and not is_resumed:
        notes.append(
            "the server does not tell token ids: answers are known by their text, and conversations go on with tokens "
            "drawn in place of its answers"
        )
    if not part.samples:
        notes.append("the server is on another machine, so its memory is not known here")
    return notes
