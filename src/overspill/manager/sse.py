"""Server-sent events: changes for listeners, only the latest of each name so that a slow listener costs nothing."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from starlette.responses import StreamingResponse

T = TypeVar("T")
MEDIA_TYPE = "text/event-stream"
_QUIET_S = 15.0


class Changes(Generic[T]):
    def __init__(self) -> None:
        self._listeners: set[Listener[T]] = set()

    def publish(self, name: str, value: T) -> None:
        for listener in self._listeners:
            listener.latest[name] = value
            listener.woken.set()

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    @contextmanager
    def listening(self) -> "Iterator[Listener[T]]":
        """Register a listener, which misses no change from here on."""
        listener: Listener[T] = Listener()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)


class Listener(Generic[T]):
    def __init__(self) -> None:
        self.latest: dict[str, T] = {}
        self.woken = asyncio.Event()

    async def next(self) -> dict[str, T]:
        """Wait for changes, and return the latest since the last call, by name."""
        await self.woken.wait()
        self.woken.clear()
        latest, self.latest = self.latest, {}
        return latest


def event(name: str, data: str) -> str:
    lines = "".join(f"data: {line}\n" for line in data.splitlines() or [""])
    return f"event: {name}\n{lines}\n"


def stream(events: AsyncIterator[str], closing: asyncio.Event, media_type: str = MEDIA_TYPE) -> StreamingResponse:
    """Response with the events, and with headers that keep proxies from buffering it."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    quiet = ": nothing new\n\n" if media_type == MEDIA_TYPE else ""
    return StreamingResponse(_until(events, closing, quiet), media_type=media_type, headers=headers)


async def _until(events: AsyncIterator[str], closing: asyncio.Event, quiet: str) -> AsyncIterator[str]:
    """Yield events until closing, and a comment when quiet: a lost client is noticed only when something is sent."""
    ended: asyncio.Future[Any] = asyncio.ensure_future(closing.wait())
    next_one: asyncio.Future[Any] | None = None
    if quiet:
        yield quiet  # sends the headers at once, so that a browser knows that it is connected
    try:
        while not ended.done():
            if next_one is None:
                next_one = asyncio.ensure_future(anext(events))
            await asyncio.wait({next_one, ended}, timeout=_QUIET_S, return_when=asyncio.FIRST_COMPLETED)
            if next_one.done():
                try:
                    yield next_one.result()
                except StopAsyncIteration:
                    return
                next_one = None
            elif not ended.done() and quiet:
                yield quiet
    finally:
        ended.cancel()
        if next_one is not None:
            next_one.cancel()
            await asyncio.gather(next_one, return_exceptions=True)
        if hasattr(events, "aclose"):
            await events.aclose()
