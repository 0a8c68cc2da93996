"""Request bodies: how large, and how slowly they may come."""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overspill.kv.sizes import MiB, format_size
from overspill.manager.security.answers import refuse

MAX_BODY_BYTES = 64 * MiB
"""A prompt of a million tokens is some 5 MB; pictures in it may be more."""
PAUSE_S = 20.0
"""The longest without a byte."""
_SLOWEST_BYTES_PER_S = 16 * 1024
_CLOSE = (b"connection", b"close")


class BodyGuard:
    """ASGI: 413 for too large a body, 408 for one that does not come. Nothing is done once the body is there."""

    def __init__(self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES, pause_s: float = PAUSE_S) -> None:
        self._app, self._max_bytes, self._pause_s = app, max_bytes, pause_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        declared = _content_length(scope)
        if declared is not None and declared > self._max_bytes:
            await refuse(scope, send, 413, self._too_large(declared), [_CLOSE])
            return
        body = _Body(scope, receive, send, self)
        try:
            await self._app(scope, body.receive, body.send)
        except Exception:
            if not body.is_refused:  # else it is the app's way to say that its client is gone
                raise

    def _too_large(self, num_bytes: int) -> str:
        most = format_size(self._max_bytes)
        return f"the request's body has {format_size(num_bytes)} or more; at most {most} are accepted"

    async def _receive(self, receive: Receive, began_at: float, num_bytes: int) -> Message:
        # Whoever sends a byte now and then is not waited for without end either.
        whole = began_at + self._pause_s + num_bytes / _SLOWEST_BYTES_PER_S - time.monotonic()
        async with asyncio.timeout(min(self._pause_s, whole)):
            return await receive()


class _Body:
    """One request's. After a refusal the app is told that the client is gone, and what it still sends is dropped."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, guard: BodyGuard) -> None:
        self._scope, self._receive, self._send, self._guard = scope, receive, send, guard
        self._began_at = time.monotonic()
        self._num_bytes = 0
        self.is_refused = False
        self._is_whole = self._has_answered = False

    async def receive(self) -> Message:
        if self.is_refused:
            return {"type": "http.disconnect"}
        if self._is_whole:
            return await self._receive()
        try:
            message = await self._guard._receive(self._receive, self._began_at, self._num_bytes)
        except TimeoutError:
            return await self._refuse(408, "the request's body did not come in time; send it faster, or in one piece")
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            if self._num_bytes > self._guard._max_bytes:
                return await self._refuse(413, self._guard._too_large(self._num_bytes))
        return message

    async def send(self, message: Message) -> None:
        if self.is_refused:
            return
        self._has_answered = True
        await self._send(message)

    async def _refuse(self, status: int, message: str) -> Message:
        self.is_refused = True
        if not self._has_answered:
            await refuse(self._scope, self._send, status, message, [_CLOSE])
        return {"type": "http.disconnect"}


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _content_length(scope: Scope) -> int | None:
    values = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(values[0]) if values and values[0].isdigit() else None
