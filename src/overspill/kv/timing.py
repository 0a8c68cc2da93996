"""How long steps take, seen where the model runs."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from overspill.kv.jobs import StepJobs, StepReport
from overspill.kv.speeds import PREFILL_TOKENS

# A mark costs a few microseconds, which a step of a few milliseconds should not pay every time.
_STEPS_BETWEEN_MARKS = 8


class Mark(ABC):
    """A point in the order of compute."""

    @abstractmethod
    def seconds_until(self, later: "Mark") -> float | None:
        """Seconds between two marks; None while the later one is not reached."""


class WallMark(Mark):
    """Where compute is over when it returns."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_until(self, later: Mark) -> float | None:
        assert isinstance(later, WallMark)
        return later._time - self._time


class StepTimer:
    """Prefill speed, from all steps with many tokens, and the time of a small step, from some of them."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._start: Mark | None = None
        self._steps = 0
        self._waiting: list[tuple[int, Mark, Mark]] = []

    def begin_step(self, jobs: StepJobs) -> None:
        self._start = None
        if jobs.num_tokens >= PREFILL_TOKENS:
            self._start = self._mark()
        elif jobs.num_tokens and jobs.spill is None:
            self._steps += 1
            if self._steps % _STEPS_BETWEEN_MARKS == 0:
                self._start = self._mark()

    def end_step(self, jobs: StepJobs) -> None:
        if self._start is not None:
            self._waiting.append((jobs.num_tokens, self._start, self._mark()))
            self._start = None

    def report(self, report: StepReport) -> None:
        """Put what is known by now into the report."""
        waiting: list[tuple[int, Mark, Mark]] = []
        for num_tokens, start, end in self._waiting:
            seconds = start.seconds_until(end)
            if seconds is None:
                waiting.append((num_tokens, start, end))
            elif num_tokens >= PREFILL_TOKENS:
                report.prefill_speed.add(num_tokens, seconds)
            else:
                report.plain_steps.add(1, seconds)
        self._waiting = waiting
