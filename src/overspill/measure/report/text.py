"""Measurements as text for a terminal: comparisons, single outcomes and lists of results."""

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from overspill.figures import aligned
from overspill.kv.sizes import format_size
from overspill.measure.compare import (
    BY_KEY,
    MEASURES,
    NOT_FINISHED,
    Basis,
    Comparison,
    Ratio,
    Row,
    Verdict,
    verdict_words,
)
from overspill.measure.measurement import Outcome
from overspill.measure.metrics import LATENCIES
from overspill.measure.trial import INTERRUPTED
from overspill.registry import Result

LISTED = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "tokens_from_ram")
_FIRST = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
_MARKS = (
    ({Verdict.HIGHER, Verdict.LOWER}, "better and worse: the interval of the ratio lies on one side of 1"),
    ({Verdict.NO_DIFFERENCE}, "no difference above 5 %: all of the interval is within 5 % of 1"),
    ({Verdict.NOT_SHOWN}, "no difference shown: the interval includes 1 and more; more --repeats may narrow it"),
    ({Verdict.ONE_RUN}, "one run: the interval is over its requests, and the next run may differ by more"),
)
_STATISTICS = ("mean", "median", "p90", "p99", "std")


def comparison_as_text(comparison: Comparison) -> str:
    """One table for two configurations; with more, the ratios of each get their own table."""
    labels = [column.label for column in comparison.columns]
    first = comparison.first.label
    head = ["", *labels]
    pair = comparison.others[0] if len(labels) == 2 and all(column.finished for column in comparison.columns) else None
    if pair is not None:
        head += [f"{labels[pair]} / {first}", ""]
    values = [
        [row.measure.name, *map(row.measure.shown, row.values), *(() if pair is None else _ratio_cells(row, pair))]
        for row in comparison.rows
    ]
    parts = [aligned([head, *values], left=(0, len(labels) + 2))]
    for index in comparison.others if len(labels) > 2 else ():
        found = [row for row in comparison.rows if row.ratios[index] is not None]
        lines = [[row.measure.name, *_ratio_cells(row, index)] for row in found]
        parts.append(aligned([[f"{labels[index]} / {first}", "", ""], *lines], left=(0, 2)) if lines else "")
    parts.append("\n".join(notes(comparison)))
    return "\n\n".join(part for part in parts if part)


def _ratio_cells(row: Row, index: int) -> list[str]:
    ratio = row.ratios[index]
    return ["", ""] if ratio is None else [ratio_as_text(ratio), verdict_words(row.measure, ratio)]


def ratio_as_text(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3g}"
    low, high = (f"{end:.3g}" if 0.001 <= end < 1000 else "0" if end < 1 else "∞" for end in (ratio.low, ratio.high))
    return f"{ratio.value:.3g} ({low} to {high})"


def notes(comparison: Comparison) -> list[str]:
    """Notes that a reader needs besides the numbers."""
    first = comparison.first.label
    lines = []
    for each in comparison.answers:
        if each.compared and each.same == each.compared:
            lines.append(f"All {each.compared} answers of {each.label} are those of {first}.")
        elif each.compared:
            lines.append(
                f"{each.compared - each.same} of {each.compared} answers of {each.label} differ from those of {first}: "
                "rounding can change a token when batches differ. overspill verify checks for other causes."
            )
    ratios = [ratio for row in comparison.rows for ratio in row.ratios if ratio is not None]
    bases = {ratio.basis for ratio in ratios}
    if bases - {Basis.NONE}:
        over = "; ".join(basis for basis in (Basis.PAIRS, Basis.GROUPS, Basis.REQUESTS) if basis in bases)
        lines.append(f"In brackets: 95 % confidence intervals, {over}.")
    if meant := [meaning for verdicts, meaning in _MARKS if verdicts & {ratio.verdict for ratio in ratios}]:
        lines.append(f"Marks: {'; '.join(meant)}.")
    if bases & {Basis.NONE, Basis.REQUESTS}:
        fewest = min(len(column.finished) for column in comparison.columns)
        little = "One repeat of each does not show" if fewest < 2 else f"{fewest} repeats of each hardly show"
        lines.append(f"{little} how results vary; use --repeats 3 or more.")
    if comparison.uneven:
        had = "; ".join(f"{label} has {', '.join(map(str, each))}" for label, each in comparison.uneven.items())
        lines.append(
            f"Some repeats are missing: {had}. Values use the repeats that all configurations have; a ratio uses "
            "those that both of its configurations have."
        )
    # No interval then covers how two starts of the same engine differ, so verdicts ignore it.
    if comparison.shares_starts and any(column.has_repeats for column in comparison.columns):
        lines.append(
            "With --keep, the repeats of a configuration share one start of its engine: do not trust differences "
            "of a few percent, whatever their mark."
        )
    if len(comparison.columns) > 1 and (label := comparison.cold_start) is not None:
        lines.append(
            f"The very first start, of {label}, reads weights from disk and may compile code that later starts find "
            "cached, so its load time is not compared."
        )
    return lines


