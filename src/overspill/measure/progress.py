"""Progress of one measurement and of a series of trials, for a terminal or a log."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from overspill.kv.sizes import format_size

Say = Callable[[str], None]
Clock = Callable[[], float]
_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    done: int
    total: int
    earlier: int = 0
    """Done requests that an earlier part answered; they say nothing about this part's speed."""
    elapsed_s: float
    gpu_bytes: int | None
    ram_bytes: int | None

    @property
    def eta_s(self) -> float | None:
        """Seconds left; None until this part's first request is answered."""
        now = self.done - self.earlier
        return (self.total - self.done) * self.elapsed_s / now if now else None

    def as_text(self) -> str:
        rate = (self.done - self.earlier) / self.elapsed_s if self.elapsed_s > 0 else 0.0
        text = f"{self.done}/{self.total} requests in {self.elapsed_s:.0f} s, {rate:.2f}/s"
        text += "" if self.eta_s is None else f", {self.eta_s:.0f} s left"
        sizes = (("GPU", self.gpu_bytes), ("RAM", self.ram_bytes))
        return text + "".join(f", {name} {format_size(size)}" for name, size in sizes if size is not None)


class ProgressPrinter:
    """Rewrites one line on a terminal; elsewhere prints a new line at most every few seconds."""

    def __init__(self, out: TextIO, clock: Clock = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._is_terminal = out.isatty()
        self._printed = clock()
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        text = progress.as_text()
        if self._is_terminal:
            self._out.write(f"\r{text:{self._width}}")
            self._width = len(text)
        elif self._clock() - self._printed >= _EVERY_S:
            self._printed = self._clock()
            self._out.write(f"{text}\n")
        self._out.flush()

    def end(self) -> None:
        if self._width:
            self._out.write("\n")
            self._out.flush()


class Reporter:
    """Reports each trial's number, its current activity, and the time left for all trials.

    Without a `total`, the number of trials is an estimate, and so is the time.
    """

    def __init__(
        self, say: Say, *, total: int | None = None, repeats: int | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._say, self._total, self._repeats, self._clock = say, total, repeats, clock
        self._durations: list[float] = []
        self._head, self._number, self._left = "", 0, 0
        self._began = self._last = clock()

    def begin(self, label: str, repeat: int, left: int) -> None:
        """Begin a trial; `left` counts it too."""
        self._number, self._left = self._number + 1, left
        number = f"{self._number}" if self._total is None else f"{self._number}/{self._total}"
        of_all = "" if self._repeats is None else f" of {self._repeats}"
        self._head = f"[{number}] {label}, repeat {repeat}{of_all}"
        self._began = self._last = self._clock()

    def say(self, what: str) -> None:
        now = self._last = self._clock()
        left = eta(self._durations, self._left, now - self._began)
        about = "about " if self._total is None else ""
        self._say(f"{self._head}: {what}" + ("" if left is None else f"; {about}{duration(left)} left in all"))

    def say_now_and_then(self, what: str, every_s: float = _EVERY_S) -> None:
        if self._clock() - self._last >= every_s:
            self.say(what)

    def end(self, what: str | None = None) -> None:
        self._durations.append(self._clock() - self._began)
        if what is not None:
            self._say(f"{self._head}: {what}")

    @property
    def usual_s(self) -> float:
        """Mean duration of a trial; 0 before the first has ended."""
        return sum(self._durations) / len(self._durations) if self._durations else 0.0


def eta(durations: Sequence[float], steps_left: int, of_this: float) -> float | None:
    """Seconds until the last step is done, the current one included; None before a first duration is known."""
    if not durations:
        return None
    each = sum(durations) / len(durations)
    return (steps_left - 1) * each + max(0.0, each - of_this)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
