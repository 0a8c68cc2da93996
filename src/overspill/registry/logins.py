"""The manager's password, and the sessions of those who logged in with it or with a key."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select, update

from overspill.registry.database import Registry
from overspill.registry.errors import RegistryError
from overspill.registry.hashes import digest, hash_password
from overspill.registry.schema import now
from overspill.registry.tables import PasswordRow, SessionRow

BY_PASSWORD = "password"
MIN_PASSWORD_LENGTH, MAX_PASSWORD_LENGTH = 10, 1000
# There is one password; its row always has this number, so that two who set it at once leave one.
_ONLY = 1
MAX_SESSIONS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A session, by the digest of its id."""

    digest: str
    who: str
    """What it was begun with: "password", or the name of a key."""
    address: str
    created_at: datetime
    seen_at: datetime


def set_password(registry: Registry, password: str) -> None:
    """Everybody who is logged in has to do so again."""
    if not MIN_PASSWORD_LENGTH <= len(password) <= MAX_PASSWORD_LENGTH:
        raise RegistryError(
            f"a password needs {MIN_PASSWORD_LENGTH} to {MAX_PASSWORD_LENGTH} characters, and this one has "
            f"{len(password)}; four or five words that do not belong together are easy to keep in mind"
        )
    row = PasswordRow(id=_ONLY, hash=hash_password(password), changed_at=now())
    with registry.writing() as session:
        session.execute(delete(SessionRow))
        session.merge(row)


def remove_password(registry: Registry) -> bool:
    """Whether there was one. Ends all sessions."""
    with registry.writing() as session:
        session.execute(delete(SessionRow))
        return session.execute(delete(PasswordRow).returning(PasswordRow.id)).first() is not None


def password_hash(registry: Registry) -> str | None:
    """None if none is set."""
    with registry.reading() as session:
        return session.scalar(select(PasswordRow.hash).where(PasswordRow.id == _ONLY))


def start_session(registry: Registry, session_id: str, who: str, address: str) -> Login:
    """Beyond 200 the one that was not seen for the longest time ends."""
    at = now()
    row = SessionRow(digest=digest(session_id), who=who, address=address[:100], created_at=at, seen_at=at)
    with registry.writing() as session:
        session.add(row)
        session.flush()
        newest = select(SessionRow.id).order_by(SessionRow.seen_at.desc(), SessionRow.id.desc()).limit(MAX_SESSIONS)
        session.execute(delete(SessionRow).where(SessionRow.id.not_in(newest)))
        return _login(row)


def end_session(registry: Registry, digest: str) -> None:
    with registry.writing() as session:
        session.execute(delete(SessionRow).where(SessionRow.digest == digest))


def end_sessions_before(registry: Registry, *, created: datetime, seen: datetime) -> None:
    """Those that are too old, and those that were idle for too long."""
    with registry.writing() as session:
        session.execute(delete(SessionRow).where((SessionRow.created_at < created) | (SessionRow.seen_at < seen)))


def sessions_were_seen(registry: Registry, when: Mapping[str, datetime]) -> None:
    """By digest; many at once, since a write for each request would be too much."""
    with registry.writing() as session:
        for one, at in when.items():
            session.execute(update(SessionRow).where(SessionRow.digest == one).values(seen_at=at))


def list_sessions(registry: Registry) -> list[Login]:
    """The newest first."""
    with registry.reading() as session:
        return list(map(_login, session.scalars(select(SessionRow).order_by(SessionRow.id.desc()))))


def _login(row: SessionRow) -> Login:
    return Login(digest=row.digest, who=row.who, address=row.address, created_at=row.created_at, seen_at=row.seen_at)
