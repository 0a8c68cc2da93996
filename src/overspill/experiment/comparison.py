"""Configurations side by side: a decision on stored repeats, without effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.experiment.intervals import Ratio, Verdict, centre, paired_ratio, resampled_ratio, unpaired_ratio
from overspill.experiment.measures import MEASURES, Better, Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A measurement of one configuration."""

    number: int
    metrics: Mapping[str, Any]
    is_complete: bool = True
    problem: str | None = None
    conditions: str = ""
    """Workload and seed: only repeats under equal ones are pairs, and only their answers should be the same."""
    is_first_start: bool = False
    """Whether it began with the first start of an engine in its experiment."""
    source: Any = None
    """What it was read from, for reports."""


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
    def problem(self) -> str | None:
        """Why the last attempt came to nothing, if so."""
        unfinished = [repeat.problem for repeat in self.repeats if not repeat.is_complete]
        return (unfinished[-1] or "not finished") if unfinished else None

    def values(self, measure: Measure) -> dict[int, float]:
        found = {repeat.number: measure.value(repeat.metrics) for repeat in self.finished}
        return {number: value for number, value in found.items() if value is not None}

    def comparable(self, measure: Measure) -> dict[int, float]:
        """Without what would be held against a configuration only because it was the first."""
        cold = {repeat.number for repeat in self.finished if measure.begins_cold and repeat.is_first_start}
        return {number: value for number, value in self.values(measure).items() if number not in cold}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    measure: Measure
    values: tuple[float | None, ...]
    """Of each configuration, over the repeats that are compared."""
    points: tuple[tuple[float, ...], ...]
    """What these are the centres of."""
    ratios: tuple[Ratio | None, ...]
    """Of each to the one that they are compared with, whose own is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How many answers are those of the configuration that it is compared with."""

    label: str
    compared: int
    same: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    columns: tuple[Column, ...]
    baseline: int
    """Which of them the others are compared with: the first, or the first with something to compare."""
    rows: tuple[Row, ...]
    answers: tuple[Answers, ...]
    expected_repeats: int | None = None
    """Of each configuration; None where it is not known."""
    shares_starts: bool = False
    """Whether repeats of a configuration are of one start of its engine."""

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
        """Of pairs that were not all measured equally often: which repeats each configuration has."""
        pairs = [column for column in self.columns if column is self.first or are_pairs(self.first, column)]
        had = {column.label: tuple(repeat.number for repeat in column.finished) for column in pairs}
        return had if len(set(had.values())) > 1 else {}

    @property
    def cold_start(self) -> str | None:
        """Whose load time was the first of the experiment, where load times are told."""
        told = any(row.measure.begins_cold for row in self.rows)
        first = (column.label for column in self.columns if any(repeat.is_first_start for repeat in column.finished))
        return next(first, None) if told else None


def compare(
    columns: Sequence[Column], *, expected_repeats: int | None = None, shares_starts: bool = False
) -> Comparison:
    """Each with the first; measures that nobody has are left out."""
    baseline = next((index for index, column in enumerate(columns) if column.finished), 0)
    first = columns[baseline]
    rows = []
    for measure in MEASURES:
        points = _points(measure, first, columns)
        if not any(value for found in points for value in found):
            continue
        ratios = [None if column is first else _ratio(measure, first, column) for column in columns]
        rows.append(
            Row(
                measure=measure,
                values=tuple(centre(found) if found else None for found in points),
                points=points,
                ratios=tuple(ratios),
            )
        )
    return Comparison(
        columns=tuple(columns),
        baseline=baseline,
        rows=tuple(rows),
        answers=tuple(_same_answers(first, column) for column in columns if column is not first),
        expected_repeats=expected_repeats,
        shares_starts=shares_starts,
    )


def are_pairs(first: Column, second: Column) -> bool:
    """Whether repeats of the same number sent the same requests."""
    ours = {repeat.number: repeat.conditions for repeat in first.finished}
    theirs = {repeat.number: repeat.conditions for repeat in second.finished}
    shared = ours.keys() & theirs.keys()
    return bool(shared) and all(ours[number] == theirs[number] for number in shared)


def _points(measure: Measure, first: Column, columns: Sequence[Column]) -> tuple[tuple[float, ...], ...]:
    """Of repeats that are pairs, only those that all have: the ratio is over these, and others had other requests."""
    found = [column.comparable(measure) or column.values(measure) for column in columns]
    paired = [column is first or are_pairs(first, column) for column in columns]
    sets = [values.keys() for values, is_paired in zip(found, paired) if values and is_paired]
    shared = set.intersection(*map(set, sets)) if sets else set()
    return tuple(
        tuple(value for number, value in values.items() if not (shared and is_paired) or number in shared)
        for values, is_paired in zip(found, paired)
    )


def _ratio(measure: Measure, first: Column, second: Column) -> Ratio | None:
    if not measure.is_compared:
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
    """Of the only repeat; with more there is no need of them. None for a request that was not answered."""
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
    """Of a ratio, in plain words: whether it is better, and how much."""
    verdict = ratio.verdict
    if verdict not in (Verdict.HIGHER, Verdict.LOWER):
        return str(verdict)
    is_better = (verdict is Verdict.HIGHER) == (measure.better is Better.HIGHER)
    return "better" if is_better else "worse"
