"""Profiles: what engines were seen to take beside weights and KV, and how fast the link was."""

from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite

from overspill.planning.profiles import Profile
from overspill.registry.database import Registry
from overspill.registry.errors import RegistryError
from overspill.registry.schema import now, storable
from overspill.registry.tables import ProfileRow

_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    h2d_bytes_per_second: int
    d2h_bytes_per_second: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    fingerprint: str
    """Of `overspill.planning.profiles.fingerprint`: everything that the figures depend on."""
    overheads: Profile
    link: MeasuredLink | None
    measured_at: datetime


def save_profile(
    registry: Registry, fingerprint: str, overheads: Profile, link: MeasuredLink | None = None
) -> MeasuredProfile:
    """In the place of an older one. Without a link, the one that was measured before stays."""
    rates = asdict(link) if link is not None else {}
    figures = {**asdict(overheads), **rates}
    for name, figure in figures.items():
        if type(figure) is not int or not 0 <= figure < _LARGEST:
            raise RegistryError(f"{name} of a profile is {figure!r:.80}; a whole number of bytes from 0 on is needed")
    values = {**figures, "fingerprint": storable(fingerprint, "the fingerprint"), "measured_at": now()}
    # Two writers at once: the last one wins, as a whole.
    insert = postgresql.insert if registry.place.file is None else sqlite.insert
    statement = insert(ProfileRow).values(values)
    changed = {name: value for name, value in values.items() if name != "fingerprint"}
    with registry.writing() as session:
        session.execute(statement.on_conflict_do_update(index_elements=[ProfileRow.fingerprint], set_=changed))
        row = session.scalars(select(ProfileRow).where(ProfileRow.fingerprint == fingerprint)).one()
        return _profile(row)


def load_profile(registry: Registry, fingerprint: str) -> MeasuredProfile | None:
    with registry.reading() as session:
        row = session.scalar(select(ProfileRow).where(ProfileRow.fingerprint == fingerprint))
        return None if row is None else _profile(row)


def _profile(row: ProfileRow) -> MeasuredProfile:
    rates = (row.h2d_bytes_per_second, row.d2h_bytes_per_second)
    return MeasuredProfile(
        fingerprint=row.fingerprint,
        overheads=Profile(
            non_torch_bytes=row.non_torch_bytes,
            activation_bytes=row.activation_bytes,
            graph_bytes=row.graph_bytes,
            context_bytes=row.context_bytes,
        ),
        link=None if rates[0] is None or rates[1] is None else MeasuredLink(rates[0], rates[1]),
        measured_at=row.measured_at,
    )
