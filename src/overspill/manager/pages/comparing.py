"""A comparison as a page's table and charts."""

from dataclasses import dataclass

from markupsafe import Markup

from overspill.experiment.charts import Bar, bar_chart
from overspill.experiment.comparison import Comparison, verdict_words
from overspill.experiment.intervals import own_interval
from overspill.experiment.text import ratio_as_text

_CHARTED = ("output_throughput", "mean_ttft_ms", "returning_mean_ttft_ms", "mean_tpot_ms", "tokens_from_ram", "load_s")


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    verdict: str = ""
    """better, worse or nothing."""


@dataclass(frozen=True, slots=True)
class TableRow:
    name: str
    cells: tuple[Cell, ...]


def comparison_rows(comparison: Comparison) -> list[TableRow]:
    """The value of each configuration, then the ratios of the others to the one they are compared with."""
    rows = []
    for row in comparison.rows:
        cells = [Cell(row.measure.shown(value)) for value in row.values]
        for index in comparison.others:
            ratio = row.ratios[index]
            if ratio is None:
                cells.append(Cell("–"))
                continue
            words = verdict_words(row.measure, ratio)
            verdict = words if words in ("better", "worse") else ""
            cells.append(Cell(f"{ratio_as_text(ratio)} {words}", verdict))
        rows.append(TableRow(row.measure.name.strip(), tuple(cells)))
    return rows


def comparison_charts(comparison: Comparison) -> list[Markup]:
    """As SVG, whose texts are escaped where it is made."""
    charts = []
    for row in comparison.rows:
        if row.measure.key not in _CHARTED:
            continue
        bars = []
        for index, (column, value) in enumerate(zip(comparison.columns, row.values)):
            if value is not None:
                points = tuple(column.values(row.measure).values())
                bars.append(
                    Bar(
                        series=index % 6, label=column.label, value=value, shown=row.measure.shown(value),
                        interval=own_interval(points), points=points if len(points) > 1 else (),
                    )
                )  # fmt: skip
        better = f" ({row.measure.better} is better)" if row.measure.better else ""
        if chart := bar_chart(f"{row.measure.name.strip()}{better}", bars):
            charts.append(Markup(chart))
    return charts
