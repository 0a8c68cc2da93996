"""Comparisons of configurations: measures, ratios and their confidence, computed from stored repeats without effects.

Times and rates vary by factors, so their logarithms are compared. Repeats of two configurations are pairs: each repeat
sends the same requests to both, minutes apart. With n pairs the mean of the log-ratios has a t-interval with n - 1
degrees of freedom, which is exact for normal log-ratios however few there are, and wide for two.
"""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from overspill.kv.sizes import format_size


class Better(StrEnum):
    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    key: str
    name: str
    unit: str
    better: Better = Better.NEITHER
    requests: str | None = None
    """Key of the list of per-request values whose mean this measure is."""
    begins_cold: bool = False
    """Whether an experiment's first start is slower, whatever its configuration: weights are read from disk, and
    compiled code is cached for later starts."""

    def value(self, metrics: Mapping[str, Any]) -> float | None:
        found = metrics.get(self.key)
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None

    def shown(self, value: float | None) -> str:
        """The value with its unit."""
        if value is None:
            return "-"
        if self.unit == "bytes":
            return format_size(int(value))
        return f"{_digits(value)} {self.unit}" if self.unit else f"{round(value):,}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def _time(key: str, name: str, requests: str | None = None) -> Measure:
    return Measure(key=key, name=name, unit="ms", better=Better.LOWER, requests=requests)


def _rate(key: str, name: str, unit: str) -> Measure:
    return Measure(key=key, name=name, unit=unit, better=Better.HIGHER)


# Ordered by what users ask first; the cost of getting there, load time, comes last.
MEASURES = (
    _rate("output_throughput", "output throughput", "tok/s"),
    _rate("request_throughput", "request throughput", "req/s"),
    _rate("request_goodput", "goodput", "req/s"),
    _rate("goodput_percent", "  of the requests", "%"),
    _rate("total_token_throughput", "total throughput", "tok/s"),
    _time("mean_ttft_ms", "TTFT, mean", "ttfts"),
    _time("median_ttft_ms", "TTFT, median"),
    _time("p99_ttft_ms", "TTFT, p99"),
    _time("cold_mean_ttft_ms", "TTFT of new prompts"),
    _time("returning_mean_ttft_ms", "TTFT of returning ones"),
    _time("mean_tpot_ms", "TPOT, mean"),
    _time("p99_tpot_ms", "TPOT, p99"),
    _time("mean_itl_ms", "ITL, mean"),
    _time("p99_itl_ms", "ITL, p99"),
    _time("mean_e2el_ms", "E2EL, mean", "latencies"),
    _time("p99_e2el_ms", "E2EL, p99"),
    Measure(key="peak_gpu_bytes", name="GPU memory, peak", unit="bytes"),
    Measure(key="peak_ram_bytes", name="RAM, peak", unit="bytes"),
    Measure(key="prompt_tokens", name="prompt tokens", unit=""),
    Measure(key="tokens_from_gpu_cache", name="  from the KV cache", unit=""),
    Measure(key="tokens_from_ram", name="  from RAM", unit=""),
    Measure(key="preemptions", name="preemptions", unit=""),
    Measure(key="draft_tokens", name="drafts", unit=""),
    Measure(key="accepted_tokens", name="  accepted", unit=""),
    Measure(key="spill_in_bytes", name="streamed from RAM", unit="bytes"),
    Measure(key="duration", name="duration", unit="s"),
    Measure(key="load_s", name="load time", unit="s", better=Better.LOWER, begins_cold=True),
)
BY_KEY = {measure.key: measure for measure in MEASURES}


NOT_FINISHED = "not finished"
CONFIDENCE = 0.95
# Two starts of the same engine differ in ways that no number of repeats averages out: clocks, memory placement, the
# order of the configurations. Less than one percent cannot be distinguished from these, and is not worth acting on.
FLOOR = 0.01
# "No difference" is a claim like any other: the whole interval must lie within this factor of 1. An
# interval that includes 1 and reaches further only failed to show a difference.
SAME = 1.05
# With fewer requests a bootstrap interval is far too narrow: 2 equal engines seem to differ in every second run.
FEWEST_REQUESTS = 20
_RESAMPLES = 2000
# Student's t, 97.5 %, for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Basis(StrEnum):
    """What an interval covers, worded for reports."""

    PAIRS = "over repeats, paired"
    GROUPS = "over repeats, not paired"
    REQUESTS = "over the requests of one repeat; what differs between runs is not in it"
    NONE = "one repeat: no interval"


