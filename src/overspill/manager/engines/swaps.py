"""Which model is loaded next, and what goes for it: the request that waits longest decides."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from overspill.manager.engines.engine import Engine
from overspill.manager.engines.eviction import Choice, Running, Verdict, choose, kept_in_the_way
from overspill.manager.engines.memory import Memory, total
from overspill.manager.engines.needs import Need
from overspill.manager.engines.queue import Queue
from overspill.manager.engines.states import State
from overspill.manager.engines.timing import Timing
from overspill.manager.errors import NoRoom, StartFailed
from overspill.registry import Model

logger = logging.getLogger(__name__)

_HOLDING = (State.STARTING, State.READY, State.STOPPING)


@dataclass(eq=False, slots=True)
class Swaps:
    queue: Queue
    timing: Timing
    engines: Mapping[str, Engine]
    find_model: Callable[[str], Model | None]
    reckon: Callable[[Model, Memory], Need]
    """Blocks."""
    free: Callable[[], Memory]
    """Blocks. What is free now."""
    budget: Memory | None
    """What all engines together may hold, instead of what is free."""
    reserved_for: list[str] = field(default_factory=list)
    """Why no engine is started now, if there are reasons."""
    _draining: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Engines that take no new requests, for which model, and until when they are waited for."""
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self._turn()
            except Exception:
                logger.exception("Overspill: choosing the next model failed, and is tried again")
                await asyncio.sleep(1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25 if len(self.queue) else 1.0):
                    await self._woken.wait()

    async def _turn(self) -> None:
        self._stop_idle()
        self._end_drains()
        for name in self.queue.names():
            waiting = self.queue.names()
            if name not in waiting:
                continue  # whoever asked went away while another was dealt with
            if self.engines[name].is_draining and name != waiting[0]:
                continue
            if not await self._serve(name):
                # Nobody overtakes: what becomes free is for the one that waits longest.
                break

    async def _serve(self, name: str) -> bool:
        """Whether those behind may be looked at: it is ready, starting, or refused."""
        engine, model = self.engines[name], self.find_model(name)
        match engine.state:
            case State.READY:
                # Asked for before the one it was to go for.
                engine.is_draining = False
                self._draining.pop(name, None)
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
        try:
            need, free = await asyncio.to_thread(self.reckon, model, self._evictable()), await self._free()
        except Exception as error:
            # Of one model, or of the driver: those that wait behind it must not wait for that.
            logger.exception("Overspill: what %s needs cannot be told", name)
            self.queue.refuse(name, NoRoom(f"what {name} needs cannot be told ({type(error).__name__}: {error})"))
            return True
        if need.refused and self._is_in_motion():
            return False
        if need.refused:
            kept = _kept([one.name for one in self._running() if one.is_kept])
            self.queue.refuse(name, NoRoom(f"{name} cannot be started: {need.refused}{kept}"))
            return True
        if name not in self.queue.names() or engine.state not in (State.STOPPED, State.FAILED):
            return True  # meanwhile
        running = self._running()
        choice = choose(need.least, free, running, now=time.monotonic(), least_service_s=self.timing.least_service_s)
        return self._carry_out(choice, engine, model, need, free)

    def _carry_out(self, choice: Choice, engine: Engine, model: Model, need: Need, free: Memory) -> bool:
        name = engine.name
        match choice.verdict:
            case Verdict.FITS:
                engine.want_up(model.settings.as_json(), need.takes)
                self._end_drains()  # there was room without those that were to go for it
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
                for victim in choice.victims:
                    self._draining[victim] = (name, time.monotonic() + self.timing.drain_s)
                    self.engines[victim].is_draining = True
                self._end_drains()
        return False

    def _end_drains(self) -> None:
        """Those that are idle by now are stopped; those that nobody needs to go any more stay."""
        now = time.monotonic()
        for victim, (for_name, deadline) in list(self._draining.items()):
            engine = self.engines[victim]
            if engine.state not in (State.READY, State.STARTING):
                del self._draining[victim]
            elif not self.queue.count(for_name) or self.engines[for_name].state in (State.STARTING, State.READY):
                del self._draining[victim]
                engine.is_draining = False
            elif not engine.in_flight or now > deadline:
                del self._draining[victim]
                engine.want_down(f"it was stopped to make room for {for_name}")

    def _stop_idle(self) -> None:
        now = time.monotonic()
        for name, engine in self.engines.items():
            model = self.find_model(name)
            ttl = model.settings.ttl if model is not None and not model.settings.keep else None
            if ttl is None or engine.state is not State.READY or not engine.is_managed:
                continue
            if not engine.in_flight and not self.queue.count(name) and now - engine.last_used >= ttl:
                engine.want_down(f"it was not used for {ttl} s")

    async def _free(self) -> Memory:
        """What starting engines will take is theirs already, whether they have it yet or not."""
        holding = [one for one in self.engines.values() if one.state in _HOLDING or one.has_process]
        if self.budget is not None:
            return self.budget - total([one.holds for one in holding])
        measured = await asyncio.to_thread(self.free)
        return measured - total([one.holds for one in holding if one.state is State.STARTING])

    def _evictable(self) -> Memory:
        return total([one.holds for one in self._running() if one.is_evictable or one.is_leaving])

    def _running(self) -> list[Running]:
        return [
            Running(
                name=one.name,
                holds=one.holds,
                in_flight=one.in_flight,
                last_used=one.last_used,
                ready_since=one.ready_since,
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
        """What is measured now need not be so in a moment: an engine that starts has taken a part of what it was
        promised, which then counts twice, and of one that ended not all is free yet."""
        if self.budget is not None:
            return False
        moving = any(one.state in (State.STARTING, State.STOPPING) for one in self.engines.values())
        return moving or self._is_settling()

    def _is_settling(self) -> bool:
        """Memory of an engine that has just ended may not be free yet: nobody else should go for it."""
        if self.budget is not None:
            return False
        last = max((one.ended_at for one in self.engines.values()), default=float("-inf"))
        return time.monotonic() - last < self.timing.settle_s

    def _no_room(self, name: str, need: Need, free: Memory, victims: tuple[str, ...] = ()) -> NoRoom:
        told = f"{name} needs {need.least}; {free.where_asked(need.least)} is free"
        if victims:
            return NoRoom(f"{told}. Stop {' and '.join(victims)} first, or switch to {name}")
        if kept := kept_in_the_way(need.least, free, self._running()):
            return NoRoom(told + _kept(kept))
        held = [one.name for one in self.engines.values() if one.held and one.state in _HOLDING]
        if held:
            return NoRoom(f"{told}, and {', '.join(held)} is being measured. Ask again later", retry_after_s=30.0)
        others = [one for one in self._running() if not one.may_go]
        if others:
            return NoRoom(f"{told}, and {', '.join(one.name for one in others)} was not started here. Stop it first")
        return NoRoom(f"{told}, and stopping other models would not be enough. Use a shorter context, or less RAM")


def _kept(names: Sequence[str]) -> str:
    """What to say of engines that are kept, after what is said of the room that is not there."""
    if not names:
        return ""
    who, are = " and ".join(names), "is" if len(names) == 1 else "are"
    return (
        f". {who} {are} kept, and so not stopped for it. Stop {who} first, or take that back: overspill models edit "
        f"{names[0]} --no-keep"
    )


def _failed(engine: Engine, wait: float) -> StartFailed:
    assert engine.failure is not None
    again = f"it is tried again in {wait:.0f} s" if wait >= 1 else "it is tried again at the next request"
    return StartFailed(
        f"{engine.failure.reason}; {again}", retry_after_s=max(1.0, wait), log_lines=engine.failure.log_lines
    )
