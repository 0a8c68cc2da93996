"""What engines tell of themselves: the status files of `overspill serve`, and how the registry says that they ended."""

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from overspill.manager.engines.memory import NOTHING, Memory
from overspill.manager.engines.process import Identity
from overspill.manager.engines.records import Record
from overspill.manager.engines.systemd import Unit, journal_of, unit_of
from overspill.planning.attempts import PROCESS_RAM_BYTES
from overspill.registry import Model, Registry, RegistryError, RunEnd, end_run, list_runs
from overspill.serve.status import Status, read_statuses


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    name: str
    """By which it was asked for, which for a unit is where its model is."""
    source: str = ""
    served_name: str = ""
    unit: Unit | None = None
    identity: Identity
    phase: str = ""
    phases: tuple[tuple[str, float], ...] = ()
    """Each with the time at which it began, in seconds since 1970."""
    messages: tuple[str, ...] = ()
    url: str | None = None
    log_file: str | None = None
    session: int | None = None
    """Of the engine's processes."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, int | None] = field(default_factory=dict)
    """Bytes of weights, KV and the rest, as its workers report them."""
    error: str = ""

    @property
    def holds(self) -> Memory:
        """By the plan it was started with."""
        return holds_of(self.plan) if self.plan else NOTHING


def read_told() -> dict[int, Told]:
    """Of every engine of this machine that lives, by the number of its process. Blocks."""
    return {status.pid: _told(status) for status in read_statuses() if _is_here(status) and status.is_alive}


def record_of(told: Told, name: str) -> Record:
    """Of an engine that somebody else started."""
    return Record(
        name=name,
        pid=told.identity.pid,
        process=told.identity.process,
        url=told.url,
        log_file=told.log_file,
        settings={},
        holds=told.holds,
        started_at=told.phases[0][1] if told.phases else 0.0,
        unit=told.unit.name if told.unit is not None else None,
        journal=journal_of(told.unit.name, is_user=told.unit.is_user) if told.unit is not None else None,
    )


def name_of(told: Told, models: Mapping[str, Model]) -> str:
    """The registry's, if one of its models is meant: a unit names its model by where it is, and serves it by name."""
    if told.name in models:
        return told.name
    served = models.get(told.served_name)
    if served is not None and served.settings.source == told.source:
        return served.name
    unit = told.unit
    return next((name for name in models if unit is not None and unit.is_of(name)), told.name)


def how_it_ended(registry: Registry, name: str, identity: Identity) -> tuple[bool, str] | None:
    """Whether it was asked to, and what it said; None if it could not tell any more. Blocks."""
    for status in read_statuses():
        if _is_here(status) and (status.pid, status.process) == (identity.pid, identity.process) and status.problem:
            return False, status.problem
    try:
        runs = list_runs(registry, name, limit=5)
    except RegistryError:
        return None
    for run in runs:
        if (run.pid, run.process) == (identity.pid, identity.process) and run.end not in (None, RunEnd.LOST):
            return run.end is RunEnd.STOPPED, run.detail or ""
    return None


def end_killed_run(registry: Registry, name: str, identity: Identity, reason: str) -> None:
    """Of a process that is gone, and so writes nothing itself any more. Blocks."""
    for run in list_runs(registry, name, limit=5):
        if (run.pid, run.process) == (identity.pid, identity.process) and run.ended_at is None:
            end_run(registry, run.id, RunEnd.KILLED, detail=reason)


def holds_of(plan: Mapping[str, Any]) -> Memory:
    """Of a plan as JSON."""
    parts = ("weights_pinned_bytes", "spilled_kv_bytes", "offload_bytes")
    ram = sum(int(plan.get(name) or 0) for name in parts) + PROCESS_RAM_BYTES
    given = plan.get("gpu_bytes")
    device = int(given["value"] if isinstance(given, Mapping) else given or 0)
    if plan.get("device") == "cpu":
        return Memory(ram_bytes=ram + device)
    return Memory(gpu_bytes=device, ram_bytes=ram)


def _told(status: Status) -> Told:
    return Told(
        name=status.model,
        source=status.source,
        served_name=status.served_name,
        unit=unit_of(status.pid),
        identity=Identity(status.pid, status.process or ""),
        phase=str(status.phase),
        phases=tuple((str(one.phase), datetime.fromisoformat(one.at).timestamp()) for one in status.phases),
        messages=status.lines,
        url=status.url,
        log_file=status.log_file,
        session=status.session,
        plan=status.plan,
        memory=dataclasses.asdict(status.memory),
        error=status.error or "",
    )


def _is_here(status: Status) -> bool:
    """Homes may be shared between machines."""
    return status.host == platform.node()
