"""A streaming client: one request, timed as `vllm bench serve` times it.

Its HTTP/1.1 is only as much as a server's events need: a general client takes 50 to 150 µs for each piece of an answer.
With 64 streams at 100 tokens a second that is up to a whole core, and then the client measures itself.
"""

import asyncio
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from overspill.address import client_context
from overspill.measure import CannotMeasure
from overspill.measure.target import Target, ask
from overspill.measure.workload import ids_as_text

_READ_BYTES = 1 << 16
_LONGEST_HEAD = 1 << 16
# Uvicorn closes what was idle for 5 s, maybe while a request is on its way.
_REUSED_WITHIN_S = 2.0
_CONNECT_S = 60.0

OnData = Callable[[bytes, float], None]


class Broken(Exception):
    """The connection broke, or its bytes were not HTTP."""


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


# With its token ids an answer brings those of its prompt, once; reading them would hold up other streams.
_PROMPT_IDS = re.compile(rb'"prompt_token_ids":\s*\[[^\]]*\]')
_LARGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Times are seconds, and a client's: since the request was sent, and between pieces of the answer."""

    prompt_tokens: int
    output_tokens: int
    started_s: float
    """Since the measurement began."""
    ttft: float
    latency: float
    gaps: tuple[float, ...]
    tokens: tuple[int, ...] | None
    """None where the server does not send them."""
    digest: str
    """Of the tokens, or else of the text."""


class RequestFailed(Exception):
    """No whole answer came; the text says why."""


class Refused(RequestFailed):
    """The server does not take the request, and would not take another like it."""


class Unavailable(RequestFailed):
    """The server is gone, or says that it is."""


class Client:
    def __init__(self, target: Target, *, began: float) -> None:
        self._target = target
        self._wire = Wire(target.url, target.headers)
        self._model = json.dumps(target.model)
        self._began = began
        self.close = self._wire.close

    async def ask(self, prompt: str, output: int) -> Answer:
        """`prompt` is ids as JSON writes them, without the brackets. Waits as long as it takes: of requests that are
        sent all at once, the last waits for all others."""
        body = (
            f'{{"model": {self._model}, "prompt": [{prompt}], "max_tokens": {output}, "temperature": 0, '
            '"ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true}'
        ).encode()
        sent = time.perf_counter()
        stream = _Stream(sent)
        try:
            status, refusal = await self._wire.post("/v1/completions", body, stream.feed)
        except Broken as error:
            raise Unavailable(str(error)) from error
        if status != HTTPStatus.OK:
            raise _refusal(status, refusal)
        return stream.answer(sent - self._began)

    async def is_well(self) -> bool:
        """Whether the server is there and its engine works."""
        try:
            answer = await asyncio.to_thread(ask, self._target, "/health")
            if answer.status_code == HTTPStatus.NOT_FOUND:  # not vLLM's
                answer = await asyncio.to_thread(ask, self._target, "/v1/models")
        except CannotMeasure:
            return False
        return answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR


class _Stream:
    """Server-sent events as they come, and the time of each."""

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._rest, self._rest_at = b"", 0.0
        self._times: list[float] = []
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._has_tokens = True
        self._is_over = False

    def feed(self, piece: bytes, at: float) -> None:
        # An event counts from when it begins to arrive. That is when it is there, but for a prompt's ids, which come
        # with the first token here and not for vLLM's own client.
        began = self._rest_at if self._rest else at
        *events, rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            self._event(event.strip(), began)
            began = at
        self._rest, self._rest_at = rest, began

    def _event(self, event: bytes, at: float) -> None:
        data = event.removeprefix(b"data:").strip()
        if not data or event.startswith(b":"):
            return
        if data == b"[DONE]":
            self._is_over = True
            return
        if len(data) > _LARGE:
            data = _PROMPT_IDS.sub(b'"prompt_token_ids":null', data)
        try:
            found = json.loads(data.decode())
            if "error" in found:
                raise Unavailable(_message(found))
            if choices := found.get("choices"):
                self._choice(choices[0], at)
            elif usage := found.get("usage"):
                self._usage = usage
        except (ValueError, AttributeError, TypeError) as error:
            raise RequestFailed(f"a piece of the answer is not what OpenAI's API gives: {data[:80]!r}") from error

    def _choice(self, choice: dict[str, Any], at: float) -> None:
        self._times.append(at)
        self._texts.append(choice.get("text") or "")
        tokens = choice.get("token_ids")
        if tokens is None:
            self._has_tokens = False
        else:
            self._tokens += tokens
        if choice.get("finish_reason") in ("abort", "error"):
            raise RequestFailed(f"the server ended the answer: {choice['finish_reason']}")

    def answer(self, started_s: float) -> Answer:
        if not self._is_over:
            raise Unavailable("the answer broke off")
        if not self._times:
            raise RequestFailed("the answer has no token")
        times = self._times
        said_tokens = self._usage.get("completion_tokens")
        # vLLM's client counts what the server says it is, too; several tokens may come in one piece.
        counted = len(self._tokens) if self._has_tokens else len(times)
        said = f"ids:{ids_as_text(self._tokens)}" if self._has_tokens else f"text:{''.join(self._texts)}"
        return Answer(
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            output_tokens=int(said_tokens) if said_tokens else counted,
            started_s=started_s,
            ttft=times[0] - self._sent,
            latency=times[-1] - self._sent,
            gaps=tuple(later - earlier for earlier, later in itertools.pairwise(times)),
            tokens=tuple(self._tokens) if self._has_tokens else None,
            digest=hashlib.sha256(said.encode()).hexdigest()[:16],
        )


def _refusal(status: int, body: bytes) -> RequestFailed:
    try:
        why = _message(json.loads(body))
    except (ValueError, AttributeError):
        why = body[:200].decode(errors="replace")
    sentence = f"status {status}: {' '.join(why.split())[:400]}"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Unavailable(sentence)
    return RequestFailed(sentence) if status == HTTPStatus.TOO_MANY_REQUESTS else Refused(sentence)


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, dict) else error)
