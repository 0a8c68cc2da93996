"""A measurement as text."""

from collections.abc import Sequence
from typing import Any

from overspill.bench.metrics import LATENCIES
from overspill.bench.outcome import Outcome
from overspill.kv.sizes import format_size

_STATISTICS = ("mean", "median", "p99", "std")
_PHASES = ("cold", "returning")


def report_as_text(outcome: Outcome) -> str:
    metrics = outcome.metrics
    lines = [*_facts(metrics), "", *_latencies(metrics)]
    lines += [f"note: {note}" for note in outcome.notes]
    return "\n".join(lines)


def _facts(metrics: dict[str, Any]) -> list[str]:
    rows = [
        (
            "requests",
            f"{metrics['completed']:,} answered, {metrics['failed']:,} failed, in {metrics['duration']:.2f} s",
        ),
        ("requests/s", f"{metrics['request_throughput']:.3f}"),
        ("output tokens/s", f"{metrics['output_throughput']:,.1f}"),
        ("all tokens/s", f"{metrics['total_token_throughput']:,.1f}"),
        ("prompt tokens", _prompt_tokens(metrics)),
        ("output tokens", f"{metrics['total_output_tokens']:,}"),
    ]
    if metrics.get("preemptions"):
        rows.append(("preemptions", f"{metrics['preemptions']:,}"))
    if metrics.get("spilled_steps"):
        streamed = format_size(int(metrics["spill_in_bytes"] or 0))
        rows.append(("spill", f"{metrics['spilled_steps']:,} steps streamed {streamed} from RAM"))
    if metrics["peak_gpu_bytes"] is not None:
        rows.append(("GPU memory", f"{format_size(metrics['peak_gpu_bytes'])} at most"))
    if metrics["peak_ram_bytes"] is not None:
        rows.append(("RAM", f"{format_size(metrics['peak_ram_bytes'])} at most, of the {metrics['ram_of']}"))
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}" for name, text in rows]


def _prompt_tokens(metrics: dict[str, Any]) -> str:
    inputs = f"{metrics['total_input_tokens']:,}"
    ram, gpu = metrics["tokens_from_ram"], metrics["tokens_from_gpu_cache"]
    if ram is None and gpu is None:
        return inputs
    # A server without a second tier does not count it.
    return f"{inputs}: {ram or 0:,} from RAM, {gpu or 0:,} from the GPU's cache"


def _latencies(metrics: dict[str, Any]) -> list[str]:
    rows: list[Sequence[str]] = [("ms", *_STATISTICS)]
    for name in LATENCIES:
        rows.append((name.upper(), *(f"{metrics[f'{each}_{name}_ms']:,.2f}" for each in _STATISTICS)))
    for phase in _PHASES:
        if metrics.get(f"{phase}_completed"):
            cells = (f"{metrics[f'{phase}_{each}_ttft_ms']:,.2f}" for each in _STATISTICS)
            rows.append((f"TTFT {phase}", *cells))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
