"""`--max-model-len auto`: the longest context that decodes fast enough, and what it was bounded by."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from overspill.errors import CannotServe
from overspill.planning.ways import Way

# Speeds are not known so well that steps below a kilotoken would mean something; short models get finer ones.
_STEP, _LEAST_STEPS = 1024, 64


class Bound(StrEnum):
    """What a longer context would exceed."""

    MODEL = "model"
    MEMORY = "memory"
    SPEED = "speed"
    GPU = "gpu"
    """No length is fast enough, and a longer one would be slower still: it would not be on the GPU alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoContext:
    max_model_len: int
    bound: Bound
    min_speed: float
    speed: float
    """Tokens/s of one request of that length."""
    longest: int
    """That fits, up to the model's limit."""
    longest_speed: float

    def __str__(self) -> str:
        took = f"--max-model-len auto takes {self.max_model_len:,} tokens, which decode at {self.speed:.1f} tokens/s"
        if self.bound is Bound.MODEL:
            return f"{took}: the model's limit"
        if self.bound is Bound.MEMORY:
            return f"{took}: no more fit in this memory"
        beyond = f"{self.longest:,} tokens fit, at {self.longest_speed:.1f} tokens/s"
        if self.bound is Bound.SPEED:
            return f"{took}: longer ones decode at less than {self.min_speed:g} (--min-speed); {beyond}"
        return f"{took}: no length reaches {self.min_speed:g} (--min-speed), and no more fit on the GPU alone; {beyond}"


def auto_context(model: str, limit: int, min_speed: float, best_at: Callable[[int], Way | None]) -> AutoContext | None:
    """`best_at` gives the way that a length would be served by, `limit` is the model's. None if no length fits; raises
    where weights in RAM make every length too slow."""
    step = min(_STEP, max(1, limit // _LEAST_STEPS))
    lengths = [*range(step, limit, step), limit]
    at = cache(best_at)
    if (longest := _last(lengths, lambda length: at(length) is not None)) is None:
        return None

    def speed_at(length: int) -> float:
        way = at(length)
        return 0.0 if way is None else way.at_once_tokens_per_s.value / way.at_once

    def is_on_gpu(length: int) -> bool:
        way = at(length)
        return way is not None and not way.num_mechanisms

    found = _last(lengths, lambda length: speed_at(length) >= min_speed)
    bound = Bound.SPEED if found != longest else Bound.MODEL if found == limit else Bound.MEMORY
    if found is None:
        found, bound = _last(lengths, is_on_gpu), Bound.GPU
    if found is None:
        most = speed_at(step)
        raise CannotServe(
            f"{model} reaches {min_speed:g} tokens/s with no context: {step:,} tokens decode at {_rounded(most)}, "
            f"since weights have to be in RAM. Use --min-speed {_rounded(most * 0.95)} for the longest context at that "
            "speed, --max-model-len to name one, or a smaller or quantised model"
        )
    return AutoContext(
        max_model_len=found, bound=bound, min_speed=min_speed, speed=speed_at(found), longest=longest,
        longest_speed=speed_at(longest),
    )  # fmt: skip


def _rounded(speed: float) -> str:
    """To two digits, which adds less than 5 %: what is advised can be had."""
    return f"{float(f'{speed:.2g}'):g}"


def _last(lengths: Sequence[int], is_met: Callable[[int], bool]) -> int | None:
    """The longest that meets a condition which shorter ones meet too; None if the shortest does not."""
    number = bisect_left(lengths, True, key=lambda length: not is_met(length))
    return lengths[number - 1] if number else None
