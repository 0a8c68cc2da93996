"""Requests that wait for their model: bounded, in the order in which they came, and left by who goes away."""

import asyncio
import time
from dataclasses import dataclass, field

from overspill.manager.errors import NotServed, QueueFull


@dataclass(eq=False, slots=True)
class Waiting:
    name: str
    ready: "asyncio.Future[None]"
    may_evict: bool = True
    since: float = field(default_factory=time.monotonic)


class Queue:
    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: dict[Waiting, None] = {}  # in order, and quick to leave

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, name: str, *, may_evict: bool = True) -> Waiting:
        if len(self._waiting) >= self.most:
            raise QueueFull(
                f"{len(self._waiting)} requests wait for models to load already, and {self.most} may; ask again later",
                retry_after_s=5.0,
            )
        one = Waiting(name, asyncio.get_running_loop().create_future(), may_evict)
        self._waiting[one] = None
        return one

    def leave(self, one: Waiting) -> None:
        self._waiting.pop(one, None)

    def count(self, name: str) -> int:
        return sum(one.name == name for one in self._waiting)

    def names(self) -> list[str]:
        """Of models, the one that was asked for first at the front."""
        return list(dict.fromkeys(one.name for one in self._waiting))

    def since(self, name: str) -> float:
        """When the first of those that wait for it came; on the monotonic clock."""
        return min((one.since for one in self._waiting if one.name == name), default=float("inf"))

    def may_evict(self, name: str) -> bool:
        return any(one.may_evict for one in self._waiting if one.name == name)

    def admit(self, name: str) -> None:
        for one in self._of(name):
            self._waiting.pop(one)
            if not one.ready.done():
                one.ready.set_result(None)

    def refuse(self, name: str, error: NotServed) -> None:
        for one in self._of(name):
            self._waiting.pop(one)
            if not one.ready.done():
                one.ready.set_exception(error)

    def refuse_all(self, error: NotServed) -> None:
        for name in self.names():
            self.refuse(name, error)

    def _of(self, name: str) -> list[Waiting]:
        return [one for one in self._waiting if one.name == name]