class Verdict(StrEnum):
    NO_DIFFERENCE = "no difference above 5 %"
    """The interval excludes any difference that matters."""
    NOT_SHOWN = "no difference shown"
    """The interval includes 1, and larger differences too."""
    HIGHER = "higher"
    LOWER = "lower"
    ONE_RUN = "one run"
    """The interval is over requests, so it misses how two runs of the same engine differ."""
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
    """Ratio of the second to the first over repeats of the same number; None if they share no repeat."""
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
    """Ratio of unpaired measurements with Welch's interval, which allows the two different variances."""
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
    """Ratio of two means over requests with a bootstrap interval, in pairs where both sent the same requests.

    Requests of one run share its luck, so the interval says nothing about the next run. None for too few requests.
    """
    if min(len(first), len(second)) < FEWEST_REQUESTS or not _are_positive(
        [statistics.fmean(first), statistics.fmean(second)]
    ):
        return None
    if is_paired and len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} requests are not pairs")
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
    """Confidence interval of one configuration's repeats, for a chart."""
    if len(values) < 2 or not _are_positive(values):
        return None
    logs = [math.log(value) for value in values]
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    found = _around(centre(values), half, Basis.GROUPS)
    return (found.low, found.high) if found.low is not None and found.high is not None else None


def centre(values: Sequence[float]) -> float:
    """One number for several repeats: the geometric mean, so that the ratio of two is the mean of their ratios."""
    if len(values) == 1:
        return values[0]  # exactly, not rounded by a logarithm
    return statistics.geometric_mean(values) if _are_positive(values) else statistics.fmean(values)


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t; beyond the table by series expansion, right to three digits."""
    return _T[freedom - 1] if freedom <= len(_T) else 1.960 + 2.372 / freedom + 2.82 / freedom**2


def _around(value: float, half: float, basis: Basis) -> Ratio:
    # Two repeats far apart would overflow a float; such an interval means "anything".
    widest = min(half, 300.0)
    return Ratio(value=value, low=value * math.exp(-widest), high=value * math.exp(widest), basis=basis)


def _are_positive(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One measurement of a configuration."""

    number: int
    metrics: Mapping[str, Any]
    is_complete: bool = True
    problem: str | None = None
    conditions: str = ""
    """Model, workload and seed: only repeats under equal conditions are pairs and should give equal answers."""
    is_first_start: bool = False
    """Whether this repeat began with its experiment's first start of an engine."""
    source: Any = None
    """The stored result behind this repeat, for reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A configuration and its repeats."""

    label: str
    text: str
    repeats: tuple[Repeat, ...]

    @property
    def finished(self) -> tuple[Repeat, ...]:
        return tuple(repeat for repeat in self.repeats if repeat.is_complete)

    @property
    def has_repeats(self) -> bool:
        return len(self.finished) > 1

    @property
    def problem(self) -> str | None:
        """Reason why the last unfinished repeat failed; None if all are finished."""
        unfinished = [repeat.problem for repeat in self.repeats if not repeat.is_complete]
        return (unfinished[-1] or NOT_FINISHED) if unfinished else None

    def values(self, measure: Measure) -> dict[int, float]:
        found = {repeat.number: measure.value(repeat.metrics) for repeat in self.finished}
        return {number: value for number, value in found.items() if value is not None}

    def comparable(self, measure: Measure) -> dict[int, float]:
        """Values by repeat, without those that are worse only because the configuration started first."""
        cold = {repeat.number for repeat in self.finished if measure.begins_cold and repeat.is_first_start}
        return {number: value for number, value in self.values(measure).items() if number not in cold}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    measure: Measure
    values: tuple[float | None, ...]
    """Centre of each configuration, over the repeats that are compared."""
    points: tuple[tuple[float, ...], ...]
    """The single values behind each centre."""
    ratios: tuple[Ratio | None, ...]
    """Ratio of each configuration to the baseline, whose own is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How many answers of a configuration equal those of the baseline."""

    label: str
    compared: int
    same: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    columns: tuple[Column, ...]
    baseline: int
    """Index of the column the others are compared with: the first, or the first with a finished repeat."""
    rows: tuple[Row, ...]
    answers: tuple[Answers, ...]
    expected_repeats: int | None = None
    """Planned repeats of each configuration; None if unknown."""
    shares_starts: bool = False
    """Whether the repeats of a configuration share one start of its engine."""

    @property
    def is_complete(self) -> bool:
        if self.expected_repeats is None:
            return all(repeat.is_complete for column in self.columns for repeat in column.repeats)
        wanted = set(range(1, self.expected_repeats + 1))
        return all({repeat.number for repeat in column.finished} >= wanted for column in self.columns)

    @property
    def first(self) -> Column:
        return self.columns[self.baseline]

    @property
    def others(self) -> list[int]:
        return [index for index in range(len(self.columns)) if index != self.baseline]

    @property
    def uneven(self) -> dict[str, tuple[int, ...]]:
        """Finished repeats of each paired configuration, by label; empty if all have the same ones."""
        pairs = [column for column in self.columns if column is self.first or are_pairs(self.first, column)]
        had = {column.label: tuple(repeat.number for repeat in column.finished) for column in pairs}
        return had if len(set(had.values())) > 1 else {}

    @property
    def cold_start(self) -> str | None:
        """Label of the configuration whose engine started first, if load times are reported."""
        is_reported = any(row.measure.begins_cold for row in self.rows)
        first = (column.label for column in self.columns if any(repeat.is_first_start for repeat in column.finished))
        return next(first, None) if is_reported else None


