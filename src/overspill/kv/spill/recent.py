"""The most of something in the last minute or so."""

import time
from collections.abc import Callable


class RecentMost:
    """Forgets in two steps: what was seen is remembered for at least `seconds`, and at most twice as long."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._began = clock()
        self._before = self._current = 0

    def saw(self, amount: int) -> None:
        self._turn()
        self._current = max(self._current, amount)

    @property
    def most(self) -> int:
        self._turn()
        return max(self._before, self._current)

    def forget(self) -> None:
        self._began = self._clock()
        self._before = self._current = 0

    def _turn(self) -> None:
        passed = self._clock() - self._began
        if passed < self._seconds:
            return
        self._before = self._current if passed < 2 * self._seconds else 0
        self._current = 0
        self._began += passed
