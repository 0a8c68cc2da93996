"""Figures with their origin (measured here, derived from other figures, or assumed), and tables of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Origin(StrEnum):
    MEASURED = "measured"  # read or timed on this machine
    DERIVED = "derived"  # computed from what was measured
    ASSUMED = "assumed"  # stated by the user, from a data sheet, or a default: nothing here confirms it


@dataclass(frozen=True, slots=True)
class Known(Generic[T_co]):
    """A value, its origin, and a few words for the line it is printed on."""

    value: T_co
    origin: Origin
    note: str = ""


def measured(value: T, note: str = "") -> Known[T]:
    return Known(value, Origin.MEASURED, note)


def derived(value: T, *sources: Known[Any], note: str = "") -> Known[T]:
    """A value computed from `sources`; its origin is the weakest of theirs."""
    return Known(value, origin_of(*sources), note)


def assumed(value: T, note: str = "") -> Known[T]:
    return Known(value, Origin.ASSUMED, note)


def origin_of(*sources: Known[Any]) -> Origin:
    """Origin of a value computed from `sources`: "assumed" if any of them is, else "derived", never "measured"."""
    return Origin.ASSUMED if any(source.origin is Origin.ASSUMED for source in sources) else Origin.DERIVED


def as_json(value: object) -> Any:
    """Figures, dataclasses and collections of them as JSON types; byte counts stay integers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(as_json(item) for item in value)
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, StrEnum | Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def aligned(lines: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> str:
    """Lines as a table, right-aligned except for the columns in `left`."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )
