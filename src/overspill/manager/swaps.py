"""Model swaps: the queue of waiting requests, the model to load next, and the engines to evict for it.

Eviction is a pure function, by memory and not by count.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, combinations

from overspill.manager.engine import Engine
from overspill.manager.errors import NoRoom, NotServed, QueueFull, StartFailed
from overspill.manager.needs import NO_LIMIT, NOTHING, Memory, Need, total
from overspill.manager.states import State, Timing
from overspill.planning.memory import SLACK_BYTES
from overspill.registry import Model

logger = logging.getLogger(__name__)

# How many engines are compared in all combinations; of more, the least recently used, and the rest another time.
_COMPARED = 10
_UP = (State.STARTING, State.READY)
_HOLDING = (State.STARTING, State.READY, State.STOPPING, State.PARKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine that holds memory, as eviction sees it."""

    name: str
    holds: Memory
    in_flight: int
    last_used: float
    ready_since: float | None
    """When the engine became ready; None while it starts."""
    may_go: bool = True
    """Whether the manager may stop the engine: not if somebody else started it, nor while it is held."""
    is_kept: bool = False
    """Whether the model is set to be kept, so that the engine is not evicted."""
    is_leaving: bool = False
    """Whether the engine is stopping, or draining in order to stop, so that its memory will be free."""
    is_overdue: bool = False
    """Whether the engine has been starting for longer than any request waits, and no request waits for it."""

    @property
    def is_evictable(self) -> bool:
        return self.may_go and not self.is_kept and not self.is_leaving


class Verdict(StrEnum):
    FITS = "fits"
    EVICT = "evict"
    WAIT = "wait"
    """Wait for engines that leave, start, or have not served long enough yet."""
    NEVER = "never"
    """Not enough memory even with every evictable engine gone."""


@dataclass(frozen=True, slots=True)
class Choice:
    verdict: Verdict
    victims: tuple[str, ...] = ()


def choose(need: Memory, free: Memory, running: Iterable[Running], *, now: float, least_service_s: float) -> Choice:
    """Choose what to evict: as few busy engines as possible, then as few engines, then the least recently used.

    A busy engine is left alone until it has served for a while: two models requested in turn would otherwise only
    ever load.
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
    """The fewest kept engines whose end would make room; none if there is room anyway, or still would not be."""
    engines = list(running)
    room = free + total([one.holds for one in engines if one.is_evictable or one.is_leaving])
    if room.holds(need):
        return ()
    kept = sorted((one for one in engines if one.is_kept and one.may_go and not one.is_leaving), key=_order)
    groups = _groups(kept[:_COMPARED])  # smallest first
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


def may_park(need: Memory, free: Memory, leaving: Iterable[Memory], parked: Iterable[Memory]) -> bool:
    """Whether parking engines, which frees `parked`, makes enough room without stopping them."""
    return (free + total([*leaving, *parked])).holds(need)


@dataclass(eq=False, slots=True)
class Waiting:
    name: str
    ready: "asyncio.Future[None]"
    may_evict: bool = True
    since: float = field(default_factory=time.monotonic)


class Queue:
    """Bounded queue of requests in order of arrival; clients that go away leave it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: dict[Waiting, None] = {}  # ordered, and quick to remove from

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, name: str, *, may_evict: bool = True) -> Waiting:
        if len(self._waiting) >= self.most:
            raise QueueFull(
                f"{len(self._waiting)} requests already wait for models to load, the most allowed; ask again later",
                retry_after_s=5.0,
            )
        one = Waiting(name, asyncio.get_running_loop().create_future(), may_evict)
        self._waiting[one] = None
        return one

    def leave(self, one: Waiting) -> None:
        self._waiting.pop(one, None)

    def count(self, name: str) -> int:
        return sum(one.name == name for one in self._waiting)

    def names(self) -> list[str]:
        """Names of the models waited for, in order of their first request."""
        return list(dict.fromkeys(one.name for one in self._waiting))

    def since(self, name: str) -> float:
        """Arrival of the first request that waits for the model, on the monotonic clock."""
        return min((one.since for one in self._waiting if one.name == name), default=float("inf"))

    def may_evict(self, name: str) -> bool:
        return any(one.may_evict for one in self._waiting if one.name == name)

    def admit(self, name: str) -> None:
        for one in self._take(name):
            one.ready.set_result(None)

    def refuse(self, name: str, error: NotServed) -> None:
        for one in self._take(name):
            one.ready.set_exception(error)

    def refuse_all(self, error: NotServed) -> None:
        for name in self.names():
            self.refuse(name, error)

    def _take(self, name: str) -> list[Waiting]:
        taken = [one for one in self._waiting if one.name == name]
        for one in taken:
            del self._waiting[one]
        return [one for one in taken if not one.ready.done()]


