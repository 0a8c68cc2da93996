"""Clients and their rights: API keys, the password and sessions, checked against an in-memory copy of the registry."""

import asyncio
import contextlib
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from starlette.responses import Response
from starlette.types import Message, Receive, Send

from overspill.registry import access as stored
from overspill.registry.access import Key, KeyExpired, KeyScope, Login, digest
from overspill.registry.database import Registry
from overspill.registry.errors import RegistryUnavailable
from overspill.registry.tables import now

# Changes that another process makes to keys, the password or sessions take effect within this time.
_MAX_AGE_S = 2.0
# After this time the registry is read again in the background, while requests still use the copy.
_REFRESH_S = 1.0
# While the registry cannot be read, the copy serves up to this age; after that every request is refused.
_LONGEST_WITHOUT_REGISTRY_S = 60.0
IDLE = timedelta(hours=12)
LONGEST = timedelta(days=7)
RECHECK_S = 2.0
"""Seconds between checks of the client's rights during a long answer, such as a stream."""
_MAX_COOKIE_LENGTH = 100
_FREE_TRIES = 5
_LONGEST_WAIT_S = 900.0
_FORGIVEN_AFTER_S = 3600.0
_MAX_ADDRESSES = 4096
# Against guesses from many addresses: after this many failures within a minute or so, every address has to wait,
# except those that have logged in before: otherwise anybody could lock the owner out.
_FREE_TRIES_OF_ALL = 50
_LONGEST_WAIT_OF_ALL_S = 60.0
_DRAIN_PER_S = 0.5
_MAX_TRUSTED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The client that sent a request."""

    who: str
    """The client's name in the audit log."""
    scope: KeyScope
    models: tuple[str, ...] = ()
    """Models that the client may use; empty for all."""
    session: str | None = None
    """Digest of the session id, if the client logged in."""


LOCAL = Identity(who="local", scope=KeyScope.ALL)
"""Every client, where only this machine can connect and neither a key nor a password exists."""


@dataclass(frozen=True, slots=True)
class _Known:
    keys: dict[str, Key]
    password: str | None
    sessions: dict[str, Login]


