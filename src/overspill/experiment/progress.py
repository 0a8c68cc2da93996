"""What is told while an experiment runs: which configuration, which repeat, what it does, and how long it will take."""

import time
from collections.abc import Callable, Sequence

from overspill.experiment.schedule import Step

Tell = Callable[[str], None]
_EVERY_S = 5.0


class Telling:
    def __init__(self, tell: Tell, steps: Sequence[Step], repeats: int) -> None:
        self._tell, self._total, self._repeats = tell, len(steps), repeats
        self._began = time.monotonic()
        self._step_began = self._last = self._began
        self._durations: list[float] = []
        self._number, self._step = 0, Step(0, "")

    def begin(self, step: Step) -> None:
        self._number, self._step = self._number + 1, step
        self._step_began = time.monotonic()

    def end(self) -> None:
        self._durations.append(time.monotonic() - self._step_began)

    def say(self, what: str) -> None:
        self._last = time.monotonic()
        number, step = f"{self._number}/{self._total}", self._step
        head = f"[{number}] {step.label}, repeat {step.repeat} of {self._repeats}: {what}"
        self._tell(f"{head}{self._eta()}")

    def say_now_and_then(self, what: str) -> None:
        if time.monotonic() - self._last >= _EVERY_S:
            self.say(what)

    def _eta(self) -> str:
        left = eta(self._durations, self._total - self._number + 1, time.monotonic() - self._step_began)
        return f"; {duration(left)} left in all" if left is not None else ""


def eta(durations: Sequence[float], steps_left: int, of_this: float) -> float | None:
    """Seconds until the last step is done, the present one included; None before the first has shown how long."""
    if not durations:
        return None
    each = sum(durations) / len(durations)
    return (steps_left - 1) * each + max(0.0, each - of_this)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
