"""Ratios and how sure they are: confidence intervals for few repeats, and when there is no difference.

Times and rates vary by factors, so their logarithms are compared. Repeats of two configurations are pairs: each repeat
sends the same requests to both, minutes apart. With n pairs the mean of the log-ratios has a t-interval with n - 1
degrees of freedom, which is exact for normal log-ratios however few there are, and wide when there are two.
"""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

CONFIDENCE = 0.95
# Between two starts of the same engine lie differences that no number of repeats takes out: clocks, memory placement,
# the order of the configurations. Less than one percent is not told apart from them, and not worth acting on.
FLOOR = 0.01
# "No difference" is a claim like any other: the whole interval must lie within this factor of 1. One that includes 1
# and reaches further only failed to show a difference.
SAME = 1.05
# Of fewer requests a bootstrap's interval is far too narrow: of 2 equal engines it tells one apart in every second run.
FEWEST_REQUESTS = 20
_RESAMPLES = 2000
# Student's t, 97.5 %, for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Basis(StrEnum):
    """What an interval is over; the value is how it is told."""

    PAIRS = "over repeats, paired"
    GROUPS = "over repeats, not paired"
    REQUESTS = "over the requests of one repeat; what differs between runs is not in it"
    NONE = "one repeat: no interval"


class Verdict(StrEnum):
    NO_DIFFERENCE = "no difference above 5 %"
    """The interval leaves room for none that matters."""
    NOT_SHOWN = "no difference shown"
    """The interval includes 1, and much else."""
    HIGHER = "higher"
    LOWER = "lower"
    ONE_RUN = "one run"
    """The interval is over requests: what differs between two runs of the same engine is not in it."""
    UNKNOWN = "one repeat: no interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    value: float
    low: float | None = None
    high: float | None = None
    basis: Basis

    @property
    def verdict(self) -> Verdict:
        if self.low is None or self.high is None:
            return Verdict.UNKNOWN
        if self.basis is Basis.REQUESTS:
            return Verdict.ONE_RUN
        if self.low <= 1 <= self.high or abs(self.value - 1) < FLOOR:
            is_known = self.low >= 1 / SAME and self.high <= SAME
            return Verdict.NO_DIFFERENCE if is_known else Verdict.NOT_SHOWN
        return Verdict.HIGHER if self.value > 1 else Verdict.LOWER


def paired_ratio(first: Mapping[int, float], second: Mapping[int, float]) -> Ratio | None:
    """Of the second to the first, by the number of the repeat; None if there is none that both have."""
    shared = sorted(first.keys() & second.keys())
    if not shared or not _are_positive([*first.values(), *second.values()]):
        return None
    logs = [math.log(second[repeat] / first[repeat]) for repeat in shared]
    value = math.exp(statistics.fmean(logs))
    if len(logs) < 2:
        return Ratio(value=value, basis=Basis.NONE)
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return _around(value, half, Basis.PAIRS)


def unpaired_ratio(first: Sequence[float], second: Sequence[float]) -> Ratio | None:
    """Of measurements that were not made in pairs: Welch's interval, which lets the two vary differently."""
    if not first or not second or not _are_positive([*first, *second]):
        return None
    logs = [[math.log(value) for value in values] for values in (first, second)]
    value = math.exp(statistics.fmean(logs[1]) - statistics.fmean(logs[0]))
    if len(first) < 2 or len(second) < 2:
        return Ratio(value=value, basis=Basis.NONE)
    parts = [statistics.variance(group) / len(group) for group in logs]
    if not sum(parts):
        return _around(value, 0.0, Basis.GROUPS)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(group) - 1) for part, group in zip(parts, logs))
    return _around(value, t_quantile(max(1, math.floor(freedom))) * math.sqrt(sum(parts)), Basis.GROUPS)


def resampled_ratio(first: Sequence[float], second: Sequence[float], *, is_paired: bool, seed: int = 0) -> Ratio | None:
    """Of two means over requests, by resampling them; in pairs where both sent the same requests.

    The requests of one run share its luck, so this is no statement about the next run. None of too few of them.
    """
    if min(len(first), len(second)) < FEWEST_REQUESTS or not _are_positive(
        [statistics.fmean(first), statistics.fmean(second)]
    ):
        return None
    if is_paired and len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} requests are no pairs")
    draw = random.Random(seed)
    found = []
    for _ in range(_RESAMPLES):
        ours = draw.choices(range(len(first)), k=len(first))
        theirs = ours if is_paired else draw.choices(range(len(second)), k=len(second))
        mean = statistics.fmean(first[index] for index in ours)
        if mean > 0:
            found.append(statistics.fmean(second[index] for index in theirs) / mean)
    found.sort()
    tail = round((1 - CONFIDENCE) / 2 * len(found))
    value = statistics.fmean(second) / statistics.fmean(first)
    return Ratio(value=value, low=found[tail], high=found[-1 - tail], basis=Basis.REQUESTS)


def own_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Of one configuration's repeats, for a chart."""
    if len(values) < 2 or not _are_positive(values):
        return None
    logs = [math.log(value) for value in values]
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    found = _around(centre(values), half, Basis.GROUPS)
    return (found.low, found.high) if found.low is not None and found.high is not None else None


def centre(values: Sequence[float]) -> float:
    """One number for several repeats: the geometric mean, so that the ratio of two is the mean of their ratios."""
    if len(values) == 1:
        return values[0]  # and not what is left of it after its logarithm
    return statistics.geometric_mean(values) if _are_positive(values) else statistics.fmean(values)


def t_quantile(freedom: int) -> float:
    """97.5 % of Student's t; beyond the table by its expansion, right to three digits."""
    return _T[freedom - 1] if freedom <= len(_T) else 1.960 + 2.372 / freedom + 2.82 / freedom**2


def _around(value: float, half: float, basis: Basis) -> Ratio:
    # Two repeats far apart reach beyond any number; what is known then is "anything".
    widest = min(half, 300.0)
    return Ratio(value=value, low=value * math.exp(-widest), high=value * math.exp(widest), basis=basis)


def _are_positive(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)
