"""Access to the manager: API keys, the password and sessions, with all secrets stored as hashes."""

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import Integer, String, Text, delete, select, update
from sqlalchemy.orm import Mapped, mapped_column

from overspill.registry.database import Registry
from overspill.registry.errors import RegistryError, UnknownRecord
from overspill.registry.tables import Base, Word, now
from overspill.settings import among, is_name, parse_duration

_KEY_PREFIX = "osk"
_PREFIX_BYTES, _SECRET_BYTES = 6, 32
_KEY = re.compile(rf"{_KEY_PREFIX}_([a-z0-9]{{{2 * _PREFIX_BYTES}}})_([A-Za-z0-9_-]{{43}})")
# 32 MiB and a few tenths of a second per try: among the settings that OWASP's password storage cheat sheet calls equal,
# one that keeps the manager small.
_LOG2_N, _R, _P, _SALT_BYTES, _HASH_BYTES = 15, 8, 3, 16, 32
_MAX_MEMORY = 128 << 20
_SCRYPT = re.compile(r"scrypt\$(\d{1,2})\$(\d{1,2})\$(\d{1,2})\$([\w-]+=*)\$([\w-]+=*)")


def new_key() -> tuple[str, str]:
    """Generate a key, to be shown once and never stored, and its prefix, which identifies it in lookups and lists."""
    prefix = secrets.token_hex(_PREFIX_BYTES)
    return f"{_KEY_PREFIX}_{prefix}_{secrets.token_urlsafe(_SECRET_BYTES)}", prefix


def key_prefix(key: str) -> str | None:
    """The key's prefix, or None for a malformed key, which is then neither hashed nor looked up."""
    match = _KEY.fullmatch(key)
    return match[1] if match is not None else None


def new_session_id() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def digest(secret: str) -> str:
    """Digest of a secret with 256 random bits.

    One round of SHA-256, without salt: nobody can try 2^256 secrets, however fast the hash, and no two are equal, so
    the salt and slowness that protect passwords are of no use here. Checking a gateway request takes microseconds, not
    tenths of a second.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def same(one: str, other: str) -> bool:
    """Compare two strings in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


def hash_password(password: str) -> str:
    """Hash a password slowly and with its own salt: people choose passwords that can be guessed."""
    salt = secrets.token_bytes(_SALT_BYTES)
    hashed = _scrypt(password, salt, _LOG2_N, _R, _P)
    return f"scrypt${_LOG2_N}${_R}${_P}${urlsafe_b64encode(salt).decode()}${urlsafe_b64encode(hashed).decode()}"


def password_matches(password: str, kept: str) -> bool:
    """Check a password, as slowly as hashing it; the stored hash names its parameters, so the defaults may change."""
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


# Key names appear in logs and on pages.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,99}")


_LONGEST_KEY_S = 100 * 365 * 86400


class KeyExpired(RegistryError):
    """A valid key whose lifetime is over."""


class KeyScope(StrEnum):
    GATEWAY = "gateway"
    """Requests to models under /v1, and nothing else."""
    METRICS = "metrics"
    """The numbers at /metrics, for Prometheus, and nothing else."""
    ALL = "all"
    """Everything the web page can do as well: starting, stopping, editing."""


class Key(Base, kw_only=True):
    __tablename__ = "manager_keys"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, init=False)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    prefix: Mapped[str] = mapped_column(String(40), unique=True)
    digest: Mapped[str] = mapped_column(String(64))
    scope: Mapped[KeyScope] = mapped_column(Word(KeyScope))
    created_at: Mapped[datetime]
    last_used_at: Mapped[datetime | None] = mapped_column(default=None)
    expires_at: Mapped[datetime | None] = mapped_column(default=None)
    models: Mapped[list[str] | None] = mapped_column(default=None)
    """Models the key may use, by name or alias; None for all."""

    @property
    def who(self) -> str:
        """The key's user, as sessions and the audit log name it."""
        return f"key {self.name}"

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= now()

    def as_json(self) -> dict[str, Any]:
        """The key for the API, without its digest."""
        times = {name: getattr(self, name) for name in ("created_at", "last_used_at", "expires_at")}
        told = {name: at.isoformat() if at is not None else None for name, at in times.items()}
        return {"name": self.name, "prefix": self.prefix, "scope": str(self.scope), "models": self.models, **told}


def create_key(
    registry: Registry, name: str, scope: KeyScope = KeyScope.ALL, *, models: Sequence[str] = (),
    expires_in: object = None,
) -> tuple[str, Key]:  # fmt: skip
    """Create a key; returns the secret, which is stored nowhere, and the record. `expires_in` is written like a TTL."""
    if _NAME.fullmatch(name) is None:
        raise RegistryError(
            f"{name!r:.110} is not a name for a key: letters, digits and . _ @ - are accepted, at most 100 of them; "
            "write for example laptop"
        )
    if models and scope is not KeyScope.GATEWAY:
        raise RegistryError("a key for certain models is for the gateway only; give it the scope gateway")
    if wrong := [one for one in models if not is_name(one)]:
        raise RegistryError(f"{wrong[0]!r:.80} is not a model's name; write for example qwen")
    lasts_s = parse_duration(expires_in) if expires_in is not None else None
    if lasts_s is not None and lasts_s > _LONGEST_KEY_S:
        raise RegistryError("a key lasts for 36500d at most; leave the time out for one that does not expire")
    at = now()
    expires_at = at + timedelta(seconds=lasts_s) if lasts_s is not None else None
    secret, prefix = new_key()
    with registry.writing() as session:
        if session.scalar(select(Key.id).where(Key.name == name)) is not None:
            raise RegistryError(f"there is a key {name} already; choose another name, or remove that key first")
        key = Key(
            name=name, prefix=prefix, digest=digest(secret), scope=KeyScope(scope), created_at=at,
            expires_at=expires_at, models=list(models) or None,
        )  # fmt: skip
        session.add(key)
    return secret, key


