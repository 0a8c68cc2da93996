"""Byte sizes as people write and read them."""

import re

from overspill.kv.errors import OverspillError

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = {
    "": 1, "B": 1,
    "K": KiB, "KIB": KiB, "KB": 10**3,
    "M": MiB, "MIB": MiB, "MB": 10**6,
    "G": GiB, "GIB": GiB, "GB": 10**9,
    "T": TiB, "TIB": TiB, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> int:
    """Bytes from an int, or from a string such as "40GiB", "1.5 GB" or "512m"."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise OverspillError(f'{value!r} is not a size; write bytes as an integer, or a string such as "40GiB"')
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].upper() not in _UNITS:
        raise OverspillError(f'{value!r} is not a size; write for example "40GiB", "512MiB" or "40GB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_size(num_bytes: int) -> str:
    """Size for display, with three significant digits: 1536 -> "1.5 KiB"."""
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.3g} {name}" if abs(num_bytes) < 1000 * unit else f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def exact_size(num_bytes: int) -> str:
    """Size to the byte, in the largest unit that divides it: 1536 -> "1536B", 2048 -> "2KiB"."""
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return f"{num_bytes}B"
