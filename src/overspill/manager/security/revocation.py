"""Answers that go on for long, such as events and a model's stream: who gets them is asked for again now and then."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.types import Message, Receive, Send

AGAIN_S = 2.0


class Revocable:
    """One answer. Once its client may not have it any more, it ends, and whoever makes it is told that nobody listens.

    Asked when something is sent: that costs nothing while nothing is, and what is not sent is not seen either.
    """

    def __init__(self, receive: Receive, send: Send, may_go_on: Callable[[], Awaitable[bool]]) -> None:
        self._receive, self._send, self._may_go_on = receive, send, may_go_on
        self._asked_at = time.monotonic()
        self._revoked = asyncio.Event()

    async def send(self, message: Message) -> None:
        if self._revoked.is_set():
            return
        if message["type"] == "http.response.body" and time.monotonic() - self._asked_at > AGAIN_S:
            self._asked_at = time.monotonic()
            if not await self._may_go_on():
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