def list_keys(registry: Registry) -> list[Key]:
    """All keys, sorted by name."""
    with registry.reading() as session:
        return sorted(session.scalars(select(Key)), key=lambda key: key.name)


def remove_key(registry: Registry, name: str) -> Key:
    """Delete a key and the sessions begun with it; from now on requests that use them are refused."""
    with registry.writing() as session:
        key = session.scalar(select(Key).where(Key.name == name)) if _NAME.fullmatch(name) else None
        if key is None:
            hint = among(name, session.scalars(select(Key.name)).all(), "there are none")
            raise UnknownRecord(f"there is no key {name!r:.110}; {hint}")
        session.delete(key)
        session.execute(delete(Login).where(Login.who == key.who))
    return key


def keys_were_used(registry: Registry, when: Mapping[str, datetime]) -> None:
    """Record when each key was last used, by prefix; in batches, since one write per request would be too much."""
    with registry.writing() as session:
        for prefix, at in when.items():
            session.execute(update(Key).where(Key.prefix == prefix).values(last_used_at=at))


BY_PASSWORD = "password"
MIN_PASSWORD_LENGTH, MAX_PASSWORD_LENGTH = 10, 1000
# There is one password; its row always has this id, so that two processes setting it at once leave one.
_ONLY = 1
MAX_SESSIONS = 200


class Password(Base, kw_only=True):
    __tablename__ = "manager_passwords"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    hash: Mapped[str] = mapped_column(Text, repr=False)
    changed_at: Mapped[datetime]


class Login(Base, kw_only=True):
    """A session, stored under the digest of its id."""

    __tablename__ = "manager_sessions"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, init=False)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    who: Mapped[str] = mapped_column(Text)
    """Credential that began the session: "password", or a key's `who`."""
    address: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    seen_at: Mapped[datetime]


def set_password(registry: Registry, password: str) -> None:
    """Set the password and end all sessions, so that everybody has to log in again."""
    if not MIN_PASSWORD_LENGTH <= len(password) <= MAX_PASSWORD_LENGTH:
        raise RegistryError(
            f"a password needs {MIN_PASSWORD_LENGTH} to {MAX_PASSWORD_LENGTH} characters, and this one has "
            f"{len(password)}; four or five words that do not belong together are easy to keep in mind"
        )
    row = Password(id=_ONLY, hash=hash_password(password), changed_at=now())
    with registry.writing() as session:
        session.execute(delete(Login))
        session.merge(row)


def remove_password(registry: Registry) -> bool:
    """Remove the password and end all sessions; True if there was a password."""
    with registry.writing() as session:
        session.execute(delete(Login))
        return session.execute(delete(Password).returning(Password.id)).first() is not None


def password_hash(registry: Registry) -> str | None:
    """Hash of the password, or None if none is set."""
    with registry.reading() as session:
        return session.scalar(select(Password.hash).where(Password.id == _ONLY))


def start_session(registry: Registry, session_id: str, who: str, address: str) -> Login:
    """Start a session; beyond 200 sessions, the least recently seen one ends."""
    at = now()
    login = Login(digest=digest(session_id), who=who, address=address[:100], created_at=at, seen_at=at)
    with registry.writing() as session:
        session.add(login)
        session.flush()
        newest = select(Login.id).order_by(Login.seen_at.desc(), Login.id.desc()).limit(MAX_SESSIONS)
        session.execute(delete(Login).where(Login.id.not_in(newest)))
    return login


def end_session(registry: Registry, digest: str) -> None:
    with registry.writing() as session:
        session.execute(delete(Login).where(Login.digest == digest))


def end_sessions_before(registry: Registry, *, created: datetime, seen: datetime) -> None:
    """End sessions created before `created`, and those last seen before `seen`."""
    with registry.writing() as session:
        session.execute(delete(Login).where((Login.created_at < created) | (Login.seen_at < seen)))


def sessions_were_seen(registry: Registry, when: Mapping[str, datetime]) -> None:
    """Record when each session was last seen, by digest; in batches, since one write per request would be too much."""
    with registry.writing() as session:
        for one, at in when.items():
            session.execute(update(Login).where(Login.digest == one).values(seen_at=at))


def list_sessions(registry: Registry) -> list[Login]:
    """All sessions, newest first."""
    with registry.reading() as session:
        return list(session.scalars(select(Login).order_by(Login.id.desc())))
