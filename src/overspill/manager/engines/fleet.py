"""All engines: the one object that pages, the API and the gateway call."""

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from overspill.manager import logs
from overspill.manager.engines.catalogue import Catalogue
from overspill.manager.engines.engine import Engine, World
from overspill.manager.engines.events import Changes
from overspill.manager.engines.launch import Backend, OwnProcesses
from overspill.manager.engines.memory import Memory
from overspill.manager.engines.needs import Need, free_memory, reckon
from overspill.manager.engines.observed import Told, end_killed_run, how_it_ended, name_of, read_told, record_of
from overspill.manager.engines.process import EngineProcess
from overspill.manager.engines.queue import Queue
from overspill.manager.engines.records import Records
from overspill.manager.engines.snapshots import Snapshot, Traffic
from overspill.manager.engines.states import State
from overspill.manager.engines.swaps import Swaps
from overspill.manager.engines.timing import Timing
from overspill.manager.engines.upstream import Upstream
from overspill.manager.errors import AlreadyManaged, NotServed, StillLoading, Stopped
from overspill.registry import Model, ModelSettings, Registry, RegistryError, UnknownModel, end_lost_runs, needs_restart
from overspill.settings import nearest

logger = logging.getLogger(__name__)

_REMEMBERED_NEED_S = 10.0
# Memory of an engine that ends comes back within seconds.
_REMEMBERED_REFUSAL_S = 1.0


