"""Who is asking: API keys, the password and sessions, checked in memory against what the registry holds."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from overspill.registry.access import (
    BY_PASSWORD,
    MAX_PASSWORD_LENGTH,
    Key,
    KeyScope,
    Login,
    digest,
    end_session,
    end_sessions_before,
    key_prefix,
    keys_were_used,
    list_keys,
    list_sessions,
    new_session_id,
    password_hash,
    password_matches,
    same,
    sessions_were_seen,
    start_session,
)
from overspill.registry.database import Registry
from overspill.registry.errors import RegistryUnavailable
from overspill.registry.tables import now

# A key that another process made or removed counts after so long at most,
_MAX_AGE_S = 2.0
# and it is looked for after so long already, while requests go on with what is known.
_LOOK_AGAIN_S = 1.0
# or after so long while the registry cannot be read; then nobody is let in any more.
_LONGEST_WITHOUT_REGISTRY_S = 60.0
IDLE = timedelta(hours=12)
LONGEST = timedelta(days=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a request is from."""

    who: str
    """As the audit log has it."""
    scope: KeyScope
    session: str | None = None
    """The session's digest, for those who logged in."""


LOCAL = Identity(who="local", scope=KeyScope.ALL)
"""Anybody, where only this machine can ask and there is neither a key nor a password."""


@dataclass(frozen=True, slots=True)
class _Known:
    keys: dict[str, Key]
    password: str | None
    sessions: dict[str, Login]


