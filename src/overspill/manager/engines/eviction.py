"""Which engines must go for another one to fit: a pure function, by memory and not by count."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, combinations

from overspill.manager.engines.memory import Memory, total

# Sets of so many are compared; of more engines the least recently used are looked at, and the rest another time.
_COMPARED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine that holds memory."""

    name: str
    holds: Memory
    in_flight: int
    last_used: float
    ready_since: float | None
    """None while it starts."""
    may_go: bool = True
    """False for one that Overspill's manager did not start: whoever did may stop it."""
    is_kept: bool = False
    """Its model is set to be kept: no other goes before it."""
    is_leaving: bool = False
    """Stopping, or draining in order to stop: what it holds will be free."""
    is_overdue: bool = False
    """Starting for longer than anybody waits, and nobody does."""

    @property
    def is_evictable(self) -> bool:
        return self.may_go and not self.is_kept and not self.is_leaving


class Verdict(StrEnum):
    FITS = "fits"
    EVICT = "evict"
    WAIT = "wait"
    """For engines that leave, start, or have not served long enough yet."""
    NEVER = "never"
    """Not even with everything gone that may go."""


@dataclass(frozen=True, slots=True)
class Choice:
    verdict: Verdict
    victims: tuple[str, ...] = ()


def choose(need: Memory, free: Memory, running: Iterable[Running], *, now: float, least_service_s: float) -> Choice:
    """The fewest that free enough; idle ones before busy ones, and of these the least recently used.

    A busy engine is left alone until it has served for a while: two models that are asked for in turn would otherwise
    only ever load.
    """
    engines = list(running)
    if free.holds(need):
        return Choice(Verdict.FITS)
    leaving = total([one.holds for one in engines if one.is_leaving])
    evictable = [one for one in engines if one.is_evictable]
    if not (free + leaving + total([one.holds for one in evictable])).holds(need):
        return Choice(Verdict.NEVER)
    if (free + leaving).holds(need):
        return Choice(Verdict.WAIT)
    candidates = sorted((one for one in evictable if _has_served(one, now, least_service_s)), key=_order)
    compared = candidates[:_COMPARED]
    enough = [group for group in _groups(compared) if (free + leaving + total([o.holds for o in group])).holds(need)]
    if not enough and len(candidates) > _COMPARED:
        return Choice(Verdict.EVICT, tuple(one.name for one in compared))
    if not enough:
        return Choice(Verdict.WAIT)
    best = min(enough, key=lambda group: (sum(o.in_flight > 0 for o in group), len(group), list(map(_order, group))))
    return Choice(Verdict.EVICT, tuple(one.name for one in best))


def kept_in_the_way(need: Memory, free: Memory, running: Iterable[Running]) -> tuple[str, ...]:
    """The fewest engines that are kept without which there would be room; none if there is some, or would be none."""
    engines = list(running)
    room = free + total([one.holds for one in engines if one.is_evictable or one.is_leaving])
    if room.holds(need):
        return ()
    kept = sorted((one for one in engines if one.is_kept and one.may_go and not one.is_leaving), key=_order)
    groups = _groups(kept[:_COMPARED])  # the smallest come first
    enough = (group for group in groups if (room + total([one.holds for one in group])).holds(need))
    return tuple(one.name for one in next(enough, ()))


def _has_served(one: Running, now: float, least_service_s: float) -> bool:
    if one.ready_since is None:
        return one.is_overdue
    return not one.in_flight or now - one.ready_since >= least_service_s


def _order(one: Running) -> tuple[bool, float, str]:
    return one.in_flight > 0, one.last_used, one.name


def _groups(candidates: list[Running]) -> Iterable[tuple[Running, ...]]:
    return chain.from_iterable(combinations(candidates, size) for size in range(1, len(candidates) + 1))
