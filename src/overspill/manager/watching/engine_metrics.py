"""A vLLM server's /metrics: the few series a page shows, and what happened between two looks at them."""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import httpx

# Series to fields of Metrics. Overspill's own are in overspill.kv.metrics, which needs vLLM; a test holds the two
# together.
_SERIES = {
    b"vllm:num_requests_running": "requests_running",
    b"vllm:num_requests_waiting": "requests_waiting",
    b"vllm:kv_cache_usage_perc": "kv_cache_use",
    b"vllm:prompt_tokens_total": "prompt_tokens",
    b"vllm:generation_tokens_total": "generation_tokens",
    b"vllm:prefix_cache_queries_total": "prefix_queries",
    b"vllm:prefix_cache_hits_total": "prefix_hits",
    b"vllm:external_prefix_cache_queries_total": "external_queries",
    b"vllm:external_prefix_cache_hits_total": "external_hits",
    b"vllm:num_preemptions_total": "preemptions",
    b"vllm:time_to_first_token_seconds_sum": "ttft_seconds",
    b"vllm:time_to_first_token_seconds_count": "ttft_count",
    b"vllm:request_time_per_output_token_seconds_sum": "tpot_seconds",
    b"vllm:request_time_per_output_token_seconds_count": "tpot_count",
    b"overspill_load_bytes_total": "load_bytes",
    b"overspill_load_seconds_total": "load_seconds",
    b"overspill_store_bytes_total": "store_bytes",
    b"overspill_store_seconds_total": "store_seconds",
    b"overspill_hit_tokens_total": "ram_hit_tokens",
    b"overspill_miss_tokens_total": "ram_miss_tokens",
    b"overspill_load_failures_total": "load_failures",
    b"overspill_evicted_blocks_total": "evicted_blocks",
    b"overspill_corrupt_blocks_total": "corrupt_blocks",
    b"overspill_spilled_steps_total": "spilled_steps",
    b"overspill_plain_steps_total": "plain_steps",
    b"overspill_spill_in_bytes_total": "spill_in_bytes",
    b"overspill_spill_out_bytes_total": "spill_out_bytes",
    b"overspill_pool_bytes": "pool_bytes",
    b"overspill_pool_used_bytes": "pool_used_bytes",
    b"overspill_pool_pinned_bytes": "pool_pinned_bytes",
    b"overspill_resident_blocks_used": "resident_blocks_used",
    b"overspill_spilled_blocks_used": "spilled_blocks_used",
    b"overspill_spill_link_bytes_per_second": "spill_link_bytes_per_s",
}
_GAUGES = {
    "requests_running", "requests_waiting", "kv_cache_use", "pool_bytes", "pool_used_bytes", "pool_pinned_bytes",
    "resident_blocks_used", "spilled_blocks_used", "spill_link_bytes_per_s",
}  # fmt: skip
# Shares, not amounts: of several engines the fullest counts.
_SHARES = {"kv_cache_use"}
# One pass over the page, most of which is buckets of histograms. Labels may hold anything in quotes, so they end at the
# line's last brace.
_LINE = re.compile(rb"^(" + b"|".join(map(re.escape, _SERIES)) + rb")(?:\{.*\})?[ \t]+([^\s]+)", re.MULTILINE)
_MAX_PAGE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """As they stand, summed over a server's engines; None is a series that the page does not have."""

    at: float
    requests_running: float | None = None
    requests_waiting: float | None = None
    kv_cache_use: float | None = None
    """0 to 1; with spill of resident and spilled blocks together."""
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_queries: float | None = None
    """Tokens, as are the three after it."""
    prefix_hits: float | None = None
    external_queries: float | None = None
    external_hits: float | None = None
    preemptions: float | None = None
    ttft_seconds: float | None = None
    ttft_count: float | None = None
    tpot_seconds: float | None = None
    tpot_count: float | None = None
    load_bytes: float | None = None
    load_seconds: float | None = None
    store_bytes: float | None = None
    store_seconds: float | None = None
    ram_hit_tokens: float | None = None
    ram_miss_tokens: float | None = None
    load_failures: float | None = None
    evicted_blocks: float | None = None
    corrupt_blocks: float | None = None
    spilled_steps: float | None = None
    plain_steps: float | None = None
    spill_in_bytes: float | None = None
    spill_out_bytes: float | None = None
    pool_bytes: float | None = None
    pool_used_bytes: float | None = None
    pool_pinned_bytes: float | None = None
    resident_blocks_used: float | None = None
    spilled_blocks_used: float | None = None
    spill_link_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of the time between two looks; None is what nothing happened to tell of, or what is not counted."""

    seconds: float
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    prefix_hit_rate: float | None = None
    """Of prompt tokens asked of the GPU's prefix cache."""
    external_hit_rate: float | None = None
    """Of those it missed, asked of RAM."""
    ttft_s: float | None = None
    """Mean of the requests that got their first token meanwhile."""
    tpot_s: float | None = None
    """Mean of the requests that ended meanwhile."""
    preemptions_per_s: float | None = None
    load_bytes_per_s: float | None = None
    """Over the whole time, not only while copying."""
    store_bytes_per_s: float | None = None
    ram_hit_tokens_per_s: float | None = None
    spill_in_bytes_per_s: float | None = None
    spill_out_bytes_per_s: float | None = None
    spilled_step_share: float | None = None


