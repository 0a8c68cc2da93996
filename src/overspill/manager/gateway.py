"""The gateway: OpenAI's API on one port, which loads the model that a request names and passes bytes through.

A plain ASGI application. It reads only the model's name and the stream options of a request, and only the token
counts of an answer. How large a request may be, and how slowly it may arrive, is the body guard's business.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from overspill.kv.sizes import MiB
from overspill.manager import messages
from overspill.manager.activity import Activity
from overspill.manager.engine import Engine
from overspill.manager.errors import NotServed
from overspill.manager.fleet import Engines
from overspill.manager.messages import GatewayError, Header, Source, Usage
from overspill.manager.states import State, Traffic
from overspill.manager.upstreams import Server, Servers
from overspill.registry import RegistryError
from overspill.registry.activity import Request, RequestOutcome
from overspill.upstream import Connection, Head, UpstreamLost

_KEPT_ANSWER_BYTES = 8 * MiB
_LONGEST_EVENT_BYTES = MiB


# Paths that vLLM serves without /v1 (_BARE), and those among them it serves only so; the gateway accepts both forms.
_BARE_ONLY = frozenset({"/classify", "/detokenize", "/generative_scoring", "/pooling", "/tokenize"})
_BARE = _BARE_ONLY | {"/rerank", "/score", "/v2/embed", "/v2/rerank"}


def is_gateways(path: str) -> bool:
    """Whether requests to this path go to models."""
    return path.startswith("/v1/") or path in _BARE


KEEP_ALIVE = b"x-overspill-keep-alive"
"""Request header, for answers that are not streams: 200 and headers are sent early, then blanks until the answer."""
_STREAM_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no"),
]  # fmt: skip
_JSON_HEADERS: list[Header] = [(b"content-type", b"application/json"), (b"x-accel-buffering", b"no")]


@dataclass(eq=False, slots=True)
class Exchange:
    """One request and its answer."""

    scope: Scope
    receive: Receive
    send: Send
    has_begun: bool = False
    is_done: bool = False
    sending_since: float | None = None
    is_abandoned: bool = False
    """Whether the client is gone or has stopped reading."""
    is_stream: bool = False
    is_kept_alive: bool = False
    """Whether headers were sent before the engine's, so that errors become part of the body."""
    is_inside_event: bool = False
    model: str = ""
    began: float = field(default_factory=time.monotonic)
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    wrote_at: float = 0.0
    waited_s: float = 0.0
    first_at: float | None = None
    status: int | None = None
    problem: str = ""
    """Why the request failed; empty if it did not."""
    usage: Usage = field(default_factory=Usage)

    async def begin(self, status: int, headers: list[Header]) -> None:
        self.has_begun, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool) -> None:
        self.is_done = not more  # ASGI servers report a finished answer as a disconnect too
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, status: int, headers: list[Header], body: bytes) -> None:
        await self.begin(status, headers)
        await self.write(b"" if self.scope["method"] == "HEAD" else body, more=False)

    async def refuse(self, error: GatewayError) -> None:
        """Send an error: as an event of a stream that has begun, or else as the body."""
        if not self.has_begun:
            await self.answer(error.status, error.headers, error.body)
        elif self.is_stream or self.is_kept_alive:
            await self.write(self.event(error.body) if self.is_stream else error.body, more=False)

    def event(self, error: bytes) -> bytes:
        """An error's JSON as an event for a stream that has begun; the clients of its path raise it."""
        return messages.error_event(error, self.scope["path"])

    async def give_sign(self, text: str) -> None:
        """Send bytes that clients skip: a comment in a stream, or a blank before JSON."""
        if not self.has_begun:
            self.is_kept_alive = True
            await self.begin(200, _STREAM_HEADERS if self.is_stream else _JSON_HEADERS)
        if not self.is_done:
            await self.write(f": {text}\n\n".encode() if self.is_stream else b" ", more=True)

    async def _send(self, message: Message) -> None:
        self.sending_since = time.monotonic()
        await self.send(message)
        self.sending_since, self.wrote_at = None, time.monotonic()


