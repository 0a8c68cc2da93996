"""Comparisons as HTML with charts, a table and facts: a part of the manager's pages, and a self-contained file."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from overspill.kv.sizes import format_size
from overspill.measure.compare import BY_KEY, Column, Comparison, own_interval, verdict_words
from overspill.measure.report.text import failures, headline, notes, ratio_as_text, result_facts
from overspill.registry import Result

_CHARTED = ("output_throughput", "mean_ttft_ms", "returning_mean_ttft_ms", "mean_tpot_ms", "request_throughput",
            "tokens_from_ram", "load_s")  # fmt: skip
_TILES = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "request_throughput", "goodput_percent",
          "peak_ram_bytes", "peak_gpu_bytes")  # fmt: skip
_TIMES = {"ttft": "Time to the first token (TTFT)", "tpot": "Time per token after it (TPOT)",
          "e2el": "Time of a whole request (E2EL)"}  # fmt: skip
# Series colours for a light and for a dark page.
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
Bar = tuple[int, str, float, Sequence[float]]
"""Colour index, label, value, and the points whose centre the value is."""


def comparison_as_page(title: str, body: Markup) -> str:
    return _templates.get_template("page.html").render(title=title, body=body, colours=_COLOURS)


def comparison_as_body(facts: Mapping[str, str], comparison: Comparison, warnings: Sequence[str] = ()) -> Markup:
    """HTML with all texts escaped; a single measurement gets charts of how its times are distributed."""
    columns = comparison.columns
    is_one = len(columns) == len(columns[0].repeats) == 1
    charts = _charts_of_one(columns[0]) if is_one else _bar_charts(comparison)
    rows = {row.measure.key: row for row in comparison.rows}
    measured = [
        (column, [(repeat, repeat.source and _details(repeat.source)) for repeat in column.repeats])
        for column in columns
    ]
    return Markup(
        _templates.get_template("body.html").render(
            facts=facts, comparison=comparison, warnings=warnings, notes=notes(comparison), measured=measured,
            headline=headline(comparison), has_failed=bool(failures(comparison)), is_one=is_one,
            tiles=[(rows[key].measure, rows[key].values[0]) for key in _TILES if is_one and key in rows],
            heads=_table_heads(comparison), rows=_table_rows(comparison), colours=len(_COLOURS),
            charts=[*charts, *_line_charts(comparison)],
        )
    )  # fmt: skip


def _compared(comparison: Comparison) -> list[int]:
    return [index for index in comparison.others if comparison.columns[index].finished]


def _table_heads(comparison: Comparison) -> list[str]:
    labels = [column.label for column in comparison.columns]
    return [*labels, *(f"{labels[index]} / {comparison.first.label}" for index in _compared(comparison))]


def _table_rows(comparison: Comparison) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Each measure's name and cells (text, verdict, CSS class): values first, then ratios to the baseline."""
    rows = []
    for row in comparison.rows:
        cells = [(row.measure.shown(value), "", "") for value in row.values]
        for ratio in (row.ratios[index] for index in _compared(comparison)):
            words = "" if ratio is None else verdict_words(row.measure, ratio)
            cells.append((ratio_as_text(ratio), words, words if words in ("better", "worse") else ""))
        rows.append((row.measure.name.strip(), cells))
    return rows


def _bar_charts(comparison: Comparison) -> list[Markup]:
    rows = {row.measure.key: row for row in comparison.rows}
    charts = []
    for row in (rows[key] for key in _CHARTED if key in rows):
        measure = row.measure
        better = f" ({measure.better} is better)" if measure.better else ""
        name = f"prompt tokens {measure.name.strip()}" if measure.name.startswith(" ") else measure.name
        bars = [
            (index, comparison.columns[index].label, value, points)
            for index, (value, points) in enumerate(zip(row.values, row.points))
            if value is not None
        ]
        charts.append(_bar_chart(f"{name}{better}", bars, measure.shown))
    return charts


def _charts_of_one(column: Column) -> list[Markup]:
    metrics = column.finished[0].metrics if column.finished else {}
    charts = []
    for name, title in _TIMES.items():
        found = [(each, metrics.get(f"{each}_{name}_ms")) for each in ("mean", "median", "p90", "p99")]
        bars: list[Bar] = [(0, each, value, ()) for each, value in found if isinstance(value, int | float)]
        if any(value for _, _, value, _ in bars):
            charts.append(_bar_chart(title, bars, BY_KEY["mean_ttft_ms"].shown))
    if prompts := BY_KEY["prompt_tokens"].value(metrics):
        gpu, ram = (BY_KEY[key].value(metrics) or 0.0 for key in ("tokens_from_gpu_cache", "tokens_from_ram"))
        parts = (("computed", prompts - gpu - ram), ("from the KV cache", gpu), ("from RAM", ram))
        bars = [(index, label, value, ()) for index, (label, value) in enumerate(parts)]
        charts.append(_bar_chart("Prompt tokens", bars, BY_KEY["prompt_tokens"].shown))
    return charts


def _bar_chart(title: str, bars: Sequence[Bar], shown: Callable[[float], str]) -> Markup:
    intervals = [own_interval(points) for _, _, _, points in bars]
    # A very wide interval would shrink the bars to nothing.
    ends = [end for (_, _, value, points), each in zip(bars, intervals) for end in (value, *points, *(each or ()))]
    top = min(max(ends), 2 * max(value for _, _, value, _ in bars)) or 1.0

    def x(value: float) -> float:
        return _LEFT + _WIDTH * min(max(0.0, value), top) / top

    drawn = [
        {
            "series": index % len(_COLOURS), "label": label, "shown": shown(value), "end": x(value),
            "interval": interval and (*map(x, interval), interval[1] > top),
            "points": [x(point) for point in points] if len(points) > 1 else [],
        }
        for (index, label, value, points), interval in zip(bars, intervals)
    ]  # fmt: skip
    return _chart("bars", title, drawn)


def _line_charts(comparison: Comparison) -> list[Markup]:
    """Charts of the TTFT distribution, and of memory during the last repeat."""
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
    """Cumulative distribution as points of a step line: the share of values, in percent, up to each of them."""
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
