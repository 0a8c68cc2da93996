"""Copies of spilled KV that run as late as the order of streams allows: only when someone waits for them."""

import threading
from collections.abc import Callable
from typing import Any

from overspill.kv.spill.steps import Runs
from overspill.kv.spill.streams import HostStreams, Point


class _Stream:
    """Closures in order; a point is how many of them come before it."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], None] | None] = []
        self.num_done = 0

    def ask(self, operation: Callable[[], None]) -> None:
        self.operations.append(operation)

    def so_far(self) -> Point:
        return self, len(self.operations)


class LateStreams(HostStreams):
    """The worst case that a GPU allows. `HostStreams` is the best one: there a copy is over when it is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in, self._out = _Stream(), _Stream()
        self._lock = threading.RLock()

    def _reach(self, point: Point) -> None:
        if point is None:
            return  # compute is over when it returns
        stream, count = point
        with self._lock:
            while stream.num_done < count:
                operation, stream.operations[stream.num_done] = stream.operations[stream.num_done], None
                stream.num_done += 1
                assert operation is not None
                operation()

    def _fill(self, region: int, runs: Runs) -> None:
        do = super()._fill
        self._in.ask(lambda: do(region, runs))

    def move(self, pairs: list[tuple[int, int]]) -> None:
        do = super().move
        self._in.ask(lambda: do(pairs))

    def _save(self, region: int, runs: Runs) -> None:
        do = super()._save
        self._out.ask(lambda: do(region, runs))

    def filled(self) -> Point:
        return self._in.so_far()

    def saved(self) -> Point:
        return self._out.so_far()

    def fill_after(self, point: Point) -> None:
        self._in.ask(lambda: self._reach(point))

    def save_after(self, point: Point) -> None:
        self._out.ask(lambda: self._reach(point))

    def compute_after(self, point: Point) -> None:
        self._reach(point)

    def wait(self, point: Point) -> None:
        self._reach(point)

    def close(self) -> None:
        self._reach(self.filled())
        self._reach(self.saved())
