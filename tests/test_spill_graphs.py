"""Steps in graphs, without a GPU: what is queued when, and a watchdog that ends the engine for what was lost, and not
for what is long."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from overspill.kv.cuda import half_queued
from overspill.kv.spill import graphs
from overspill.kv.spill.steps import SpillStep


@dataclass
class Point:
    """Stands in for a CUDA event."""

    is_reached: bool = False

    def query(self) -> bool:
        return self.is_reached


class Watched(graphs.Watchdog):
    def __init__(self) -> None:
        super().__init__()
        self.reason, self.has_ended = "", threading.Event()

    def end(self, reason: str) -> None:
        self.reason = reason
        self.has_ended.set()


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(graphs, "_STALL_S", 0.2)
    monkeypatch.setattr(graphs, "_POLL_S", 0.01)
    return Watched()


def test_a_step_that_does_not_end_ends_the_engine(watchdog: Watched) -> None:
    watchdog.watch(Point(True), Point(True), 0)
    watchdog.watch(Point(True), Point(), 0)
    assert watchdog.has_ended.wait(20)
    assert "the engine exits" in watchdog.reason


def test_time_counts_from_when_the_gpu_gets_to_the_step(watchdog: Watched) -> None:
    """It is queued while a prompt is computed, which may take longer than any step of decodes."""
    begun = Point()
    watchdog.watch(begun, Point(), 0)
    assert not watchdog.has_ended.wait(1)
    begun.is_reached = True
    assert watchdog.has_ended.wait(20)


def test_later_steps_do_not_hide_one_that_does_not_end(watchdog: Watched) -> None:
    watchdog.watch(Point(True), Point(), 0)
    watchdog.watch(Point(), Point(), 0)
    assert watchdog.has_ended.wait(20)


def test_each_step_has_time_for_its_bytes(watchdog: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_SLOWEST_BYTES_PER_S", 100)
    over = Point()
    watchdog.watch(Point(True), over, 200)
    assert not watchdog.has_ended.wait(1)
    over.is_reached = True
    watchdog.watch(Point(True), Point(), 0)
    assert watchdog.has_ended.wait(20)


class Side:
    """Stands in for streams, window and vLLM's graphs; notes what is called, and whether memory could be registered."""

    device, bytes_in = "cpu", 0
    accesses: Sequence[Any] = ()

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def _note(self, name: str) -> Point:
        self.calls.append((name, not half_queued.locked()))
        return Point(True)

    def compute_event(self) -> Point:
        return self._note("begun")

    def fill_event(self) -> Point:
        return self._note("over")

    def run_fullgraph(self, chosen: object) -> object:
        self._note("replay")
        return chosen

    def begin_graphed(self, queue_copies: Callable[[], None]) -> None:
        self._note("copies")


def test_copies_are_queued_behind_the_replay_and_nothing_is_registered_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that wait for a graph would otherwise fill their stream's queue before the graph is there."""
    monkeypatch.setattr(graphs, "FlagQueue", lambda: None)
    side: Any = Side()
    made = graphs.SpilledGraphs(side, side, 32)
    made._full = side
    made.begin(SpillStep())
    assert made.run_fullgraph("output") == "output"
    assert side.calls == [("begun", True), ("replay", False), ("copies", False), ("over", False)]
    assert not half_queued.locked()


def test_the_end_says_where_threads_wait() -> None:
    code = "from overspill.kv.spill.graphs import Watchdog; Watchdog().end('a copy was lost')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 1
    assert "a copy was lost" in child.stdout + child.stderr and "most recent call first" in child.stderr
