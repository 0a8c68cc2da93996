"""The state of a tuning, decided anew from its results: scores, the next trial, the winner; as text and JSON.

Each candidate is measured once, cheaply; those that are clearly worse, and the worse half, are left out; the rest are
measured again with other requests. In the end the best is taken, or the simplest of those that come close to it.
Lengths are tried from the longest one down, by halves, until the longest that works is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overspill.figures import aligned
from overspill.measure.candidates import AS_IT_IS, Candidate
from overspill.measure.compare import BY_KEY, Better, Measure, Ratio, Verdict, centre, paired_ratio
from overspill.measure.trial import INTERRUPTED, Step
from overspill.measure.tuning import Goal, Tuning, length_of, measure_of
from overspill.registry import Result

Values = Mapping[str, Mapping[int, float]]  # by label and repeat

# So much worse after one and after two measurements is out. One alone says nothing of how they vary.
MARGINS = (1.3, 1.1)
# What a simpler candidate may cost: so much less is given up for fewer things in RAM, and no more on mere doubt.
NEAR = 1.03
NEAR_PERCENT = 100 * (NEAR - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    alive: tuple[Candidate, ...]
    dropped: Mapping[str, str]
    """And why."""
    next: Step | None
    """None when there is nothing more to find out."""
    steps_left: int
    """With the next one, about: how many will be dropped is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What is known so far, by label."""

    better: Better
    values: Values = field(default_factory=dict)
    """By repeat."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """And why."""

    def standing(self, candidates: Sequence[Candidate], repeats: int) -> Standing:
        """Decided anew from all that was measured, so that it goes on where it was broken off."""
        alive = [each for each in candidates if each.label not in self.failed]
        dropped: dict[str, str] = {}
        for repeat in range(1, repeats + 1):
            if not alive or (repeat > 1 and len(alive) < 2):
                break
            # Every second time in reverse: a machine that becomes slower with time does so for all alike.
            order = alive if repeat % 2 else alive[::-1]
            missing = [each for each in order if repeat not in self.values.get(each.label, {})]
            if missing:
                left = _steps_left(len(missing), len(alive), repeats - repeat)
                step = Step(repeat, missing[0].label)
                return Standing(alive=tuple(alive), dropped=dropped, next=step, steps_left=left)
            out = self._losers(alive, repeat, is_last=repeat == repeats)
            dropped |= out
            alive = [each for each in alive if each.label not in out]
        return Standing(alive=tuple(alive), dropped=dropped, next=None, steps_left=0)

    def choose(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The simplest of those that come near the best; None if nothing was measured."""
        return min(self.nearest(candidates), key=lambda each: each.rank, default=None)

    def nearest(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best that was measured, and those that are near it."""
        losses = self.losses(candidates)
        return [each for each in candidates if each.label in losses and is_near(losses[each.label])]

    def losses(self, candidates: Sequence[Candidate]) -> dict[str, Ratio | None]:
        """By label, how much worse than the best of them: above 1 for the worse, None for the best itself."""
        measured = [each for each in candidates if self.values.get(each.label) and each.label not in self.failed]
        if not (shared := self.shared_repeats(measured)):
            return {}
        values = {each.label: {one: self.values[each.label][one] for one in shared} for each in measured}
        return self._losses(values, measured)

    def shared_repeats(self, candidates: Sequence[Candidate]) -> set[int]:
        """Of a round that was broken off, only repeats that all have are compared: others had other requests."""
        found = [set(self.values[each.label]) for each in candidates if self.values.get(each.label)]
        return set.intersection(*found) if found else set()

    def worse_percent(self, loss: float) -> float:
        """Of a rate at most 100: half the rate is 50 % worse, and twice the time 100 %."""
        return 100 * (1 - 1 / loss if self.better is Better.HIGHER else loss - 1)

    def better_percent(self, loss: float) -> float:
        """How much better the best is than what has this loss."""
        return 100 * (loss - 1 if self.better is Better.HIGHER else 1 - 1 / loss)

    def _losers(self, alive: Sequence[Candidate], repeat: int, *, is_last: bool) -> dict[str, str]:
        values = {
            each.label: {number: value for number, value in self.values[each.label].items() if number <= repeat}
            for each in alive
        }
        best, losses = self._ordered(alive, values)[0], self._losses(values, alive)
        out: dict[str, str] = {}
        for label, loss in losses.items():
            is_far = loss is not None and repeat <= len(MARGINS) and loss.value > MARGINS[repeat - 1]
            if loss is not None and (is_far or is_worse(loss)):
                out[label] = f"{self.worse_percent(loss.value):.0f} % worse than {best.label}"
        left = [each for each in alive if each.label not in out]
        if not is_last and len(left) > 2:
            kept = self._ordered(left, values)[: max(2, math.ceil(len(alive) / 2))]
            simplest = min(left, key=lambda each: each.rank)
            out |= {one.label: "not among the better half" for one in left if one not in kept and one is not simplest}
        return out

    def _losses(self, values: Values, candidates: Sequence[Candidate]) -> dict[str, Ratio | None]:
        best = self._ordered(candidates, values)[0].label
        pairs = {label: (values[best], theirs) for label, theirs in values.items() if label != best}
        if self.better is Better.HIGHER:
            pairs = {label: (theirs, ours) for label, (ours, theirs) in pairs.items()}
        return {label: paired_ratio(*pairs[label]) if label in pairs else None for label in values}

    def _ordered(self, candidates: Sequence[Candidate], values: Values) -> list[Candidate]:
        sign = -1 if self.better is Better.HIGHER else 1
        return sorted(candidates, key=lambda each: (sign * centre(list(values[each.label].values())), each.rank))


def is_near(loss: Ratio | None) -> bool:
    """Whether it may be taken for the best. An interval that includes 1 is no excuse for a mean that is far off: with
    few repeats nearly every interval does."""
    return loss is None or (loss.value <= NEAR and (loss.low is None or loss.low <= 1))


def is_worse(loss: Ratio) -> bool:
    """Whether it is so much worse that it need not be measured again: one measurement must say so clearly."""
    return loss.value > MARGINS[0] if loss.low is None else loss.verdict is Verdict.HIGHER


def _steps_left(missing: int, alive: int, rounds: int) -> int:
    total = missing
    for _ in range(rounds):
        alive = max(2, math.ceil(alive / 2)) if alive > 1 else 0
        total += alive
    return total


LEAST = 256
# Nearer than this part of the length, one in so many, is not looked for.
_SHARE = 20


def next_length(longest: int, tried: Mapping[int, bool]) -> int | None:
    """`tried` says of lengths whether they work. None when enough is known."""
    if not tried:
        return longest
    works = longest_working(tried) or 0
    too_long = [length for length, is_working in tried.items() if not is_working and length > works]
    if not too_long:
        return None
    low, high = works, min(too_long)
    step = _step(high)
    if high - low <= max(step, high // _SHARE):
        return None
    middle = (low + high) // 2 // step * step
    return middle if max(low, LEAST - 1) < middle < high else None


def longest_working(tried: Mapping[int, bool]) -> int | None:
    return max((length for length, is_working in tried.items() if is_working), default=None)


def trials_left(longest: int, tried: Mapping[int, bool]) -> int:
    """The next one included, if each is too long; a few more where one works."""
    left, known = 0, dict(tried)
    while (length := next_length(longest, known)) is not None:
        left += 1
        known[length] = False
    return left


def _step(length: int) -> int:
    return 1024 if length >= 16384 else 128


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
        """A candidate that did not start would not do so later; one that was interrupted may."""
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
                    failed[label] = f"too slow: {value:.3g} tok/s, and {least:g} are wanted"
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
        """Which were tried, and whether they work; without those that were interrupted."""
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
                lines.append("One run of each was compared, which does not tell how runs vary.")
        elif not self.is_interrupted:
            lines.append("No candidate could be measured to the end.")
        if self.is_interrupted or self.is_out_of_time:
            why = "Interrupted" if self.is_interrupted else "The time of --budget is over"
            how = f" To go on: overspill tune --resume {self.experiment}" if self.results else ""
            lines.append(f"{why}.{how}")
        return lines

    @property
    def doubt(self) -> str | None:
        """Why the best is not to be kept unasked: what was measured does not show that it is better."""
        alive, definition = self.standing.alive, self.definition
        if self.is_of_context or self.winner is None:
            return None
        if definition.repeats == 1 or (self._is_measured_once and len(alive) > 1):
            return "one run of each does not show which is better, and --repeats 3 may"
        was_as_good = AS_IT_IS in (one.label for one in self.scores.nearest(alive))
        return f"the settings as they are come within {NEAR_PERCENT:.0f} % of it" if was_as_good else None

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
        if (loss := losses[candidate.label]) is None:  # the best, and the winner is simpler
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
        """Whether the choice rests on one run of each."""
        return not self.is_of_context and len(self.scores.shared_repeats(self.standing.alive)) == 1

    def _finished(self, candidate: Candidate) -> list[Result]:
        return [one for one in self.results if one.label == candidate.label and one.is_complete]

    def _value(self, candidate: Candidate, measure: Measure) -> float | None:
        found = [measure.value(one.metrics) for one in self._finished(candidate)]
        values = [value for value in found if value is not None]
        return centre(values) if values else None


def tokens_per_s(result: Result) -> float | None:
    """Of one request's answer. One that came in a single piece has no time between tokens: it was at least as fast as
    with the time of its prompt."""
    if tpot := BY_KEY["mean_tpot_ms"].value(result.metrics):
        return 1000 / tpot
    tokens, latency = result.metrics.get("total_output_tokens"), BY_KEY["mean_e2el_ms"].value(result.metrics)
    return 1000 * float(tokens) / latency if tokens and latency else None
