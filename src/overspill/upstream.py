"""HTTP client for model servers: connections that pass bytes on as they arrive, kept for later requests.

Not httpx: its parser and layers cost 50 to 150 µs per token. That is more than everything else the gateway does, and up
to a whole core with 64 streams at 100 tokens a second, so that a benchmark would measure itself.
"""

import asyncio
import json
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from overspill.address import client_context

Headers = Sequence[tuple[bytes, bytes]]

_MOST_PENDING_BYTES = 256 * 1024
# vLLM's server closes a connection after 5 s idle; trying one that is about to be closed is not worth it.
_IDLE_S = 2.0
_MOST_IDLE = 128
_JUST_CLOSED_S = 1.0
_MOST_PAGE_BYTES = 8 << 20
DONE = b"[DONE]"  # OpenAI's last event
# An answer may take hours, so only TCP can notice a host that has vanished: after a minute.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
)


class UpstreamLost(Exception):
    """The server cannot be reached, or the connection broke before the answer's end."""

    def __init__(self, why: str, *, had_begun: bool = False) -> None:
        super().__init__(why)
        self.had_begun = had_begun
        """Whether part of the answer had arrived, so that the request must not be repeated."""


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: list[tuple[bytes, bytes]]

    def value(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


class Events:
    """Parser of server-sent events in the pieces of a stream."""

    def __init__(self) -> None:
        self.rest = b""
        """Bytes of an event that is not complete yet."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of each event that ends in the piece; empty for a comment, which keeps a connection alive."""
        *events, self.rest = (self.rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        return [data_of(event) for event in events]


def data_of(event: bytes) -> bytes:
    """Data of one event, which may have several lines and other fields."""
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))


def error_text(body: bytes) -> str:
    """The error in a server's JSON answer, or else the beginning of whatever it answered."""
    try:
        answer = json.loads(body)
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body[:200].decode(errors="replace")


class Connection(asyncio.Protocol):
    """A connection to a server, for one request at a time."""

    def __init__(self, url: str) -> None:
        self.address, self._host = address(url), urlsplit(url).netloc.encode()
        self.idle_since = 0.0
        self.was_used = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._lost: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: Head | None = None
        self._pieces: list[bytes] = []
        self._pending = 0
        self._is_paused = False
        self._is_complete = self._keeps_alive = False
        self._has_begun = False

    # Callbacks of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio.Transport, but behave like it.
        self._transport = cast(asyncio.Transport, transport)
        connected = transport.get_extra_info("socket")
        for level, option, value in _KEEPALIVE:
            connected.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost = f"what it answered is not HTTP: {error}"
            self.close()
        if self._pending > _MOST_PENDING_BYTES and not self._is_paused and self._transport is not None:
            # The client reads slower than the engine writes.
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_complete and self._lost is None:
            if error is None and self._head is not None and self._ends_with_connection(self._head):
                self._is_complete = True
            else:
                self._lost = str(error) if error is not None else "it closed the connection"
        self._lost = self._lost or "the connection is closed"
        self._transport = None
        self._wake()

    # Callbacks of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head = Head(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._pending += len(body)

    def on_message_complete(self) -> None:
        self._is_complete = True
        # The parser only knows now.
        self._keeps_alive = bool(self._parser.should_keep_alive())

    # For callers

    @property
    def is_usable(self) -> bool:
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._lost is None
            and time.monotonic() - self.idle_since < _IDLE_S
        )

    @property
    def may_be_kept(self) -> bool:
        return self._keeps_alive and self._lost is None

    def send(self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        if self.was_used:
            self._reset()
        self.was_used = True
        if self._transport is None:
            return  # head() raises
        lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (method.encode(), target, self._host)]
        lines += [b"%s: %s" % header for header in headers]
        if body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(body))
        self._transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    async def head(self) -> Head:
        while self._head is None:
            self._raise_if_lost()
            await self._wait()
        return self._head

    async def read(self) -> bytes | None:
        """Wait for body bytes and return all since the last call; None at the end."""
        while not self._pieces:
            if self._is_complete:
                return None
            self._raise_if_lost()
            await self._wait()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._pending = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self, most_bytes: int) -> bytes:
        body = bytearray()
        while (part := await self.read()) is not None:
            body += part
            if len(body) > most_bytes:
                raise UpstreamLost(f"its answer is larger than {most_bytes} bytes", had_begun=True)
        return bytes(body)

    def close(self) -> None:
        """Close at once, so that the engine notices and stops computing."""
        if self._transport is not None:
            self._transport.abort()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise UpstreamLost(self._lost, had_begun=self._has_begun)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @staticmethod
    def _ends_with_connection(head: Head) -> bool:
        return head.value(b"content-length") is None and head.value(b"transfer-encoding") is None


