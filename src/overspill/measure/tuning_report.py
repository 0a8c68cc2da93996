"""Reports on tunings: scores, next trial and winner, derived anew from the results, as text and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overspill.figures import aligned
from overspill.measure.candidates import AS_IT_IS, Candidate
from overspill.measure.compare import BY_KEY, Measure, centre
from overspill.measure.search import NEAR_PERCENT, Scores, Standing, is_near, longest_working
from overspill.measure.trial import INTERRUPTED
from overspill.measure.tuning import Goal, Tuning, length_of, measure_of
from overspill.registry import Result

_SHOWN = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "load_s", "peak_gpu_bytes", "peak_ram_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    experiment: str
    definition: Tuning
    results: tuple[Result, ...]
    is_interrupted: bool = False
    is_out_of_time: bool = False

    @property
    def is_of_context(self) -> bool:
        return self.definition.goal is Goal.CONTEXT

    @property
    def candidates(self) -> Sequence[Candidate]:
        return self.definition.tried(self.results)

    @property
    def scores(self) -> Scores:
        """Values and failures by label; a failed start counts as final, an interrupted run does not."""
        measure, least = measure_of(self.definition.goal), self.definition.least_tokens_per_s
        values: dict[str, dict[int, float]] = {}
        failed: dict[str, str] = {}
        for one in self.results:
            label, problem = one.label or "", str(one.metrics.get("problem") or "not finished")
            if one.is_complete:
                value = tokens_per_s(one) if self.is_of_context else measure.value(one.metrics)
                if not value:
                    failed[label] = f"{measure.name} was not measured"
                elif self.is_of_context and value < least:
                    failed[label] = f"too slow: {value:.3g} tok/s, at least {least:g} is required"
                else:
                    values.setdefault(label, {})[one.repeat or 1] = value
            elif problem != INTERRUPTED:
                failed[label] = problem.splitlines()[0]
        return Scores(better=measure.better, values=values, failed=failed)

    @property
    def standing(self) -> Standing:
        return self.scores.standing(self.definition.candidates, self.definition.repeats)

    @property
    def lengths(self) -> dict[int, bool]:
        """Whether each tried length works; interrupted ones are left out."""
        scores = self.scores
        known = [one for one in self.results if one.label in scores.values or one.label in scores.failed]
        return {length_of(one): one.label not in scores.failed for one in known}

    @property
    def winner(self) -> Candidate | None:
        if self.is_of_context:
            longest = longest_working(self.lengths)
            return self.definition.of_length(longest) if longest is not None else None
        return self.scores.choose(self.standing.alive)

    def as_text(self) -> str:
        definition = self.definition
        sent = "one prompt of each length" if self.is_of_context else definition.workload
        lines = [f"Tuning {self.experiment}: {definition.model} for {definition.goal}", f"workload: {sent}", ""]
        return "\n".join([*lines, self._table(), "", *self.conclusion])

    @property
    def conclusion(self) -> list[str]:
        lines = []
        if (winner := self.winner) is not None:
            lines += [f"Best: {winner.label}{self._why(winner)}", f"  {winner.text(self.definition.given)}"]
            if self._is_measured_once:
                lines.append("One run of each was compared, which does not show how runs vary.")
        elif not self.is_interrupted:
            lines.append("No candidate could be measured to the end.")
        if self.is_interrupted or self.is_out_of_time:
            why = "Interrupted" if self.is_interrupted else "The time of --budget is used up"
            how = f" To resume: overspill tune --resume {self.experiment}" if self.results else ""
            lines.append(f"{why}.{how}")
        return lines

    @property
    def doubt(self) -> str | None:
        """Reason not to save the winner without confirmation: the measurements do not show that it is better."""
        alive, definition = self.standing.alive, self.definition
        if self.is_of_context or self.winner is None:
            return None
        if definition.repeats == 1 or (self._is_measured_once and len(alive) > 1):
            return "one run of each does not show which is better, and --repeats 3 may"
        was_as_good = any(one.label == AS_IT_IS or self._is_present(one) for one in self.scores.nearest(alive))
        return f"the settings as they are come within {NEAR_PERCENT:.0f} % of it" if was_as_good else None

    def _is_present(self, candidate: Candidate) -> bool:
        """Whether the plan's candidate is the registered model as it is."""
        subject = self.definition.subject
        if subject is None or subject.version is None or not candidate.is_planned:
            return False
        before = {**subject.settings, **subject.tuned}
        changes = {key: value for key, value in self.definition.given.items() if value not in (None, before.get(key))}
        is_same = candidate.vllm_args == subject.tuned_args and candidate.settings.items() >= subject.tuned.items()
        return is_same and not changes

    def as_json(self) -> dict[str, Any]:
        winner = self.winner
        return {
            "experiment": self.experiment,
            "definition": self.definition.as_json(),
            "is_interrupted": self.is_interrupted,
            "is_out_of_time": self.is_out_of_time,
            "winner": winner.as_json() if winner is not None else None,
            "candidates": [
                {
                    "label": each.label, "text": each.text(self.definition.given),
                    "repeats": len(self._finished(each)), **{key: self._value(each, BY_KEY[key]) for key in _SHOWN},
                    "outcome": self._outcome(each),
                }
                for each in self.candidates
            ],
            "results": [one.id for one in self.results],
        }  # fmt: skip

    def _table(self) -> str:
        candidates = self.candidates
        measures = [BY_KEY[key] for key in _SHOWN]
        measures = [one for one in measures if any(self._value(each, one) is not None for each in candidates)]
        head = ["candidate", "repeats", *(measure.name for measure in measures), ""]
        rows = [
            [
                each.label, str(len(self._finished(each))),
                *(measure.shown(self._value(each, measure)) for measure in measures), self._outcome(each),
            ]
            for each in candidates
        ]  # fmt: skip
        return aligned([head, *rows], left=(0, len(head) - 1))

    def _outcome(self, candidate: Candidate) -> str:
        winner, scores = self.winner, self.scores
        if winner is not None and candidate.label == winner.label:
            return "best, measured once" if self._is_measured_once else "best"
        if (why := scores.failed.get(candidate.label)) is not None:
            return why
        if self.is_of_context:
            return "works" if self._finished(candidate) else "not finished"
        if not scores.values.get(candidate.label):
            return "not tried"
        stand = self.standing
        if (why := stand.dropped.get(candidate.label)) is not None:
            return why
        losses = scores.losses(stand.alive)
        if candidate.label not in losses or winner is None:
            return "not finished"
        if (loss := losses[candidate.label]) is None:  # this candidate is the best, and the winner is simpler
            given_up = losses[winner.label]
            gained = scores.better_percent(given_up.value) if given_up is not None else 0.0
            return f"{gained:.2g} % better, and not as simple"
        also = ", and not as simple" if is_near(loss) else ""
        return f"{scores.worse_percent(loss.value):.2g} % worse than the best{also}"

    def _why(self, winner: Candidate) -> str:
        near = [] if self.is_of_context else self.scores.nearest(self.standing.alive)
        others = [each.label for each in near if each.label != winner.label]
        return f", the simplest of those within {NEAR_PERCENT:.0f} %: {', '.join(others)}" if others else ""

    @property
    def _is_measured_once(self) -> bool:
        """Whether the choice rests on one run of each candidate."""
        return not self.is_of_context and len(self.scores.shared_repeats(self.standing.alive)) == 1

    def _finished(self, candidate: Candidate) -> list[Result]:
        return [one for one in self.results if one.label == candidate.label and one.is_complete]

    def _value(self, candidate: Candidate, measure: Measure) -> float | None:
        found = [measure.value(one.metrics) for one in self._finished(candidate)]
        values = [value for value in found if value is not None]
        return centre(values) if values else None


def tokens_per_s(result: Result) -> float | None:
    """Speed of a single request's answer. An answer in one piece has no time between tokens; its whole latency, prompt
    included, then gives a lower bound."""
    if tpot := BY_KEY["mean_tpot_ms"].value(result.metrics):
        return 1000 / tpot
    tokens, latency = result.metrics.get("total_output_tokens"), BY_KEY["mean_e2el_ms"].value(result.metrics)
    return 1000 * float(tokens) / latency if tokens and latency else None