def parse_metrics(page: bytes, at: float) -> Metrics:
    values: dict[str, float] = {}
    for series, text in _LINE.findall(page):
        name = _SERIES[series]
        try:
            value = float(text)
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if name in _SHARES:
            values[name] = max(value, values.get(name, 0.0))
        else:
            values[name] = values.get(name, 0.0) + value
    return Metrics(at=at, **values)


def rates(before: Metrics, after: Metrics) -> Rates | None:
    """None where there is nothing to compare: no time passed, or the counters began anew, as after a restart."""
    seconds = after.at - before.at
    if seconds <= 0 or _began_anew(before, after):
        return None

    def grown(name: str) -> float | None:
        old, new = getattr(before, name), getattr(after, name)
        # A series that has only just appeared grew from 0: vLLM shows some after their first use only.
        return None if new is None else new - (old or 0.0)

    def per_second(name: str) -> float | None:
        amount = grown(name)
        return None if amount is None else amount / seconds

    return Rates(
        seconds=seconds,
        prompt_tokens_per_s=per_second("prompt_tokens"),
        generation_tokens_per_s=per_second("generation_tokens"),
        prefix_hit_rate=_share(grown("prefix_hits"), grown("prefix_queries")),
        external_hit_rate=_share(grown("external_hits"), grown("external_queries")),
        ttft_s=_mean(grown("ttft_seconds"), grown("ttft_count")),
        tpot_s=_mean(grown("tpot_seconds"), grown("tpot_count")),
        preemptions_per_s=per_second("preemptions"),
        load_bytes_per_s=per_second("load_bytes"),
        store_bytes_per_s=per_second("store_bytes"),
        ram_hit_tokens_per_s=per_second("ram_hit_tokens"),
        spill_in_bytes_per_s=per_second("spill_in_bytes"),
        spill_out_bytes_per_s=per_second("spill_out_bytes"),
        spilled_step_share=_share(grown("spilled_steps"), _sum(grown("spilled_steps"), grown("plain_steps"))),
    )


def chart_values(metrics: Metrics, between: Rates | None, engine: str) -> dict[str, float]:
    """One number for each line of a chart, as overspill.manager.watching.samples has them."""
    values: dict[str, Any] = {name: getattr(metrics, name) for name in _GAUGES}
    if between is not None:
        values |= {field.name: getattr(between, field.name) for field in fields(Rates) if field.name != "seconds"}
    return {f"engine.{engine}.{name}": value for name, value in values.items() if value is not None}


async def scrape(client: httpx.AsyncClient, url: str, headers: Mapping[str, str] | None = None) -> Metrics | None:
    """One look at `url`'s /metrics; None if it does not answer as vLLM does."""
    page = bytearray()
    try:
        async with client.stream("GET", f"{url}/metrics", headers=headers) as answer:
            if answer.status_code != httpx.codes.OK:
                return None
            async for piece in answer.aiter_bytes():
                page += piece
                if len(page) > _MAX_PAGE_BYTES:
                    return None
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return parse_metrics(bytes(page), time.time())


def _began_anew(before: Metrics, after: Metrics) -> bool:
    """One counter that fell is enough: the others then also count from another beginning."""
    for field in fields(Metrics):
        if field.name in _GAUGES or field.name == "at":
            continue
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old is not None and (new is None or new < old):
            return True
    return False


def _mean(total: float | None, count: float | None) -> float | None:
    return total / count if total is not None and count else None


def _share(part: float | None, whole: float | None) -> float | None:
    share = _mean(part, whole)
    # Hits of a request may be counted a scrape after its queries.
    return None if share is None else min(1.0, max(0.0, share))


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None and other is None else (one or 0.0) + (other or 0.0)
