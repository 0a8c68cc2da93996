"""Server under test: its address, its models, and requests to it, timed as `vllm bench serve` times them."""

import asyncio
import hashlib
import ipaddress
import itertools
import json
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx

from overspill.address import client_context, listening_pid
from overspill.flags import hide_in_value
from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.workload import ids_as_text
from overspill.settings import nearest
from overspill.upstream import DONE, Events, Upstream, UpstreamLost, error_text

_TIMEOUT_S, _CONNECT_S = 30.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    """Address without /v1."""
    model: str
    """Name under which the server lists the model."""
    api_key: str | None = None
    pid: int | None = None
    """Process that, with its descendants, is the server; None if unknown."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def is_here(self) -> bool:
        """Whether the server runs on this machine, where its memory can be sampled."""
        return self.pid is not None or _is_this_machine(urlsplit(self.url).hostname or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Model as the server lists it."""

    name: str
    root: str | None = None
    max_model_len: int | None = None


def parse_url(text: str) -> str:
    """Address without /v1, from `127.0.0.1:8000`, `http://host:8000` or `http://host:8000/v1`."""
    example = "write for example http://127.0.0.1:8000"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise MeasureError(f"{text!r:.80} is not an address: {error}; {example}") from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.username or " " in text:
        raise MeasureError(f"{hide_in_value(text)!r:.80} is not the address of a server; {example}")
    path = parts.path.rstrip("/").removesuffix("/v1")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{path}"


def find_target(url: str, model: str | None = None, api_key: str | None = None) -> Target:
    """Find the server and the model; without a name, the only model served there."""
    target = Target(url=url, model=model or "", api_key=api_key)
    name = find_served(target).name
    return Target(url=url, model=name, api_key=api_key, pid=_listening_pid(url))


def find_served(target: Target) -> Served:
    """Look up the served model; raises if no server answers, the key is refused, or the model is not served."""
    # An adapter counts only when it is named.
    served = [_served(each) for each in _list(target) if not each.get("parent") or each["id"] == target.model]
    names = [each.name for each in served]
    if target.model:
        found = [each for each in served if each.name == target.model]
        if not found:
            raise MeasureError(
                f"{target.url} serves {', '.join(names)}, and not {target.model!r:.80}; {nearest(target.model, names)}"
            )
        return found[0]
    if len(served) > 1:
        raise MeasureError(f"{target.url} serves {', '.join(names)}; name one of them with --model")
    return served[0]


def _served(entry: dict[str, Any]) -> Served:
    length = entry.get("max_model_len")
    return Served(
        name=str(entry["id"]), root=entry.get("root"), max_model_len=length if isinstance(length, int) else None
    )