class Access:
    """One copy of keys, password and sessions; a request costs a look into a dictionary and one SHA-256.

    For one event loop. The registry is read in a thread, at most every two seconds, and only if somebody asks.
    `is_loopback`: nobody of another machine can ask, by a proxy neither.
    """

    def __init__(self, registry: Registry, *, is_loopback: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._is_loopback, self._clock = registry, is_loopback, clock
        self._known = _Known({}, None, {})
        self._read_at: float | None = None
        self._tried_at = float("-inf")
        self._problem: RegistryUnavailable | None = None
        """Why it could not be read the last time."""
        self._num_failures = 0
        self._is_outdated = True
        self._is_failing = False
        self._reading = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        # One try takes 32 MiB and a core: a thousand at once must not take a thousand of each.
        self._checking = asyncio.Lock()
        self._used_keys: dict[str, datetime] = {}
        self._seen_sessions: dict[str, datetime] = {}

    async def identify(
        self, authorization: str | None, session_id: str | None, *, is_use: bool = True
    ) -> Identity | None:
        """By an Authorization header, else by a session's cookie; None for nobody.

        Whoever sends a key is that key or nobody: a wrong one is not overlooked because of a cookie. Without `is_use`
        it does not count as a sign of life: a page that is only open does not keep its session for ever.
        """
        if authorization is not None:
            kind, _, key = authorization.strip().partition(" ")
            identity = await self._by_key(key.strip(), is_use=is_use) if kind.lower() == "bearer" else None
            # OpenAI's clients cannot be told to send none, so where nothing is protected any will do.
            return identity or await self._local()
        if session_id is not None and (identity := await self._by_session(session_id, is_use=is_use)) is not None:
            return identity
        return await self._local()

    async def is_protected(self) -> bool:
        known = await self._fresh()
        return bool(known.keys) or known.password is not None

    async def log_in(self, secret: str, address: str) -> str | None:
        """A new session's id for the password, or for a key that may do everything.

        Who may try, and how often, is for LoginLimit to say.
        """
        who = await self._who_may_log_in(secret)
        if who is None:
            return None
        session_id = new_session_id()
        await asyncio.to_thread(start_session, self._registry, session_id, who, address)
        self.forget()
        return session_id

    async def log_out(self, identity: Identity) -> None:
        if identity.session is not None:
            await asyncio.to_thread(end_session, self._registry, identity.session)
            self.forget()

    def forget(self) -> None:
        """The next request reads the registry again."""
        self._is_outdated, self._is_failing = True, False

    async def note_use(self) -> None:
        """Writes what was used since the last time, and ends old sessions; to be called every minute and at the end."""
        keys, sessions = self._used_keys, self._seen_sessions
        self._used_keys, self._seen_sessions = {}, {}
        with contextlib.suppress(RegistryUnavailable):
            await asyncio.to_thread(self._write_use, keys, sessions)

    async def _local(self) -> Identity | None:
        """Not by what was known at the start: whoever removes the last key must not open the door to others."""
        return LOCAL if self._is_loopback and not await self.is_protected() else None

    async def _by_key(self, key: str, *, is_use: bool = True) -> Identity | None:
        prefix = key_prefix(key)
        if prefix is None:
            return None
        known = (await self._fresh()).keys.get(prefix)
        if known is None or not same(known.digest, digest(key)):
            return None
        if is_use:
            self._used_keys[prefix] = now()
        return Identity(who=known.who, scope=known.scope)

    async def _by_session(self, session_id: str, *, is_use: bool = True) -> Identity | None:
        hashed = digest(session_id)
        login = (await self._fresh()).sessions.get(hashed)
        at = now()
        if login is None:
            return None
        seen_at = max(login.seen_at, self._seen_sessions.get(hashed, login.seen_at))
        if at - login.created_at > LONGEST or at - seen_at > IDLE:
            return None
        if is_use:
            self._seen_sessions[hashed] = at
        return Identity(who=f"session {hashed[:8]} by {login.who}", scope=KeyScope.ALL, session=hashed)

    async def _who_may_log_in(self, secret: str) -> str | None:
        if (by_key := await self._by_key(secret)) is not None:
            return by_key.who if by_key.scope is KeyScope.ALL else None
        kept = (await self._fresh()).password
        if kept is None or len(secret) > MAX_PASSWORD_LENGTH:
            return None
        async with self._checking:
            return BY_PASSWORD if await asyncio.to_thread(password_matches, secret, kept) else None

    async def _fresh(self) -> _Known:
        if self._is_old() and not (self._is_failing and self._is_usable()):
            failures = self._num_failures
            async with self._reading:
                # Nobody else was faster. A try may take as long as the registry's patience, so that who waited for one
                # that failed makes none of their own: the last of twenty would wait for twenty.
                if self._is_old() and self._num_failures == failures:
                    await self._read_again()
        elif self._clock() - self._tried_at > _LOOK_AGAIN_S and self._looking is None:
            self._looking = asyncio.create_task(self._look_again())
        if self._problem is not None and not self._is_usable():
            raise RegistryUnavailable(str(self._problem)) from self._problem
        return self._known

    async def _look_again(self) -> None:
        """So that no request of a busy server waits for the registry, and none for one that has just not answered."""
        try:
            async with self._reading:
                await self._read_again()
        finally:
            self._looking = None

    def _is_old(self) -> bool:
        return self._is_outdated or self._age_s() > _MAX_AGE_S

    def _is_usable(self) -> bool:
        """While the registry cannot be read."""
        return self._age_s() <= _LONGEST_WITHOUT_REGISTRY_S

    def _age_s(self) -> float:
        return float("inf") if self._read_at is None else self._clock() - self._read_at

    async def _read_again(self) -> None:
        self._tried_at, self._is_outdated = self._clock(), False
        began = self._tried_at
        try:
            self._known, self._read_at = await asyncio.to_thread(self._read), began
        except RegistryUnavailable as error:
            self._problem, self._is_failing, self._is_outdated = error, True, True
            self._num_failures += 1
        else:
            self._problem, self._is_failing = None, False

    def _read(self) -> _Known:
        return _Known(
            keys={key.prefix: key for key in list_keys(self._registry)},
            password=password_hash(self._registry),
            sessions={login.digest: login for login in list_sessions(self._registry)},
        )

    def _write_use(self, keys: dict[str, datetime], sessions: dict[str, datetime]) -> None:
        at = now()
        if keys:
            keys_were_used(self._registry, keys)
        if sessions:
            sessions_were_seen(self._registry, sessions)
        end_sessions_before(self._registry, created=at - LONGEST, seen=at - IDLE)
