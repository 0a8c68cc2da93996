"""A comparison as charts, a table, and one page that holds everything needed to repeat it."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from overspill.kv.sizes import format_size
from overspill.measure.compare import BY_KEY, Comparison, Row, own_interval, verdict_words
from overspill.measure.report.text import notes, ratio_as_text, result_facts
from overspill.registry import Result

_CHARTED = ("mean_ttft_ms", "returning_mean_ttft_ms", "mean_tpot_ms", "output_throughput", "request_throughput",
            "tokens_from_ram", "load_s")  # fmt: skip
# On a light page, and on a dark one.
_COLOURS = (
    ("#3b6fb6", "#7fb0f0"), ("#c2571a", "#f0a060"), ("#2f8f5b", "#6fd09a"), ("#8b4fb0", "#c59be8"),
    ("#a88912", "#e0c050"), ("#b03a5b", "#f08aa8"),
)  # fmt: skip
_LEFT, _WIDTH, _BOTTOM, _HEIGHT = 8, 384, 198, 180  # of a chart's plot
_templates = Environment(
    loader=PackageLoader("overspill.measure.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip

Points = Sequence[tuple[float, float]]


def comparison_as_page(
    title: str, facts: Mapping[str, str], comparison: Comparison, warnings: Sequence[str] = ()
) -> str:
    """`facts` stand on top, by name, and then the warnings."""
    measured = [
        (column, [(repeat, repeat.source and _details(repeat.source)) for repeat in column.repeats])
        for column in comparison.columns
    ]
    return _templates.get_template("page.html").render(
        title=title, facts=facts, comparison=comparison, warnings=warnings, notes=notes(comparison), measured=measured,
        heads=table_heads(comparison), rows=table_rows(comparison), colours=_COLOURS,
        charts=[*bar_charts(comparison), *_line_charts(comparison)],
    )  # fmt: skip


def table_heads(comparison: Comparison) -> list[str]:
    labels = [column.label for column in comparison.columns]
    return [*labels, *(f"{labels[index]} / {comparison.first.label}" for index in comparison.others)]


def table_rows(comparison: Comparison) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Each measure's name and cells: text, verdict, and its class. Values come first, then ratios to the first."""
    rows = []
    for row in comparison.rows:
        cells = [(row.measure.shown(value), "", "") for value in row.values]
        for ratio in (row.ratios[index] for index in comparison.others):
            words = "" if ratio is None else verdict_words(row.measure, ratio)
            cells.append((ratio_as_text(ratio), words, words if words in ("better", "worse") else ""))
        rows.append((row.measure.name.strip(), cells))
    return rows


def bar_charts(comparison: Comparison) -> list[Markup]:
    """As SVG, whose texts are escaped."""
    rows = {row.measure.key: row for row in comparison.rows}
    return [_bar_chart(rows[key], comparison) for key in _CHARTED if key in rows]


def _bar_chart(row: Row, comparison: Comparison) -> Markup:
    measure = row.measure
    found = [
        (index, value, points, own_interval(points))
        for index, (value, points) in enumerate(zip(row.values, row.points))
        if value is not None
    ]
    # A very wide interval would leave nothing of the bars.
    ends = [end for _, value, points, interval in found for end in (value, *points, *(interval or ()))]
    top = min(max(ends), 2 * max(value for _, value, _, _ in found)) or 1.0

    def x(value: float) -> float:
        return _LEFT + _WIDTH * min(max(0.0, value), top) / top

    bars = [
        {
            "series": index % len(_COLOURS), "label": comparison.columns[index].label, "shown": measure.shown(value),
            "end": x(value), "interval": interval and tuple(map(x, interval)),
            "points": [x(point) for point in points] if len(points) > 1 else [],
        }
        for index, value, points, interval in found
    ]  # fmt: skip
    better = f" ({measure.better} is better)" if measure.better else ""
    name = f"prompt tokens {measure.name.strip()}" if measure.name.startswith(" ") else measure.name
    return _chart("bars", f"{name}{better}", bars)


def _line_charts(comparison: Comparison) -> list[Markup]:
    """How TTFT is distributed, and memory during the last repeat."""
    ttfts: list[Points] = []
    memory: dict[str, list[Points]] = {"ram_bytes": [], "gpu_bytes": []}
    for column in comparison.columns:
        found = [value for repeat in column.finished for value in repeat.metrics.get("ttfts") or []]
        values = [1000 * value for value in found if isinstance(value, int | float)]
        ttfts.append(shares(values) if values else ())
        samples = column.finished[-1].metrics.get("samples") or [] if column.finished else []
        for key, lines in memory.items():
            points = [(sample.get("t"), sample.get(key)) for sample in samples if isinstance(sample, dict)]
            lines.append([(t, y) for t, y in points if isinstance(t, int | float) and isinstance(y, int | float)])
    shown, percent, seconds = BY_KEY["mean_ttft_ms"].shown, "{:.0f} %".format, "{:.3g} s".format
    since = "time since the first request"
    charts = [
        _line_chart("TTFT: share of requests answered by then", ttfts, "time to the first token", shown, percent),
        _line_chart("RAM during the last repeat", memory["ram_bytes"], since, seconds, _size),
        _line_chart("GPU memory during the last repeat", memory["gpu_bytes"], since, seconds, _size),
    ]
    return [chart for chart in charts if chart is not None]


def _size(value: float) -> str:
    return format_size(int(value))


def _line_chart(
    title: str, lines: Sequence[Points], x_name: str, x_shown: Callable[[float], str], y_shown: Callable[[float], str]
) -> Markup | None:
    drawn = [(index % len(_COLOURS), points) for index, points in enumerate(lines) if len(points) > 1]
    if not drawn:
        return None
    right = max(x for _, points in drawn for x, _ in points) or 1.0
    top = max(y for _, points in drawn for _, y in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + _WIDTH * x / right, _BOTTOM - _HEIGHT * y / top

    ticks = [
        (*place(share * right, share * top), x_shown(share * right), y_shown(share * top), anchor)
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    ]
    placed = [(series, [place(*each) for each in points]) for series, points in drawn]
    return _chart("lines", title, ticks, placed, x_name)


def _chart(kind: str, *values: Any) -> Markup:
    return Markup(getattr(_templates.get_template("charts.html").module, kind)(*values))


def shares(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The part of the values, in percent, up to each of them: their distribution as a line."""
    ordered = sorted(values)
    points = [(0.0, 0.0)]
    for number, value in enumerate(ordered, start=1):
        points += [(value, points[-1][1]), (value, 100 * number / len(ordered))]
    return tuple(points)


def _details(result: Result) -> dict[str, Any]:
    return {
        "facts": result_facts(result),
        "command": shlex.join(result.argv),
        "environment": "\n".join(f"{name}={value}" for name, value in result.environment.items()),
        "plan": json.dumps(result.plan, indent=1) if result.plan is not None else "",
    }