def _list(target: Target) -> list[dict[str, Any]]:
    answer = ask(target, "/v1/models")
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        how = "another --api-key" if target.api_key else "--api-key, or OVERSPILL_API_KEY"
        raise CannotMeasure(
            f"{target.url} refuses {'this' if target.api_key else 'to answer without a'} key; give {how}"
        )
    not_openai = f"{target.url} answers, but not like an OpenAI server: /v1/models gave"
    if answer.status_code != httpx.codes.OK:
        raise CannotMeasure(f"{not_openai} status {answer.status_code}. Is it another program's port?")
    try:
        models: list[dict[str, Any]] = [{**each, "id": each["id"]} for each in answer.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CannotMeasure(f"{not_openai} no list of models. Is it another program's port?") from error
    if not models:
        raise CannotMeasure(f"{target.url} serves no model yet; wait until it does")
    return models


def ask(target: Target, path: str, *, timeout_s: float = _TIMEOUT_S) -> httpx.Response:
    """Send one GET; raises `CannotMeasure` if no server answers."""
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
    try:
        # A proxy from the environment would be measured too.
        with httpx.Client(
            timeout=timeout, headers=target.headers, trust_env=False, verify=client_context(target.url) or True
        ) as client:
            return client.get(target.url + path)
    except httpx.InvalidURL as error:
        raise MeasureError(f"{target.url} is not an address: {error}") from error
    except httpx.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise CannotMeasure(
                f"the certificate of {target.url} is not trusted by this machine ({error}); name the file of its "
                "authority, or the certificate itself, in SSL_CERT_FILE"
            ) from error
        raise CannotMeasure(
            f"no server answers at {target.url} ({error}); start one with overspill serve MODEL, or name its address"
        ) from error
    except httpx.TransportError as error:
        why = str(error) or type(error).__name__
        raise CannotMeasure(
            f"the server at {target.url} does not answer: {why}. Is it another program's port?"
        ) from error


def _is_this_machine(host: str) -> bool:
    with suppress(OSError, ValueError):
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
        if all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return True
        for address in addresses:  # an address that can be bound belongs to this machine
            family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
        return True
    return False


def _listening_pid(url: str) -> int | None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_this_machine(parts.hostname or ""):
        return None
    return listening_pid(port)


# While a measurement runs, a busy server may be slow to accept connections.
_BUSY_CONNECT_S = 60.0
# For the end of a stream after its last event; only a broken server does not send it at once.
_END_S = 1.0
_LONGEST_REFUSAL_BYTES = 1 << 20
# With an answer's token ids vLLM also sends those of the prompt, once; parsing them would delay other streams.
_PROMPT_IDS = re.compile(rb'"prompt_token_ids":\s*\[[^\]]*\]')
_LARGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer; times are the client's, in seconds since the request was sent, or between pieces of the answer."""

    prompt_tokens: int
    output_tokens: int
    started_s: float
    """Time of sending, in seconds since the measurement began."""
    ttft: float
    latency: float
    gaps: tuple[float, ...]
    tokens: tuple[int, ...] | None
    """Token ids, or None if the server does not send them."""
    digest: str
    """Hash of the token ids, or of the text without them."""


class RequestFailed(Exception):
    """No complete answer arrived; the text says why."""


class Refused(RequestFailed):
    """The server rejects the request, and would reject others like it."""


class Unavailable(RequestFailed):
    """The server is gone, or reports an error of its own."""


class Client:
    """Sends prompts and reads the streamed answers."""

    def __init__(self, target: Target, *, began: float) -> None:
        self._target, self._began = target, began
        self._upstream = Upstream(_BUSY_CONNECT_S)
        self._path = f"{urlsplit(target.url).path}/v1/completions".encode()
        headers = {"content-type": "application/json", "accept": "text/event-stream", **target.headers}
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._model = json.dumps(target.model)
        self.close = self._upstream.close

    async def ask(self, prompt: str, output: int) -> Answer:
        """Send a prompt, token ids as JSON without the brackets. No timeout: the last of many requests sent at once
        waits for all others."""
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
                with suppress(TimeoutError):
                    async with asyncio.timeout(None) as limit:
                        while (data := await connection.read()) is not None:
                            stream.feed(data, time.perf_counter())
                            if stream.is_over:
                                limit.reschedule(asyncio.get_running_loop().time() + _END_S)
            finally:
                self._upstream.give_back(connection)
        except UpstreamLost as error:
            raise Unavailable(str(error)) from error
        answer = stream.answer(sent - self._began)
        # Not every server counts the prompt's tokens; each is a number here.
        return answer if answer.prompt_tokens else replace(answer, prompt_tokens=prompt.count(",") + 1)

    async def is_well(self) -> bool:
        """Whether the server answers and its engine works."""
        try:
            answer = await asyncio.to_thread(ask, self._target, "/health")
            if answer.status_code == HTTPStatus.NOT_FOUND:  # not a vLLM server
                answer = await asyncio.to_thread(ask, self._target, "/v1/models")
        except CannotMeasure:
            return False
        return answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR


class _Stream:
    """Server-sent events as they arrive, with the time of each."""

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._events, self._rest_at = Events(), 0.0
        self._times: list[float] = []
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._has_tokens = True
        self.is_over = False

    def feed(self, piece: bytes, at: float) -> None:
        # An event is timed when it begins to arrive. Only the prompt's ids make that differ from its end: they come
        # with the first token here, and not at all in vLLM's own client.
        began = self._rest_at if self._events.rest else at
        for data in self._events.feed(piece):
            self._event(data, began)
            began = at
        self._rest_at = began

    def _event(self, data: bytes, at: float) -> None:
        if not data:
            return
        if data == DONE:
            self.is_over = True
            return
        if len(data) > _LARGE:
            data = _PROMPT_IDS.sub(b'"prompt_token_ids":null', data)
        try:
            found = json.loads(data.decode())
            if "error" in found:
                raise Unavailable(error_text(data))
            if choices := found.get("choices"):
                self._choice(choices[0], at)
            if usage := found.get("usage"):
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
        if not self.is_over:
            raise Unavailable("the answer broke off")
        if not self._times:
            raise RequestFailed("the answer has no token")
        times = self._times
        said_tokens = self._usage.get("completion_tokens")
        # The server's own count wins, as in vLLM's client: one piece may hold several tokens.
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
    sentence = f"status {status}: {' '.join(error_text(body).split())[:400]}"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Unavailable(sentence)
    return RequestFailed(sentence) if status == HTTPStatus.TOO_MANY_REQUESTS else Refused(sentence)