@dataclass(eq=False, slots=True)
class Gateway:
    engines: Engines
    activity: Activity | None = None
    servers: Servers | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)
        except (GatewayError, NotServed, RegistryError) as error:
            refusal = error if isinstance(error, GatewayError) else messages.converted(error)
            exchange.status, exchange.problem = refusal.status, exchange.problem or refusal.message
            if not exchange.is_abandoned:
                await exchange.refuse(refusal)
        finally:
            if self.activity is not None and scope["method"] == "POST":
                self.activity.note(self._noted(exchange))

    def _noted(self, exchange: Exchange) -> Request:
        now, usage, identity = time.monotonic(), exchange.usage, exchange.scope.get("state", {}).get("identity")
        if exchange.problem:
            outcome = RequestOutcome.FAILED
        else:
            outcome = RequestOutcome.OK if exchange.is_done else RequestOutcome.CANCELLED
        return Request(
            at=exchange.began_at, model=exchange.model, who=identity.who if identity is not None else "",
            path=exchange.scope["path"], outcome=outcome, reason=exchange.problem.partition("\n")[0] or None,
            http_status=exchange.status, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.answered,
            cached_tokens=usage.cached_tokens, spilled_tokens=self._spilled(exchange), waited_s=exchange.waited_s,
            ttft_s=None if exchange.first_at is None else exchange.first_at - exchange.began,
            duration_s=now - exchange.began,
        )  # fmt: skip

    def _spilled(self, exchange: Exchange) -> int | None:
        """Tokens beyond the KV on the GPU according to the plan, which cannot have fitted there; None if unknown."""
        plan = self.engines.plan(exchange.model)
        if exchange.usage.prompt_tokens is None or not plan:
            return None
        per_token = int(plan.get("kv_bytes_per_token") or 0)
        if not per_token or not plan.get("spilled_kv_bytes"):
            return 0
        resident = int(plan.get("resident_kv_bytes") or 0) // per_token
        return max(0, exchange.usage.prompt_tokens + (exchange.usage.completion_tokens or 0) - resident)

    async def _route(self, exchange: Exchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        if {".", ".."} & set(path.split("/")):  # it would leave the upstream's part of its host
            raise GatewayError(404, "a path here has no . and .. in it", code="unknown_url")
        if path.rstrip("/") == "/v1/models" and method in ("GET", "HEAD"):
            await self._models(exchange)
        elif path.startswith("/v1/models/") and method in ("GET", "HEAD"):
            await self._model(exchange, path.removeprefix("/v1/models/"))
        elif method == "POST":
            await self._pass_on(exchange)
        else:
            raise GatewayError(
                405 if path.startswith("/v1/models") else 404,
                f"there is no {method} {path} here: POST requests with the model's name in their JSON",
                code="unknown_url",
            )

    # /v1/models

    async def _models(self, exchange: Exchange) -> None:
        await self.engines.catalogue.refresh(0.5)
        called = [one for one in sorted(self.engines.catalogue.called().items()) if _may_use(exchange, *one)]
        data = [self._described(*one) for one in called]
        for name in self.servers.names() if self.servers is not None else ():
            if (remote := self._remote(name)) is not None and _may_use(exchange, name):
                data.append(_described_remote(name, *remote))
        await _answer_json(exchange, {"object": "list", "data": data})

    async def _model(self, exchange: Exchange, name: str) -> None:
        if (remote := self._remote(name)) is not None:
            _require_right(exchange, name)
            await _answer_json(exchange, _described_remote(name, *remote))
            return
        model, _ = await self.engines.catalogue.resolve(name)
        _require_right(exchange, name, model)
        await self.engines.known(model)
        await _answer_json(exchange, self._described(name, model))

    def _described(self, called: str, name: str) -> dict[str, Any]:
        engine, model = self.engines.snapshot(name), self.engines.catalogue.get(name)
        # A model may leave its context length to the plan, which is known once the engine is planned.
        length = engine.plan.get("max_model_len") or (model.settings.max_model_len if model is not None else None)
        return {
            "id": called,
            "object": "model",
            "created": int(model.created_at.timestamp()) if model is not None else int(engine.since),
            "owned_by": "overspill",
            "root": model.settings.source if model is not None else name,
            "parent": name if called != name else None,
            "max_model_len": length if isinstance(length, int) else None,
            "state": str(engine.state),
            "error": engine.error or None,
        }

    def _remote(self, name: str) -> tuple[Server, str] | None:
        """The upstream that serves a model, and the model's name there; the registry's models take precedence."""
        if self.servers is None or self.engines.catalogue.is_called(name):
            return None
        return self.servers.find(name)

    # Everything else

    async def _pass_on(self, exchange: Exchange) -> None:
        if (body := await _body(exchange)) is None:
            return
        headers = dict(exchange.scope["headers"])
        kind = headers.get(b"content-type", b"")
        asked = messages.asked_of(body, kind)
        exchange.model = asked.model
        server: Server | None = None
        if (remote := self._remote(asked.model)) is not None:
            _require_right(exchange, asked.model)
            name, (server, there) = asked.model, remote
            body = messages.rewritten(body, kind, there)
        else:
            name, changes = await self.engines.catalogue.resolve(asked.model)
            _require_right(exchange, asked.model, name)
            await self.engines.known(name)
            exchange.model = name
            if changes or name != asked.model:
                body = messages.rewritten(body, kind, name, changes)
        exchange.is_stream = asked.is_stream
        counts = server.traffic if server is not None else self.engines.counts[name]
        using = contextlib.nullcontext(server) if server is not None else self.engines.using(name)
        counts.requests += 1
        counts.last_used = time.time()
        asks_usage = messages.with_usage(body, asked, exchange.scope["path"])
        try:
            signs = asked.is_stream or KEEP_ALIVE in headers
            async with self._watched(exchange, signs=signs), using as engine:
                exchange.waited_s = time.monotonic() - exchange.began
                body = body if asks_usage is None else asks_usage
                if isinstance(engine, Engine) and engine.served and name not in engine.served:
                    body = messages.rewritten(body, kind, engine.served[0])
                await self._exchange(exchange, engine, body, counts, hides_usage=asks_usage is not None)
        except asyncio.CancelledError:
            counts.cancelled += 1
            if not exchange.is_abandoned:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        except (GatewayError, NotServed):
            counts.failed += 1
            raise

    async def _exchange(
        self, exchange: Exchange, engine: Engine | Server, body: bytes, counts: Traffic, *, hides_usage: bool
    ) -> None:
        connection, head = await self._ask(exchange, engine, body)
        try:
            if (head.value(b"content-type") or b"").startswith(b"text/event-stream"):
                await self._stream(exchange, connection, engine, head, counts, hides_usage=hides_usage)
            else:
                await self._whole(exchange, connection, engine, head, counts)
        except BaseException:
            connection.close()
            raise
        finally:  # tokens of a broken answer count too: they were computed
            counts.prompt_tokens += exchange.usage.prompt_tokens or 0
            counts.completion_tokens += exchange.usage.answered or 0
        self.engines.upstream.give_back(connection)

    async def _ask(self, exchange: Exchange, engine: Engine | Server, body: bytes) -> tuple[Connection, Head]:
        """Send the request and wait until the answer begins. Without streaming vLLM sends nothing before the end, which
        may be hours; a client that goes away and (by its health) an engine that hangs are noticed meanwhile."""
        scope = exchange.scope
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["path"].removeprefix("/v1") in _BARE_ONLY:
            target = target.removeprefix(b"/v1")
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = messages.passed_on(scope["headers"])
        if isinstance(engine, Server):
            target, headers = engine.path.encode() + target, [*headers, *engine.headers]
        try:
            return await self.engines.upstream.request(engine.url or "", scope["method"], target, headers, body)
        except UpstreamLost as error:
            raise _lost(engine, error) from error

    async def _stream(
        self, exchange: Exchange, connection: Connection, engine: Engine | Server, head: Head, counts: Traffic, *,
        hides_usage: bool,
    ) -> None:  # fmt: skip
        """Pass on events as they come, but only whole ones: no error could be sent after half an event."""
        exchange.is_stream = True
        if not exchange.has_begun:
            await exchange.begin(head.status, messages.passed_back(head.headers))
        rest = b""
        try:
            while (data := await connection.read()) is not None:
                data = rest + data if rest else data
                end = messages.end_of_events(data)
                if end == len(data):
                    rest = b""
                elif end:
                    data, rest = data[:end], data[end:]
                elif len(data) < _LONGEST_EVENT_BYTES:
                    rest = data
                    continue
                else:
                    rest = b""
                exchange.is_inside_event = end != len(data)
                if exchange.first_at is None:
                    exchange.first_at = time.monotonic()
                exchange.usage.read_events(data)
                if hides_usage:
                    data = messages.without_usage(data)
                if data:
                    await exchange.write(data, more=True)
        except UpstreamLost as error:
            counts.failed += 1
            lost = _lost(engine, error)
            exchange.problem = lost.message
            await exchange.write(exchange.event(lost.body), more=False)
            return
        await exchange.write(rest, more=False)

    async def _whole(
        self, exchange: Exchange, connection: Connection, engine: Engine | Server, head: Head, counts: Traffic
    ) -> None:
        """Pass on a complete answer, so that one that breaks off becomes an error; only huge ones go out in parts."""
        pieces, size = [], 0
        try:
            while (data := await connection.read()) is not None:
                pieces.append(data)
                size += len(data)
                if size > _KEPT_ANSWER_BYTES and not exchange.is_stream:
                    exchange.is_inside_event = True
                    if not exchange.has_begun:
                        await exchange.begin(head.status, messages.passed_back(head.headers))
                    await exchange.write(b"".join(pieces), more=True)
                    pieces.clear()
        except UpstreamLost as error:
            if exchange.has_begun and not exchange.is_kept_alive:
                exchange.problem = str(error)
                raise  # the client's connection is closed before the announced length
            raise _lost(engine, error) from error
        body = b"".join(pieces)
        exchange.usage.read(body)
        if head.status >= 500:
            counts.failed += 1
        if head.status >= 400:
            source = Source.UPSTREAM if isinstance(engine, Server) else Source.ENGINE
            exchange.problem = messages.error_message(body) or f"the {source} answered {head.status}"
            body = messages.one_shape(head.status, body, source) if not exchange.is_inside_event else body
        if not exchange.has_begun:
            await exchange.answer(head.status, messages.passed_back(head.headers, length=len(body)), body)
            return
        exchange.status = head.status
        if exchange.is_stream:
            body = exchange.event(body) if head.status >= 400 else b"data: " + body + b"\n\n"
        await exchange.write(body, more=False)

    @contextlib.asynccontextmanager
    async def _watched(self, exchange: Exchange, *, signs: bool) -> AsyncIterator[None]:
        """Cancel the request, wherever it waits, when its client goes away; with `signs`, send a waiting client signs
        of life."""
        task = asyncio.current_task()
        assert task is not None
        timing = self.engines.timing

        async def watch() -> None:
            gone = asyncio.ensure_future(_disconnected(exchange.receive))
            pause_s = timing.stalled_client_s / 4
            try:
                while not gone.done():
                    sign_s = timing.sign_s if exchange.has_begun else timing.first_sign_s
                    await asyncio.wait({gone}, timeout=min(pause_s, sign_s) if signs else pause_s)
                    since, now = exchange.sending_since, time.monotonic()
                    if since is not None and now - since > timing.stalled_client_s:
                        break
                    is_free = since is None and not exchange.is_done and not exchange.is_inside_event
                    if signs and is_free and not gone.done() and now - max(exchange.wrote_at, exchange.began) >= sign_s:
                        await exchange.give_sign(self._doing(exchange.model))
            finally:
                gone.cancel()
            if not exchange.is_done:
                exchange.is_abandoned = True
                task.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()

    def _doing(self, name: str) -> str:
        """What the model is doing, in one line that a client may print."""
        if self._remote(name) is not None:
            return f"{name} is computing"
        engine = self.engines.snapshot(name)
        if engine.state is State.READY:
            return f"{name} is computing"
        doing = engine.phase or ("waiting for room" if engine.pid is None else "the process begins")
        elapsed = f"for {time.time() - engine.since:.0f} s"
        usual = f", {engine.start_s:.0f} s the last time" if engine.start_s is not None else ""
        if engine.state is State.STARTING:
            return f"{name} is starting {elapsed}{usual}: {doing}"
        return f"{name} is {engine.state}"


async def _body(exchange: Exchange) -> bytes | None:
    """The request body; None if the client went away or the guard refused the body."""
    pieces = []
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _described_remote(name: str, server: Server, model: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": 0, "owned_by": server.name, "root": model, "parent": None,
        "max_model_len": None, "state": "upstream", "error": server.problem or None,
    }  # fmt: skip


def _may_use(exchange: Exchange, *names: str) -> bool:
    """Whether the client's key is for all models, or for the one with these names."""
    identity = exchange.scope.get("state", {}).get("identity")
    return identity is None or not identity.models or any(name in identity.models for name in names)


def _require_right(exchange: Exchange, *names: str) -> None:
    if not _may_use(exchange, *names):
        identity = exchange.scope["state"]["identity"]
        allowed = ", ".join(identity.models)
        raise GatewayError(
            403, f"the {identity.who} may not use {names[0]!r:.220}; it is for {allowed}", code="model_not_allowed",
            param="model",
        )  # fmt: skip


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer_json(exchange: Exchange, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    await exchange.answer(200, messages.json_headers(body), body)


def _lost(engine: Engine | Server, error: UpstreamLost) -> GatewayError:
    """Error for an answer that broke off, with who ended it as far as known."""
    if isinstance(engine, Server):
        why = f"the upstream {engine.name} did not answer, or broke off: {error}"
        return GatewayError(502, why, code="upstream_lost", source=Source.UPSTREAM, retry_after_s=5.0)
    if engine.state is State.STOPPING and engine.stop_reason:
        why = f"{engine.name} ended while it answered: {engine.stop_reason}"
        return GatewayError(502, why, code="engine_stopped", retry_after_s=5.0)
    return GatewayError(
        502, f"the engine of {engine.name} died or closed the connection while it answered: {error}",
        code="engine_died", source=Source.ENGINE, retry_after_s=5.0,
    )  # fmt: skip
