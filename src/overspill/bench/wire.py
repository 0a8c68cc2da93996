"""HTTP/1.1 for streams, and only as much of it as a server's events need.

A general client takes 50 to 150 µs for each piece of an answer. With 64 streams at 100 tokens a second that is up to a
whole core, and what it measures is itself.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from overspill.address import client_context

_READ_BYTES = 1 << 16
_LONGEST_HEAD = 1 << 16
# Uvicorn closes what was idle for 5 s, maybe while a request is on its way.
_REUSED_WITHIN_S = 2.0
_CONNECT_S = 60.0

OnData = Callable[[bytes, float], None]


class Broken(Exception):
    """The connection broke, or what came was not HTTP."""


class Wire:
    """Connections to one server, kept for the next request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path
        lines = {"Host": parts.netloc, "Content-Type": "application/json", "Accept": "text/event-stream", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[tuple[_Connection, float]] = []
        self._tls = client_context(url)

    async def post(self, path: str, body: bytes, on_data: OnData) -> tuple[int, bytes]:
        """Status, and the body unless it is 200; of that, `on_data` gets each piece and when it began to arrive."""
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode()
        while True:
            connection, is_reused = await self._connection()
            try:
                answer = await connection.exchange(head, body, on_data)
                if connection.can_stay:
                    self._idle.append((connection, time.monotonic()))
                return answer
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                if not (is_reused and not connection.was_answered):  # else the server had closed it: once more
                    raise Broken(str(error) or type(error).__name__) from error
            finally:
                if not connection.can_stay:
                    connection.close()

    async def _connection(self) -> tuple["_Connection", bool]:
        while self._idle:
            connection, since = self._idle.pop()
            if time.monotonic() - since < _REUSED_WITHIN_S:
                return connection, True
            connection.close()
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls, limit=_LONGEST_HEAD
                )
        except OSError as error:
            raise Broken(str(error) or type(error).__name__) from error
        return _Connection(reader, writer), False

    def close(self) -> None:
        for connection, _ in self._idle:
            connection.close()
        self._idle.clear()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.can_stay = False
        """Whether another request may follow on it."""
        self.was_answered = False

    def close(self) -> None:
        self._writer.close()

    async def exchange(self, head: bytes, body: bytes, on_data: OnData) -> tuple[int, bytes]:
        self.can_stay = self.was_answered = False
        self._writer.write(head + body)
        await self._writer.drain()
        status, headers = _parse_head(await self._reader.readuntil(b"\r\n\r\n"))
        self.was_answered = True
        pieces: list[bytes] = []
        take = on_data if status == 200 else lambda piece, at: pieces.append(piece)
        if "chunked" in headers.get("transfer-encoding", ""):
            await self._read_chunks(take)
            self.can_stay = "close" not in headers.get("connection", "")
        elif (length := headers.get("content-length")) is not None:
            take(await self._reader.readexactly(int(length)), time.perf_counter())
            self.can_stay = "close" not in headers.get("connection", "")
        else:
            while piece := await self._reader.read(_READ_BYTES):
                take(piece, time.perf_counter())
        return status, b"".join(pieces)

    async def _read_chunks(self, take: OnData) -> None:
        rest, began = b"", 0.0
        while True:
            data = await self._reader.read(_READ_BYTES)
            now = time.perf_counter()
            if not data:
                raise EOFError("the connection was closed in the middle of an answer")
            rest, began = (rest + data, began) if rest else (data, now)
            while (end := rest.find(b"\r\n")) >= 0:
                size = int(rest[:end].partition(b";")[0], 16)
                if not size:
                    if rest.endswith(b"\r\n\r\n"):
                        return
                    break
                after = end + 2 + size
                if len(rest) < after + 2:
                    break
                take(rest[end + 2 : after], began)
                rest, began = rest[after + 2 :], now


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if not words[0].startswith("HTTP/1.") or len(words) < 2:
        raise ValueError(f"this is not HTTP: {first[:60]!r}")
    fields = (line.partition(":") for line in lines if line)
    return int(words[1]), {name.strip().lower(): value.strip().lower() for name, _, value in fields}