class Upstream:
    """Pool of connections to servers, by address."""

    def __init__(self, connect_s: float = 5.0) -> None:
        self._connect_s = connect_s
        self._idle: dict[tuple[str, int], list[Connection]] = {}

    async def request(
        self, url: str, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> tuple[Connection, Head]:
        """Send a request and wait until the answer begins, which may take hours. The caller reads the answer and gives
        the connection back or closes it. If the server had just closed a kept connection without answering, the request
        is sent again on a fresh one."""
        for fresh in (False, True):
            connection = await self.connect(url, fresh=fresh)
            is_kept, sent_at = connection.was_used, time.monotonic()
            connection.send(method, target, headers, body)
            try:
                return connection, await connection.head()
            except BaseException as error:
                connection.close()
                # One that was lost later may have been worked on.
                had_closed = is_kept and time.monotonic() - sent_at < _JUST_CLOSED_S
                if not isinstance(error, UpstreamLost) or error.had_begun or not had_closed:
                    raise
        raise AssertionError("a fresh connection answers or is lost")

    async def connect(self, url: str, *, fresh: bool = False) -> Connection:
        host, port = address(url)
        kept = self._idle.get((host, port), [])
        while kept and not fresh:
            connection = kept.pop()
            if connection.is_usable:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self._connect_s):
                loop, tls = asyncio.get_running_loop(), client_context(url)
                _, made = await loop.create_connection(lambda: Connection(url), host, port, ssl=tls)
        except (OSError, TimeoutError) as error:
            raise UpstreamLost(f"it cannot be reached at {url}: {error or 'no answer'}") from error
        return made

    def give_back(self, connection: Connection) -> None:
        kept = self._idle.setdefault(connection.address, [])
        if connection.may_be_kept and len(kept) < _MOST_IDLE:
            connection.idle_since = time.monotonic()
            kept.append(connection)
        else:
            connection.close()

    def drop(self, url: str) -> None:
        """Close kept connections to an engine that is gone."""
        for connection in self._idle.pop(address(url), []):
            connection.close()

    def close(self) -> None:
        for kept in self._idle.values():
            for connection in kept:
                connection.close()
        self._idle.clear()

    async def ask(
        self, url: str, path: str, timeout: float, *, most_bytes: int = _MOST_PAGE_BYTES, headers: Headers = (),
        method: str = "GET",
    ) -> tuple[int, bytes] | None:  # fmt: skip
        """Status and body; None without a timely answer, or if the body is too large, as any program may answer."""
        connection = None
        try:
            async with asyncio.timeout(timeout):
                connection = await self.connect(url, fresh=True)
                connection.send(method, path.encode(), [(b"connection", b"close"), *headers], b"")
                head = await connection.head()
                return head.status, await connection.read_all(most_bytes)
        except (UpstreamLost, TimeoutError):
            return None
        finally:
            if connection is not None:
                connection.close()


def read_names(answer: tuple[int, bytes] | None) -> tuple[str, ...] | None:
    """Names of the models listed by an answer of /v1/models; None for any other answer."""
    with suppress(ValueError, KeyError, TypeError):
        if answer is not None and answer[0] == 200:
            return tuple(str(model["id"]) for model in json.loads(answer[1])["data"])
    return None


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
