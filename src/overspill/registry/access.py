"""Access to the manager: API keys, its password, and sessions; secrets are kept as hashes."""

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import delete, select, update

from overspill.registry.database import Registry
from overspill.registry.errors import DuplicateKey, RegistryError, UnknownRecord
from overspill.registry.tables import KeyRow, PasswordRow, SessionRow, copied, now
from overspill.settings import nearest

_KEY_PREFIX = "osk"
_PREFIX_BYTES, _SECRET_BYTES = 6, 32
_KEY = re.compile(rf"{_KEY_PREFIX}_([a-z0-9]{{{2 * _PREFIX_BYTES}}})_([A-Za-z0-9_-]{{43}})")
# 32 MiB and some tenths of a second for each try: of the choices that OWASP's password storage cheat sheet calls equal,
# one that leaves the manager small.
_LOG2_N, _R, _P, _SALT_BYTES, _HASH_BYTES = 15, 8, 3, 16, 32
_MAX_MEMORY = 128 << 20
_SCRYPT = re.compile(r"scrypt\$(\d{1,2})\$(\d{1,2})\$(\d{1,2})\$([\w-]+=*)\$([\w-]+=*)")


def new_key() -> tuple[str, str]:
    """The whole key, which is shown once and never kept, and its prefix, by which it is looked up and named."""
    prefix = secrets.token_hex(_PREFIX_BYTES)
    return f"{_KEY_PREFIX}_{prefix}_{secrets.token_urlsafe(_SECRET_BYTES)}", prefix


def key_prefix(key: str) -> str | None:
    """None for what cannot be a key, so that nothing is hashed or looked up for it."""
    match = _KEY.fullmatch(key)
    return match[1] if match is not None else None


def new_session_id() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def digest(secret: str) -> str:
    """Of a secret with 256 random bits.

    One round of SHA-256, without salt: nobody can try 2^256 secrets, however fast the hash, and no two are alike, so
    what salt and slowness do for passwords is of no use here. A request to the gateway costs microseconds, not
    tenths of a second.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def same(one: str, other: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


def hash_password(password: str) -> str:
    """With its own salt, and slow: people choose passwords that can be guessed."""
    salt = secrets.token_bytes(_SALT_BYTES)
    hashed = _scrypt(password, salt, _LOG2_N, _R, _P)
    return f"scrypt${_LOG2_N}${_R}${_P}${urlsafe_b64encode(salt).decode()}${urlsafe_b64encode(hashed).decode()}"


def password_matches(password: str, kept: str) -> bool:
    """As slow as hashing it; what is kept names its own parameters, so they may change later."""
    match = _SCRYPT.fullmatch(kept)
    if match is None:
        return False
    try:
        salt, expected = urlsafe_b64decode(match[4]), urlsafe_b64decode(match[5])
        hashed = _scrypt(password, salt, int(match[1]), int(match[2]), int(match[3]))
    except (Base64Error, ValueError):
        return False
    return hmac.compare_digest(hashed, expected)


def _scrypt(password: str, salt: bytes, log2_n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(
        password.encode(errors="surrogatepass"),
        salt=salt,
        n=1 << log2_n,
        r=r,
        p=p,
        maxmem=_MAX_MEMORY,
        dklen=_HASH_BYTES,
    )


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
    return copied(Key, row, scope=KeyScope(row.scope))


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
    return copied(Login, row)
