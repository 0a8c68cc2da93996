"""Looks at the machine and its engines every second, keeps the numbers, and tells those who watch."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from overspill.manager.engines.events import Changes
from overspill.manager.engines.fleet import Engines
from overspill.manager.engines.states import State
from overspill.manager.watching import engine_metrics, samples
from overspill.manager.watching.engine_metrics import Metrics, Rates
from overspill.manager.watching.history import History
from overspill.manager.watching.sampler import Sampler
from overspill.manager.watching.samples import Sample

logger = logging.getLogger(__name__)

_EVERY_S = 1.0
_METRICS_WAIT_S = 2.0
STALE_S = 5.0
"""Numbers that are older are greyed."""
# Of an engine that nobody watches the history needs fewer.
_UNWATCHED_EVERY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumbers:
    metrics: Metrics
    rates: Rates | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All that is known of one second."""

    sample: Sample
    engines: Mapping[str, EngineNumbers] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    """For charts."""

    @property
    def event(self) -> str:
        return json.dumps({"at": round(self.sample.at, 2), "values": {k: round(v, 4) for k, v in self.values.items()}})


class Watching:
    """One task; its history is read in the same event loop."""

    def __init__(
        self, engines: Engines, disks: Mapping[str, Path], other_processes: Callable[[], Mapping[str, int]]
    ) -> None:
        self.history = History()
        self.changes: Changes[Moment] = Changes()
        self.latest: Moment | None = None
        self.found: dict[str, str] = {}
        """Addresses of servers that Overspill did not start and that are watched, by name."""
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
                    # A page that shows nothing new is greyed; the next look may work.
                    logger.exception("Overspill: looking at the machine failed, and is tried again")
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
        values = samples.chart_values(sample)
        spilled = sum(one.memory.get("spilled_bytes") or 0 for one in snapshots)
        values["ram.spilled_bytes"] = float(spilled)
        values["ram.pinned_bytes"] = float(sum(one.memory.get("pinned_bytes") or 0 for one in snapshots))
        for name, numbers in self._numbers.items():
            if sample.at - numbers.metrics.at < STALE_S:
                values |= engine_metrics.chart_values(numbers.metrics, numbers.rates, name)
        self.latest = Moment(sample=sample, engines=dict(self._numbers), values=values)
        self.history.add(sample.at, values)
        if self.changes.has_listeners:
            self.changes.tell("moment", self.latest)

    async def numbers_of(self, url: str) -> Metrics | None:
        """What an engine counts at this very moment."""
        answer = await self._engines.upstream.get(url, "/metrics", _METRICS_WAIT_S)
        if answer is None or answer[0] != 200:
            return None
        return engine_metrics.parse_metrics(answer[1], time.time())

    async def _look_at_engines(self) -> None:
        ready = {one.name: one.url for one in self._engines.snapshots() if one.state is State.READY and one.url}
        urls = {**self.found, **ready}
        for gone in self._numbers.keys() - urls.keys():
            del self._numbers[gone]
        looks = await asyncio.gather(*(self.numbers_of(url) for url in urls.values()))
        for name, metrics in zip(urls, looks):
            if metrics is None:  # it is busy, or ends: what was known of it grows old
                continue
            before = self._numbers.get(name)
            between = engine_metrics.rates(before.metrics, metrics) if before is not None else None
            self._numbers[name] = EngineNumbers(metrics=metrics, rates=between)
