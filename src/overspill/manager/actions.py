"""What the page and the API do to models and engines: each once, for both, with a line in the audit log."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.manager.errors import StartFailed
from overspill.manager.fleet import Engines
from overspill.manager.needs import Replanned, replan
from overspill.manager.security.model_sources import confined_source
from overspill.manager.setup import Setup
from overspill.manager.states import Snapshot
from overspill.manager.vllm_flags import require_allowed
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
from overspill.registry.audit import AuditOutcome, record
from overspill.settings import parse_settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, for the audit log."""

    who: str
    address: str


class Actions:
    def __init__(self, registry: Registry, engines: Engines, setup: Setup) -> None:
        self._registry, self._engines, self._setup = registry, engines, setup
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.refusals: dict[str, str] = {}
        """Why the last start of a model was refused, where its state does not tell."""

    # Models

    async def add(self, caller: Caller, name: str, settings: Mapping[str, object]) -> Model:
        async with self.audited(caller, "add model", name):
            checked = self._checked({"source": settings.get("source") or name, **_given(settings)}, None)
            model = await asyncio.to_thread(add_model, self._registry, name, checked)
        await self._engines.catalogue.refresh()
        return model

    async def edit(self, caller: Caller, name: str, changes: Mapping[str, object], version: int | None) -> Edit:
        async with self.audited(caller, "edit model", name) as told:
            before = await asyncio.to_thread(get_model, self._registry, name)
            checked = self._checked(changes, before.settings)
            edit = await asyncio.to_thread(edit_model, self._registry, name, checked, version=version)
            told.append(f"changed {', '.join(edit.changed) or 'nothing'}")
        await self._engines.catalogue.refresh()
        self._tell(name)
        return edit

    async def remove(self, caller: Caller, name: str, version: int | None) -> Model:
        async with self.audited(caller, "remove model", name):
            model = await asyncio.to_thread(remove_model, self._registry, name, version=version)
        await self._engines.catalogue.refresh()
        self.refusals.pop(name, None)
        return model

    async def plan(self, name: str, changes: Mapping[str, object]) -> Replanned:
        """Of a model of the registry, with some settings changed."""
        model = await asyncio.to_thread(get_model, self._registry, name)
        parsed = parse_settings({key: value for key, value in changes.items() if key != "source"})
        return await asyncio.to_thread(replan, model.settings, parsed, self._engines.snapshot(name).holds)

    # Engines

    async def start(self, caller: Caller, name: str, *, make_room: bool = False) -> Snapshot:
        """Returns when it is ready; raises if it does not become so."""
        self.refusals.pop(name, None)
        async with self.audited(caller, "switch to" if make_room else "start", name):
            return await self._engines.start(name, make_room=make_room)

    async def stop(self, caller: Caller, name: str) -> Snapshot:
        self.refusals.pop(name, None)
        async with self.audited(caller, "stop", name):
            return await self._engines.stop(name, reason=f"it was stopped by {caller.who}")

    async def restart(self, caller: Caller, name: str) -> Snapshot:
        self.refusals.pop(name, None)
        async with self.audited(caller, "restart", name):
            return await self._engines.restart(name)

    async def require_known(self, name: str) -> None:
        await self._engines.require_known(name)

    def begin(self, name: str, doing: Coroutine[Any, Any, Snapshot]) -> None:
        """Does it beside; what becomes of it is seen in the engine's state, or in `refusals`."""
        task = asyncio.create_task(self._done(name, doing))
        self._tasks[f"{name} {id(task)}"] = task
        task.add_done_callback(lambda done: self._tasks.pop(f"{name} {id(done)}", None))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # For others

    @asynccontextmanager
    async def audited(self, caller: Caller, action: str, subject: str) -> AsyncIterator[list[str]]:
        """Writes how it went. What is put into the list is told beside it."""
        told: list[str] = []
        outcome, detail = AuditOutcome.DONE, ""
        try:
            yield told
        except OverspillError as error:
            outcome = AuditOutcome.FAILED if isinstance(error, StartFailed | CannotNow) else AuditOutcome.REFUSED
            detail = str(error)
            raise
        except asyncio.CancelledError:
            outcome, detail = AuditOutcome.FAILED, "who asked went away, or the manager was stopped"
            raise
        except BaseException as error:
            # A full disk, a mistake of ours: how far it got is not known, and "done" would be a lie.
            outcome, detail = AuditOutcome.FAILED, f"{type(error).__name__}: {error}"
            raise
        finally:
            text = "; ".join(filter(None, (*told, detail.partition("\n")[0])))
            await asyncio.shield(self._record(caller, action, subject, outcome, text or None))

    async def _record(
        self, caller: Caller, action: str, subject: str, outcome: AuditOutcome, detail: str | None
    ) -> None:
        def write() -> None:
            record(
                self._registry, who=caller.who, action=action, subject=subject, address=caller.address,
                outcome=outcome, detail=detail,
            )  # fmt: skip

        try:
            await asyncio.to_thread(write)
        except RegistryError as error:
            # What was asked for is done or refused all the same.
            logger.warning("Overspill: %s of %s by %s is not in the audit log: %s", action, subject, caller.who, error)

    async def _done(self, name: str, doing: Awaitable[Snapshot]) -> None:
        try:
            await doing
        except OverspillError as error:
            if not self._engines.snapshot(name).error:
                self.refusals[name] = str(error)
            self._tell(name)

    def _checked(self, given: Mapping[str, object], before: ModelSettings | None) -> dict[str, object]:
        """What may be set over the web; what is as it was stays as it is."""
        checked = dict(given)
        source, flags = given.get("source"), given.get("vllm_args")
        if isinstance(source, str) and (before is None or source != before.source):
            checked["source"] = confined_source(source, self._setup.models_folders)
        if flags and not self._setup.any_vllm_flag:
            words = parse_settings({"vllm_args": flags})["vllm_args"]
            if before is None or words != before.vllm_args:
                require_allowed(words)
        return checked

    def _tell(self, name: str) -> None:
        """Cards that show it are made anew."""
        with contextlib.suppress(OverspillError):
            self._engines.changes.publish(name, self._engines.snapshot(name))


def _given(settings: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if value is not None}
