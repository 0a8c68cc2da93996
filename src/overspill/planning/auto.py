"""`--max-model-len auto`: the longest context that decodes fast enough, and what bounds it."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from overspill.errors import CannotServe
from overspill.planning.ways import Way

# Speeds are not known well enough for steps below a kilotoken to mean anything; short models get finer steps.
_STEP, _LEAST_STEPS = 1024, 64


class Bound(StrEnum):
    """Limit that a longer context would exceed."""

    MODEL = "model"
    MEMORY = "memory"
    SPEED = "speed"
    GPU = "gpu"
    """No length is fast enough, and a longer one would be slower still, as it would need RAM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoContext:
    max_model_len: int
    bound: Bound
    min_speed: float
    speed: float
    """Tokens/s of one request of `max_model_len` tokens."""
    longest: int
    """Longest context that fits, up to the model's limit."""
    longest_speed: float

    def __str__(self) -> str:
        took = f"--max-model-len auto chooses {self.max_model_len:,} tokens, which decode at {self.speed:.1f} tokens/s"
        if self.bound is Bound.MODEL:
            return f"{took}: the model's limit"
        if self.bound is Bound.MEMORY:
            return f"{took}: no more fit in this memory"
        beyond = f"{self.longest:,} tokens fit, at {self.longest_speed:.1f} tokens/s"
        if self.bound is Bound.SPEED:
            return f"{took}: longer ones decode at less than {self.min_speed:g} (--min-speed); {beyond}"
        return f"{took}: no length reaches {self.min_speed:g} (--min-speed), and no more fit on the GPU alone; {beyond}"


def auto_context(model: str, limit: int, min_speed: float, best_at: Callable[[int], Way | None]) -> AutoContext | None:
    """Choose a context; `best_at` gives the way to serve a length, and `limit` is the model's. None if no length fits;
    raises where weights in RAM make every length too slow."""
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
            f"{model} does not reach {min_speed:g} tokens/s with any context: even {step:,} tokens decode at "
            f"{_rounded(most)}, since weights have to be in RAM. Use --min-speed {_rounded(most * 0.95)} for the "
            "longest context at that speed, --max-model-len to name one, or a smaller or quantised model"
        )
    return AutoContext(
        max_model_len=found, bound=bound, min_speed=min_speed, speed=speed_at(found), longest=longest,
        longest_speed=speed_at(longest),
    )  # fmt: skip


def _rounded(speed: float) -> str:
    """The speed to two digits, which adds less than 5 %, so that 95 % of a speed, rounded, is still reached."""
    return f"{float(f'{speed:.2g}'):g}"


def _last(lengths: Sequence[int], is_met: Callable[[int], bool]) -> int | None:
    """Longest length that meets a condition which all shorter ones meet too; None if the shortest does not."""
    number = bisect_left(lengths, True, key=lambda length: not is_met(length))
    return lengths[number - 1] if number else None
