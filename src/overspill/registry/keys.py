"""API keys of the manager: made and shown once, listed by their prefix, removed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import delete, select, update

from overspill.registry.database import Registry
from overspill.registry.errors import DuplicateKey, RegistryError, UnknownRecord
from overspill.registry.hashes import digest, new_key
from overspill.registry.names import nearest
from overspill.registry.schema import now
from overspill.registry.tables import KeyRow, SessionRow

# A name stands in logs and on pages.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,99}")


class KeyScope(StrEnum):
    GATEWAY = "gateway"
    """Requests to models under /v1, and nothing else."""
    ALL = "all"
    """Everything the page does as well: starting, stopping, editing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    name: str
    prefix: str
    digest: str
    scope: KeyScope
    created_at: datetime
    last_used_at: datetime | None

    @property
    def who(self) -> str:
        """Its user, as sessions and the audit log have it."""
        return f"key {self.name}"


def create_key(registry: Registry, name: str, scope: KeyScope = KeyScope.ALL) -> tuple[str, Key]:
    """The key itself, which is kept nowhere and cannot be had again, and its record."""
    if _NAME.fullmatch(name) is None:
        raise RegistryError(
            f"{name!r:.110} is not a name for a key: letters, digits and . _ @ - are accepted, at most 100 of them; "
            "write for example laptop"
        )
    secret, prefix = new_key()
    with registry.writing() as session:
        if session.scalar(select(KeyRow.id).where(KeyRow.name == name)) is not None:
            raise DuplicateKey(f"there is a key {name} already; choose another name, or remove that key first")
        row = KeyRow(name=name, prefix=prefix, digest=digest(secret), scope=KeyScope(scope), created_at=now())
        session.add(row)
        session.flush()
        return secret, _key(row)


def list_keys(registry: Registry) -> list[Key]:
    """By name."""
    with registry.reading() as session:
        return sorted(map(_key, session.scalars(select(KeyRow))), key=lambda key: key.name)


def remove_key(registry: Registry, name: str) -> Key:
    """Whoever still uses it is refused from now on, and so are the sessions that were begun with it."""
    with registry.writing() as session:
        row = session.scalar(select(KeyRow).where(KeyRow.name == name)) if _NAME.fullmatch(name) else None
        if row is None:
            hint = nearest(name, session.scalars(select(KeyRow.name)).all()) or "there are none"
            raise UnknownRecord(f"there is no key {name!r:.110}; {hint}")
        key = _key(row)
        session.execute(delete(KeyRow).where(KeyRow.id == row.id))
        session.execute(delete(SessionRow).where(SessionRow.who == key.who))
    return key


def keys_were_used(registry: Registry, when: Mapping[str, datetime]) -> None:
    """Notes the time each was last used, by prefix; many at once, since a write for each request would be too much."""
    with registry.writing() as session:
        for prefix, at in when.items():
            session.execute(update(KeyRow).where(KeyRow.prefix == prefix).values(last_used_at=at))


def _key(row: KeyRow) -> Key:
    return Key(
        name=row.name,
        prefix=row.prefix,
        digest=row.digest,
        scope=KeyScope(row.scope),
        created_at=row.created_at,
        last_used_at=row.last_used_at,
    )
