"""Changes of engines, for whoever listens: the latest of each, so that a slow listener costs nothing."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Changes(Generic[T]):
    def __init__(self) -> None:
        self._listeners: set[Listener[T]] = set()

    def tell(self, key: str, value: T) -> None:
        for listener in self._listeners:
            listener.tell(key, value)

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    @contextmanager
    def listening(self) -> "Iterator[Listener[T]]":
        """From here on nothing is missed."""
        listener: Listener[T] = Listener()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)


class Listener(Generic[T]):
    def __init__(self) -> None:
        self._latest: dict[str, T] = {}
        self._woken = asyncio.Event()

    def tell(self, key: str, value: T) -> None:
        self._latest[key] = value
        self._woken.set()

    async def next(self) -> dict[str, T]:
        """What has changed since the last time, by name."""
        await self._woken.wait()
        self._woken.clear()
        latest, self._latest = self._latest, {}
        return latest