def failures(comparison: Comparison) -> list[str]:
    """Configurations that were not measured to the end, with reasons."""
    found = [(column.label, column.problem) for column in comparison.columns if column.problem is not None]
    ended = (INTERRUPTED, NOT_FINISHED)
    return [
        f"{label} is not complete: {problem}." if problem in ended else f"{label} failed: {_last_error(problem)}"
        for label, problem in found
    ]


def _last_error(problem: str) -> str:
    """The problem's first line, with the log's last error if that line gives no reason."""
    first, *log = map(str.strip, problem.splitlines())
    said = [line for line in log[1:] if re.search(r"(Error|Exception)\b", line)] or log[1:]
    has_reason = ": " in first.rpartition("vLLM ended")[2]
    return first if has_reason or not said else f"{first}: {said[-1]}"


def headline(comparison: Comparison) -> str:
    """The main finding: which configurations failed, or how the others compare with the baseline."""
    if found := failures(comparison):
        return "\n".join(found)
    rows = {row.measure.key: row for row in comparison.rows}
    lines = []
    for index in comparison.others:
        shown = [(rows[key], ratio) for key in _FIRST if key in rows and (ratio := rows[key].ratios[index]) is not None]
        said = [f"{row.measure.name} × {ratio.value:.3g}{_mark(row, ratio)}" for row, ratio in shown]
        once = "; one repeat of each" if not any(column.has_repeats for column in comparison.columns) else ""
        if said:
            lines.append(f"{comparison.columns[index].label} against {comparison.first.label}: {', '.join(said)}{once}")
    return "\n".join(lines)


def _mark(row: Row, ratio: Ratio) -> str:
    return "" if ratio.verdict is Verdict.UNKNOWN else f" ({verdict_words(row.measure, ratio)})"


def outcome_as_text(outcome: Outcome) -> str:
    """One measurement, as `overspill bench` prints it."""
    metrics = outcome.metrics
    served, failed = f"{metrics['completed']:,} answered", f"{metrics['failed']:,} failed"
    prompts, ram, gpu = metrics["total_input_tokens"], metrics["tokens_from_ram"], metrics["tokens_from_gpu_cache"]
    # A server without a second tier has no counter for it.
    tiers = "" if ram is None and gpu is None else f": {ram or 0:,} from RAM, {gpu or 0:,} from the GPU's cache"
    facts = [
        ("requests", f"{served}, {failed}, in {metrics['duration']:.2f} s"),
        ("requests/s", f"{metrics['request_throughput']:.3f}"),
        ("output tokens/s", f"{metrics['output_throughput']:,.1f}"),
        ("all tokens/s", f"{metrics['total_token_throughput']:,.1f}"),
        ("prompt tokens", f"{prompts:,}{tiers}"),
        ("output tokens", f"{metrics['total_output_tokens']:,}"),
    ]
    if (good := metrics.get("good_requests")) is not None:
        share, rate = metrics["goodput_percent"], metrics["request_goodput"]
        facts.append(("goodput", f"{good:,} requests within the limits, {share:.0f} %, {rate:.3f} requests/s"))
    if metrics.get("preemptions"):
        facts.append(("preemptions", f"{metrics['preemptions']:,}"))
    if metrics.get("spilled_steps"):
        streamed = format_size(int(metrics["spill_in_bytes"] or 0))
        facts.append(("spill", f"{metrics['spilled_steps']:,} steps streamed {streamed} from RAM"))
    if drafts := metrics.get("draft_tokens"):
        accepted = metrics["accepted_tokens"] or 0
        facts.append(("drafts", f"{accepted:,} of {drafts:,} tokens accepted, {accepted / drafts:.0%}"))
    if metrics["peak_gpu_bytes"] is not None:
        facts.append(("GPU memory", f"{format_size(metrics['peak_gpu_bytes'])} at most"))
    if metrics["peak_ram_bytes"] is not None:
        facts.append(("RAM", f"{format_size(metrics['peak_ram_bytes'])} at most, of the {metrics['ram_of']}"))
    prefixes = {name.upper(): ("", name) for name in LATENCIES}
    prefixes |= {f"TTFT {one}": (f"{one}_", "ttft") for one in ("cold", "returning") if metrics.get(f"{one}_completed")}
    rows = [
        [head, *(f"{metrics[f'{prefix}{each}_{name}_ms']:,.2f}" for each in _STATISTICS)]
        for head, (prefix, name) in prefixes.items()
    ]
    parts = [aligned(facts, left=(0, 1)), "", aligned([["ms", *_STATISTICS], *rows], left=(0,))]
    return "\n".join([*parts, *(f"note: {note}" for note in outcome.notes)])


