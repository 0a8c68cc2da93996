"""Copies of spilled KV that run as late as the order of streams allows: only when someone waits for them."""

import threading
from collections.abc import Callable
from typing import Any

from overspill.kv.spill.steps import Runs
from overspill.kv.spill.streams import Event, HostStreams


class _Stream:
    """Closures in order; an event is how many of them precede it."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], None] | None] = []
        self.num_done = 0

    def ask(self, operation: Callable[[], None]) -> None:
        self.operations.append(operation)

    def so_far(self) -> Event:
        return self, len(self.operations)


class LateStreams(HostStreams):
    """The worst case that a GPU allows. `HostStreams` is the best one: there a copy is over when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in, self._out = _Stream(), _Stream()
        self._lock = threading.RLock()

    def _reach(self, event: Event) -> None:
        if event is None:
            return  # compute is over when it returns
        stream, count = event
        with self._lock:
            while stream.num_done < count:
                operation, stream.operations[stream.num_done] = stream.operations[stream.num_done], None
                stream.num_done += 1
                assert operation is not None
                operation()

    def _fill(self, region: int, runs: Runs) -> None:
        do = super()._fill
        self._in.ask(lambda: do(region, runs))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        do = super().copy_blocks
        self._in.ask(lambda: do(pairs))

    def _save(self, region: int, runs: Runs) -> None:
        do = super()._save
        self._out.ask(lambda: do(region, runs))

    def fill_event(self) -> Event:
        return self._in.so_far()

    def save_event(self) -> Event:
        return self._out.so_far()

    def fill_after(self, event: Event) -> None:
        self._in.ask(lambda: self._reach(event))

    def save_after(self, event: Event) -> None:
        self._out.ask(lambda: self._reach(event))

    def compute_after(self, event: Event) -> None:
        self._reach(event)

    def wait(self, event: Event) -> None:
        self._reach(event)

    def close(self) -> None:
        self._reach(self.fill_event())
        self._reach(self.save_event())
