"""The watchdog of steps in graphs: it ends the engine for what was lost, and not for what is long."""

import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

from overspill.kv.spill import graphs


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


def test_the_end_says_where_threads_wait() -> None:
    code = "from overspill.kv.spill.graphs import Watchdog; Watchdog().end('a copy was lost')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 1
    assert "a copy was lost" in child.stdout + child.stderr and "most recent call first" in child.stderr
