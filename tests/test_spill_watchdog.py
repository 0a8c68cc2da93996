"""The watchdog of steps in graphs: it ends the engine for what was lost, and not for what is long."""

import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

from overspill.kv.spill import watchdog as watching


@dataclass
class Point:
    """Stands in for a CUDA event."""

    is_reached: bool = False

    def query(self) -> bool:
        return self.is_reached


class Watched(watching.Watchdog):
    def __init__(self) -> None:
        super().__init__()
        self.reason, self.has_ended = "", threading.Event()

    def end(self, reason: str) -> None:
        self.reason = reason
        self.has_ended.set()


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(watching, "_STALL_S", 0.2)
    monkeypatch.setattr(watching, "_POLL_S", 0.01)
    return Watched()


def watch(watchdog: Watched, begun: bool, *over: bool, num_bytes: int = 0) -> watching.Watched:
    step = watchdog.watch(Point(begun), num_bytes)
    step.over = {part: Point(one) for part, one in zip(("copies", "graph"), over, strict=False)}
    return step


@pytest.mark.parametrize(
    ("over", "said"),
    [((), "not queued as a whole"), ((True, False), "running: graph"), ((False, True), "running: copies")],
    ids=str,
)
def test_a_step_that_does_not_end_ends_the_engine(watchdog: Watched, over: tuple[bool, ...], said: str) -> None:
    watch(watchdog, True, True, True)
    watch(watchdog, True, *over)
    assert watchdog.has_ended.wait(20)
    assert f"{said})" in watchdog.reason and "the engine exits" in watchdog.reason


def test_time_counts_from_when_the_gpu_gets_to_the_step(watchdog: Watched) -> None:
    """It is queued while a prompt is computed, which may take longer than any step of decodes."""
    step = watch(watchdog, False, False)
    assert not watchdog.has_ended.wait(1)
    step.begun.is_reached = True
    assert watchdog.has_ended.wait(20)


def test_later_steps_do_not_hide_one_that_does_not_end(watchdog: Watched) -> None:
    watch(watchdog, True, False)
    watch(watchdog, False, False)
    assert watchdog.has_ended.wait(20)


def test_each_step_has_time_for_its_bytes(watchdog: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_SLOWEST_BYTES_PER_S", 100)
    step = watch(watchdog, True, False, num_bytes=200)
    assert not watchdog.has_ended.wait(1)
    step.over["copies"].is_reached = True
    watch(watchdog, True, False)
    assert watchdog.has_ended.wait(20)


@pytest.mark.parametrize("stderr", ["sys.stderr", "None"])
def test_the_end_says_where_threads_wait(stderr: str) -> None:
    code = (
        f"import sys; from overspill.kv.spill.watchdog import Watchdog; sys.stderr = {stderr}; Watchdog().end('lost')"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 1
    assert stderr == "None" or ("lost" in child.stdout + child.stderr and "most recent call first" in child.stderr)