@dataclass(slots=True)
class Counts:
    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_used: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a manager is set up."""

    folder: Path
    """Its own: records of engines, and their logs."""
    backend: Backend = OwnProcesses()
    memory: Memory | None = None
    """What all engines together may hold; without it, what is free on the machine."""
    most_waiting: int = 256
    timing: Timing = Timing()
    reckon: Callable[[Model, Memory], Need] | None = None
    """What a model needs; without it, as its plan says."""


class Engines:
    """Made inside a running event loop, with `async with`. Leaving stops what it started, unless told to keep it."""

    def __init__(self, registry: Registry, options: Options) -> None:
        self.options, self.timing = options, options.timing
        self.catalogue = Catalogue(registry)
        self.upstream = Upstream()
        self.changes: Changes[Snapshot] = Changes()
        self.queue = Queue(options.most_waiting)
        self.counts: dict[str, Counts] = {}
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
            records=Records(self.options.folder / "engines"),
            upstream=self.upstream,
            timing=self.timing,
            how_it_ended=self._how_it_ended,
            was_killed=self._was_killed,
            changed=self._changed,
        )
        self._swaps = Swaps(
            queue=self.queue,
            timing=self.timing,
            engines=self._engines,
            find_model=self.catalogue.get,
            reckon=self._reckon,
            free=free_memory,
            budget=self.options.memory,
        )
        await self.catalogue.refresh()
        for record in await asyncio.to_thread(self._world.records.read_all):
            self._engine(record.name).adopt(record, is_managed=True)
        await self._find_others()
        with contextlib.suppress(RegistryError):
            await asyncio.to_thread(end_lost_runs, self._registry)
        self._tasks = [asyncio.create_task(each) for each in (self._swaps.run(), self._look_around(), self._preload())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, *, keep: bool = False) -> None:
        """Stops what a manager started; with `keep`, engines go on, and the next manager finds them."""
        if self._is_closing:
            return
        self._is_closing = True
        self.queue.refuse_all(Stopped("the manager is being stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not keep:
            managed = [one for one in self._engines.values() if one.is_managed]
            for engine in managed:
                engine.want_down("the manager is being stopped")
            await asyncio.gather(*(one.until(State.STOPPED, State.FAILED) for one in managed))
        for engine in self._engines.values():
            await engine.leave()
        self.upstream.close()
        await asyncio.sleep(0)  # connections are closed at the loop's next turn
        if self._lock is not None:
            self._lock.close()

    # What is there

    def snapshots(self) -> list[Snapshot]:
        """Every model of the registry, and engines of models that were removed from it; by name."""
        names = {*self.catalogue.names(), *(name for name, one in self._engines.items() if one.has_process)}
        return [self.snapshot(name) for name in sorted(names)]

    def snapshot(self, name: str) -> Snapshot:
        engine, model = self._engine(name), self.catalogue.get(name)
        told, failure, record = engine.told, engine.failure, engine.record
        changed: tuple[str, ...] = ()
        if record is not None and record.settings and model is not None:
            changed = tuple(needs_restart(ModelSettings.from_json(record.settings), model.settings))
        return Snapshot(
            name=name,
            state=engine.state,
            since=engine.since,
            is_registered=model is not None,
            is_managed=engine.is_managed,
            phase=told.phase if told is not None else "",
            phases=told.phases if told is not None else (),
            messages=told.messages if told is not None else (),
            is_draining=engine.is_draining,
            url=engine.url,
            served_names=engine.served,
            pid=record.pid if record is not None else None,
            unit=record.unit if record is not None else None,
            holds=engine.holds,
            error=failure.reason if failure is not None else "",
            log_lines=failure.log_lines if failure is not None else (),
            retry_at=time.time() + engine.retry_after_s if failure is not None else None,
            log_file=None if engine.log_hint else str(engine.log_file),
            log_hint=engine.log_hint,
            stop_reason=engine.stop_reason,
            needs_restart=changed,
            plan=dict(told.plan) if told is not None else {},
            memory=dict(told.memory) if told is not None else {},
            traffic=self.traffic(name),
        )

    def traffic(self, name: str) -> Traffic:
        counts = self.counts.get(name, Counts())
        waiting, in_flight = self.queue.count(name), self._engine(name).in_flight
        return Traffic(**dataclasses.asdict(counts), in_flight=in_flight, waiting=waiting)

    def log_file(self, name: str) -> Path:
        return self._engine(name).log_file

    def log_hint(self, name: str) -> str:
        """Where the log is, if not in that file; empty if it is."""
        return self._engine(name).log_hint

    async def events(self) -> AsyncIterator[list[Snapshot]]:
        """All of them first, then those that change."""
        with self.changes.listening() as listener:
            yield self.snapshots()
            while True:
                yield list((await listener.next()).values())

    # What to do: each may be repeated, and returns when it is so.

    async def start(self, name: str, *, make_room: bool = False) -> Snapshot:
        """Also after a failed start, without waiting for its time. Raises if it does not become ready."""
        engine = await self._known(name)
        if engine.failure is not None:
            engine.want_down("it is started again")
        await self._wait(engine, may_evict=make_room, within=None)
        return self.snapshot(name)

    async def stop(self, name: str, *, reason: str = "it was stopped") -> Snapshot:
        """Requests that wait for it are refused, and those in flight end."""
        engine = self._engines.get(name) or await self._known(name)
        self.queue.refuse(name, Stopped(f"{name} was stopped while the request waited"))
        engine.want_down(reason)
        await engine.until(State.STOPPED, State.FAILED)
        return self.snapshot(name)

    async def restart(self, name: str) -> Snapshot:
        await self.stop(name, reason="it is being restarted")
        return await self.start(name, make_room=True)

    async def switch(self, to: str) -> Snapshot:
        """Starts it, and stops what must go for it."""
        return await self.start(to, make_room=True)

    async def ensure_ready(self, name: str, *, within: float | None = None) -> Engine:
        """As a request asks for it: waits while it loads, at most `within` seconds."""
        engine = await self._known(name)
        await self._wait(engine, may_evict=True, within=self.timing.load_s if within is None else within)
        return engine

    @asynccontextmanager
    async def using(self, name: str, *, hold: bool = False) -> AsyncIterator[Engine]:
        """An engine that is ready. For another model it is stopped only after a while, and not at all if it is held."""
        engine = self._engines.get(name)
        if engine is None or engine.state is not State.READY or engine.is_draining:
            engine = await self.ensure_ready(name)
        # Nothing is awaited between being ready and being counted.
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
        """No engine is started until this is left; who asks for one is told why."""
        self._swaps.reserved_for.append(why)
        try:
            yield
        finally:
            self._swaps.reserved_for.remove(why)
            self._swaps.wake()

    def count(self, name: str) -> Counts:
        return self.counts.setdefault(name, Counts())

    # Inside

    async def _wait(self, engine: Engine, *, may_evict: bool, within: float | None) -> None:
        if self._is_closing:
            raise Stopped("the manager is being stopped")
        while engine.state is not State.READY or engine.is_draining:
            one = self.queue.join(engine.name, may_evict=may_evict)
            self._swaps.wake()
            try:
                async with asyncio.timeout(within):
                    await one.ready
            except TimeoutError:
                doing = engine.told.phase if engine.told is not None else str(engine.state)
                raise StillLoading(
                    f"{engine.name} is not ready after {within:g} s ({doing}); ask again", retry_after_s=10.0
                ) from None
            finally:
                self.queue.leave(one)

    async def require_known(self, name: str) -> None:
        await self._known(name)

    async def _known(self, name: str) -> Engine:
        if await self.catalogue.find(name) is None and not (name in self._engines and self._engines[name].has_process):
            hint = nearest(name, self.catalogue.names()) or "there are none yet; add it with: overspill models add"
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
            self.changes.tell(engine.name, self.snapshot(engine.name))

    def _reckon(self, model: Model, evictable: Memory) -> Need:
        if self.options.reckon is not None:
            return self.options.reckon(model, evictable)
        key, now = (model.name, model.version), time.monotonic()
        known = self._needs.get(key)
        remembered_s = _REMEMBERED_NEED_S if known is None or not known[1].refused else _REMEMBERED_REFUSAL_S
        if known is None or now - known[0] > remembered_s:
            known = self._needs[key] = (now, reckon(model.settings, evictable))
        return known[1]

    def _how_it_ended(self, name: str, process: EngineProcess) -> tuple[bool, str] | None:
        return how_it_ended(self._registry, name, process.root)

    def _was_killed(self, name: str, process: EngineProcess, reason: str) -> None:
        try:
            end_killed_run(self._registry, name, process.root, reason)
        except RegistryError as error:
            logger.warning("Overspill: why %s was killed is not in its run: %s", name, error)

    async def _preload(self) -> None:
        """One after the other, so that the next is given what is left then; nothing that runs goes for them."""
        for name in sorted(one.name for one in self.catalogue.models() if one.settings.preload):
            try:
                await self.start(name)
            except (NotServed, RegistryError) as error:
                logger.warning("Overspill: %s was to be started with the manager: %s", name, error)

    async def _look_around(self) -> None:
        """For what others do: models that are added, engines that are started by hand, logs that grow."""
        while True:
            await asyncio.sleep(self.timing.look_models_s)
            try:
                await self.catalogue.refresh()
                await self._find_others()
                for name in [name for name, one in self._engines.items() if one.is_managed]:
                    await asyncio.to_thread(logs.limit_size, self._engine(name).own_log)
            except Exception:
                logger.exception("Overspill: looking for engines failed, and is tried again")

    async def _find_others(self) -> None:
        told: dict[int, Told] = await asyncio.to_thread(read_told)
        models = {model.name: model for model in self.catalogue.models()}
        for one in told.values():
            name = name_of(one, models)
            if name in models or name in self._engines:
                engine = self._engine(name)
                is_free = not engine.has_process and engine.state in (State.STOPPED, State.FAILED)
                if is_free and one.identity.is_alive:  # still: it may have ended since the file was read
                    # What systemd starts again after a failure is what was started here.
                    is_again = engine.failure is not None and one.unit is not None and one.unit.name == engine.unit
                    if is_again and engine.is_managed:
                        record = dataclasses.replace(record_of(one, name), settings=engine.settings)
                        engine.adopt(record, is_managed=True)
                        await asyncio.to_thread(self._world.records.write, record)
                    else:
                        engine.adopt(record_of(one, name), is_managed=False)
        for engine in list(self._engines.values()):
            if engine.record is not None:
                engine.tell(told.get(engine.record.pid))


def _lock(folder: Path) -> IO[str]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = (folder / "manager.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        pid = file.read().strip() or "unknown"
        file.close()
        raise AlreadyManaged(f"a manager runs already (process {pid}); stop it first, or use that one") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
