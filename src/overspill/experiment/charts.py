"""Charts as SVG for a page: no script, no reference to anything outside, colours by the page's style."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 400
_LEFT, _RIGHT, _ROW = 8, 8, 44
_PLOT_HEIGHT, _AXIS = 180, 44


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    series: int
    """Its colour."""
    label: str
    value: float
    shown: str
    interval: tuple[float, float] | None = None
    points: tuple[float, ...] = ()
    """Single repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    series: int
    label: str
    points: tuple[tuple[float, float], ...]


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """A bar for each configuration, the interval of its repeats, and a dot for each of them."""
    if not bars:
        return ""
    # A very wide interval would leave nothing of the bars.
    largest = max(bar.value for bar in bars)
    ends = [end for bar in bars for end in (bar.value, *bar.points, *(bar.interval or ()))]
    top = min(max(ends), 2 * largest) or 1.0
    usable = WIDTH - _LEFT - _RIGHT

    def x(value: float) -> float:
        return _LEFT + usable * min(value, top) / top

    parts = []
    for index, bar in enumerate(bars):
        y = index * _ROW + 8
        parts.append(_text(_LEFT, y + 8, bar.label))
        parts.append(_text(WIDTH - _RIGHT, y + 8, bar.shown, anchor="end"))
        parts.append(
            f'<rect class="fill{bar.series}" x="{_LEFT}" y="{y + 13}" width="{x(bar.value) - _LEFT:.1f}" height="14"/>'
        )
        if bar.interval is not None:
            low, high = x(max(0.0, bar.interval[0])), x(bar.interval[1])
            middle = y + 20
            path = f"M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"
            parts.append(f'<path class="whisker" d="{path}"/>')
        parts += [f'<circle class="dot" cx="{x(point):.1f}" cy="{y + 20}" r="2.5"/>' for point in bar.points]
    return _figure(title, len(bars) * _ROW + 4, parts)


def line_chart(
    title: str, lines: Sequence[Line], *, x_shown: Callable[[float], str], y_shown: Callable[[float], str], x_name: str
) -> str:
    """From zero on both axes."""
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return ""
    right = max(point[0] for line in lines for point in line.points) or 1.0
    top = max(point[1] for line in lines for point in line.points) or 1.0
    left, bottom = _LEFT, 18 + _PLOT_HEIGHT
    width = WIDTH - left - _RIGHT
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * _PLOT_HEIGHT
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(left, y - 3, y_shown(share * top), css="axis"))
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        parts.append(_text(left + share * width, bottom + 14, x_shown(share * right), anchor=anchor, css="axis"))
    for line in lines:
        places = [(left + width * x / right, bottom - _PLOT_HEIGHT * y / top) for x, y in line.points]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line{line.series}" points="{drawn}"/>')
    parts.append(_text(WIDTH / 2, bottom + 30, x_name, anchor="middle", css="axis"))
    return _figure(title, bottom + _AXIS - 8, parts)


def shares(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The part of the values, in percent, up to each of them: their distribution as a line."""
    ordered = sorted(values)
    points = [(0.0, 0.0)]
    for number, value in enumerate(ordered, start=1):
        points += [(value, points[-1][1]), (value, 100 * number / len(ordered))]
    return tuple(points)


def _figure(title: str, height: float, parts: Sequence[str]) -> str:
    shown = escape(title)
    return (
        f'<figure><figcaption>{shown}</figcaption><svg role="img" viewBox="0 0 {WIDTH} {height:.0f}">'
        f"<title>{shown}</title>{''.join(parts)}</svg></figure>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", css: str = "label") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
