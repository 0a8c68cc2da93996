"""Numbers of the last minutes and of the last day, for charts: rings of columns, one writer, no locks.

Written and read by the event loop's thread only, so a reader never meets a half-written row.
"""

import math
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

SECONDS_KEPT = 15 * 60
MINUTES_KEPT = 24 * 60
# A column takes 19 kB. Names come from engines and disks, so there are a few dozen, unless something is wrong.
MAX_COLUMNS = 512
_NOTHING = math.nan
T = TypeVar("T")


class Ring:
    """The last `size` rows. A value that a row does not have is NaN, and null in JSON."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_written = 0
        self._times = array("d", [_NOTHING]) * size
        self._columns: dict[str, array[float]] = {}

    def append(self, at: float, values: Mapping[str, float]) -> None:
        row = self._num_written % self._size
        self._times[row] = at
        for name in values.keys() - self._columns.keys():
            if len(self._columns) < MAX_COLUMNS:
                self._columns[name] = array("d", [_NOTHING]) * self._size
        for name, column in self._columns.items():
            # Four decimals are more than a chart shows, and a third of the bytes.
            column[row] = round(values.get(name, _NOTHING), 4)
        self._num_written += 1
        if self._num_written % self._size == 0:
            self._forget_empty_columns()

    def columns(self, names: Collection[str] | None = None, *, after: float = -math.inf) -> dict[str, Any]:
        """Rows that are newer than `after`, the oldest first: {"time": […], "series": {name: […]}}."""
        times = self._in_order(self._times)
        # Usually the last rows; clocks are set back now and then.
        wanted = [row for row, at in enumerate(times) if at > after] if after > -math.inf else None
        series = {
            name: _picked(
                [None if value != value else value for value in self._in_order(column)], wanted
            )  # NaN is null
            for name, column in self._columns.items()
            if names is None or name in names
        }
        return {"time": _picked(list(times), wanted), "series": series}

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def _in_order(self, column: "array[float]") -> "array[float]":
        """The oldest first."""
        if self._num_written < self._size:
            return column[: self._num_written]
        begin = self._num_written % self._size
        return column[begin:] + column[:begin]

    def _forget_empty_columns(self) -> None:
        """Of engines that are long gone."""
        for name in [name for name, column in self._columns.items() if all(map(math.isnan, column))]:
            del self._columns[name]


def _picked(values: list[T], wanted: list[int] | None) -> list[T]:
    return values if wanted is None else [values[row] for row in wanted]


@dataclass(frozen=True, slots=True)
class Latest:
    at: float
    value: float


class History:
    """The last 15 minutes by the second, the last day as averages of minutes, and every number's newest value."""

    def __init__(self, seconds: int = SECONDS_KEPT, minutes: int = MINUTES_KEPT) -> None:
        self.by_second, self.by_minute = Ring(seconds), Ring(minutes)
        self._latest: dict[str, Latest] = {}
        self._minute: int | None = None
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, at: float, values: Mapping[str, float]) -> None:
        """One row. What is missing in it was not measured then: charts show a gap, and the page greys the number."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self.by_second.append(at, finite)
        for name, value in finite.items():
            if name in self._latest or len(self._latest) < MAX_COLUMNS:
                self._latest[name] = Latest(at, value)
        self._count(at, finite)

    def latest(self) -> dict[str, Latest]:
        """With the time of each, so that a page can grey what is stale."""
        return dict(self._latest)

    def _count(self, at: float, values: Mapping[str, float]) -> None:
        minute = int(at // 60)
        if self._minute is not None and minute != self._minute:
            averages = {name: total / count for name, (total, count) in self._sums.items()}
            self.by_minute.append(self._minute * 60.0, averages)
            self._sums.clear()
            known = set(self.by_second.names) | set(self.by_minute.names)
            self._latest = {name: latest for name, latest in self._latest.items() if name in known}
        self._minute = minute
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1
