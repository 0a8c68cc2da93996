"""Numbers as the cells of Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from record import Json


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits without exponents; a dash where there is no number."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{value:.0f}"


def ranged(numbers: Json | None, scale: float = 1.0, digits: int = 3) -> str:
    """`median (min–max)`: a number without its spread is half a number."""
    if not numbers or numbers.get("median") is None:
        return "–"
    if numbers["min"] == numbers["max"]:
        return f"{number(numbers['median'] * scale, digits)} (one run)"
    median, low, high = (number(numbers[key] * scale, digits) for key in ("median", "min", "max"))
    return f"{median} ({low}–{high})"
