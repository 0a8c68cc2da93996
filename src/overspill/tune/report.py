"""What tuning comes to: every candidate, what was measured of it, and which is the best, as text and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overspill.experiment.intervals import centre
from overspill.experiment.measures import BY_KEY, Better, Measure
from overspill.experiment.text import aligned
from overspill.registry import Result
from overspill.tune.candidates import Candidate
from overspill.tune.definition import Definition
from overspill.tune.goals import Goal, measure_of
from overspill.tune.search import (
    NEAR,
    Scores,
    better_percent,
    is_near,
    losses_of,
    nearest,
    shared_repeats,
    standing,
    worse_percent,
)
from overspill.tune.trials import INTERRUPTED

_SHOWN = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "load_s", "peak_gpu_bytes", "peak_ram_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    experiment: str
    definition: Definition
    results: tuple[Result, ...]
    winner: Candidate | None
    is_interrupted: bool = False
    is_out_of_time: bool = False

    @property
    def candidates(self) -> Sequence[Candidate]:
        return candidates_of(self.definition, self.results)

    def as_text(self) -> str:
        definition = self.definition
        sent = "one prompt of each length" if definition.goal is Goal.CONTEXT else definition.workload
        lines = [f"Tuning {self.experiment}: {definition.model} for {definition.goal}", f"workload: {sent}", ""]
        return "\n".join([*lines, self._table(), "", *self.conclusion])

    @property
    def conclusion(self) -> list[str]:
        lines = []
        if self.winner is not None:
            lines.append(f"Best: {self.winner.label}{self._why()}")
            lines.append(f"  {self.winner.text(self.definition.given)}")
            if self._is_measured_once:
                lines.append("One run of each was compared, which does not tell how runs vary.")
        elif not self.is_interrupted:
            lines.append("No candidate could be measured to the end.")
        if self.is_interrupted or self.is_out_of_time:
            why = "Interrupted" if self.is_interrupted else "The time of --budget is over"
            how = f" To go on: overspill tune --resume {self.experiment}" if self.results else ""
            lines.append(f"{why}.{how}")
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "definition": self.definition.as_json(),
            "is_interrupted": self.is_interrupted,
            "is_out_of_time": self.is_out_of_time,
            "winner": self.winner.as_json() if self.winner is not None else None,
            "candidates": [
                {
                    "label": each.label,
                    "text": each.text(self.definition.given),
                    "repeats": len(self._finished(each)),
                    **{key: self._value(each, BY_KEY[key]) for key in _SHOWN},
                    "outcome": self._outcome(each),
                }
                for each in self.candidates
            ],
            "results": [one.id for one in self.results],
        }

    def _table(self) -> str:
        measures = [
            measure
            for key in _SHOWN
            if any(self._value(each, measure := BY_KEY[key]) is not None for each in self.candidates)
        ]
        head = ["candidate", "repeats", *(measure.name for measure in measures), ""]
        rows = [
            [
                each.label,
                str(len(self._finished(each))),
                *(measure.shown(self._value(each, measure)) for measure in measures),
                self._outcome(each),
            ]
            for each in self.candidates
        ]
        return aligned([head, *rows], left=(0, len(head) - 1))

    def _outcome(self, candidate: Candidate) -> str:
        if self.winner is not None and candidate.label == self.winner.label:
            return "best, measured once" if self._is_measured_once else "best"
        scores = scores_of(self.definition, self.results)
        if (why := scores.failed.get(candidate.label)) is not None:
            return why
        if self.definition.goal is Goal.CONTEXT:
            return "works" if self._finished(candidate) else "not finished"
        if not scores.values.get(candidate.label):
            return "not tried"
        stand = standing(self.definition.candidates, scores, self.definition.repeats, self._better)
        if (why := stand.dropped.get(candidate.label)) is not None:
            return why
        losses = losses_of(stand.alive, scores, self._better)
        if candidate.label not in losses or self.winner is None:
            return "not finished"
        if (loss := losses[candidate.label]) is None:  # the best, and the winner is simpler
            given_up = losses[self.winner.label]
            gained = better_percent(given_up.value, self._better) if given_up is not None else 0.0
            return f"{_percent(gained)} better, and not as simple"
        lost = worse_percent(loss.value, self._better)
        return f"{_percent(lost)} worse than the best{', and not as simple' if is_near(loss) else ''}"

    def _why(self) -> str:
        if self.definition.goal is Goal.CONTEXT or self.winner is None:
            return ""
        scores = scores_of(self.definition, self.results)
        near = nearest(self._alive(scores), scores, self._better)
        others = [each.label for each in near if each.label != self.winner.label]
        return f", the simplest of those within {100 * (NEAR - 1):.0f} %: {', '.join(others)}" if others else ""

    @property
    def _is_measured_once(self) -> bool:
        """Whether the choice rests on one run of each."""
        if self.definition.goal is Goal.CONTEXT:
            return False
        scores = scores_of(self.definition, self.results)
        return len(shared_repeats(self._alive(scores), scores)) == 1

    def _alive(self, scores: Scores) -> Sequence[Candidate]:
        return standing(self.definition.candidates, scores, self.definition.repeats, self._better).alive

    @property
    def _better(self) -> Better:
        return measure_of(self.definition.goal).better

    def _finished(self, candidate: Candidate) -> list[Result]:
        return [one for one in self.results if one.label == candidate.label and one.is_complete]

    def _value(self, candidate: Candidate, measure: Measure) -> float | None:
        found = [measure.value(one.metrics) for one in self._finished(candidate)]
        values = [value for value in found if value is not None]
        return centre(values) if values else None


def _percent(value: float) -> str:
    return f"{value:.2g} %"


def candidates_of(definition: Definition, results: Sequence[Result]) -> Sequence[Candidate]:
    """Of lengths, those that were tried, the longest first."""
    if definition.goal is not Goal.CONTEXT:
        return definition.candidates
    lengths = sorted({length_of(one) for one in results}, reverse=True)
    return [definition.of_length(length) for length in lengths]


def scores_of(definition: Definition, results: Sequence[Result]) -> Scores:
    """One that did not start would not do so later; one that was interrupted may."""
    measure, least = measure_of(definition.goal), definition.least_tokens_per_s
    values: dict[str, dict[int, float]] = {}
    failed: dict[str, str] = {}
    for one in results:
        label, problem = one.label or "", str(one.metrics.get("problem") or "not finished")
        if one.is_complete:
            value = tokens_per_s(one) if definition.goal is Goal.CONTEXT else measure.value(one.metrics)
            if not value:
                failed[label] = f"{measure.name} was not measured"
            elif definition.goal is Goal.CONTEXT and value < least:
                failed[label] = f"too slow: {value:.3g} tok/s, and {least:g} are wanted"
            else:
                values.setdefault(label, {})[one.repeat or 1] = value
        elif problem != INTERRUPTED:
            failed[label] = problem.splitlines()[0]
    return Scores(values=values, failed=failed)


def tried_lengths(definition: Definition, results: Sequence[Result]) -> dict[int, bool]:
    """Whether they work; without those that were interrupted."""
    scores = scores_of(definition, results)
    known = [one for one in results if one.label in scores.values or one.label in scores.failed]
    return {length_of(one): one.label not in scores.failed for one in known}


def length_of(result: Result) -> int:
    return int(result.config["candidate"]["settings"]["max_model_len"])


def tokens_per_s(result: Result) -> float | None:
    """Of one request's answer. One that came in a single piece has no time between tokens: it was at least as fast as
    with the time of its prompt."""
    if tpot := BY_KEY["mean_tpot_ms"].value(result.metrics):
        return 1000 / tpot
    tokens, latency = result.metrics.get("total_output_tokens"), BY_KEY["mean_e2el_ms"].value(result.metrics)
    return 1000 * float(tokens) / latency if tokens and latency else None
