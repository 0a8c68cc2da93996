"""How far a measurement is: one line that is rewritten on a terminal, and a line now and then elsewhere."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from overspill.kv.sizes import format_size

_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    done: int
    total: int
    elapsed_s: float
    requests_per_s: float
    eta_s: float | None
    """None until the first request is answered."""
    gpu_bytes: int | None
    ram_bytes: int | None

    def as_text(self) -> str:
        eta = "" if self.eta_s is None else f", {self.eta_s:.0f} s left"
        sizes = [
            f", {name} {format_size(size)}"
            for name, size in (("GPU", self.gpu_bytes), ("RAM", self.ram_bytes))
            if size is not None
        ]
        return (
            f"{self.done}/{self.total} requests in {self.elapsed_s:.0f} s, {self.requests_per_s:.2f}/s"
            f"{eta}{''.join(sizes)}"
        )


def progress_of(
    *, done: int, total: int, earlier: int, elapsed_s: float, gpu_bytes: int | None, ram_bytes: int | None
) -> Progress:
    """`earlier` were answered in a part before this one, and say nothing of its speed."""
    now = done - earlier
    return Progress(
        done=done,
        total=total,
        elapsed_s=elapsed_s,
        requests_per_s=now / elapsed_s if elapsed_s > 0 else 0.0,
        eta_s=(total - done) * elapsed_s / now if now else None,
        gpu_bytes=gpu_bytes,
        ram_bytes=ram_bytes,
    )


class ProgressPrinter:
    """Called with every progress; prints some of them."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._is_terminal = out.isatty()
        self._told = clock()
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        text = progress.as_text()
        if self._is_terminal:
            self._out.write(f"\r{text:{self._width}}")
            self._width = len(text)
        elif self._clock() - self._told >= _EVERY_S:
            self._told = self._clock()
            self._out.write(f"{text}\n")
        self._out.flush()

    def end(self) -> None:
        if self._width:
            self._out.write("\n")
            self._out.flush()