def results_as_text(results: Sequence[Result], *, is_filtered: bool = False) -> str:
    if not results and is_filtered:
        return "no result matches; overspill results list, without flags, shows all results"
    if not results:
        return "no results yet; measure with overspill bench or overspill ab"
    rows = [["id", "when (UTC)", "model", "workload", "experiment", "label", "repeat", "output", "TTFT", "TPOT",
             "from RAM", ""]]  # fmt: skip
    for one in results:
        rows.append(
            [str(one.id), f"{one.started_at:%Y-%m-%d %H:%M}", one.model, one.benchmark, one.experiment or "-",
             one.label or "-", str(one.repeat or "-"), *listed_values(one), "" if one.is_complete else "not complete"]
        )  # fmt: skip
    return aligned(rows, left=(1, 2, 3, 4, 5, 11))


def listed_values(result: Result) -> list[str]:
    return [BY_KEY[key].shown(BY_KEY[key].value(result.metrics)) for key in LISTED]


def result_as_text(result: Result) -> str:
    """One result with everything known about it."""
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in result.environment.items())
    facts = {
        **result_facts(result),
        "command": shlex.join(result.argv),
        "server": shlex.join(result.config.get("server") or ()),
        "goodput limits": str(result.config.get("goodput") or ""),
        "environment": environment,
        "plan": json.dumps(result.plan) if result.plan is not None else "",
    }
    lines = [f"{name:16}{value}" for name, value in facts.items() if value]
    values = [(measure, measure.value(result.metrics)) for measure in MEASURES]
    numbers = [[measure.name, measure.shown(value)] for measure, value in values if value is not None]
    found = [f"note: {note}" for note in result.metrics.get("notes") or []]
    return "\n".join([*lines, "", *([aligned(numbers, left=(0,))] if numbers else []), *found])


def result_facts(result: Result) -> dict[str, str]:
    """Where, when and with what a result was measured, by name; unknown facts are empty."""
    config: dict[str, Any] = dict(result.config)
    machine = config.get("machine") if isinstance(config.get("machine"), dict) else {}
    return {
        "result": str(result.id),
        "model": result.model,
        "workload": f"{config.get('workload') or result.benchmark}, seed {config.get('seed', '-')}",
        "experiment": result.experiment or "",
        "configuration": result.label or "",
        "repeat": str(result.repeat or ""),
        "started": f"{result.started_at:%Y-%m-%d %H:%M:%S} UTC",
        "complete": "yes" if result.is_complete else f"no: {result.metrics.get('problem') or 'not finished'}",
        "GPU": result.gpu or "",
        "driver": result.driver or "",
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        "revision": result.git_revision or "",
        "machine": ", ".join(f"{name} {value}" for name, value in (machine or {}).items()),
        "log": str(config.get("log_file") or ""),
    }
