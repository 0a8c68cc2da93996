"""From raw repeats to the numbers a table shows: pure functions over one offload result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from record import Json, spread
from systems import system

SERVING = ("short", "arrivals", "multiturn")
SERVING_NUMBERS = (
    "requests_per_second", "output_tokens_per_second", "total_tokens_per_second",
    "ttft.mean", "ttft.median", "ttft.p99", "tpot.mean", "tpot.median", "tpot.p99",
    "itl.mean", "itl.median", "itl.p99", "counters.external_tokens", "counters.preemptions",
)  # fmt: skip
# What a ratio is taken of, and whether more is better.
HEADLINES = {
    "ttft-8k": ("ttft.median", False),
    "ttft-64k": ("ttft.median", False),
    "short": ("output_tokens_per_second", True),
    "arrivals": ("output_tokens_per_second", True),
    "multiturn": ("requests_per_second", True),
}


def repeats(entry: Json, workload: str, phase: str = "measured") -> list[Json]:
    """All repeats of a workload, over all lives of a system."""
    return [
        repeat for life in entry["lives"] for repeat in life["workloads"].get(workload, []) if repeat["phase"] == phase
    ]


def summarise(result: Json) -> None:
    """Fill in every system's summary and the ratios; called again whenever a life is added."""
    for name, entry in result["systems"].items():
        workloads = {workload for life in entry["lives"] for workload in life["workloads"]}
        entry["summary"] = {
            workload: (
                summarise_serving(repeats(entry, workload))
                if workload in SERVING
                else summarise_ttft(result, name, workload)
            )
            for workload in HEADLINES
            if workload in workloads and repeats(entry, workload)
        }
    result["ratios"] = ratios(result)


def summarise_serving(measured: Sequence[Json]) -> Json:
    """Median over repeats of each repeat's number, with the extremes beside it."""
    numbers = {}
    for name in SERVING_NUMBERS:
        values = [value for repeat in measured if (value := _dig(repeat, name)) is not None]
        if values:
            numbers[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {"repeats": len(measured), **numbers}


def summarise_ttft(result: Json, name: str, workload: str) -> Json:
    entry = result["systems"][name]
    offloads = entry["kv_transfer_config"] is not None
    passes = repeats(entry, workload)
    samples = [sample for one in passes for sample in one["samples"]]
    # A life that was killed before its engine was up does not know its block size.
    block = next(life["block_tokens"] for life in entry["lives"] if "block_tokens" in life)
    served = [sample for sample in samples if not offloads or came_from_cache(sample, block)]
    missed = [sample for sample in samples if offloads and not came_from_cache(sample, block)]
    cached = sum(sample["cached_tokens"] for sample in samples)
    external = sum(one["counters"]["external_tokens"] for one in passes)
    summary: Json = {
        "passes": len(passes),
        "ttft": spread([sample["ttft"] for sample in served]),
        # Requests that were (partly) recomputed are no measure of a load; they are shown, not averaged in.
        "recomputed": [{key: s[key] for key in ("prompt", "ttft", "cached_tokens")} for s in missed],
        "cached_tokens_from_ram": external / cached if cached else None,
        # TTFT of the same prompts from the GPU's own cache: what is left when nothing has to be loaded.
        "ttft_gpu_hit": spread(gpu_hits(entry, workload)),
        "tokens_equal": compare_tokens(entry, workload),
    }
    link = result.get("link") or {}
    if offloads and served and link.get("h2d_bytes_per_second"):
        tokens = statistics.median(sample["cached_tokens"] for sample in served)
        floor = tokens * result["kv_bytes_per_token"] / link["h2d_bytes_per_second"]
        summary["floor_seconds"] = floor
        summary["ttft_over_floor"] = summary["ttft"]["median"] / floor
    return summary


def gpu_hits(entry: Json, workload: str) -> list[float]:
    return [
        sample["ttft"]
        for repeat in repeats(entry, workload, "reference")
        for sample in repeat["samples"]
        if sample["cached_tokens"] > 0
    ]


def came_from_cache(sample: Json, block_tokens: int) -> bool:
    """At most all tokens but one can be cached, in whole blocks; two blocks less are forgiven."""
    most = (sample["prompt_tokens"] - 1) // block_tokens * block_tokens
    return bool(sample["cached_tokens"] >= most - 2 * block_tokens > 0)


def compare_tokens(entry: Json, workload: str) -> Json:
    """How many answers from RAM equal those from the GPU's own cache in the same engine life.

    Where another number of tokens was cached, the prompt was computed in other chunks, bf16 rounds
    differently and an answer may differ without anything being wrong: such pairs are not compared. Nor are
    lives: another engine may choose other kernels.
    """
    equal = compared = answers = 0
    seen: set[str] = set()
    for life in entry["lives"]:
        done = life["workloads"].get(workload, [])
        references: dict[tuple[int, int], str] = {
            (sample["prompt"], sample["cached_tokens"]): sample["tokens_hash"]
            for repeat in done
            if repeat["phase"] == "reference"
            for sample in repeat["samples"]
        }
        for sample in [s for repeat in done if repeat["phase"] == "measured" for s in repeat["samples"]]:
            answers += 1
            seen.add(sample["tokens_hash"])
            expected = references.get((sample["prompt"], sample["cached_tokens"]))
            if expected is not None:
                compared += 1
                equal += sample["tokens_hash"] == expected
    # One answer to all prompts would mean a model that hears nothing, and equality that proves nothing.
    return {"equal": equal, "compared": compared, "answers": answers, "distinct": len(seen)}


def headline(entry: Json, workload: str) -> float | None:
    """The one number of a workload that systems are ranked by."""
    summary = entry.get("summary", {}).get(workload)
    if summary is None:
        return None
    name, _ = HEADLINES[workload]
    value = summary["ttft"].get("median") if workload.startswith("ttft") else summary[name]["median"]
    return None if value is None else float(value)


def speedup(workload: str, value: float, reference: float) -> float:
    """Above 1 is better than the reference, whichever way the number counts."""
    _, more_is_better = HEADLINES[workload]
    return value / reference if more_is_better else reference / value


def best_peer(result: Json, workload: str) -> str | None:
    found = {
        name: value
        for name, entry in result["systems"].items()
        if system(name, 0).is_peer and (value := headline(entry, workload)) is not None
    }
    _, more_is_better = HEADLINES[workload]
    return (max if more_is_better else min)(found, key=lambda name: found[name]) if found else None


def ratios(result: Json) -> Json:
    """Per workload and system: how many times better than `none`, and than the best peer."""
    table: Json = {}
    for workload in HEADLINES:
        peer = best_peer(result, workload)
        rows = {}
        for name, entry in result["systems"].items():
            value = headline(entry, workload)
            if value is None:
                continue
            row: Json = {"value": value}
            for key, other in (("over_none", "none"), ("over_best_peer", peer)):
                reference = headline(result["systems"].get(other, {}), workload) if other else None
                row[key] = speedup(workload, value, reference) if reference else None
            rows[name] = row
        if rows:
            table[workload] = {"best_peer": peer, "systems": rows}
    return table


def _dig(repeat: Json, dotted: str) -> float | None:
    value = repeat
    for key in dotted.split("."):
        if key not in value:
            return None
        value = value[key]
    return float(value)  # type: ignore[arg-type]
