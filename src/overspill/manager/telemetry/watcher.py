"""The watcher: samples the machine and its engines every second, keeps a history for charts, and publishes it."""

import asyncio
import json
import logging
import math
import time
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.manager.fleet import Engines
from overspill.manager.sse import Changes
from overspill.manager.states import State
from overspill.manager.telemetry import engine_metrics, machine
from overspill.manager.telemetry.engine_metrics import Metrics, Rates
from overspill.manager.telemetry.machine import Sample, Sampler

logger = logging.getLogger(__name__)

SECONDS_KEPT = 15 * 60
MINUTES_KEPT = 24 * 60
# A column takes 19 kB. Names come from engines and disks, so a few dozen are usual, and more mean a fault.
MAX_COLUMNS = 512
_NOTHING = math.nan
_EVERY_S = 1.0
STALE_S = 5.0
"""Age from which numbers are greyed."""
# The history needs fewer samples of engines that nobody watches.
_UNWATCHED_EVERY = 5


class Ring:
    """Ring buffer of the last `size` rows, in columns; a missing value is NaN, and null in JSON.

    Only the event loop's thread writes and reads it, so a reader never meets a half-written row.
    """

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
            # These belong to engines that are long gone.
            for name in [name for name, column in self._columns.items() if all(map(math.isnan, column))]:
                del self._columns[name]

    def columns(self, names: Collection[str] | None = None, *, after: float = -math.inf) -> dict[str, Any]:
        """Rows newer than `after`, oldest first: {"time": […], "series": {name: […]}}."""
        times = self._in_order(self._times)
        # Usually the last rows, but clocks are set back now and then.
        rows = [row for row, at in enumerate(times) if at > after]
        ordered = {
            name: self._in_order(column) for name, column in self._columns.items() if names is None or name in names
        }
        series = {
            name: [None if math.isnan(column[row]) else column[row] for row in rows] for name, column in ordered.items()
        }
        return {"time": [times[row] for row in rows], "series": series}

    def names(self, *, after: float = -math.inf) -> list[str]:
        """Names of columns that have a value in a row newer than `after`."""
        rows = [row for row, at in enumerate(self._times) if at > after]
        return [
            name for name, column in self._columns.items() if any(not math.isnan(column[row]) for row in reversed(rows))
        ]

    def _in_order(self, column: "array[float]") -> "array[float]":
        """Column in order of time, oldest first."""
        if self._num_written < self._size:
            return column[: self._num_written]
        begin = self._num_written % self._size
        return column[begin:] + column[:begin]


class History:
    """The last 15 minutes by the second, and the last day as averages per minute."""

    def __init__(self, seconds: int = SECONDS_KEPT, minutes: int = MINUTES_KEPT) -> None:
        self.by_second, self.by_minute = Ring(seconds), Ring(minutes)
        self._minute: int | None = None
        self._sums: dict[str, tuple[float, int]] = {}

    def ring(self, seconds: float) -> Ring:
        """The finest ring that goes back this far."""
        return self.by_second if seconds <= SECONDS_KEPT else self.by_minute

    def add(self, at: float, values: Mapping[str, float]) -> None:
        """Add a row. Missing values were not measured then: charts show a gap, and the page greys the number."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self.by_second.append(at, finite)
        minute = int(at // 60)
        if self._minute is not None and minute != self._minute:
            averages = {name: total / count for name, (total, count) in self._sums.items()}
            self.by_minute.append(self._minute * 60.0, averages)
            self._sums.clear()
        self._minute = minute
        for name, value in finite.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumbers:
    metrics: Metrics
    rates: Rates | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All measurements of one second."""

    sample: Sample
    engines: Mapping[str, EngineNumbers] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    """Values for charts, by name."""

    @property
    def event(self) -> str:
        return json.dumps({"at": round(self.sample.at, 2), "values": {k: round(v, 4) for k, v in self.values.items()}})


class Watching:
    """The watcher as one task; its history is read in the same event loop."""

    def __init__(
        self, engines: Engines, disks: Mapping[str, Path], other_processes: Callable[[], Mapping[str, int]]
    ) -> None:
        self.history = History()
        self.changes: Changes[Moment] = Changes()
        self.latest: Moment | None = None
        self.found: dict[str, str] = {}
        """Addresses of watched servers that Overspill did not start, by name."""
        self._engines, self._others = engines, other_processes
        self._sampler = Sampler(disks)
        self._numbers: dict[str, EngineNumbers] = {}
        self._num_ticks = 0

    async def run(self) -> None:
        try:
            while True:
                began = time.monotonic()
                try:
                    await self.tick()
                except Exception:
                    # A page without news is greyed; the next look may work.
                    logger.exception("Overspill: measuring the machine failed, will retry")
                self._num_ticks += 1
                await asyncio.sleep(max(0.05, _EVERY_S - (time.monotonic() - began)))
        finally:
            self._sampler.close()

    async def tick(self) -> None:
        snapshots = [one for one in self._engines.snapshots() if one.pid is not None]
        watched = {one.name: one.pid for one in snapshots if one.pid is not None} | dict(self._others())
        if self.changes.has_listeners or self._num_ticks % _UNWATCHED_EVERY == 0:
            await self._look_at_engines()
        sample = await asyncio.to_thread(self._sampler.read, watched)
        values = machine.chart_values(sample)
        for kind in ("spilled_bytes", "pinned_bytes"):
            values[f"ram.{kind}"] = float(sum(one.memory.get(kind) or 0 for one in snapshots))
        for name, numbers in self._numbers.items():
            if sample.at - numbers.metrics.at < STALE_S:
                values |= engine_metrics.chart_values(numbers.metrics, numbers.rates, name)
        self.latest = Moment(sample=sample, engines=dict(self._numbers), values=values)
        self.history.add(sample.at, values)
        if self.changes.has_listeners:
            self.changes.publish("moment", self.latest)

    async def numbers_of(self, url: str) -> Metrics | None:
        """The engine's metrics at this very moment; None if it does not answer."""
        return await engine_metrics.scrape(self._engines.upstream, url)

    async def _look_at_engines(self) -> None:
        ready = {one.name: one.url for one in self._engines.snapshots() if one.state is State.READY and one.url}
        urls = {**self.found, **ready}
        for gone in self._numbers.keys() - urls.keys():
            del self._numbers[gone]
        looks = await asyncio.gather(*(self.numbers_of(url) for url in urls.values()))
        for name, metrics in zip(urls, looks):
            if metrics is None:  # busy or ending: its last numbers grow old
                continue
            before = self._numbers.get(name)
            between = engine_metrics.rates(before.metrics, metrics) if before is not None else None
            self._numbers[name] = EngineNumbers(metrics=metrics, rates=between)