def compare(
    columns: Sequence[Column], *, expected_repeats: int | None = None, shares_starts: bool = False
) -> Comparison:
    """Compare each column with the baseline; measures that are missing or zero everywhere are left out."""
    baseline = next((index for index, column in enumerate(columns) if column.finished), 0)
    first = columns[baseline]
    rows = []
    for measure in MEASURES:
        points = _points(measure, first, columns)
        if not any(value for found in points for value in found):
            continue
        ratios = [None if column is first else _ratio(measure, first, column) for column in columns]
        values = tuple(centre(found) if found else None for found in points)
        rows.append(Row(measure=measure, values=values, points=points, ratios=tuple(ratios)))
    return Comparison(
        columns=tuple(columns), baseline=baseline, rows=tuple(rows), expected_repeats=expected_repeats,
        answers=tuple(_same_answers(first, column) for column in columns if column is not first),
        shares_starts=shares_starts,
    )  # fmt: skip


def are_pairs(first: Column, second: Column) -> bool:
    """Whether repeats of the same number sent the same requests."""
    ours = {repeat.number: repeat.conditions for repeat in first.finished}
    theirs = {repeat.number: repeat.conditions for repeat in second.finished}
    shared = ours.keys() & theirs.keys()
    return bool(shared) and all(ours[number] == theirs[number] for number in shared)


def _points(measure: Measure, first: Column, columns: Sequence[Column]) -> tuple[tuple[float, ...], ...]:
    """Values of each column; of paired columns only repeats that all have, since others sent other requests."""
    found = [column.comparable(measure) or column.values(measure) for column in columns]
    paired = [column is first or are_pairs(first, column) for column in columns]
    sets = [values.keys() for values, is_paired in zip(found, paired) if values and is_paired]
    shared = set.intersection(*map(set, sets)) if sets else set()
    return tuple(
        tuple(value for number, value in values.items() if not (shared and is_paired) or number in shared)
        for values, is_paired in zip(found, paired)
    )


def _ratio(measure: Measure, first: Column, second: Column) -> Ratio | None:
    if measure.better is Better.NEITHER:
        return None
    ours, theirs = first.comparable(measure), second.comparable(measure)
    if not are_pairs(first, second):
        found = unpaired_ratio(list(ours.values()), list(theirs.values()))
    else:
        found = paired_ratio(ours, theirs)
    if found is None or found.low is not None or measure.requests is None:
        return found
    return _over_requests(measure.requests, first, second) or found


def _over_requests(key: str, first: Column, second: Column) -> Ratio | None:
    ours, theirs = _requests(first, key), _requests(second, key)
    if are_pairs(first, second) and len(ours) == len(theirs):
        pairs = [(one, other) for one, other in zip(ours, theirs) if one is not None and other is not None]
        return resampled_ratio([one for one, _ in pairs], [other for _, other in pairs], is_paired=True)
    answered = [[value for value in values if value is not None] for values in (ours, theirs)]
    return resampled_ratio(*answered, is_paired=False)


def _requests(column: Column, key: str) -> list[float | None]:
    """Per-request values of the only repeat, None if unanswered; empty with several repeats, which need none."""
    found = column.finished[0].metrics.get(key) if len(column.finished) == 1 else None
    if not isinstance(found, list):
        return []
    return [float(value) if isinstance(value, int | float) else None for value in found]


def _same_answers(first: Column, second: Column) -> Answers:
    theirs = {(repeat.number, repeat.conditions): repeat.metrics.get("answers") for repeat in first.finished}
    compared = same = 0
    for repeat in second.finished:
        expected = theirs.get((repeat.number, repeat.conditions)) or []
        for mine, other in zip(repeat.metrics.get("answers") or [], expected):
            compared += 1
            same += mine == other
    return Answers(label=second.label, compared=compared, same=same)


def verdict_words(measure: Measure, ratio: Ratio) -> str:
    """Verdict on a ratio in plain words: better, worse, or the verdict itself."""
    verdict = ratio.verdict
    if verdict not in (Verdict.HIGHER, Verdict.LOWER):
        return str(verdict)
    is_better = (verdict is Verdict.HIGHER) == (measure.better is Better.HIGHER)
    return "better" if is_better else "worse"
