"""Overspill's metrics, in vLLM's own /metrics and log line."""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.config import VllmConfig

from overspill.kv.vllm_api import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "load_bytes": "Bytes loaded from RAM",
    "load_seconds": "Seconds that loads took, from first copy to last",
    "store_bytes": "Bytes stored to RAM",
    "store_seconds": "Seconds that stores took, from first copy to last",
    "hit_tokens": "Prompt tokens found in RAM beyond the GPU's prefix cache, and loaded",
    "miss_tokens": "Prompt tokens found neither on the GPU nor in RAM",
    "loads_skipped_tokens": "Tokens in RAM that were recomputed because that was faster",
    "load_failures": "Loads that failed and were recomputed",
    "stores_dropped_blocks": "Blocks not stored because RAM was full of blocks in use or the link was saturated",
    "store_failures": "Stores that failed",
    "evicted_blocks": "Blocks evicted from RAM for newer ones",
    "verified_blocks": "Blocks whose checksum was checked before a load",
    "corrupt_blocks": "Blocks whose checksum did not match; each was dropped and recomputed",
    "disk_hit_tokens": "Prompt tokens found on disk beyond the GPU's prefix cache and RAM, and read into RAM",
    "disk_skipped_tokens": "Tokens on disk that were recomputed because that was faster",
    "disk_read_bytes": "Bytes read from disk",
    "disk_read_seconds": "Seconds that reads from disk took, from first to last",
    "disk_write_bytes": "Bytes written to disk",
    "disk_bad_blocks": "Blocks on disk that could not be read or did not match their digest; each was recomputed",
    "disk_write_failures": "Blocks that could not be written to disk",
    "disk_dropped_blocks": "Blocks that left RAM unwritten because the disk was too slow",
    "remote_hit_tokens": "Prompt tokens found in the store between machines beyond RAM and disk, and read into RAM",
    "remote_load_bytes": "Bytes read from the store",
    "remote_store_bytes": "Bytes put into the store, or already there",
    "remote_bad_blocks": "Blocks that the store listed but did not return intact; each was recomputed",
    "remote_corrupt_blocks": "Of these, blocks whose digest did not match",
    "remote_failures": "Calls to the store that failed or timed out",
    "remote_timeouts": "Of these, calls that timed out",
    "remote_pauses": "Times that the store was paused after failures",
    "remote_dropped_blocks": "Blocks not put because the store was too slow",
    "spilled_steps": "Steps that streamed spilled KV",
    "graphed_steps": "Steps that streamed spilled KV inside a FULL CUDA graph",
    "plain_steps": "Steps that streamed no spilled KV, with spill on",
    "spill_in_bytes": "Bytes of spilled KV streamed to the GPU",
    "spill_far_bytes": "Bytes of spilled KV that the CPU attended to in RAM",
    "spill_out_bytes": "Bytes of spilled KV written back to RAM",
    "window_moves": "Times that memory moved between GPU blocks and the window",
    "window_preemptions": "Requests preempted because others waited for the window's memory",
    "grown_bytes": "GPU memory added under the KV cache, as granted",
    "shrunk_bytes": "GPU memory that the KV cache gave back to other engines",
    "grow_failures": "Times that granted GPU memory could not be allocated",
    "shrink_lost_blocks": "Cached blocks evicted without a copy in RAM, to give memory to other engines",
    "shrink_preemptions": "Requests preempted to give memory to other engines",
    "hits_given_up_blocks": "Cached GPU blocks recomputed because recurrent states needed their memory",
    "standstills": "Times that a request gave up loaded KV because no request with loaded KV could continue",
}
GAUGES = {
    "pool_bytes": "RAM of the pool",
    "pool_used_bytes": "RAM of the pool that holds KV",
    "pool_pinned_bytes": "RAM of the pool that is registered for DMA so far",
    "pinning_refused": "1 if registering the pool for DMA was refused; the rest is copied as pageable memory",
    "kv_held_bytes": "GPU memory under the KV cache, where it grows and shrinks",
    "disk_used_bytes": "Disk that holds KV of this model",
    "resident_blocks_used": "KV blocks in use on the GPU, with spill on",
    "spilled_blocks_used": "KV blocks in use in RAM",
    "spill_link_bytes_per_second": "Speed at which spilled KV was last streamed to the GPU",
}

_SHOWN = (
    "hit_tokens", "disk_hit_tokens", "remote_hit_tokens", "remote_failures", "load_failures", "corrupt_blocks",
    "disk_bad_blocks", "stores_dropped_blocks", "store_failures",
)  # fmt: skip


@dataclass
class OverspillStats(KVConnectorStats):
    """Counters since the last report and current gauges, in one flat dict."""

    data: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, amount: float = 1) -> None:
        assert name in COUNTERS, name
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def gauge(self, name: str, value: float, rank: int = 0) -> None:
        """Set a rank's value under a key of its own, since vLLM aggregates ranks and steps by the same call."""
        assert name in GAUGES, name
        self.data[f"{name}@{rank}"] = value

    def take(self) -> "OverspillStats | None":
        """Stats since the last call, or None if there are none."""
        if not self.data:
            return None
        taken = OverspillStats(data=self.data)
        self.data = {}
        return taken

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = value if "@" in name else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        data = self.data
        line: dict[str, int | float] = {}
        for way in ("load", "store"):
            num_bytes, seconds = data.get(f"{way}_bytes", 0), data.get(f"{way}_seconds", 0.0)
            if num_bytes:
                line[f"{way} MB"] = round(num_bytes / 1e6, 1)
                line[f"{way} GB/s"] = round(num_bytes / 1e9 / seconds, 1) if seconds else 0.0
        if data.get("spilled_steps"):
            line["spilled steps"] = data["spilled_steps"]
            line["spill MB per step"] = round(data.get("spill_in_bytes", 0) / 1e6 / data["spilled_steps"], 1)
        for name in _SHOWN:
            if data.get(name):
                line[name.replace("_", " ")] = data[name]
        if "pool_used_bytes@0" in data:
            line["pool used MB"] = round(data["pool_used_bytes@0"] / 1e6, 1)
        return line

    def is_empty(self) -> bool:
        return not self.data


class OverspillPromMetrics(KVConnectorPromMetrics):
    """The `overspill_*` series, with one child per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister_series()
        self._series: dict[str, dict[int, Any]] = {}
        self._of_rank: dict[tuple[int, str], dict[str, float]] = {}
        for kind, table in ((Counter, COUNTERS), (Gauge, GAUGES)):
            for name, text in table.items():
                arguments: dict[str, Any] = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
                metric = metric_types[kind](
                    name=f"overspill_{name}", documentation=f"{text}.", labelnames=labelnames, **arguments
                )
                self._series[name] = {
                    engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            name, _, rank = key.partition("@")
            child = self._series[name][engine_idx]
            if not rank:
                child.inc(value)
                continue
            parts = self._of_rank.setdefault((engine_idx, name), {})
            parts[rank] = value
            child.set(max(parts.values()) if name == "pinning_refused" else sum(parts.values()))


def _unregister_series() -> None:
    """Let a second engine in the same process register its series again, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("overspill_"):
            REGISTRY.unregister(collector)
