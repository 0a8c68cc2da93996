"""Measurements that are kept: results of benchmarks, and profiles of what engines take beside weights and KV."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite

from overspill.flags import without_secrets
from overspill.planning.overheads import Profile
from overspill.registry.database import Registry
from overspill.registry.errors import RegistryError, UnknownRecord
from overspill.registry.runs import environment_that_matters
from overspill.registry.tables import ProfileRow, ResultRow, copied, is_key, now, storable


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What is to be saved."""

    benchmark: str
    model: str
    config: Mapping[str, Any]
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """All of it; only what matters is saved, and no secrets."""
    versions: Mapping[str, str] = field(default_factory=dict)
    gpu: str | None = None
    driver: str | None = None
    plan: Mapping[str, Any] | None = None
    git_revision: str | None = None
    metrics: Mapping[str, Any]
    """By vLLM's names for them."""
    started_at: datetime
    is_complete: bool = True
    """False for the part of an interrupted one that was finished."""
    experiment: str | None = None
    """What results that are compared with each other have in common."""
    label: str | None = None
    """Which of the compared configurations it is."""
    repeat: int | None = None
    run_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Measurement):
    id: int
    saved_at: datetime

    def as_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        times = {name: values[name].isoformat() for name in ("started_at", "saved_at")}
        return {"id": self.id, **values, **times, "argv": list(self.argv)}


def save_result(registry: Registry, measurement: Measurement) -> Result:
    if measurement.started_at.tzinfo is None:
        raise RegistryError(f"started_at {measurement.started_at} has no time zone; use datetime.now(UTC)")
    values = {each.name: getattr(measurement, each.name) for each in fields(Measurement)}
    values |= {
        "argv": without_secrets(measurement.argv),
        "environment": environment_that_matters(measurement.environment),
    }
    plain = {name: value for name, value in values.items() if name != "started_at"}
    row = ResultRow(
        **{name: storable(value, f"{name} of a result") for name, value in plain.items()},
        started_at=measurement.started_at.astimezone(UTC),
        saved_at=now(),
    )
    with registry.writing() as session:
        session.add(row)
        session.flush()
        return _result(row)


def list_results(
    registry: Registry,
    *,
    benchmark: str | None = None,
    model: str | None = None,
    experiment: str | None = None,
    limit: int | None = None,
) -> list[Result]:
    """The newest first."""
    wanted = {"benchmark": benchmark, "model": model, "experiment": experiment}
    query = select(ResultRow).order_by(ResultRow.id.desc()).limit(limit)
    with registry.reading() as session:
        by = {name: value for name, value in wanted.items() if value is not None}
        return list(map(_result, session.scalars(query.filter_by(**by))))


def get_result(registry: Registry, result_id: int) -> Result:
    with registry.reading() as session:
        row = session.get(ResultRow, result_id) if is_key(result_id) else None
        if row is None:
            newest = session.scalar(select(func.max(ResultRow.id)))
            hint = f"the newest is {newest}" if newest is not None else "there are none yet"
            raise UnknownRecord(f"there is no result {result_id} in the registry; {hint}")
        return _result(row)


def _result(row: ResultRow) -> Result:
    return copied(Result, row, argv=tuple(row.argv))


_LARGEST = 1 << 62


def save_profile(registry: Registry, fingerprint: str, profile: Profile) -> None:
    """In the place of an older one; `fingerprint` is of everything that the figures depend on."""
    figures = asdict(profile)
    for name, figure in figures.items():
        if type(figure) is not int or not 0 <= figure < _LARGEST:
            raise RegistryError(f"{name} of a profile is {figure!r:.80}; a whole number of bytes from 0 on is needed")
    changed = {**figures, "measured_at": now()}
    # Two writers at once: the last one wins, as a whole.
    insert = postgresql.insert if registry.place.file is None else sqlite.insert
    statement = insert(ProfileRow).values(fingerprint=storable(fingerprint, "the fingerprint"), **changed)
    with registry.writing() as session:
        session.execute(statement.on_conflict_do_update(index_elements=[ProfileRow.fingerprint], set_=changed))


def load_profile(registry: Registry, fingerprint: str) -> Profile | None:
    with registry.reading() as session:
        row = session.scalar(select(ProfileRow).where(ProfileRow.fingerprint == fingerprint))
        return None if row is None else copied(Profile, row)
