"""Where memory goes and where KV lies, as the dashboard shows it: from one moment, without effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.manager.engines.snapshots import Snapshot
from overspill.manager.watching.memory_map import Claim, Kind, Part, memory_map
from overspill.manager.watching.samples import Sample
from overspill.manager.watching.watcher import STALE_S, EngineNumbers, Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    title: str
    total_bytes: int
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        parts = [{"kind": str(one.kind), "bytes": one.num_bytes, "engine": one.engine} for one in self.parts]
        return {"title": self.title, "total_bytes": self.total_bytes, "parts": parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One number of an engine; None is what it does not tell."""

    name: str
    value: float | None
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTiers:
    engine: str
    is_stale: bool
    tiers: tuple[Tier, ...]


def memory_maps(sample: Sample, engines: Sequence[Snapshot]) -> list[Map]:
    """Of each GPU, then of RAM."""
    maps = [
        Map(
            title=f"GPU {gpu.index}: {gpu.name}",
            total_bytes=gpu.total_bytes,
            # What engines report is of all their GPUs together; of the first it is shown in parts.
            parts=tuple(memory_map(gpu.total_bytes, gpu.used_bytes, _gpu_claims(sample, engines, gpu.index))),
        )
        for gpu in sample.gpus
    ]
    ram = sample.ram
    used = ram.total_bytes - ram.available_bytes
    parts = memory_map(ram.total_bytes, used, [_ram_claim(sample, one) for one in engines if one.pid is not None])
    return [*maps, Map(title="RAM", total_bytes=ram.total_bytes, parts=tuple(parts))]


def engine_tiers(moment: Moment, engines: Sequence[Snapshot]) -> list[EngineTiers]:
    """Of engines that tell their numbers."""
    memory = {one.name: one.memory for one in engines}
    return [
        EngineTiers(
            engine=name,
            is_stale=moment.sample.at - numbers.metrics.at > STALE_S,
            tiers=_tiers(numbers, memory.get(name, {})),
        )
        for name, numbers in sorted(moment.engines.items())
    ]


def _tiers(numbers: EngineNumbers, memory: Mapping[str, int | None]) -> tuple[Tier, ...]:
    metrics, between = numbers.metrics, numbers.rates

    def rate(name: str) -> float | None:
        return getattr(between, name) if between is not None else None

    return (
        Tier(name="KV on the GPU", value=memory.get("resident_kv_bytes"), unit="bytes"),
        Tier(name="spilled KV in RAM", value=memory.get("spilled_bytes"), unit="bytes"),
        Tier(name="idle KV in RAM", value=metrics.pool_used_bytes, unit="bytes"),
        Tier(name="pool for idle KV", value=metrics.pool_bytes, unit="bytes"),
        Tier(name="KV in use", value=metrics.kv_cache_use, unit="share"),
        Tier(name="resident blocks in use", value=metrics.resident_blocks_used, unit=""),
        Tier(name="spilled blocks in use", value=metrics.spilled_blocks_used, unit=""),
        Tier(name="hits on the GPU", value=rate("prefix_hit_rate"), unit="share"),
        Tier(name="hits in RAM", value=rate("external_hit_rate"), unit="share"),
        Tier(name="tokens from RAM, in all", value=metrics.ram_hit_tokens, unit="tokens"),
        Tier(name="requests running", value=metrics.requests_running, unit=""),
        Tier(name="requests waiting", value=metrics.requests_waiting, unit=""),
        Tier(name="answer tokens", value=rate("generation_tokens_per_s"), unit="tok/s"),
        Tier(name="prompt tokens", value=rate("prompt_tokens_per_s"), unit="tok/s"),
        Tier(name="TTFT", value=rate("ttft_s"), unit="s"),
        Tier(name="time per token", value=rate("tpot_s"), unit="s"),
        Tier(name="RAM to GPU", value=rate("load_bytes_per_s"), unit="bytes/s"),
        Tier(name="GPU to RAM", value=rate("store_bytes_per_s"), unit="bytes/s"),
    )


def _gpu_claims(sample: Sample, engines: Sequence[Snapshot], index: int) -> list[Claim]:
    claims = []
    for one in engines:
        process = sample.processes.get(one.name)
        taken = process.gpu_bytes if process is not None else None
        if one.pid is None or one.plan.get("device") == "cpu":
            continue
        parts = _device_parts(one.memory) if index == 0 else ()
        known = sum(size for _, size in parts)
        claims.append(Claim(engine=one.name, parts=parts, taken_bytes=known if taken is None else taken))
    return claims


def _ram_claim(sample: Sample, engine: Snapshot) -> Claim:
    memory = engine.memory
    parts = [
        (Kind.WEIGHTS, memory.get("weights_in_ram_bytes") or 0),
        (Kind.SPILLED_KV, memory.get("spilled_bytes") or 0),
        (Kind.OFFLOAD_POOL, memory.get("pool_bytes") or 0),
    ]
    if engine.plan.get("device") == "cpu":
        parts += [(kind, size) for kind, size in _device_parts(memory) if kind is not Kind.ACTIVATIONS]
    process = sample.processes.get(engine.name)
    known = sum(size for _, size in parts)
    return Claim(
        engine=engine.name, parts=tuple(parts), taken_bytes=process.ram_bytes if process is not None else known
    )


def _device_parts(memory: Mapping[str, int | None]) -> tuple[tuple[Kind, int], ...]:
    return (
        (Kind.WEIGHTS, memory.get("weights_bytes") or 0),
        (Kind.RESIDENT_KV, memory.get("resident_kv_bytes") or 0),
        (Kind.WINDOW, memory.get("window_bytes") or 0),
        (Kind.ACTIVATIONS, (memory.get("activation_bytes") or 0) + (memory.get("graph_bytes") or 0)),
    )
