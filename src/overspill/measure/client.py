"""A streaming client: one request, timed as `vllm bench serve` times it."""

import asyncio
import hashlib
import itertools
import json
import re
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from overspill.measure import CannotMeasure
from overspill.measure.target import Target, ask
from overspill.measure.workload import ids_as_text
from overspill.upstream import Upstream, UpstreamLost

_CONNECT_S = 60.0
_LONGEST_REFUSAL_BYTES = 1 << 20
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
        self._target, self._began = target, began
        self._upstream = Upstream(_CONNECT_S)
        self._path = f"{urlsplit(target.url).path}/v1/completions".encode()
        headers = {"content-type": "application/json", "accept": "text/event-stream", **target.headers}
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._model = json.dumps(target.model)
        self.close = self._upstream.close

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
            connection, head = await self._upstream.request(self._target.url, "POST", self._path, self._headers, body)
            try:
                if head.status != HTTPStatus.OK:
                    raise _refusal(head.status, await connection.read_all(_LONGEST_REFUSAL_BYTES))
                while (data := await connection.read()) is not None:
                    stream.feed(data, time.perf_counter())
            finally:
                self._upstream.give_back(connection)
        except UpstreamLost as error:
            raise Unavailable(str(error)) from error
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
