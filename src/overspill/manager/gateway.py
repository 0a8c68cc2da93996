"""The gateway: OpenAI's API on one port, which loads the model that a request names and passes bytes through.

A plain ASGI application. Of a request only the model's name is read, and of an answer only its count of tokens. How
large a request may be, and how slowly it may come, is the body guard's business.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from overspill.kv.sizes import MiB
from overspill.manager.engine import Engine
from overspill.manager.errors import NotServed
from overspill.manager.fleet import Engines
from overspill.manager.messages import (
    GatewayError,
    Header,
    Source,
    Usage,
    converted,
    json_headers,
    model_of,
    passed_back,
    passed_on,
    renamed,
)  # fmt: skip
from overspill.manager.states import State, Traffic
from overspill.registry import RegistryError
from overspill.upstream import Connection, Head, UpstreamLost

_KEPT_ANSWER_BYTES = 8 * MiB
_LONGEST_EVENT_BYTES = MiB


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
    """The client is gone, or takes nothing any more."""

    async def begin(self, status: int, headers: list[Header]) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool) -> None:
        self.is_done = not more  # a server calls that a disconnect too
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, status: int, headers: list[Header], body: bytes) -> None:
        await self.begin(status, headers)
        await self.write(b"" if self.scope["method"] == "HEAD" else body, more=False)

    async def _send(self, message: Message) -> None:
        self.sending_since = time.monotonic()
        await self.send(message)
        self.sending_since = None


@dataclass(eq=False, slots=True)
class Gateway:
    engines: Engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)
        except (GatewayError, NotServed, RegistryError) as error:
            if not exchange.is_abandoned:
                refusal = error if isinstance(error, GatewayError) else converted(error)
                await exchange.answer(refusal.status, refusal.headers, refusal.body)

    async def _route(self, exchange: Exchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        if path.rstrip("/") == "/v1/models" and method in ("GET", "HEAD"):
            await self._models(exchange)
        elif path.startswith("/v1/models/") and method in ("GET", "HEAD"):
            await self._model(exchange, path.removeprefix("/v1/models/"))
        elif method == "POST":
            await self._pass_on(exchange)
        else:
            raise GatewayError(
                405 if path.startswith("/v1/models") else 404,
                f"there is no {method} {path} here: requests are POSTed with the model's name in their JSON",
                code="unknown_url",
            )

    # /v1/models

    async def _models(self, exchange: Exchange) -> None:
        await self.engines.catalogue.refresh(0.5)
        listed = {"object": "list", "data": [self._described(name) for name in self.engines.catalogue.names()]}
        await _answer_json(exchange, listed)

    async def _model(self, exchange: Exchange, name: str) -> None:
        if await self.engines.catalogue.find(name) is None:
            await self.engines.require_known(name)
        await _answer_json(exchange, self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        engine, model = self.engines.snapshot(name), self.engines.catalogue.get(name)
        return {
            "id": name,
            "object": "model",
            "created": int(model.created_at.timestamp()) if model is not None else int(engine.since),
            "owned_by": "overspill",
            "root": model.settings.source if model is not None else name,
            "max_model_len": model.settings.max_model_len if model is not None else None,
            "state": str(engine.state),
            "error": engine.error or None,
        }

    # Everything else

    async def _pass_on(self, exchange: Exchange) -> None:
        if (body := await _body(exchange)) is None:
            return
        kind = next((value for name, value in exchange.scope["headers"] if name == b"content-type"), b"")
        name = model_of(body, kind)
        await self.engines.require_known(name)
        counts = self.engines.count(name)
        counts.requests += 1
        counts.last_used = time.time()
        try:
            async with self._watched(exchange), self.engines.using(name) as engine:
                if engine.served and name not in engine.served:
                    body = renamed(body, kind, engine.served[0])
                await self._exchange(exchange, engine, body, counts)
        except asyncio.CancelledError:
            counts.cancelled += 1
            if not exchange.is_abandoned:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        except (GatewayError, NotServed):
            counts.failed += 1
            raise

    async def _exchange(self, exchange: Exchange, engine: Engine, body: bytes, counts: Traffic) -> None:
        connection, head = await self._ask(exchange, engine, body)
        usage = Usage()
        try:
            if (head.value(b"content-type") or b"").startswith(b"text/event-stream"):
                await self._stream(exchange, connection, engine, head, counts, usage)
            else:
                await self._whole(exchange, connection, engine, head, counts, usage)
        except BaseException:
            connection.close()
            raise
        finally:  # also of what breaks off: it was computed
            counts.prompt_tokens += usage.prompt_tokens
            counts.completion_tokens += usage.completion_tokens
        self.engines.upstream.give_back(connection)

    async def _ask(self, exchange: Exchange, engine: Engine, body: bytes) -> tuple[Connection, Head]:
        """Until the answer begins. That may be hours: vLLM sends nothing of an answer that is not a stream before its
        end. A client that goes away is noticed meanwhile, and so is an engine that hangs, by its health."""
        scope = exchange.scope
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = passed_on(scope["headers"])
        try:
            return await self.engines.upstream.request(engine.url or "", scope["method"], target, headers, body)
        except UpstreamLost as error:
            raise _lost(engine, error) from error

    async def _stream(
        self, exchange: Exchange, connection: Connection, engine: Engine, head: Head, counts: Traffic, usage: Usage
    ) -> None:
        """Events as they come, whole ones only: after the beginning of one that breaks off no error could be sent."""
        await exchange.begin(head.status, passed_back(head.headers))
        rest = b""
        try:
            while (data := await connection.read()) is not None:
                data = rest + data if rest else data
                end = data.rfind(b"\n\n") + 2
                if end == len(data):
                    rest = b""
                elif end >= 2:
                    data, rest = data[:end], data[end:]
                elif len(data) < _LONGEST_EVENT_BYTES:
                    rest = data
                    continue
                else:
                    rest = b""
                usage.read(data)
                await exchange.write(data, more=True)
        except UpstreamLost as error:
            counts.failed += 1
            await exchange.write(_lost(engine, error).event, more=False)
            return
        await exchange.write(rest, more=False)

    async def _whole(
        self, exchange: Exchange, connection: Connection, engine: Engine, head: Head, counts: Traffic, usage: Usage
    ) -> None:
        """An answer that breaks off is an error, so none of it is passed on before its end, unless it is huge."""
        pieces, size = [], 0
        try:
            while (data := await connection.read()) is not None:
                pieces.append(data)
                size += len(data)
                if size > _KEPT_ANSWER_BYTES:
                    if not exchange.has_begun:
                        await exchange.begin(head.status, passed_back(head.headers))
                    await exchange.write(b"".join(pieces), more=True)
                    pieces.clear()
        except UpstreamLost as error:
            if exchange.has_begun:
                raise  # the client's connection is closed before the announced length
            raise _lost(engine, error) from error
        body = b"".join(pieces)
        usage.read(body)
        if head.status >= 500:
            counts.failed += 1
        if exchange.has_begun:
            await exchange.write(body, more=False)
            return
        await exchange.answer(head.status, passed_back(head.headers, length=len(body)), body)

    @contextlib.asynccontextmanager
    async def _watched(self, exchange: Exchange) -> AsyncIterator[None]:
        """A client that goes away ends what is done for it, wherever that waits."""
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            gone = asyncio.ensure_future(_disconnected(exchange.receive))
            try:
                while not gone.done():
                    await asyncio.wait({gone}, timeout=self.engines.timing.stalled_client_s / 4)
                    since = exchange.sending_since
                    if since is not None and time.monotonic() - since > self.engines.timing.stalled_client_s:
                        break
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


async def _body(exchange: Exchange) -> bytes | None:
    """None if the client went away, or its body was refused by the guard."""
    pieces = []
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer_json(exchange: Exchange, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    await exchange.answer(200, json_headers(body), body)


def _lost(engine: Engine, error: UpstreamLost) -> GatewayError:
    """Who ended it, as far as is known by now."""
    if engine.state is State.STOPPING and engine.stop_reason:
        why = f"{engine.name} ended while it answered: {engine.stop_reason}"
        return GatewayError(502, why, code="engine_stopped", retry_after_s=5.0)
    return GatewayError(
        502, f"the engine of {engine.name} died or closed the connection while it answered: {error}",
        code="engine_died", source=Source.ENGINE, retry_after_s=5.0,
    )  # fmt: skip
