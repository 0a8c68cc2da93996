"""Engine metrics: the few series of vLLM's /metrics that a page shows, and rates between two scrapes."""

import math
import re
import time
from dataclasses import Field, dataclass, field, fields
from typing import Any

from overspill.upstream import Upstream

_WAIT_S = 2.0


def _counter(series: str, *, is_gauge: bool = False) -> Any:
    return field(default=None, metadata={"series": series.encode(), "is_gauge": is_gauge})


def _gauge(series: str) -> Any:
    return _counter(series, is_gauge=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Current values, summed over a server's engines; None for a series missing from /metrics.

    Overspill's own series are defined in overspill.kv.metrics, which needs vLLM; a test compares the two.
    """

    at: float
    requests_running: float | None = _gauge("vllm:num_requests_running")
    requests_waiting: float | None = _gauge("vllm:num_requests_waiting")
    kv_cache_use: float | None = _gauge("vllm:kv_cache_usage_perc")
    """Share from 0 to 1; with spill, of resident and spilled blocks together. Of several engines the fullest counts."""
    prompt_tokens: float | None = _counter("vllm:prompt_tokens_total")
    generation_tokens: float | None = _counter("vllm:generation_tokens_total")
    prefix_queries: float | None = _counter("vllm:prefix_cache_queries_total")
    """Counter of tokens, like the next three."""
    prefix_hits: float | None = _counter("vllm:prefix_cache_hits_total")
    external_queries: float | None = _counter("vllm:external_prefix_cache_queries_total")
    external_hits: float | None = _counter("vllm:external_prefix_cache_hits_total")
    preemptions: float | None = _counter("vllm:num_preemptions_total")
    ttft_seconds: float | None = _counter("vllm:time_to_first_token_seconds_sum")
    ttft_count: float | None = _counter("vllm:time_to_first_token_seconds_count")
    tpot_seconds: float | None = _counter("vllm:request_time_per_output_token_seconds_sum")
    tpot_count: float | None = _counter("vllm:request_time_per_output_token_seconds_count")
    load_bytes: float | None = _counter("overspill_load_bytes_total")
    load_seconds: float | None = _counter("overspill_load_seconds_total")
    store_bytes: float | None = _counter("overspill_store_bytes_total")
    store_seconds: float | None = _counter("overspill_store_seconds_total")
    ram_hit_tokens: float | None = _counter("overspill_hit_tokens_total")
    ram_miss_tokens: float | None = _counter("overspill_miss_tokens_total")
    load_failures: float | None = _counter("overspill_load_failures_total")
    evicted_blocks: float | None = _counter("overspill_evicted_blocks_total")
    corrupt_blocks: float | None = _counter("overspill_corrupt_blocks_total")
    spilled_steps: float | None = _counter("overspill_spilled_steps_total")
    plain_steps: float | None = _counter("overspill_plain_steps_total")
    spill_in_bytes: float | None = _counter("overspill_spill_in_bytes_total")
    spill_out_bytes: float | None = _counter("overspill_spill_out_bytes_total")
    pool_bytes: float | None = _gauge("overspill_pool_bytes")
    pool_used_bytes: float | None = _gauge("overspill_pool_used_bytes")
    pool_pinned_bytes: float | None = _gauge("overspill_pool_pinned_bytes")
    resident_blocks_used: float | None = _gauge("overspill_resident_blocks_used")
    spilled_blocks_used: float | None = _gauge("overspill_spilled_blocks_used")
    spill_link_bytes_per_s: float | None = _gauge("overspill_spill_link_bytes_per_second")


_FIELDS: list[Field[Any]] = [each for each in fields(Metrics) if each.metadata]
_GAUGES = [each.name for each in _FIELDS if each.metadata["is_gauge"]]
_COUNTERS = [each.name for each in _FIELDS if not each.metadata["is_gauge"]]
SERIES: dict[bytes, str] = {each.metadata["series"]: each.name for each in _FIELDS}
# One pass every second over a page that is mostly histogram buckets: prometheus_client's parser takes about 20 times
# as long. Labels may hold anything in quotes, so they end at the line's last brace.
_LINE = re.compile(rb"^(" + b"|".join(map(re.escape, SERIES)) + rb")(?:\{.*\})?[ \t]+([^\s]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates between two scrapes; None where nothing happened or nothing is counted."""

    seconds: float
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    prefix_hit_rate: float | None = None
    """Share of prompt tokens looked up in the GPU's prefix cache that hit."""
    external_hit_rate: float | None = None
    """Share of those missed there and looked up in RAM that hit."""
    ttft_s: float | None = None
    """Mean over requests that got their first token in this time."""
    tpot_s: float | None = None
    """Mean over requests that ended in this time."""
    preemptions_per_s: float | None = None
    load_bytes_per_s: float | None = None
    """Rate over the whole time, not only while copying."""
    store_bytes_per_s: float | None = None
    ram_hit_tokens_per_s: float | None = None
    spill_in_bytes_per_s: float | None = None
    spill_out_bytes_per_s: float | None = None
    spilled_step_share: float | None = None


_PER_SECOND = [each.name.removesuffix("_per_s") for each in fields(Rates) if each.name.endswith("_per_s")]


def parse_metrics(page: bytes, at: float) -> Metrics:
    values: dict[str, float] = {}
    for series, text in _LINE.findall(page):
        name = SERIES[series]
        try:
            value = float(text)
        except ValueError:
            continue
        if math.isfinite(value):
            known = values.get(name, 0.0)
            values[name] = max(value, known) if name == "kv_cache_use" else known + value
    return Metrics(at=at, **values)


def rates(before: Metrics, after: Metrics) -> Rates | None:
    """Rates between two scrapes; None if no time passed or the counters were reset, as by a restart."""
    seconds = after.at - before.at
    if seconds <= 0:
        return None
    grown: dict[str, float | None] = {}
    for name in _COUNTERS:
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and (new is None or new < old):
            return None  # one counter that fell is enough: the others were reset too
        # A series that has only just appeared grew from 0: vLLM shows some only after their first use.
        grown[name] = None if new is None else new - (old or 0.0)
    steps = [each for each in (grown["spilled_steps"], grown["plain_steps"]) if each is not None]
    return Rates(
        seconds=seconds,
        prefix_hit_rate=_share(grown["prefix_hits"], grown["prefix_queries"]),
        external_hit_rate=_share(grown["external_hits"], grown["external_queries"]),
        ttft_s=mean(grown["ttft_seconds"], grown["ttft_count"]),
        tpot_s=mean(grown["tpot_seconds"], grown["tpot_count"]),
        spilled_step_share=_share(grown["spilled_steps"], sum(steps)),
        **{f"{name}_per_s": None if (each := grown[name]) is None else each / seconds for name in _PER_SECOND},
    )


def chart_values(metrics: Metrics, between: Rates | None, engine: str) -> dict[str, float]:
    """One number per line of a chart, named like those of overspill.manager.telemetry.machine."""
    values: dict[str, Any] = {name: getattr(metrics, name) for name in _GAUGES}
    if between is not None:
        values |= {each.name: getattr(between, each.name) for each in fields(Rates) if each.name != "seconds"}
    return {f"engine.{engine}.{name}": value for name, value in values.items() if value is not None}


async def scrape(upstream: Upstream, url: str) -> Metrics | None:
    """Scrape `url`'s /metrics once; None if it does not answer as vLLM does."""
    answer = await upstream.ask(url, "/metrics", _WAIT_S)
    return parse_metrics(answer[1], time.time()) if answer is not None and answer[0] == 200 else None


def mean(total: float | None, count: float | None) -> float | None:
    return total / count if total is not None and count else None


def _share(part: float | None, whole: float | None) -> float | None:
    share = mean(part, whole)
    # Hits of a request may be counted a scrape after its queries.
    return None if share is None else min(1.0, max(0.0, share))
