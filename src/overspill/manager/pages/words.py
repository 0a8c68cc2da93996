"""Numbers and times as pages show them: always with a unit."""

import time
from datetime import UTC, datetime
from hashlib import sha256

from markupsafe import Markup

from overspill.kv.sizes import format_size


def size(value: float | None) -> str:
    return "–" if value is None else format_size(int(value))


def shown(value: float | None, unit: str) -> str:
    """A number with its unit; a dash for what is not known."""
    if value is None:
        return "–"
    if unit == "bytes":
        return format_size(int(value))
    if unit == "bytes/s":
        return f"{format_size(int(value))}/s"
    if unit == "share":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"
    if unit == "cores":
        return f"{value:.2f} cores"
    number = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{number} {unit}".strip()


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def ago(at: float | None) -> str:
    return "never" if at is None else f"{duration(time.time() - at)} ago"


def moment(at: float | datetime | None) -> str:
    """In UTC; a browser writes it in its own zone, as it does beside the charts."""
    if at is None:
        return "–"
    told = (at if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC)).astimezone(UTC)
    return Markup(f'<time datetime="{told:%Y-%m-%dT%H:%M:%SZ}">{told:%Y-%m-%d %H:%M:%S} UTC</time>')


def element_id(name: str) -> str:
    """For a page's elements: names of models hold slashes and dots."""
    return "m" + sha256(name.encode()).hexdigest()[:12]
