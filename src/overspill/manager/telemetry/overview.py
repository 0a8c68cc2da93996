"""What engines do now, in a line each and in one sentence; a pure function of one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overspill.manager.states import Snapshot, State
from overspill.manager.telemetry.engine_metrics import Metrics
from overspill.manager.telemetry.watcher import STALE_S, EngineNumbers, Moment

# As they are read: what works, what is about to, what does not.
_ORDER = (State.READY, State.STARTING, State.STOPPING, State.FAILED, State.PARKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLine:
    """Numbers that are None are not known, or older than some seconds."""

    name: str
    engine: Snapshot | None
    """None for a server that Overspill did not start."""
    tokens_per_s: float | None = None
    running: int = 0
    queued: int = 0
    """In the engine, and before it until its model is ready."""
    gpu_hits: float | None = None
    """Of all prompt tokens since its start, found in the GPU's prefix cache."""
    ram_hits: float | None = None
    """The same of RAM."""
    kv_use: float | None = None
    ttft_s: float | None = None
    """Of the requests of the last second, else of all since its start."""

    @property
    def state(self) -> str:
        return str(self.engine.state) if self.engine is not None else "found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    lines: tuple[EngineLine, ...]
    stopped: tuple[str, ...]
    """Models of which nothing runs."""

    @property
    def headline(self) -> str:
        states = [line.state for line in self.lines]
        counts = [f"{states.count(state)} {state}" for state in (*map(str, _ORDER), "found") if state in states]
        return ", ".join(counts) or ("Nothing runs" if self.stopped else "No models yet")

    @property
    def tokens_per_s(self) -> float:
        return sum(line.tokens_per_s or 0.0 for line in self.lines)

    @property
    def running(self) -> int:
        return sum(line.running for line in self.lines)

    @property
    def queued(self) -> int:
        return sum(line.queued for line in self.lines)


def overview(moment: Moment | None, engines: Sequence[Snapshot]) -> Overview:
    numbers: dict[str, EngineNumbers] = {}
    if moment is not None:
        numbers = {name: one for name, one in moment.engines.items() if moment.sample.at - one.metrics.at <= STALE_S}
    known = {one.name: one for one in engines}
    shown = sorted((one for one in engines if one.state in _ORDER), key=lambda one: _ORDER.index(one.state))
    lines = [_line(one.name, one, numbers) for one in shown]
    lines += [_line(name, None, numbers) for name in sorted(numbers.keys() - known.keys())]
    stopped = tuple(one.name for one in engines if one.state is State.STOPPED)
    return Overview(lines=tuple(lines), stopped=stopped)


def _line(name: str, engine: Snapshot | None, numbers: Mapping[str, EngineNumbers]) -> EngineLine:
    traffic = engine.traffic if engine is not None else None
    before = traffic.waiting if traffic is not None else 0
    one = numbers.get(name)
    if one is None:
        return EngineLine(name=name, engine=engine, running=traffic.in_flight if traffic else 0, queued=before)
    metrics, rates = one.metrics, one.rates
    in_flight = traffic.in_flight if traffic is not None else 0
    ttft_s = rates.ttft_s if rates is not None else None
    return EngineLine(
        name=name,
        engine=engine,
        tokens_per_s=rates.generation_tokens_per_s if rates is not None else None,
        running=int(in_flight if metrics.requests_running is None else metrics.requests_running),
        queued=before + int(metrics.requests_waiting or 0),
        gpu_hits=_share(metrics.prefix_hits, metrics),
        ram_hits=_share(metrics.external_hits, metrics),
        kv_use=metrics.kv_cache_use,
        ttft_s=ttft_s if ttft_s is not None else _mean(metrics.ttft_seconds, metrics.ttft_count),
    )


def _share(hits: float | None, metrics: Metrics) -> float | None:
    return hits / metrics.prefix_queries if hits is not None and metrics.prefix_queries else None


def _mean(total: float | None, count: float | None) -> float | None:
    return total / count if total is not None and count else None
