"""Records that outlive a process: files for the next manager, status files of engines, runs and models."""

import asyncio
import logging
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from overspill.files import replace_file
from overspill.manager.backend import Identity, Unit, journal_of, unit_of
from overspill.manager.needs import NOTHING, Memory, holds_of
from overspill.processes import identity
from overspill.registry import Model, Registry, RegistryError, RunEnd, end_run, list_models, list_runs
from overspill.serve.status import Status, read_statuses

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ANNOUNCED = "manager.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A running engine, recorded so that the next manager finds it after a crash."""

    name: str
    pid: int
    process: str
    url: str | None
    """Address of the engine; None if it chooses one itself and reports it later."""
    log_file: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the model when the engine was started."""
    holds: Memory = NOTHING
    started_at: float
    unit: str | None = None
    """The systemd unit, if one started the engine."""
    journal: str | None = None
    """Command that shows the unit's log."""

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A model's last state, for the next manager to show."""

    name: str
    state: str
    since: float
    pid: int | None = None
    stop_reason: str = ""
    error: str = ""
    log_lines: tuple[str, ...] = ()


class Records(Generic[T]):
    """JSON files of one kind in a folder of the manager, by name."""

    def __init__(self, folder: Path, kind: type[T]) -> None:
        self.folder, self._kind = folder, kind
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, name: str, record: T) -> None:
        replace_file(self._path(name), msgspec.json.encode(record).decode())

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def read_all(self) -> list[T]:
        """All records, skipping files that cannot be read."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            with suppress(OSError, ValueError):
                found.append(msgspec.json.decode(path.read_bytes(), type=self._kind))
        return found

    def _path(self, name: str) -> Path:
        return self.folder / f"{file_name(name)}.json"


def file_name(name: str) -> str:
    """A model's name, quoted for use as a file name."""
    return quote(name, safe="")


class Catalogue:
    """Cache of the registry's models, read in a thread and kept while the registry cannot be read."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.problem = ""
        """Why the last read of the registry failed; empty if it did not."""
        self._models: dict[str, Model] = {}
        self._called: dict[str, tuple[str, dict[str, Any]]] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    def get(self, name: str) -> Model | None:
        return self._models.get(name)

    def names(self) -> list[str]:
        return list(self._models)

    def models(self) -> list[Model]:
        return list(self._models.values())

    def called(self) -> dict[str, str]:
        """Every name by which a model may be called, mapped to the model's own."""
        return {name: model for name, (model, _) in self._called.items()}

    def is_called(self, name: str) -> bool:
        return name in self._called

    async def resolve(self, name: str) -> tuple[str, dict[str, Any]]:
        """The model behind a client's name, and changes for its request; an unknown name is returned unchanged."""
        if name not in self._called:
            await self.find(name)
        return self._called.get(name, (name, {}))

    async def find(self, name: str) -> Model | None:
        """The model, even if it was added only a moment ago."""
        called_at = time.monotonic()
        if name not in self._models:
            async with self._reading:
                if self._read_at < called_at:  # otherwise another call has read the registry meanwhile
                    await self._read()
        return self._models.get(name)

    async def refresh(self, older_than_s: float = 0.0) -> None:
        async with self._reading:
            if time.monotonic() - self._read_at >= older_than_s:
                await self._read()

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            models = await asyncio.to_thread(list_models, self.registry)
        except RegistryError as error:
            if str(error) != self.problem:
                logger.warning("Overspill: %s", error)
            self.problem = str(error)
            # Calls that waited for this attempt reuse its failure.
            self._read_at = time.monotonic()
        else:
            self.problem = ""
            self._models = {model.name: model for model in models}
            called = {name: (model.name, changes) for model in models for name, changes in model.names.items()}
            # A model's own name wins if two processes gave out the same name at once.
            self._called = {**called, **{model.name: (model.name, {}) for model in models}}
            self._read_at = began


# Status files of `overspill serve`


def running_statuses() -> dict[int, Status]:
    """Statuses of all living engines on this machine, by pid. Blocks."""
    return {status.pid: status for status in read_statuses() if _is_here(status) and status.is_alive}


def phases_of(status: Status) -> tuple[tuple[str, float], ...]:
    """Phases with the times at which they began, in seconds since 1970."""
    return tuple((str(one.phase), datetime.fromisoformat(one.at).timestamp()) for one in status.phases)


def record_of(status: Status, name: str, unit: Unit | None) -> Record:
    """Record of an engine that somebody else started."""
    phases = phases_of(status)
    return Record(
        name=name,
        pid=status.pid,
        process=status.process or "",
        url=status.url,
        log_file=status.log_file,
        holds=holds_of(status.plan),
        started_at=phases[0][1] if phases else 0.0,
        unit=unit.name if unit is not None else None,
        journal=journal_of(unit.name, is_user=unit.is_user) if unit is not None else None,
    )


def model_of(status: Status, models: Mapping[str, Model]) -> tuple[str, Unit | None]:
    """The model's name, as in the registry if it is there, and the engine's unit. A unit gives its model's location,
    and serves it by name."""
    unit, served = unit_of(status.pid), models.get(status.served_name)
    if status.model in models:
        return status.model, unit
    if served is not None and served.settings.source == status.source:
        return served.name, unit
    return next((name for name in models if unit is not None and unit.is_of(name)), status.model), unit


def how_it_ended(registry: Registry, name: str, who: Identity) -> tuple[bool, str] | None:
    """Whether the engine ended on request, and the reason it left; None if it could not leave one. Blocks."""
    for status in read_statuses():
        if _is_here(status) and (status.pid, status.process) == (who.pid, who.process) and status.problem:
            return False, status.problem
    try:
        runs = list_runs(registry, name, limit=5)
    except RegistryError:
        return None
    for run in runs:
        if (run.pid, run.process) == (who.pid, who.process) and run.end not in (None, RunEnd.LOST):
            return run.end is RunEnd.STOPPED, run.detail or ""
    return None


def end_killed_run(registry: Registry, name: str, who: Identity, reason: str) -> None:
    """Close the run record of a killed process, which cannot do so itself. Blocks."""
    for run in list_runs(registry, name, limit=5):
        if (run.pid, run.process) == (who.pid, who.process) and run.ended_at is None:
            end_run(registry, run.id, RunEnd.KILLED, detail=reason)


def _is_here(status: Status) -> bool:
    """Whether the status is of this machine: home folders may be shared between machines."""
    return status.host == platform.node()


# The manager's address, for commands of the same user


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    url: str
    pid: int
    process: str
    """Boot and start time: the pid alone may be another process's by now."""


def announce(folder: Path, url: str) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    announced = Announced(url=url, pid=os.getpid(), process=identity(os.getpid()) or "")
    replace_file(folder / _ANNOUNCED, msgspec.json.encode(announced).decode())


def withdraw(folder: Path) -> None:
    with suppress(OSError):
        (folder / _ANNOUNCED).unlink()


def find_manager(folder: Path) -> Announced | None:
    """The running manager, if any."""
    try:
        announced = msgspec.json.decode((folder / _ANNOUNCED).read_bytes(), type=Announced)
    except (OSError, ValueError):
        return None
    return announced if identity(announced.pid) == announced.process else None
