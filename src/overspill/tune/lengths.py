"""Which context is tried next: from the longest one down, by halves, until the longest that works is known."""

from collections.abc import Mapping

LEAST = 256
# Nearer than this part of the length, one in so many, is not looked for.
_SHARE = 20


def next_length(longest: int, tried: Mapping[int, bool]) -> int | None:
    """`tried` says of lengths whether they work. None when enough is known."""
    if not tried:
        return longest
    works = longest_working(tried) or 0
    too_long = [length for length, is_working in tried.items() if not is_working and length > works]
    if not too_long:
        return None
    low, high = works, min(too_long)
    step = _step(high)
    if high - low <= max(step, high // _SHARE):
        return None
    middle = (low + high) // 2 // step * step
    return middle if max(low, LEAST - 1) < middle < high else None


def longest_working(tried: Mapping[int, bool]) -> int | None:
    return max((length for length, is_working in tried.items() if is_working), default=None)


def trials_left(longest: int, tried: Mapping[int, bool]) -> int:
    """The next one included, if each is too long; a few more where one works."""
    left, known = 0, dict(tried)
    while (length := next_length(longest, known)) is not None:
        left += 1
        known[length] = False
    return left


def _step(length: int) -> int:
    return 1024 if length >= 16384 else 128
