"""What is reported of a repeat: one table for text, page, charts and files. Keys are vLLM's where it has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from overspill.kv.sizes import format_size


class Better(StrEnum):
    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    key: str
    name: str
    unit: str
    better: Better = Better.NEITHER
    requests: str | None = None
    """Key of the list with a value for each request, of which this is the mean."""
    begins_cold: bool = False
    """Whether the first start of an experiment takes longer, whichever configuration it is: its weights are read from
    disk, and what is compiled is kept for the others."""

    def value(self, metrics: Mapping[str, Any]) -> float | None:
        found = metrics.get(self.key)
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None

    def shown(self, value: float | None) -> str:
        """With its unit."""
        if value is None:
            return "-"
        if self.unit == "bytes":
            return format_size(int(value))
        return f"{_digits(value)} {self.unit}" if self.unit else f"{round(value):,}"

    @property
    def is_compared(self) -> bool:
        return self.better is not Better.NEITHER


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def _time(key: str, name: str, requests: str | None = None) -> Measure:
    return Measure(key=key, name=name, unit="ms", better=Better.LOWER, requests=requests)


def _rate(key: str, name: str, unit: str) -> Measure:
    return Measure(key=key, name=name, unit=unit, better=Better.HIGHER)


MEASURES = (
    Measure(key="load_s", name="load time", unit="s", better=Better.LOWER, begins_cold=True),
    Measure(key="duration", name="duration", unit="s"),
    _rate("request_throughput", "request throughput", "req/s"),
    _rate("output_throughput", "output throughput", "tok/s"),
    _rate("total_token_throughput", "total throughput", "tok/s"),
    _time("mean_ttft_ms", "TTFT, mean", "ttfts"),
    _time("median_ttft_ms", "TTFT, median"),
    _time("p99_ttft_ms", "TTFT, p99"),
    _time("cold_mean_ttft_ms", "TTFT of new prompts"),
    _time("returning_mean_ttft_ms", "TTFT of returning ones"),
    _time("mean_tpot_ms", "TPOT, mean"),
    _time("p99_tpot_ms", "TPOT, p99"),
    _time("mean_itl_ms", "ITL, mean"),
    _time("p99_itl_ms", "ITL, p99"),
    _time("mean_e2el_ms", "E2EL, mean", "latencies"),
    _time("p99_e2el_ms", "E2EL, p99"),
    Measure(key="peak_gpu_bytes", name="GPU memory, peak", unit="bytes"),
    Measure(key="peak_ram_bytes", name="RAM, peak", unit="bytes"),
    Measure(key="prompt_tokens", name="prompt tokens", unit=""),
    Measure(key="tokens_from_gpu_cache", name="  from the KV cache", unit=""),
    Measure(key="tokens_from_ram", name="  from RAM", unit=""),
    Measure(key="preemptions", name="preemptions", unit=""),
    Measure(key="spill_in_bytes", name="streamed from RAM", unit="bytes"),
)
BY_KEY = {measure.key: measure for measure in MEASURES}
