"""Actions that change something, shared by pages and API, each with a line in the audit log."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size
from overspill.manager.allowlist import confined_source, require_allowed
from overspill.manager.errors import ManagerError, StartFailed
from overspill.manager.fleet import Engines
from overspill.manager.foreign import FoundServer, find_servers, look_at, stop_found
from overspill.manager.job_commands import JobKind
from overspill.manager.jobs import Job, Jobs, given_to_resume, measured
from overspill.manager.library import Downloads, remove_cached
from overspill.manager.needs import NOTHING, Replanned, replan
from overspill.manager.states import EngineAction, Snapshot
from overspill.manager.telemetry.watcher import Watching
from overspill.manager.web.access import Access
from overspill.manager.web.setup import SET_PASSWORD, Setup
from overspill.registry import (
    CannotNow,
    Edit,
    Model,
    ModelSettings,
    Registry,
    RegistryError,
    add_model,
    edit_model,
    get_model,
    remove_model,
)
from overspill.registry.access import Key, KeyScope, create_key, remove_key
from overspill.registry.audit import AuditOutcome, record
from overspill.settings import parse_settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client that requested an action, for the audit log."""

    who: str
    address: str


class Actions:
    def __init__(
        self, registry: Registry, engines: Engines, setup: Setup, jobs: Jobs, watching: Watching, downloads: Downloads,
        access: Access,
    ) -> None:  # fmt: skip
        self._registry, self._engines, self._setup, self._access = registry, engines, setup, access
        self._jobs, self._watching, self._downloads = jobs, watching, downloads
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusals: dict[str, str] = {}
        """Why the last action on a model was refused, by name, where the engine's state shows no error."""

    # Models

    async def add(self, caller: Caller, name: str, settings: Mapping[str, object]) -> Model:
        async with self.audited(caller, "add model", name):
            given = {key: value for key, value in settings.items() if value is not None}
            checked = self._checked({"source": settings.get("source") or name, **given}, None)
            model = await asyncio.to_thread(add_model, self._registry, name, checked)
        await self._engines.catalogue.refresh()
        return model

    async def edit(self, caller: Caller, name: str, changes: Mapping[str, object], version: int | None) -> Edit:
        async with self.audited(caller, "edit model", name) as details:
            before = await asyncio.to_thread(get_model, self._registry, name)
            checked = self._checked(changes, before.settings)
            edit = await asyncio.to_thread(edit_model, self._registry, name, checked, version=version)
            details.append(f"changed {', '.join(edit.changed) or 'nothing'}")
        await self._engines.catalogue.refresh()
        self._update_cards(name)
        return edit

    async def remove(self, caller: Caller, name: str, version: int | None) -> Model:
        async with self.audited(caller, "remove model", name):
            model = await asyncio.to_thread(remove_model, self._registry, name, version=version)
        await self._engines.catalogue.refresh()
        self.refusals.pop(name, None)
        return model

    async def plan(self, name: str, changes: Mapping[str, object]) -> Replanned:
        """Plan a registered model with some settings changed."""
        model = await asyncio.to_thread(get_model, self._registry, name)
        parsed = parse_settings({key: value for key, value in changes.items() if key != "source"})
        return await asyncio.to_thread(replan, model.settings, parsed, self._engines.snapshot(name).holds)

    async def plan_new(self, source: str, changes: Mapping[str, object]) -> Replanned:
        """Plan a model that is not in the registry."""
        checked = self._checked({"source": source, **changes}, None)
        place = str(checked.pop("source"))
        settings = ModelSettings(source=place)
        return await asyncio.to_thread(replan, settings, parse_settings(checked), NOTHING)

    # Files of models

    async def download(self, caller: Caller, source: str) -> None:
        async with self.audited(caller, "download", source):
            await self._downloads.start(source)

    async def stop_download(self, caller: Caller, source: str) -> None:
        async with self.audited(caller, "stop download", source):
            await asyncio.to_thread(self._downloads.stop, source)

    async def remove_download(self, caller: Caller, source: str) -> None:
        """Remove a model's files from the hub's cache, unless an engine uses them."""
        async with self.audited(caller, "remove files", source) as details:
            users = [one.name for one in self._engines.catalogue.models() if one.settings.source == source]
            running = [name for name in users if self._engines.snapshot(name).pid is not None]
            if running:
                raise ManagerError(f"{running[0]} is using these files; stop it first")
            await asyncio.to_thread(self._downloads.forget, source)
            freed = await asyncio.to_thread(remove_cached, self._downloads.cache, source)
            details.append(f"freed {format_size(freed)}")

    # Engines

    async def control(self, caller: Caller, action: EngineAction, name: str) -> Snapshot:
        """Run the action to completion; a start returns once the engine is ready and raises if it fails."""
        self.refusals.pop(name, None)
        async with self.audited(caller, "switch to" if action == "switch" else action, name):
            if action == "stop":
                return await self._engines.stop(name, reason=f"it was stopped by {caller.who}", drains=True)
            if action == "restart":
                return await self._engines.restart(name, drains=True)
            if action == "park":
                return await self._engines.park(name, reason=f"it was parked by {caller.who}")
            return await self._engines.start(name, make_room=action in ("switch", "wake"))

    def begin(self, caller: Caller, action: EngineAction, name: str) -> None:
        """Run the action in the background; the engine's state or `refusals` shows the outcome."""
        task = asyncio.create_task(self._run(name, self.control(caller, action, name)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, name: str, action: Awaitable[Snapshot]) -> None:
        try:
            await action
        except OverspillError as error:
            if not self._engines.snapshot(name).error:
                self.refusals[name] = str(error)
            self._update_cards(name)

    # Jobs

    async def add_job(
        self, caller: Caller, kind: str, model: str, given: Mapping[str, str], *, stops_others: bool
    ) -> Job:
        if kind not in list(JobKind):
            raise ManagerError(f"{kind!r:.40} is none of {', '.join(JobKind)}; use one of these")
        async with self.audited(caller, f"start {kind}", model):
            return await self._jobs.add(JobKind(kind), model, given, stops_others=stops_others)

    async def resume_job(self, caller: Caller, number: int) -> Job:
        """Start a new job for what this one left unmeasured."""
        job = self._jobs.get(number)
        found = await asyncio.to_thread(measured, self._registry, job)
        if not found.can_go_on or found.experiment is None:
            raise ManagerError(f"job {number} left nothing to resume; start a new one")
        async with self.audited(caller, f"resume {job.kind}", job.model):
            given = given_to_resume(job, found.experiment)
            return await self._jobs.add(JobKind(job.kind), job.model, given, stops_others=job.stops_others)

    async def stop_job(self, caller: Caller, number: int, action: str = "stop job") -> Job:
        """Stop a job; a second call kills it."""
        async with self.audited(caller, action, str(number)):
            return await self._jobs.stop(number)

    # Keys

    async def add_key(self, caller: Caller, name: str, scope: KeyScope, **limits: Any) -> tuple[str, Key]:
        """Create a key and return its secret, which cannot be read again; `limits` are those of `create_key`."""
        async with self.audited(caller, "add key", name) as details:
            if scope is not KeyScope.ALL and not await self._access.has_way_in():
                raise ManagerError(
                    f"once a key exists, everybody needs one, and a key for {scope} cannot log in to this page; make "
                    f"a key for everything first, or set a password with: {SET_PASSWORD}"
                )
            made = await asyncio.to_thread(create_key, self._registry, name, scope, **limits)
            details.append(f"for {scope}")
        self._access.forget()
        return made

    async def remove_key(self, caller: Caller, name: str) -> Key:
        async with self.audited(caller, "revoke key", name):
            key = await asyncio.to_thread(remove_key, self._registry, name)
        self._access.forget()
        return key

    # vLLM servers that Overspill did not start

    async def found_servers(self) -> list[FoundServer]:
        latest = self._watching.latest
        gpus = latest.sample.gpus if latest is not None else ()
        sizes = {pid: size for gpu in gpus for pid, size in gpu.processes.items()} if gpus else None
        return await look_at(await asyncio.to_thread(find_servers, self._own_processes(), sizes))

    async def watch_found(self, caller: Caller, pid: int, *, is_watched: bool) -> FoundServer:
        """Show a found server's numbers on the dashboard, or stop showing them."""
        server = next((one for one in await self.found_servers() if one.pid == pid), None)
        if server is None:
            raise ManagerError(f"process {pid} is not one of the vLLM servers found; look again")
        if is_watched and server.url is None:
            raise ManagerError(
                f"process {pid} does not answer, so its numbers cannot be read; it may still be starting"
            )
        async with self.audited(caller, "watch" if is_watched else "watch no more", server.name):
            if is_watched and server.url is not None:
                self._watching.found[server.name] = server.url
            else:
                self._watching.found.pop(server.name, None)
        return server

    async def stop_found(self, caller: Caller, pid: int, identity: str, name: str) -> bool:
        """Stop the process that `identity` and `name` confirm; returns whether it had to be killed."""
        async with self.audited(caller, "stop found server", f"{name} (process {pid})"):
            was_killed = await asyncio.to_thread(stop_found, pid, identity, name, ours=self._own_processes())
        self._watching.found.pop(name, None)
        return was_killed

    def _own_processes(self) -> list[int]:
        """Pids of the manager and of each engine's and job's first process: these are not somebody else's servers."""
        engines = [one.pid for one in self._engines.snapshots() if one.pid is not None]
        return [os.getpid(), *engines, *self._jobs.processes().values()]

    # Checks and records

    @asynccontextmanager
    async def audited(self, caller: Caller, action: str, subject: str) -> AsyncIterator[list[str]]:
        """Write the block's outcome to the audit log, with the details that the block appends to the list."""
        details: list[str] = []
        outcome, problem = AuditOutcome.DONE, ""
        try:
            yield details
        except OverspillError as error:
            outcome = AuditOutcome.FAILED if isinstance(error, StartFailed | CannotNow) else AuditOutcome.REFUSED
            problem = str(error)
            raise
        except asyncio.CancelledError:
            outcome, problem = AuditOutcome.FAILED, "the client went away, or the manager was stopped"
            raise
        except BaseException as error:
            # A full disk or a bug of ours: nobody knows how much was done, and "done" would be a lie.
            outcome, problem = AuditOutcome.FAILED, f"{type(error).__name__}: {error}"
            raise
        finally:
            text = "; ".join(filter(None, (*details, problem.partition("\n")[0])))
            await asyncio.shield(self._record(caller, action, subject, outcome=outcome, detail=text or None))

    async def _record(self, caller: Caller, action: str, subject: str, **result: Any) -> None:
        try:
            await asyncio.to_thread(
                record, self._registry, who=caller.who, action=action, subject=subject, address=caller.address, **result
            )
        except RegistryError as error:
            # A missing line in the log does not undo the action.
            logger.warning("Overspill: %s of %s by %s is not in the audit log: %s", action, subject, caller.who, error)

    def _checked(self, given: Mapping[str, object], before: ModelSettings | None) -> dict[str, object]:
        """Settings with the source confined; refuses changed sources and flags that may not be set over the web."""
        checked = dict(given)
        source, flags = given.get("source"), given.get("vllm_args")
        if isinstance(source, str) and (before is None or source != before.source):
            checked["source"] = confined_source(source, self._setup.models_folders)
        if flags and not self._setup.any_vllm_flag:
            words = parse_settings({"vllm_args": flags})["vllm_args"]
            if before is None or words != before.vllm_args:
                require_allowed(words)
        return checked

    def _update_cards(self, name: str) -> None:
        """Send an event to the pages that show the model."""
        with contextlib.suppress(OverspillError):
            self._engines.changes.publish(name, self._engines.snapshot(name))
