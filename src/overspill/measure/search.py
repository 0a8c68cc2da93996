"""Search for the best candidate or the longest context: what to measure next, drop and choose, without effects.

Each candidate is measured once, cheaply; clearly worse ones and the worse half are dropped; the rest are measured again
with other requests. In the end the best wins, or the simplest of those that come close to it. Lengths are bisected
from the longest down, until the longest that works is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from overspill.measure.candidates import Candidate
from overspill.measure.compare import Better, Ratio, Verdict, centre, paired_ratio
from overspill.measure.trial import Step

Values = Mapping[str, Mapping[int, float]]  # by label and repeat

# Losses beyond which a candidate is dropped after one and after two measurements. One alone shows no variance.
MARGINS = (1.3, 1.1)
# How much a simpler candidate may cost: this loss is accepted for fewer things in RAM, and no more on mere doubt.
NEAR = 1.03
NEAR_PERCENT = 100 * (NEAR - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    alive: tuple[Candidate, ...]
    dropped: Mapping[str, str]
    """Reasons by label."""
    next: Step | None
    """None when nothing is left to find out."""
    steps_left: int
    """Estimate, the next step included: how many candidates will be dropped is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Everything measured so far, by label."""

    better: Better
    values: Values = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    """Reasons by label."""

    def standing(self, candidates: Sequence[Candidate], repeats: int) -> Standing:
        """Decide from all measurements anew each time, so that an interrupted search resumes where it stopped."""
        alive = [each for each in candidates if each.label not in self.failed]
        dropped: dict[str, str] = {}
        for repeat in range(1, repeats + 1):
            if not alive or (repeat > 1 and len(alive) < 2):
                break
            # Every second round in reverse: a machine that slows down with time then affects all alike.
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
        """The simplest candidate near the best; None if nothing was measured."""
        return min(self.nearest(candidates), key=lambda each: each.rank, default=None)

    def nearest(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best measured candidate, and all near it."""
        losses = self.losses(candidates)
        return [each for each in candidates if each.label in losses and is_near(losses[each.label])]

    def losses(self, candidates: Sequence[Candidate]) -> dict[str, Ratio | None]:
        """Loss against the best candidate by label: above 1 for worse ones, None for the best itself."""
        measured = [each for each in candidates if self.values.get(each.label) and each.label not in self.failed]
        if not (shared := self.shared_repeats(measured)):
            return {}
        values = {each.label: {one: self.values[each.label][one] for one in shared} for each in measured}
        return self._losses(values, measured)

    def shared_repeats(self, candidates: Sequence[Candidate]) -> set[int]:
        """Repeats that all measured candidates have; others, of an interrupted round, sent other requests."""
        found = [set(self.values[each.label]) for each in candidates if self.values.get(each.label)]
        return set.intersection(*found) if found else set()

    def worse_percent(self, loss: float) -> float:
        """Loss in percent: half the rate is 50 % worse (a rate loses at most 100), and twice the time 100 %."""
        return 100 * (1 - 1 / loss if self.better is Better.HIGHER else loss - 1)

    def better_percent(self, loss: float) -> float:
        """How many percent better the best is than a candidate with this loss."""
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
    """Whether a candidate with this loss may pass for the best. An interval that includes 1 does not excuse a mean that
    is far off: with few repeats nearly every interval includes 1."""
    return loss is None or (loss.value <= NEAR and (loss.low is None or loss.low <= 1))


def is_worse(loss: Ratio) -> bool:
    """Whether a loss is so clear that remeasuring is needless; a single measurement must show a large one."""
    return loss.value > MARGINS[0] if loss.low is None else loss.verdict is Verdict.HIGHER


def _steps_left(missing: int, alive: int, rounds: int) -> int:
    total = missing
    for _ in range(rounds):
        alive = max(2, math.ceil(alive / 2)) if alive > 1 else 0
        total += alive
    return total


LEAST = 256
# The search ends within one part in this many of the length.
_SHARE = 20


def next_length(longest: int, tried: Mapping[int, bool]) -> int | None:
    """Next length to try, or None when enough is known; `tried` says by length whether it works."""
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
    """Trials left, the next one included, if every length is too long; a few more if one works."""
    left, known = 0, dict(tried)
    while (length := next_length(longest, known)) is not None:
        left += 1
        known[length] = False
    return left


def _step(length: int) -> int:
    return 1024 if length >= 16384 else 128