class Access:
    """An in-memory copy of keys, password and sessions; a request costs a dictionary lookup and one SHA-256.

    Belongs to one event loop. A thread reads the registry, at most every second and only while requests arrive.
    `is_loopback` means that no other machine can connect, not even through a proxy.
    """

    def __init__(self, registry: Registry, *, is_loopback: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._is_loopback, self._clock = registry, is_loopback, clock
        self._known = _Known({}, None, {})
        self._read_at = self._tried_at = float("-inf")
        self._problem: RegistryUnavailable | None = None
        """Error of the last registry read; None if it succeeded."""
        self._is_outdated = True
        self._reading = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None
        # Checking a password takes 32 MiB and a core; a thousand logins at once must not take a thousand of each.
        self._checking = asyncio.Lock()
        self._used_keys: dict[str, datetime] = {}
        self._seen_sessions: dict[str, datetime] = {}

    async def identify(
        self, authorization: str | None, session_id: str | None, *, is_use: bool = True
    ) -> Identity | None:
        """Identify a client by its Authorization header, else by its session cookie; None if unknown.

        A valid cookie does not make up for a wrong key. Without `is_use` the session's idle time keeps running, so
        that an open page alone does not keep its session alive for ever.
        """
        if authorization is not None:
            kind, _, key = authorization.strip().partition(" ")
            identity = await self._by_key(key.strip(), is_use=is_use) if kind.lower() == "bearer" else None
            # OpenAI's clients always send a key, so any key will do where nothing is protected.
            return identity or await self._local()
        if session_id is not None and (identity := await self._by_session(session_id, is_use=is_use)) is not None:
            return identity
        return await self._local()

    async def is_protected(self) -> bool:
        known = await self._fresh()
        return bool(known.keys) or known.password is not None

    async def has_way_in(self) -> bool:
        """Whether a password, or an unexpired key with all rights, lets somebody log in."""
        known = await self._fresh()
        is_full = (key.scope is KeyScope.ALL and not key.is_expired for key in known.keys.values())
        return known.password is not None or any(is_full)

    async def log_in(self, secret: str, address: str) -> str | None:
        """Id of a new session if `secret` is the password or a key with all rights. LoginLimit decides who may try."""
        who = await self._who_may_log_in(secret)
        if who is None:
            return None
        session_id = stored.new_session_id()
        await asyncio.to_thread(stored.start_session, self._registry, session_id, who, address)
        self.forget()
        return session_id

    async def log_out(self, identity: Identity) -> None:
        if identity.session is not None:
            await asyncio.to_thread(stored.end_session, self._registry, identity.session)
            self.forget()

    def forget(self) -> None:
        """Make the next request read the registry again, even if the last read has just failed."""
        self._is_outdated, self._problem = True, None

    async def note_use(self) -> None:
        """Write when keys and sessions were last used, and end old sessions; called every minute and at shutdown."""
        keys, self._used_keys = self._used_keys, {}
        sessions, self._seen_sessions = self._seen_sessions, {}

        def write() -> None:
            at = now()
            if keys:
                stored.keys_were_used(self._registry, keys)
            if sessions:
                stored.sessions_were_seen(self._registry, sessions)
            stored.end_sessions_before(self._registry, created=at - LONGEST, seen=at - IDLE)

        with contextlib.suppress(RegistryUnavailable):
            await asyncio.to_thread(write)

    async def _local(self) -> Identity | None:
        """LOCAL if nothing is protected and no other machine can connect: removing the last key opens no door."""
        return LOCAL if self._is_loopback and not await self.is_protected() else None

    async def _by_key(self, key: str, *, is_use: bool = True) -> Identity | None:
        prefix = stored.key_prefix(key)
        if prefix is None:
            return None
        known = (await self._fresh()).keys.get(prefix)
        if known is None or not stored.same(known.digest, digest(key)):
            return None
        if known.is_expired:
            raise KeyExpired(f"the {known.who} expired at {known.expires_at:%Y-%m-%d %H:%M} UTC; make another one")
        if is_use:
            self._used_keys[prefix] = now()
        return Identity(who=known.who, scope=known.scope, models=tuple(known.models or ()))

    async def _by_session(self, session_id: str, *, is_use: bool = True) -> Identity | None:
        hashed = digest(session_id)
        known = await self._fresh()
        login = known.sessions.get(hashed)
        if login is None or any(key.who == login.who and key.is_expired for key in known.keys.values()):
            return None
        at = now()
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
        if kept is None or len(secret) > stored.MAX_PASSWORD_LENGTH:
            return None
        async with self._checking:
            return stored.BY_PASSWORD if await asyncio.to_thread(stored.password_matches, secret, kept) else None

    async def _fresh(self) -> _Known:
        """The copy, read again if too old. While the registry cannot be read, the old copy serves for a minute."""
        if self._is_old() and (self._problem is None or not self._is_usable()):
            before = self._problem
            async with self._reading:
                # A read may take until the registry's timeout, so waiters reuse an attempt that failed meanwhile;
                # otherwise the last of twenty would wait for twenty timeouts.
                if self._is_old() and (self._problem is None or self._problem is before):
                    await self._read_again()
        elif self._clock() - self._tried_at > _REFRESH_S and self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
        if self._problem is not None and not self._is_usable():
            raise RegistryUnavailable(str(self._problem)) from self._problem
        return self._known

    async def _refresh(self) -> None:
        """Read the registry in the background, so that requests to a busy server never wait for it."""
        try:
            async with self._reading:
                await self._read_again()
        finally:
            self._refreshing = None

    def _is_old(self) -> bool:
        return self._is_outdated or self._clock() - self._read_at > _MAX_AGE_S

    def _is_usable(self) -> bool:
        return self._clock() - self._read_at <= _LONGEST_WITHOUT_REGISTRY_S

    async def _read_again(self) -> None:
        began = self._tried_at = self._clock()
        self._is_outdated = False
        try:
            self._known, self._read_at, self._problem = await asyncio.to_thread(self._read), began, None
        except RegistryUnavailable as error:
            self._problem, self._is_outdated = error, True

    def _read(self) -> _Known:
        return _Known(
            keys={key.prefix: key for key in stored.list_keys(self._registry)},
            password=stored.password_hash(self._registry),
            sessions={login.digest: login for login in stored.list_sessions(self._registry)},
        )


class Revocable:
    """An answer that ends once its client has lost the right to it; its handler then sees a disconnect.

    Rights are checked when something is sent: a silent stream costs nothing, and reveals nothing.
    """

    def __init__(self, receive: Receive, send: Send, is_allowed: Callable[[], Awaitable[bool]]) -> None:
        self._receive, self._send, self._is_allowed = receive, send, is_allowed
        self._checked_at = time.monotonic()
        self._revoked = asyncio.Event()

    async def send(self, message: Message) -> None:
        if self._revoked.is_set():
            return
        if message["type"] == "http.response.body" and time.monotonic() - self._checked_at > RECHECK_S:
            self._checked_at = time.monotonic()
            if not await self._is_allowed():
                self._revoked.set()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def receive(self) -> Message:
        if self._revoked.is_set():
            return {"type": "http.disconnect"}
        message, revoked = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._revoked.wait())
        try:
            await asyncio.wait({message, revoked}, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            revoked.cancel()


# The cookie holds a session id or, where nobody has to log in, a number that only this browser knows. Cookies ignore
# ports: browsers send it to other servers on this host too, so alone it allows no change (guards.csrf_token).


def cookie_name(*, is_tls: bool) -> str:
    """Name of the cookie; browsers accept __Host- from this very host only, and send it over TLS only."""
    return "__Host-overspill" if is_tls else "overspill"


def set_cookie(response: Response, value: str, *, is_tls: bool) -> None:
    """Set the cookie until the browser is closed; an empty value deletes it at once."""
    response.set_cookie(
        cookie_name(is_tls=is_tls), value, max_age=None if value else 0, secure=is_tls, httponly=True, samesite="strict"
    )


def read_cookie(header: str | None, *, is_tls: bool) -> str | None:
    """Value of our cookie; None if missing, malformed, or sent with two values: then somebody else has set one."""
    name = cookie_name(is_tls=is_tls)
    pairs = (part.strip().partition("=") for part in (header or "").split(";"))
    found = {value for key, _, value in pairs if key == name}
    value = found.pop() if len(found) == 1 else ""
    return value if 0 < len(value) <= _MAX_COOKIE_LENGTH and value.isascii() and value.isprintable() else None


class LoginLimit:
    """A limit on login tries per address and in total, with waits that double, in bounded memory.

    Not kept across a restart: the manager's start takes longer than the first waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Number of failures and time of the last one, by address; the oldest first."""
        self._trusted: OrderedDict[str, None] = OrderedDict()
        self._of_all = 0.0
        self._of_all_at = clock()

    def try_now(self, address: str) -> float:
        """0 if this address may try now, else the seconds until it may.

        A try counts as failed from the start: many at once get no more tries than one by one.
        """
        now, source = self._clock(), _source(address)
        count, last_at = self._by_address.get(source, (0, now))
        count = count if now - last_at < _FORGIVEN_AFTER_S else 0
        of_all = max(0.0, self._of_all - (now - self._of_all_at) * _DRAIN_PER_S)
        waits = [0.0, _wait(count - _FREE_TRIES, _LONGEST_WAIT_S) - (now - last_at)]
        if source not in self._trusted:
            wait_of_all = _wait(int(of_all) - _FREE_TRIES_OF_ALL, _LONGEST_WAIT_OF_ALL_S)
            waits.append(wait_of_all - (now - self._of_all_at))
        if max(waits) <= 0:
            self._by_address.pop(source, None)
            self._by_address[source] = count + 1, now
            self._of_all, self._of_all_at = of_all + 1, now
        while len(self._by_address) > _MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        return max(waits)

    def succeeded(self, address: str) -> None:
        """Forget the address's failures, take its try out of the total, and trust the address from now on."""
        source = _source(address)
        self._by_address.pop(source, None)
        self._of_all = max(0.0, self._of_all - 1)
        self._trusted.pop(source, None)
        self._trusted[source] = None
        while len(self._trusted) > _MAX_TRUSTED:
            self._trusted.popitem(last=False)


def _wait(over: int, longest: float) -> float:
    """Seconds to wait: 1 after the first try too many, then 2, 4, … up to `longest`."""
    return 0.0 if over < 0 else float(min(longest, 2.0 ** min(over, 30)))


def _source(address: str) -> str:
    """The address, or an IPv6 address's /64 network: one customer has 2^64 addresses or more."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:100]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