@dataclass(eq=False, slots=True)
class Swaps:
    queue: Queue
    timing: Timing
    engines: Mapping[str, Engine]
    find_model: Callable[[str], Model | None]
    reckon: Callable[[Model, Memory], Need]
    """Function for a model's need. Blocks."""
    free: Callable[[], Memory]
    """Function for the memory that is free now. Blocks."""
    budget: Memory | None
    """Limit on what all engines together hold; None for whatever is free."""
    reserved_for: list[str] = field(default_factory=list)
    """Reasons for which no engine is started now."""
    _claim: tuple[str, Memory] = ("", NOTHING)
    """Model for which elastic engines shrink, and the memory that it needs."""
    _measured_at: float = float("-inf")
    """When the free memory that a decision rests on was measured."""
    _draining: dict[str, tuple[str, float, bool]] = field(default_factory=dict)
    """Engines that take no new requests: the model they make room for, the deadline, and whether parking suffices."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self.woken.set()

    @property
    def claimed(self) -> Memory:
        """GPU memory that elastic engines are to leave free for a waiting model."""
        name, need = self._claim
        waits = self.queue.count(name) and self.engines[name].state not in (State.STARTING, State.READY)
        return need if waits else NOTHING

    async def free_for_kv(self, gpus: Iterable[int]) -> dict[int, int]:
        """GPU memory that elastic engines may be granted on top of what they hold or were granted: neither promised nor
        beyond the budget, and less than is free, since engines take some more at times."""
        free = await self._unpromised()
        bound = free if self.budget is None else await self._free()
        return {gpu: min(free.of_gpu(gpu) - SLACK_BYTES, bound.of_gpu(gpu)) for gpu in gpus}

    async def turn(self) -> None:
        self._stop_idle()
        self._end_drains()
        self._resume_parked()
        for name in self.queue.names():
            if self.engines[name].state is State.READY and not self.engines[name].is_draining:
                self.queue.admit(name)  # they need no memory, and so do not wait for those before them
        for name in self.queue.names():
            waiting = self.queue.names()
            if name not in waiting:
                continue  # its clients went away meanwhile
            if self.engines[name].is_draining and name != waiting[0]:
                continue
            if not await self._serve(name):
                # No overtaking: memory that becomes free is for the model that has waited longest.
                break

    async def _serve(self, name: str) -> bool:
        """Serve one waiting model; True once it is ready, starting or refused, so that the next may be served."""
        engine, model = self.engines[name], self.find_model(name)
        match engine.state:
            case State.READY:
                # This model was requested before the one it was to be evicted for.
                self._cancel_drain(engine)
                self.queue.admit(name)
                return True
            case State.STARTING:
                return True
            case State.STOPPING:
                return False
        failure, wait = engine.failure, engine.retry_after_s
        if failure is not None and (wait > 0 or (failure.count and self.queue.since(name) < failure.at)):
            self.queue.refuse(name, _failed(engine, wait))
            return True
        if model is None:
            self.queue.refuse(name, NoRoom(f"{name} is not in the registry any more"))
            return True
        if self.reserved_for:
            self.queue.refuse(name, NoRoom(f"{name} is not started now: {self.reserved_for[-1]}", retry_after_s=30.0))
            return True
        if engine.state is State.PARKED and engine.refusal and self.queue.since(name) < engine.refused_at:
            self.queue.refuse(name, NoRoom(engine.refusal, retry_after_s=10.0))
            return True
        self._measured_at = time.monotonic()
        try:
            if engine.state is State.PARKED:
                await asyncio.sleep(0)  # let requests just admitted elsewhere be counted first
                need = Need(least=engine.parking_frees)
            else:
                need = await asyncio.to_thread(self.reckon, model, self._evictable())
            free = await self._free()
        except Exception as error:
            # A fault of one model or of the driver: models behind it must not wait for that.
            logger.exception("Overspill: the memory that %s needs is unknown", name)
            why = f"the memory that {name} needs is unknown ({type(error).__name__}: {error})"
            self.queue.refuse(name, NoRoom(why))
            return True
        is_down = engine.state in (State.STOPPED, State.FAILED, State.PARKED)
        if name not in self.queue.names() or not is_down or self.reserved_for:
            return True  # the clients went away, the state changed, or a job has reserved the machine meanwhile
        if need.refused and self._is_in_motion():
            return False
        if need.refused:
            kept = _kept([one.name for one in self._running() if one.is_kept])
            self.queue.refuse(name, NoRoom(f"{name} cannot be started: {need.refused}{kept}"))
            return True
        # Engines that can shrink do so before any is parked or stopped.
        could_be_free = free + total([one.could_release for one in self.engines.values()])
        running = [
            replace(one, holds=one.holds - self.engines[one.name].could_release)
            for one in self._running()
            if one.name != name
        ]
        now, least_service_s = time.monotonic(), self.timing.least_service_s
        choice = choose(need.least, could_be_free, running, now=now, least_service_s=least_service_s)
        if choice.verdict is Verdict.FITS and not free.holds(need.least):
            self._claim = (name, need.least)
            return False
        return self._carry_out(choice, engine, model, need, could_be_free)

    def _carry_out(self, choice: Choice, engine: Engine, model: Model, need: Need, free: Memory) -> bool:
        name = engine.name
        match choice.verdict:
            case Verdict.FITS:
                if engine.state is State.PARKED:
                    engine.want_awake()
                else:
                    engine.want_up(model.settings.as_json(), need.takes)
                self._end_drains()  # there was room without the engines that drain for this model
                return True
            case Verdict.NEVER if self._is_in_motion():
                return False
            case Verdict.NEVER:
                self.queue.refuse(name, self._no_room(name, need, free))
                return True
            case Verdict.EVICT if not self.queue.may_evict(name):
                self.queue.refuse(name, self._no_room(name, need, free, choice.victims))
                return True
            case Verdict.EVICT if self._is_settling():
                return False
            case Verdict.EVICT:
                victims = [self.engines[victim] for victim in choice.victims]
                leaving = [one.holds for one in self._running() if one.is_leaving]
                frees = [one.parking_frees if _parks(one) else one.holds for one in victims]
                parks = may_park(need.least, free - total([one.could_release for one in victims]), leaving, frees)
                for one in victims:
                    deadline = time.monotonic() + self.timing.drain_s
                    self._draining[one.name] = (name, deadline, parks and _parks(one))
                    one.is_draining = True
                self._end_drains()
        return False

    def _end_drains(self) -> None:
        """Stop or park drained and overdue engines; keep those whose memory is no longer needed."""
        now = time.monotonic()
        for victim, (for_name, deadline, parks) in list(self._draining.items()):
            engine = self.engines[victim]
            is_over = engine.state not in (State.READY, State.STARTING, State.PARKED)
            if is_over or not self.queue.count(for_name) or self.engines[for_name].state in _UP:
                # Also where a user stops or parks it, since an engine that refuses to be parked serves on.
                self._cancel_drain(engine)
            elif not engine.in_flight or now > deadline:
                del self._draining[victim]
                parks = parks and _parks(engine)
                how = "parked" if parks else "stopped"
                self._let_go(engine, f"it was {how} to make room for {for_name}", parks=parks)

    def _cancel_drain(self, engine: Engine) -> None:
        """Let an engine serve on instead of making room; one that is being stopped still takes no new requests."""
        self._draining.pop(engine.name, None)
        engine.is_draining = engine.is_leaving

    def _let_go(self, engine: Engine, reason: str, *, parks: bool) -> None:
        """Stop or park an engine that no user asked to stop; all such stops come through here. Requests in flight wait
        in a parked engine, and continue when it wakes."""
        if parks:
            engine.want_parked(reason, or_stop=True)
        else:
            engine.want_down(reason)

    def _stop_idle(self) -> None:
        """Park engines that were idle for their TTL, or stop those that cannot be parked or were idle for it again."""
        now = time.monotonic()
        for name, engine in self.engines.items():
            model = self.find_model(name)
            ttl = model.settings.ttl if model is not None and not model.settings.keep else None
            if ttl is None or engine.state not in (State.READY, State.PARKED) or not engine.is_managed:
                continue
            is_parked = engine.state is State.PARKED
            if engine.in_flight or self.queue.count(name) or now - engine.last_used < ttl * (2 if is_parked else 1):
                continue
            self._let_go(engine, f"it was not used for {ttl} s", parks=_parks(engine))

    def _resume_parked(self) -> None:
        """Queue engines that were parked with requests in flight, so that they get their next turn."""
        for name, engine in self.engines.items():
            if engine.state is State.PARKED and engine.in_flight and not self.queue.count(name):
                with contextlib.suppress(QueueFull):
                    # Nobody awaits this future: the requests are in the engine, and a refusal is tried again.
                    self.queue.join(name).ready.add_done_callback(asyncio.Future.exception)

    async def _free(self) -> Memory:
        if self.budget is None:
            return await self._unpromised()
        holding = [one for one in self.engines.values() if one.state in _HOLDING or one.has_process]
        left = self.budget - total([one.holds for one in holding])
        return left if self._is_limited else left.where(self.budget, await self._unpromised())

    @property
    def _is_limited(self) -> bool:
        """Whether the budget says how much there is of all memory, so that none is measured."""
        return self.budget is not None and NO_LIMIT not in (*self.budget.gpus, self.budget.ram_bytes)

    async def _unpromised(self) -> Memory:
        """Free memory without what starting engines will take and what was granted: engines may take both now."""
        free = await asyncio.to_thread(self.free)
        return free - total(
            [one.holds if one.state is State.STARTING else one.promised for one in self.engines.values()]
        )

    def _evictable(self) -> Memory:
        """Memory that could be freed: all of evictable engines, and what the others would give back."""
        return total(
            [
                one.holds if one.is_evictable or one.is_leaving else self.engines[one.name].could_release
                for one in self._running()
            ]
        )

    def _running(self) -> list[Running]:
        return [
            Running(
                name=one.name,
                holds=one.holds,
                in_flight=one.in_flight,
                last_used=one.last_used,
                # A parked engine goes at any time: it serves nobody.
                ready_since=float("-inf") if one.state is State.PARKED else one.ready_since,
                may_go=one.is_managed and not one.held,
                is_kept=self._is_kept(one.name),
                is_leaving=one.is_draining or one.state is State.STOPPING,
                is_overdue=one.starting_s > self.timing.load_s and not self.queue.count(one.name),
            )
            for one in self.engines.values()
            if one.state in _HOLDING
        ]

    def _is_kept(self, name: str) -> bool:
        model = self.find_model(name)
        return model is not None and bool(model.settings.keep)

    def _is_in_motion(self) -> bool:
        """Whether free memory is about to change: a starting engine has taken part of what it was promised, which then
        counts twice, and the memory of an ended engine is not all free yet."""
        if self._is_limited:
            return False
        moving = any(one.state in (State.STARTING, State.STOPPING) for one in self.engines.values())
        return moving or self._is_settling()

    def _is_settling(self) -> bool:
        """Whether an engine had just ended when free memory was measured, or ended later: its memory may not be counted
        as free yet, and no other should be evicted meanwhile."""
        if self._is_limited:
            return False
        last = max((one.ended_at for one in self.engines.values()), default=float("-inf"))
        return self._measured_at - last < self.timing.settle_s

    def _no_room(self, name: str, need: Need, free: Memory, victims: tuple[str, ...] = ()) -> NoRoom:
        short = f"{name} needs {need.least}; {free.where_needed(need.least)} is free"
        if victims:
            return NoRoom(f"{short}. Stop {' and '.join(victims)} first, or switch to {name}")
        if kept := kept_in_the_way(need.least, free, self._running()):
            return NoRoom(short + _kept(kept))
        held = [one.name for one in self.engines.values() if one.held and one.state in _HOLDING]
        if held:
            return NoRoom(f"{short}, and {', '.join(held)} is being measured. Ask again later", retry_after_s=30.0)
        others = [one for one in self._running() if not one.may_go]
        if others:
            outside = ", ".join(one.name for one in others)
            return NoRoom(f"{short}, and {outside} was not started by the manager. Stop it first")
        return NoRoom(f"{short}, and stopping other models would not be enough. Use a shorter context, or less RAM")


def _parks(engine: Engine) -> bool:
    return engine.can_park and engine.state is State.READY


def _kept(names: Sequence[str]) -> str:
    """End of a refusal whose reason is kept engines."""
    if not names:
        return ""
    who, are = " and ".join(names), "is" if len(names) == 1 else "are"
    return (
        f". {who} {are} set to be kept, and so not stopped. Stop {who} first, or allow it with: overspill models edit "
        f"{names[0]} --no-keep"
    )


def _failed(engine: Engine, wait: float) -> StartFailed:
    assert engine.failure is not None
    again = f"the next try is in {wait:.0f} s" if wait >= 1 else "the next request tries again"
    return StartFailed(
        f"{engine.failure.reason}; {again}", retry_after_s=max(1.0, wait), log_lines=engine.failure.log_lines
    )
