"""A comparison as one page: charts, table and everything needed to repeat it, in a file that needs nothing else."""

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from overspill.experiment.charts import Bar, Line, bar_chart, line_chart, shares
from overspill.experiment.comparison import Column, Comparison, Row, verdict_words
from overspill.experiment.intervals import own_interval
from overspill.experiment.measures import BY_KEY, Measure
from overspill.experiment.text import notes, ratio_as_text
from overspill.kv.sizes import format_size

_CHARTED = ("mean_ttft_ms", "returning_mean_ttft_ms", "mean_tpot_ms", "output_throughput", "request_throughput",
            "tokens_from_ram", "load_s")  # fmt: skip
_COLOURS = ("#3b6fb6", "#c2571a", "#2f8f5b", "#8b4fb0", "#a88912", "#b03a5b")
_DARK_COLOURS = ("#7fb0f0", "#f0a060", "#6fd09a", "#c59be8", "#e0c050", "#f08aa8")


def comparison_as_page(
    title: str, facts: Mapping[str, str], comparison: Comparison, warnings: Sequence[str] = ()
) -> str:
    """`facts` are told on top, by name, and then what is wrong."""
    body = [
        f"<h1>{escape(title)}</h1>",
        _definitions(facts),
        *(f'<p class="worse">{_lines(warning)}</p>' for warning in warnings),
        _legend(comparison.columns),
        _charts(comparison),
        "<h2>Numbers</h2>",
        _table(comparison),
        *(f"<p>{_lines(note)}</p>" for note in notes(comparison)),
        "<h2>How it was measured</h2>",
        *(_column(index, column) for index, column in enumerate(comparison.columns)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing is loaded and nothing runs, whatever a label or an argument holds.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _definitions(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value)
    return f"<dl>{rows}</dl>"


def _legend(columns: Sequence[Column]) -> str:
    rows = "".join(
        f'<li><span class="swatch back{index}"></span><b>{escape(column.label)}</b> '
        f"<code>{escape(column.text)}</code></li>"
        for index, column in enumerate(columns)
    )
    return f'<ul class="legend">{rows}</ul>'


def _charts(comparison: Comparison) -> str:
    rows = {row.measure.key: row for row in comparison.rows}
    charts = [_bars(rows[key], comparison) for key in _CHARTED if key in rows]
    charts.append(_distribution(comparison))
    charts += [_memory(comparison, key, name) for key, name in (("ram_bytes", "RAM"), ("gpu_bytes", "GPU memory"))]
    return f'<div class="charts">{"".join(charts)}</div>'


def _bars(row: Row, comparison: Comparison) -> str:
    measure = row.measure
    bars = []
    for index, (column, value, points) in enumerate(zip(comparison.columns, row.values, row.points)):
        if value is not None:
            bars.append(
                Bar(
                    series=index, label=column.label, value=value, shown=measure.shown(value),
                    interval=own_interval(points), points=points if len(points) > 1 else (),
                )
            )  # fmt: skip
    return bar_chart(_title(measure), bars)


def _title(measure: Measure) -> str:
    better = f" ({measure.better} is better)" if measure.better else ""
    name = f"prompt tokens {measure.name.strip()}" if measure.name.startswith(" ") else measure.name
    return f"{name}{better}"


def _distribution(comparison: Comparison) -> str:
    lines = []
    for index, column in enumerate(comparison.columns):
        found = [repeat.metrics.get("ttfts") or [] for repeat in column.finished]
        values = [1000 * value for each in found for value in each if isinstance(value, int | float)]
        lines.append(Line(series=index, label=column.label, points=shares(values) if values else ()))
    shown = BY_KEY["mean_ttft_ms"].shown
    return line_chart(
        "TTFT: share of requests answered by then", lines, x_shown=shown, y_shown=lambda share: f"{share:.0f} %",
        x_name="time to the first token",
    )  # fmt: skip


def _memory(comparison: Comparison, key: str, name: str) -> str:
    lines = []
    for index, column in enumerate(comparison.columns):
        samples = column.finished[-1].metrics.get("samples") or [] if column.finished else []
        points = [(sample.get("t"), sample.get(key)) for sample in samples if isinstance(sample, dict)]
        known = [(float(t), float(y)) for t, y in points if isinstance(t, int | float) and isinstance(y, int | float)]
        lines.append(Line(series=index, label=column.label, points=tuple(known)))
    return line_chart(
        f"{name} during the last repeat", lines, x_shown=lambda t: f"{t:.3g} s", y_shown=lambda y: format_size(int(y)),
        x_name="time since the first request",
    )  # fmt: skip


def _table(comparison: Comparison) -> str:
    first = comparison.first.label
    heads = [f'<th scope="col">{escape(column.label)}</th>' for column in comparison.columns]
    labels = [comparison.columns[index].label for index in comparison.others]
    heads += [f'<th scope="col">{escape(label)} / {escape(first)}</th>' for label in labels]
    lines = []
    for row in comparison.rows:
        cells = [f"<td>{escape(row.measure.shown(value))}</td>" for value in row.values]
        cells += [_ratio_cell(row, index) for index in comparison.others]
        lines.append(f'<tr><th scope="row">{escape(row.measure.name.strip())}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="wide"><table><thead><tr><td></td>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _ratio_cell(row: Row, index: int) -> str:
    ratio = row.ratios[index]
    if ratio is None:
        return "<td></td>"
    words = verdict_words(row.measure, ratio)
    css = words if words in ("better", "worse") else "same"
    return f'<td>{escape(ratio_as_text(ratio))} <span class="{css}">{escape(words)}</span></td>'


def _column(index: int, column: Column) -> str:
    parts = [f'<details><summary><span class="swatch back{index}"></span>{escape(column.label)}</summary>']
    for repeat in column.repeats:
        state = "" if repeat.is_complete else f", not complete: {repeat.problem or 'not finished'}"
        parts.append(f"<h3>Repeat {repeat.number}{_lines(state)}</h3>")
        if (source := repeat.source) is None:
            continue
        told = source.as_json()
        facts = {
            "result": str(told["id"]),
            "started": str(told["started_at"]),
            "workload": f"{told['config'].get('workload', told['benchmark'])}, seed {told['config'].get('seed', '-')}",
            "GPU": told["gpu"] or "none",
            "driver": told["driver"] or "none",
            "versions": ", ".join(f"{name} {version}" for name, version in told["versions"].items()),
            "Overspill's revision": told["git_revision"] or "",
            "machine": ", ".join(f"{name} {value}" for name, value in _machine(told["config"]).items()),
            "log": told["config"].get("log_file") or "",
        }
        parts.append(_definitions(facts))
        parts.append(f"<h4>Command</h4><pre>{escape(shlex.join(told['argv']))}</pre>")
        environment = "\n".join(f"{name}={value}" for name, value in told["environment"].items())
        parts.append(f"<h4>Environment</h4><pre>{escape(environment or 'nothing that matters')}</pre>")
        if told["plan"] is not None:
            parts.append(f"<h4>Plan</h4><pre>{escape(json.dumps(told['plan'], indent=1))}</pre>")
    return "".join([*parts, "</details>"])


def _machine(config: Mapping[str, Any]) -> Mapping[str, Any]:
    machine = config.get("machine")
    return machine if isinstance(machine, dict) else {}


def _lines(text: str) -> str:
    return "<br>".join(escape(line) for line in text.splitlines())


def _style() -> str:
    def series(colours: Sequence[str]) -> str:
        return "".join(
            f".fill{i}{{fill:{c}}}.line{i}{{stroke:{c}}}.back{i}{{background:{c}}}" for i, c in enumerate(colours)
        )

    light = "--text:#1c1f23;--page:#fff;--faint:#5c6570;--rule:#d9dee4;--code:#f3f5f7;--good:#1d7a45;--bad:#b3321f"
    dark = "--text:#e6e9ed;--page:#15181c;--faint:#9aa4b0;--rule:#343b44;--code:#1f242a;--good:#6fd09a;--bad:#f0907f"
    return (
        f":root{{{light}}}{series(_COLOURS)}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}{series(_DARK_COLOURS)}}}"
        "*{box-sizing:border-box}"
        "body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif}"
        "main{max-width:70rem;margin:0 auto;padding:1rem}"
        "h1{font-size:1.4rem}h2{font-size:1.15rem}h3,h4{font-size:1rem;margin:.8rem 0 .2rem}"
        "dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.1rem 1rem;margin:.5rem 0}"
        "dt{color:var(--faint)}dd{margin:0;overflow-wrap:anywhere}"
        ".legend{list-style:none;padding:0}.legend code{overflow-wrap:anywhere}"
        ".swatch{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}"
        ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1rem}"
        "figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto;max-width:40rem}"
        "text{fill:var(--text);font-size:12px}.axis{fill:var(--faint);font-size:11px}"
        ".whisker,.grid,polyline{fill:none}.whisker{stroke:var(--text);stroke-width:1.5}.grid{stroke:var(--rule)}"
        "polyline{stroke-width:2}.dot{fill:var(--page);stroke:var(--text)}"
        ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
        "th,td{padding:.25rem .6rem;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}"
        "th[scope=row]{text-align:left;font-weight:400;position:sticky;left:0;background:var(--page)}"
        ".better{color:var(--good)}.worse{color:var(--bad)}.same{color:var(--faint)}"
        "pre{background:var(--code);padding:.6rem;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere}"
        "code{background:var(--code)}summary{cursor:pointer}"
    )
