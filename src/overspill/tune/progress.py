"""What is told while candidates are tried: which, what it does, and how long it will take."""

import time
from collections.abc import Callable

from overspill.experiment.progress import Tell, duration, eta

_EVERY_S = 5.0


class Telling:
    """Of each trial: begin, say, end."""

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._durations: list[float] = []
        self._head, self._left = "", 0
        self._began = self._last = clock()

    def begin(self, label: str, repeat: int, trials_left: int) -> None:
        self._head, self._left = f"[{len(self._durations) + 1}] {label}, repeat {repeat}", trials_left
        self._began = self._last = self._clock()

    def say(self, what: str) -> None:
        now = self._last = self._clock()
        left = eta(self._durations, self._left, now - self._began)
        self._tell(f"{self._head}: {what}{f'; about {duration(left)} left in all' if left is not None else ''}")

    def say_now_and_then(self, what: str) -> None:
        if self._clock() - self._last >= _EVERY_S:
            self.say(what)

    def end(self, what: str) -> None:
        self._durations.append(self._clock() - self._began)
        self._tell(f"{self._head}: {what}")

    @property
    def usual_s(self) -> float:
        """How long a trial takes; 0 before the first."""
        return sum(self._durations) / len(self._durations) if self._durations else 0.0
