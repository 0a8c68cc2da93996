"""Stored measurements: benchmark results, and profiles of the memory engines take beside weights and KV."""

from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ForeignKey, Integer, Text, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Mapped, mapped_column

from overspill.flags import without_secrets
from overspill.planning.memory import Profile
from overspill.registry.database import Registry
from overspill.registry.errors import RegistryError, UnknownRecord
from overspill.registry.runs import environment_that_matters
from overspill.registry.tables import Base, Json, copied, is_key, now, storable


class Result(Base, kw_only=True):
    """A measurement, with everything needed to repeat it; `id` is None until it is saved."""

    __tablename__ = "results"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, default=None)
    benchmark: Mapped[str] = mapped_column(Text, index=True)
    model: Mapped[str] = mapped_column(Text, index=True)
    experiment: Mapped[str | None] = mapped_column(Text, index=True, default=None)
    """Name shared by results that are compared with each other."""
    label: Mapped[str | None] = mapped_column(Text, default=None)
    """Name of the configuration among those compared."""
    repeat: Mapped[int | None] = mapped_column(default=None)
    is_complete: Mapped[bool] = mapped_column(default=True)
    """False for the finished part of an interrupted measurement."""
    config: Mapped[dict[str, Any]]
    argv: Mapped[list[str]]
    environment: Mapped[dict[str, str]] = mapped_column(default_factory=dict)
    """The whole environment; only variables that matter are saved, and no secrets."""
    versions: Mapped[dict[str, str]] = mapped_column(default_factory=dict)
    gpu: Mapped[str | None] = mapped_column(Text, default=None)
    driver: Mapped[str | None] = mapped_column(Text, default=None)
    plan: Mapped[dict[str, Any] | None] = mapped_column(Json, default=None)
    git_revision: Mapped[str | None] = mapped_column(Text, default=None)
    metrics: Mapped[dict[str, Any]]
    """Metrics under vLLM's names."""
    run_id: Mapped[int | None] = mapped_column(
        Integer, ForeignKey("runs.id", ondelete="SET NULL"), index=True, default=None
    )
    started_at: Mapped[datetime]
    saved_at: Mapped[datetime] = mapped_column(default=None)

    def as_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, **{name: values[name].isoformat() for name in ("started_at", "saved_at")}}


class ProfileRow(Base, kw_only=True):
    __tablename__ = "profiles"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, init=False)
    fingerprint: Mapped[str] = mapped_column(Text, unique=True)
    non_torch_bytes: Mapped[int]
    activation_bytes: Mapped[int]
    graph_bytes: Mapped[int]
    context_bytes: Mapped[int]
    # Left from earlier versions; no longer written or read.
    h2d_bytes_per_second: Mapped[int | None] = mapped_column(default=None)
    d2h_bytes_per_second: Mapped[int | None] = mapped_column(default=None)
    measured_at: Mapped[datetime]


def save_result(registry: Registry, measured: Result) -> Result:
    if measured.started_at.tzinfo is None:
        raise RegistryError(f"started_at {measured.started_at} has no time zone; use datetime.now(UTC)")
    values = {each.name: getattr(measured, each.name) for each in fields(measured)}
    values |= {
        "argv": without_secrets(measured.argv),
        "environment": environment_that_matters(measured.environment),
    }
    plain = {name: value for name, value in values.items() if name not in ("id", "started_at", "saved_at")}
    result = Result(
        **{name: storable(value, f"{name} of a result") for name, value in plain.items()},
        started_at=measured.started_at.astimezone(UTC),
        saved_at=now(),
    )
    with registry.writing() as session:
        session.add(result)
    return result


def list_results(
    registry: Registry,
    *,
    benchmark: str | None = None,
    model: str | None = None,
    experiment: str | None = None,
    limit: int | None = None,
) -> list[Result]:
    """Results, newest first."""
    wanted = {"benchmark": benchmark, "model": model, "experiment": experiment}
    query = select(Result).order_by(Result.id.desc()).limit(limit)
    with registry.reading() as session:
        by = {name: value for name, value in wanted.items() if value is not None}
        return list(session.scalars(query.filter_by(**by)))


def get_result(registry: Registry, result_id: int) -> Result:
    with registry.reading() as session:
        result = session.get(Result, result_id) if is_key(result_id) else None
        if result is None:
            newest = session.scalar(select(func.max(Result.id)))
            hint = f"the newest is {newest}" if newest is not None else "there are none yet"
            raise UnknownRecord(f"there is no result {result_id} in the registry; {hint}")
        return result


_LARGEST = 1 << 62


def save_profile(registry: Registry, fingerprint: str, profile: Profile) -> None:
    """Save a profile, replacing an older one; `fingerprint` covers everything the figures depend on."""
    figures = asdict(profile)
    for name, figure in figures.items():
        if type(figure) is not int or not 0 <= figure < _LARGEST:
            raise RegistryError(f"{name} of a profile is {figure!r:.80}; a whole number of bytes from 0 on is needed")
    changed = {**figures, "measured_at": now()}
    # Of two simultaneous writers, the last one wins as a whole.
    insert = postgresql.insert if registry.place.file is None else sqlite.insert
    statement = insert(ProfileRow).values(fingerprint=storable(fingerprint, "the fingerprint"), **changed)
    with registry.writing() as session:
        session.execute(statement.on_conflict_do_update(index_elements=[ProfileRow.fingerprint], set_=changed))


def load_profile(registry: Registry, fingerprint: str) -> Profile | None:
    with registry.reading() as session:
        row = session.scalar(select(ProfileRow).where(ProfileRow.fingerprint == fingerprint))
        return None if row is None else copied(Profile, row)
