"""A comparison as text, for a terminal."""

from collections.abc import Sequence

from overspill.experiment.comparison import Answers, Comparison, Row, verdict_words
from overspill.experiment.intervals import Basis, Ratio, Verdict


def comparison_as_text(comparison: Comparison) -> str:
    parts = [_table(comparison)]
    if len(comparison.columns) > 2:
        parts += [_ratios(comparison, index) for index in comparison.others]
    parts.append("\n".join(notes(comparison)))
    return "\n\n".join(part for part in parts if part)


def ratio_as_text(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3g}"
    return f"{ratio.value:.3g} ({_bound(ratio.low)} to {_bound(ratio.high)})"


def notes(comparison: Comparison) -> list[str]:
    """What has to be known beside the numbers."""
    lines = [answers_as_text(each, comparison.first.label) for each in comparison.answers]
    bases = {ratio.basis for row in comparison.rows for ratio in row.ratios if ratio is not None}
    if bases - {Basis.NONE}:
        over = "; ".join(basis for basis in (Basis.PAIRS, Basis.GROUPS, Basis.REQUESTS) if basis in bases)
        lines.append(f"In brackets: 95 % confidence intervals, {over}.")
    if bases & {Basis.NONE, Basis.REQUESTS}:
        lines.append("One repeat of each tells nothing about how they vary; --repeats 3 and more does.")
    verdicts = {ratio.verdict for row in comparison.rows for ratio in row.ratios if ratio is not None}
    if Verdict.NOT_SHOWN in verdicts:
        lines.append("Where no difference is shown there may be one; more --repeats would tell.")
    lines += [_repeats_as_text(comparison), _starts_as_text(comparison), _cold_start_as_text(comparison)]
    for column in comparison.columns:
        if column.problem is not None:
            lines.append(f"{column.label} is not complete: {column.problem.splitlines()[0]}")
    return [line for line in lines if line]


def answers_as_text(answers: Answers, first: str) -> str:
    if not answers.compared:
        return ""
    if answers.same == answers.compared:
        return f"All {answers.compared} answers of {answers.label} are those of {first}."
    differ = answers.compared - answers.same
    return (
        f"{differ} of {answers.compared} answers of {answers.label} are not those of {first}: computed in other "
        "batches, a token can differ by rounding. overspill verify tells whether it is more."
    )


def _repeats_as_text(comparison: Comparison) -> str:
    if not comparison.uneven:
        return ""
    told = "; ".join(f"{label} has {', '.join(map(str, each))}" for label, each in comparison.uneven.items())
    return (
        f"Not all repeats are there: {told}. Values are over those that all have, and a ratio over those that its two "
        "have."
    )


def _starts_as_text(comparison: Comparison) -> str:
    """How two starts of the same engine differ is in no interval then, and a verdict does not know of it."""
    if not comparison.shares_starts or all(len(column.finished) < 2 for column in comparison.columns):
        return ""
    return (
        "With --keep, the repeats of a configuration share one start of its engine: differences of a few percent are "
        "not to be trusted, whatever is said of them here."
    )


def _cold_start_as_text(comparison: Comparison) -> str:
    if (label := comparison.cold_start) is None:
        return ""
    return (
        f"The first start of all, of {label}, reads its weights from disk and may compile what others then find: its "
        "load time is not compared."
    )


def _table(comparison: Comparison) -> str:
    labels = [column.label for column in comparison.columns]
    lines = [["", *labels]]
    pair = comparison.others[0] if len(labels) == 2 and all(column.finished for column in comparison.columns) else None
    if pair is not None:
        lines[0] += [f"{labels[pair]} / {comparison.first.label}", ""]
    for row in comparison.rows:
        line = [row.measure.name, *(row.measure.shown(value) for value in row.values)]
        lines.append([*line, *_ratio_cells(row, pair)] if pair is not None else line)
    return aligned(lines, left=(0, len(labels) + 2))


def _ratios(comparison: Comparison, index: int) -> str:
    first, other = comparison.first.label, comparison.columns[index].label
    lines = [[row.measure.name, *_ratio_cells(row, index)] for row in comparison.rows if row.ratios[index] is not None]
    return aligned([[f"{other} / {first}", "", ""], *lines], left=(0, 2)) if lines else ""


def _ratio_cells(row: Row, index: int) -> list[str]:
    ratio = row.ratios[index]
    return ["", ""] if ratio is None else [ratio_as_text(ratio), verdict_words(row.measure, ratio)]


def aligned(lines: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> str:
    """Columns of the width of their widest cell, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def _bound(value: float) -> str:
    return f"{value:.3g}" if 0.001 <= value < 1000 else "0" if value < 1 else "∞"
