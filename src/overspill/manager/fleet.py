"""The fleet: all engines in one object, called by pages, the API and the gateway, and its control loop."""

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from overspill.files import ledger_file
from overspill.hardware import detect
from overspill.kv.ledger import Account
from overspill.manager import logs
from overspill.manager.backend import Backend, OwnProcesses
from overspill.manager.engine import Engine, World
from overspill.manager.errors import AlreadyManaged, NotParked, NotServed, StillLoading, Stopped
from overspill.manager.grants import Grants, sessions_of
from overspill.manager.needs import Memory, Need, free_memory, reckon
from overspill.manager.records import Catalogue, Past, Record, Records, model_of, phases_of, record_of, running_statuses
from overspill.manager.sse import Changes
from overspill.manager.states import KV_FIELDS, OF_ENGINE, Snapshot, State, Timing, Traffic
from overspill.manager.swaps import Queue, Swaps
from overspill.registry import Model, ModelSettings, Registry, RegistryError, UnknownModel, end_lost_runs, needs_restart
from overspill.settings import among
from overspill.upstream import Upstream

logger = logging.getLogger(__name__)

_DRAIN_LOOK_S = 0.05
# How often GPU memory is redivided while elastic engines run, and how often to look for the first one.
_DIVIDE_EVERY_S, _LOOK_EVERY_S = 0.1, 1.0
_REMEMBERED_NEED_S = 10.0
# Short, since an ending engine frees its memory within seconds.
_REMEMBERED_REFUSAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a manager."""

    folder: Path
    """The manager's own folder, with engines' records and logs."""
    backend: Backend = OwnProcesses()
    memory: Memory | None = None
    """Limit on what all engines together may hold; None for whatever is free on the machine."""
    most_waiting: int = 256
    timing: Timing = Timing()
    reckon: Callable[[Model, Memory], Need] | None = None
    """Function for a model's need; None to derive the need from the model's plan."""


class Engines:
    """All engines, used with `async with`; leaving stops them unless `close` was called with `keep` before."""

    def __init__(self, registry: Registry, options: Options) -> None:
        self.options, self.timing = options, options.timing
        self.catalogue = Catalogue(registry)
        self.upstream = Upstream()
        self.changes: Changes[Snapshot] = Changes()
        self.queue = Queue(options.most_waiting)
        self.counts: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._registry = registry
        self._engines: dict[str, Engine] = {}
        self._needs: dict[tuple[str, int], tuple[float, Need]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._lock: IO[str] | None = None
        self._is_closing = False

    async def __aenter__(self) -> Self:
        self._lock = _lock(self.options.folder)
        self._world = World(
            backend=self.options.backend,
            folder=self.options.folder,
            records=Records(self.options.folder / "engines", Record),
            pasts=Records(self.options.folder / "past", Past),
            upstream=self.upstream,
            timing=self.timing,
            registry=self._registry,
            changed=self._changed,
        )
        gpus, memory = (await asyncio.to_thread(detect)).gpus, self.options.memory
        self._swaps = Swaps(
            queue=self.queue,
            timing=self.timing,
            engines=self._engines,
            find_model=self.catalogue.get,
            reckon=self._reckon,
            free=free_memory,
            budget=None if memory is None else dataclasses.replace(memory, gpus=memory.gpus * max(1, len(gpus))),
        )
        self._grants = {gpu.index: Grants(ledger_file(gpu.uuid)) for gpu in gpus} or {0: Grants(ledger_file(""))}
        await self.catalogue.refresh()
        for past in await asyncio.to_thread(self._world.pasts.read_all):
            self._engine(past.name).remember(past)
        for record in await asyncio.to_thread(self._world.records.read_all):
            if record.identity.is_alive:
                self._engine(record.name).adopt(record, is_managed=True)
            else:
                self._world.records.remove(record.name)
        await self._find_others()
        with contextlib.suppress(RegistryError):
            await asyncio.to_thread(end_lost_runs, self._registry)
        self._tasks = [asyncio.create_task(each) for each in (self._run(), self._preload(), self._share())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, *, keep: bool = False) -> None:
        """Stop the engines that a manager started; with `keep` they continue, and the next manager finds them."""
        if self._is_closing:
            return
        self._is_closing = True
        self.queue.refuse_all(Stopped("the manager is being stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not keep:
            is_over = (State.STOPPED, State.FAILED)  # failed engines keep their reason for the next manager
            managed = [one for one in self._engines.values() if one.is_managed and one.state not in is_over]
            for engine in managed:
                engine.want_down("the manager is being stopped")
            await asyncio.gather(*(one.until(State.STOPPED, State.FAILED) for one in managed))
        for engine in self._engines.values():
            await engine.leave()
        for grants in self._grants.values():
            grants.close()
        self.upstream.close()
        await asyncio.sleep(0)  # the event loop closes connections in its next iteration
        if self._lock is not None:
            self._lock.close()

    # Queries

    def snapshots(self) -> list[Snapshot]:
        """Snapshots of all models in the registry and of running engines whose model was removed, sorted by name."""
        names = {*self.catalogue.names(), *(name for name, one in self._engines.items() if one.has_process)}
        return [self.snapshot(name) for name in sorted(names)]

    def snapshot(self, name: str) -> Snapshot:
        engine, model = self._engine(name), self.catalogue.get(name)
        status, failure, record = engine.status, engine.failure, engine.record
        known: dict[str, Any] = {}
        if status is not None:
            known |= {"phase": str(status.phase), "phases": phases_of(status), "messages": status.lines}
            known |= {"plan": dict(status.plan), "memory": dataclasses.asdict(status.memory)}
        if failure is not None:
            known |= {"error": failure.reason, "log_lines": failure.log_lines}
            known["retry_at"] = time.time() + engine.retry_after_s
        if record is not None:
            known |= {"pid": record.pid, "unit": record.unit}
        if engine.account is not None:
            known["kv"] = {name: getattr(engine.account, name) for name in KV_FIELDS}
        if record is not None and record.settings and model is not None:
            known["needs_restart"] = tuple(needs_restart(ModelSettings.from_json(record.settings), model.settings))
        return Snapshot(
            is_registered=model is not None,
            served_names=engine.served,
            log_file=None if engine.log_hint else str(engine.log_file),
            traffic=self.traffic(name),
            **{field: getattr(engine, field) for field in OF_ENGINE},
            **known,
        )

    def plan(self, name: str) -> Mapping[str, Any]:
        """The plan the engine was started with, or an empty dict if unknown."""
        engine = self._engines.get(name)
        return engine.status.plan if engine is not None and engine.status is not None else {}

    def traffic(self, name: str) -> Traffic:
        waiting, in_flight = self.queue.count(name), self._engine(name).in_flight
        return dataclasses.replace(self.counts[name], in_flight=in_flight, waiting=waiting)

    def log_file(self, name: str) -> Path:
        return self._engine(name).log_file

    def log_hint(self, name: str) -> str:
        """Hint on where the log is if it is not in `log_file`, else an empty string."""
        return self._engine(name).log_hint

    async def events(self) -> AsyncIterator[list[Snapshot]]:
        """Yield snapshots of all models first, then of those that change."""
        with self.changes.listening() as listener:
            yield self.snapshots()
            while True:
                yield list((await listener.next()).values())

    # Actions: each may be repeated, and is complete when it returns.

    async def start(self, name: str, *, make_room: bool = False) -> Snapshot:
        """Start the engine, skipping the backoff after a failure; `make_room` allows evicting other engines.

        Raises if the engine does not become ready.
        """
        engine = await self.known(name)
        if engine.failure is not None:
            engine.want_down("it is started again")
        await self._wait(engine, may_evict=make_room, within=None)
        return self.snapshot(name)

    async def stop(self, name: str, *, reason: str = "it was stopped", drains: bool = False) -> Snapshot:
        """Stop the engine: waiting requests are refused and those in flight cut off. With `drains` those in flight get
        up to `timing.drain_s` to finish, unless the engine is stopped a second time."""
        engine = self._engines.get(name) or await self.known(name)
        self.queue.refuse(name, Stopped(f"{name} was stopped while the request waited"))
        if drains and engine.state is State.READY and engine.in_flight and not engine.is_leaving:
            engine.is_draining = engine.is_leaving = True
            self._changed(engine)
            deadline = time.monotonic() + self.timing.drain_s
            while engine.in_flight and engine.is_leaving and time.monotonic() < deadline:
                await asyncio.sleep(_DRAIN_LOOK_S)
        engine.want_down(reason)
        await engine.until(State.STOPPED, State.FAILED)
        return self.snapshot(name)

    async def park(self, name: str, *, reason: str = "it was parked") -> Snapshot:
        """Park the engine, which frees its GPU memory; requests in flight wait in the engine until it wakes."""
        engine = self._engines.get(name) or await self.known(name)
        if engine.state is State.PARKED:
            return self.snapshot(name)
        if engine.state is not State.READY:
            raise NotParked(f"{name} is {engine.state}, and only a model that is ready can be parked")
        if not engine.can_park:
            raise NotParked(
                f"{name} was started without --park; set it with: overspill models edit {name} --park, and restart it"
            )
        engine.want_parked(reason, or_stop=False)
        if await engine.until(State.PARKED, State.READY, State.STOPPED, State.FAILED) is not State.PARKED:
            raise NotParked(engine.refusal or f"{name} ended while it was being parked")
        return self.snapshot(name)

    async def restart(self, name: str, *, drains: bool = False) -> Snapshot:
        await self.stop(name, reason="it is being restarted", drains=drains)
        return await self.start(name, make_room=True)

    async def ensure_ready(self, name: str, *, within: float | None = None) -> Engine:
        """Wait for the engine on behalf of a request while the model loads, at most `within` seconds."""
        engine = await self.known(name)
        await self._wait(engine, may_evict=True, within=self.timing.load_s if within is None else within)
        return engine

    @asynccontextmanager
    async def using(self, name: str, *, hold: bool = False) -> AsyncIterator[Engine]:
        """Yield a ready engine, counted as in use: it is evicted only after a while, and with `hold` never."""
        engine = self._engines.get(name)
        if engine is None or engine.state is not State.READY or engine.is_draining:
            engine = await self.ensure_ready(name)
        # No await between the check and the count: the engine could be evicted in between.
        engine.in_flight += 1
        engine.held += hold
        engine.last_used = time.monotonic()
        try:
            yield engine
        finally:
            engine.in_flight -= 1
            engine.held -= hold
            engine.last_used = time.monotonic()
            if engine.is_draining and not engine.in_flight:
                self._swaps.wake()

    @contextlib.contextmanager
    def reserved(self, why: str) -> Iterator[None]:
        """Context in which no engine is started; requests that would need a start are refused with the reason."""
        self._swaps.reserved_for.append(why)
        self._publish_all()
        try:
            yield
        finally:
            self._swaps.reserved_for.remove(why)
            self._swaps.wake()
            self._publish_all()

    @property
    def reserved_for(self) -> str:
        """Why no engine may be started now; empty if engines may."""
        return self._swaps.reserved_for[-1] if self._swaps.reserved_for else ""

    def _publish_all(self) -> None:
        for one in self.snapshots():
            self.changes.publish(one.name, one)

    # Internals

    async def _wait(self, engine: Engine, *, may_evict: bool, within: float | None) -> None:
        if self._is_closing:
            raise Stopped("the manager is being stopped")
        while engine.state is not State.READY or engine.is_draining:
            if engine.is_leaving:
                raise Stopped(f"{engine.name} is being stopped, and only finishes its current requests")
            one = self.queue.join(engine.name, may_evict=may_evict)
            self._swaps.wake()
            try:
                async with asyncio.timeout(within):
                    await one.ready
            except TimeoutError:
                doing = engine.status.phase if engine.status is not None else engine.state
                raise StillLoading(
                    f"{engine.name} is not ready after {within:g} s ({doing}); ask again", retry_after_s=10.0
                ) from None
            finally:
                self.queue.leave(one)

    async def known(self, name: str) -> Engine:
        """The engine of a model; raises UnknownModel if the model is neither in the registry nor running."""
        if await self.catalogue.find(name) is None and not (name in self._engines and self._engines[name].has_process):
            hint = among(name, self.catalogue.called(), "there are no models yet; add it with: overspill models add")
            problem = f" ({self.catalogue.problem})" if self.catalogue.problem else ""
            raise UnknownModel(f"there is no model {name!r:.220} in the registry{problem}; {hint}")
        return self._engine(name)

    def _engine(self, name: str) -> Engine:
        if name not in self._engines:
            self._engines[name] = Engine(name, self._world)
        return self._engines[name]

    def _changed(self, engine: Engine) -> None:
        if not self._is_closing:
            self._swaps.wake()
        if self.changes.has_listeners:
            self.changes.publish(engine.name, self.snapshot(engine.name))

    def _reckon(self, model: Model, evictable: Memory) -> Need:
        if self.options.reckon is not None:
            return self.options.reckon(model, evictable)
        key, now = (model.name, model.version), time.monotonic()
        known = self._needs.get(key)
        remembered_s = _REMEMBERED_NEED_S if known is None or not known[1].refused else _REMEMBERED_REFUSAL_S
        if known is None or now - known[0] > remembered_s:
            known = self._needs[key] = (now, reckon(model.settings, evictable))
        return known[1]

    async def _preload(self) -> None:
        """Start preloaded models one by one, each with the memory left by then; no engine is evicted for them."""
        for name in sorted(one.name for one in self.catalogue.models() if one.settings.preload):
            try:
                await self.start(name)
            except (NotServed, RegistryError) as error:
                logger.warning("Overspill: %s could not be started with the manager: %s", name, error)

    async def _run(self) -> None:
        """Load the models that requests wait for, and poll for changes made outside this manager."""
        looking, looked_at = None, float("-inf")
        try:
            while True:
                self._swaps.woken.clear()
                if (looking is None or looking.done()) and time.monotonic() - looked_at >= self.timing.look_models_s:
                    # A separate task: a registry that hangs must not keep requests waiting.
                    looking, looked_at = asyncio.create_task(self._look_around()), time.monotonic()
                try:
                    await self._swaps.turn()
                except Exception:
                    logger.exception("Overspill: choosing the next model failed, will retry")
                    await asyncio.sleep(1.0)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(0.25 if len(self.queue) else 1.0, self.timing.look_models_s)):
                        await self._swaps.woken.wait()
        finally:
            if looking is not None:
                looking.cancel()

    async def _share(self) -> None:
        """Move GPU memory between elastic engines while any run."""
        problem = ""
        while True:
            pause_s = _LOOK_EVERY_S
            try:
                if await self._divide():
                    pause_s = _DIVIDE_EVERY_S
                problem = ""
            except Exception as error:
                if repr(error) != problem:  # log once: a ledger of another version stays so
                    logger.exception("Overspill: dividing the GPU's memory failed, will retry")
                problem = repr(error)
            await asyncio.sleep(pause_s)

    async def _divide(self) -> bool:
        """Divide GPU memory once; False if no elastic engine runs."""
        by_gpu = {gpu: await asyncio.to_thread(grants.look) for gpu, grants in self._grants.items()}
        by_session = sessions_of(one for accounts in by_gpu.values() for one in accounts.values())
        engines = {one.status.session: one for one in self._engines.values() if one.status is not None}
        for session, engine in engines.items():
            engine.follow(by_session.get(session) if session is not None else None)
        if not by_session:
            return False
        free = await self._swaps.free_for_kv(by_gpu)
        starting = [one.name for one in self._engines.values() if one.is_taking_memory(by_session.values())]
        # Engines that are starting, parked or being measured keep what they have, as do those unknown to this manager.
        shares = [one.account for one in engines.values() if one.is_sharing]
        claimed, changed = self._swaps.claimed, dict[Account, Account]()
        for gpu, accounts in by_gpu.items():
            if rows := {row: one for row, one in accounts.items() if one in shares}:
                given = self._grants[gpu].grant(rows, free[gpu], claimed=claimed.of_gpu(gpu), starting=starting)
                changed.update(given)
        for engine in engines.values():  # at once: a model started next must not count on this memory
            if engine.account in changed:
                engine.follow(changed[engine.account])
        return True

    async def _look_around(self) -> None:
        """Look for outside changes: models added to the registry, engines started by hand, logs that grew."""
        try:
            await self.catalogue.refresh()
            await self._find_others()
            for name in [name for name, one in self._engines.items() if one.is_managed]:
                await asyncio.to_thread(logs.limit_size, self._engine(name).own_log)
        except Exception:
            logger.exception("Overspill: looking for engines failed, will retry")

    async def _find_others(self) -> None:
        statuses = await asyncio.to_thread(running_statuses)
        models = {model.name: model for model in self.catalogue.models()}
        for status in statuses.values():
            name, unit = model_of(status, models)
            if name not in models and name not in self._engines:
                continue
            engine = self._engine(name)
            record = record_of(status, name, unit)
            is_free = not engine.has_process and engine.state in (State.STOPPED, State.FAILED)
            if is_free and record.identity.is_alive:  # the engine may have ended since the file was read
                # An engine that systemd restarts after a failure still counts as started by this manager.
                is_again = engine.failure is not None and engine.last is not None and record.unit == engine.last.unit
                if is_again and engine.is_managed and record.unit is not None:
                    record = dataclasses.replace(record, settings=engine.settings)
                    engine.adopt(record, is_managed=True)
                    await asyncio.to_thread(self._world.records.write, name, record)
                else:
                    engine.adopt(record, is_managed=False)
        for engine in list(self._engines.values()):
            if engine.record is not None:
                engine.update(statuses.get(engine.record.pid))


def _lock(folder: Path) -> IO[str]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = (folder / "manager.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        pid = file.read().strip() or "unknown"
        file.close()
        raise AlreadyManaged(f"a manager is already running (process {pid}); stop it first, or use it") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
