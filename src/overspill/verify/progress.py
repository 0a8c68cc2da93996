"""Lines while it runs: what is done, how long it took, and about how long the rest will take."""

import time
from collections.abc import Callable


class Progress:
    """`say` prints a line. Where an end is set by the clock, that counts instead of what is left to do."""

    def __init__(self, say: Callable[[str], None], *, lives: int, seconds: float | None = None) -> None:
        self._say, self._lives, self._seconds = say, lives, seconds
        self._began = time.monotonic()
        self._done = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """Whether the time that was given is used up."""
        return self._seconds is not None and self.elapsed_s >= self._seconds

    def begin(self, what: str) -> None:
        self._say(
            f"[{self.elapsed_s:5.0f} s] {what}{remaining(self._done, self._lives, self.elapsed_s, self._seconds)}"
        )

    def end(self, lives: int = 1) -> None:
        self._done += lives

    def tell(self, line: str) -> None:
        self._say(line)


def remaining(done: int, lives: int, elapsed_s: float, seconds: float | None) -> str:
    """Nothing is known before the first life is over."""
    if seconds is not None:
        return f" ({max(0.0, seconds - elapsed_s):.0f} s left)"
    if not done:
        return ""
    return f" (about {elapsed_s / done * max(0, lives - done):.0f} s left)"
