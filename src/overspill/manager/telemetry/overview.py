"""The dashboard's view of one moment: a line per engine, where memory goes, and where KV lies; no effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from overspill.manager.needs import Replanned, gpus_of
from overspill.manager.states import Snapshot, State, Traffic
from overspill.manager.telemetry.engine_metrics import Rates, mean
from overspill.manager.telemetry.machine import Sample
from overspill.manager.telemetry.watcher import STALE_S, EngineNumbers, Moment
from overspill.planning.attempts import PROCESS_RAM_BYTES

# The order of reading: what works, what is about to, what does not.
_ORDER = (State.READY, State.STARTING, State.STOPPING, State.FAILED, State.PARKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLine:
    """One engine's numbers; None for those that are unknown or older than some seconds."""

    name: str
    engine: Snapshot | None
    """Snapshot of the engine; None for a server that Overspill did not start."""
    tokens_per_s: float | None = None
    running: int = 0
    queued: int = 0
    """Requests that wait in the engine, or before it until its model is ready."""
    gpu_hits: float | None = None
    """Share of all prompt tokens since the engine's start that hit the GPU's prefix cache."""
    ram_hits: float | None = None
    """Share of all prompt tokens since the engine's start that hit in RAM."""
    kv_use: float | None = None
    ttft_s: float | None = None
    """Mean over requests of the last second, else over all since the engine's start."""

    @property
    def state(self) -> str:
        return str(self.engine.state) if self.engine is not None else "found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    lines: tuple[EngineLine, ...]
    stopped: tuple[str, ...]
    """Models without a running engine."""

    @property
    def headline(self) -> str:
        states = [line.state for line in self.lines]
        counts = [f"{states.count(state)} {state}" for state in (*map(str, _ORDER), "found") if state in states]
        return ", ".join(counts) or ("Nothing runs" if self.stopped else "No models yet")

    @property
    def tokens_per_s(self) -> float:
        return sum(line.tokens_per_s or 0.0 for line in self.lines)

    @property
    def running(self) -> int:
        return sum(line.running for line in self.lines)

    @property
    def queued(self) -> int:
        return sum(line.queued for line in self.lines)


def overview(moment: Moment | None, engines: Sequence[Snapshot]) -> Overview:
    numbers: dict[str, EngineNumbers] = {}
    if moment is not None:
        numbers = {name: one for name, one in moment.engines.items() if moment.sample.at - one.metrics.at <= STALE_S}
    known = {one.name: one for one in engines}
    shown = sorted((one for one in engines if one.state in _ORDER), key=lambda one: _ORDER.index(one.state))
    lines = [_line(one.name, one, numbers) for one in shown]
    lines += [_line(name, None, numbers) for name in sorted(numbers.keys() - known.keys())]
    stopped = tuple(one.name for one in engines if one.state is State.STOPPED)
    return Overview(lines=tuple(lines), stopped=stopped)


def _line(name: str, engine: Snapshot | None, numbers: Mapping[str, EngineNumbers]) -> EngineLine:
    traffic = engine.traffic if engine is not None else Traffic()
    one = numbers.get(name)
    if one is None:
        return EngineLine(name=name, engine=engine, running=traffic.in_flight, queued=traffic.waiting)
    metrics, rates = one.metrics, one.rates or Rates(seconds=0.0)
    return EngineLine(
        name=name,
        engine=engine,
        tokens_per_s=rates.generation_tokens_per_s,
        running=int(traffic.in_flight if metrics.requests_running is None else metrics.requests_running),
        queued=traffic.waiting + int(metrics.requests_waiting or 0),
        gpu_hits=mean(metrics.prefix_hits, metrics.prefix_queries),
        ram_hits=mean(metrics.external_hits, metrics.prefix_queries),
        kv_use=metrics.kv_cache_use,
        ttft_s=rates.ttft_s if rates.ttft_s is not None else mean(metrics.ttft_seconds, metrics.ttft_count),
    )


# Memory maps, whose parts add up to the total

Sizes = Mapping[str, int | None]
"""An engine's memory as its workers report it: fields of overspill.serve.status.Memory."""


class Kind(StrEnum):
    WEIGHTS = "weights"
    USED_KV = "KV in use"
    """Used part of an elastic engine's KV; the rest of what the engine holds is its cache."""
    RESIDENT_KV = "KV cache"
    WINDOW = "window for spilled KV"
    ACTIVATIONS = "activations and graphs"
    SPILLED_KV = "spilled KV"
    OFFLOAD_POOL = "pool for idle KV"
    ENGINE_OTHER = "other of this engine"
    JOB = "measurement"
    OTHER = "other programs"
    GRANTED_KV = "granted KV"
    """Memory that an elastic engine may take at any moment."""
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    kind: Kind
    num_bytes: int
    engine: str | None = None
    """Name of the engine; None for memory of no engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Memory that an engine reports, and what the driver or the kernel counts for it."""

    engine: str
    parts: tuple[tuple[Kind, int], ...]
    """Reported parts, the surest first: if less is in use than reported, as during a start, the last are cut."""
    taken_bytes: int | None
    """Bytes as counted from outside; None where nothing counts them, as for GPU memory under WSL."""


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
    """One number of an engine, with None as value if the engine does not report it."""

    name: str
    value: float | None
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTiers:
    engine: str
    is_stale: bool
    tiers: tuple[Tier, ...]


def memory_maps(sample: Sample, engines: Sequence[Snapshot]) -> list[Map]:
    """Memory maps of each GPU, then of RAM."""
    engine_names = {one.name for one in engines}
    running = [(one, sample.processes.get(one.name), one.plan.get("device") == "cpu") for one in engines if one.pid]
    maps = []
    for at, gpu in enumerate(sample.gpus):
        here = [one for one in engines if gpu.index in gpus_of(one.plan)]
        claims = [
            gpu_claim(
                one.name,
                _sizes_on_each(one) if one in here and one.state is not State.PARKED else {},
                process.gpus[at] if process else None,
            )
            for one, process, on_cpu in running
            if not on_cpu
        ]
        held = [(name, one.gpus[at]) for name, one in sample.processes.items() if name not in engine_names]
        claims += [Claim(engine=name, parts=((Kind.JOB, size or 0),), taken_bytes=size) for name, size in held]
        parts = with_granted(memory_map(gpu.total_bytes, gpu.used_bytes, claims), here)
        maps.append(Map(title=f"GPU {gpu.index}: {gpu.name}", total_bytes=gpu.total_bytes, parts=tuple(parts)))
    total, used = sample.ram.total_bytes, sample.ram.total_bytes - sample.ram.available_bytes
    claims = [
        ram_claim(
            one.name,
            _with_copy(one),
            process.ram_bytes if process else None,
            on_cpu=on_cpu and one.state is not State.PARKED,
        )
        for one, process, on_cpu in running
    ]
    jobs = [(name, one) for name, one in sample.processes.items() if name not in engine_names]
    claims += [Claim(engine=name, parts=((Kind.JOB, one.ram_bytes),), taken_bytes=one.ram_bytes) for name, one in jobs]
    return [*maps, Map(title="RAM", total_bytes=total, parts=tuple(memory_map(total, used, claims)))]


def plan_maps(planned: Replanned) -> list[Map]:
    """Memory maps of the GPU and RAM under a plan; as they are now if the plan found no way."""
    plan, way = planned.plan, planned.plan.chosen
    ranks, is_cpu = plan.num_ranks, plan.platform.is_cpu
    device_bytes = plan.budget.limit_bytes.value
    # On a CPU, a part of RAM takes the place of GPU memory.
    total, held = device_bytes, 0
    if not is_cpu:
        total = plan.gpu.total_bytes.value
        held = max(0, total - plan.gpu.free_bytes.value)
    sizes: Sizes = {}
    in_ram: Sizes = {}
    taken = 0
    if way is not None:
        sizes = {
            "weights_bytes": plan.rank.weights.total_bytes - way.weights.saved_bytes,
            "resident_kv_bytes": way.kv.resident_bytes,
            "window_bytes": way.kv.window_bytes,
            "activation_bytes": way.overheads.total.value + plan.budget.context_bytes.value,
        }
        in_ram = {
            "weights_in_ram_bytes": ranks * (way.weights.pinned_bytes + (way.parked_bytes if way.parks else 0)),
            "spilled_bytes": ranks * way.kv.spilled_bytes,
            "pool_bytes": ranks * way.offload_bytes,
        }
        taken = ranks * PROCESS_RAM_BYTES + (ranks * device_bytes if is_cpu else 0)
    on_device = Claim(engine="", parts=_device_parts(sizes), taken_bytes=sum(size or 0 for size in sizes.values()))
    of_ram = ram_claim("", in_ram, sum(size or 0 for size in in_ram.values()) + taken)
    ram_held = max(0, planned.ram_total_bytes - planned.ram_free_bytes)
    title = "RAM in the GPU's place" if is_cpu else ("GPU" if ranks == 1 else f"Each of {ranks} GPUs")
    maps = ((title, total, held, on_device), ("RAM", planned.ram_total_bytes, ram_held, of_ram))
    return [
        Map(title=name, total_bytes=size, parts=tuple(memory_map(size, others + (claim.taken_bytes or 0), [claim])))
        for name, size, others, claim in maps
    ]


def _with_copy(engine: Snapshot) -> Sizes:
    """An engine's sizes, with the copy of the weights that is kept for parking."""
    copied, sizes = int(engine.plan.get("parked_bytes") or 0), _sizes(engine)
    return {**sizes, "weights_in_ram_bytes": (sizes.get("weights_in_ram_bytes") or 0) + copied}


def _sizes(engine: Snapshot) -> Sizes:
    """An engine's sizes; workers know only the addresses of elastic KV, so the memory under them is the ledger's."""
    if not engine.kv:
        return engine.memory
    used = min(engine.kv["used"], engine.kv["held"])
    return {**engine.memory, "used_kv_bytes": used, "resident_kv_bytes": engine.kv["held"] - used}


def _sizes_on_each(engine: Snapshot) -> Sizes:
    """An engine's sizes on each of its GPUs; workers report their sum."""
    ranks = len(gpus_of(engine.plan))
    return {name: size and size // ranks for name, size in _sizes(engine).items()}


def with_granted(parts: Sequence[Part], engines: Sequence[Snapshot]) -> list[Part]:
    """Parts with KV split off from free memory that elastic engines were granted and have not taken yet."""
    missing = [
        (one.name, one.kv["granted"] - one.kv["held"])
        for one in engines
        if one.kv and one.state is State.READY and one.kv["granted"] > one.kv["held"]
    ]
    free = sum(part.num_bytes for part in parts if part.kind is Kind.FREE)
    shown = [part for part in parts if part.kind is not Kind.FREE]
    for name, num_bytes in missing:
        shown.append(Part(kind=Kind.GRANTED_KV, num_bytes=min(num_bytes, free), engine=name))
        free -= shown[-1].num_bytes
    return [part for part in (*shown, Part(kind=Kind.FREE, num_bytes=free)) if part.num_bytes]


def gpu_claim(engine: str, memory: Sizes, taken_bytes: int | None) -> Claim:
    parts = _device_parts(memory)
    known = sum(size for _, size in parts) + (memory.get("non_torch_bytes") or 0) + (memory.get("context_bytes") or 0)
    return Claim(engine=engine, parts=parts, taken_bytes=known if taken_bytes is None else taken_bytes)


def ram_claim(engine: str, memory: Sizes, taken_bytes: int | None, *, on_cpu: bool = False) -> Claim:
    """Claim on RAM, which on the CPU platform includes what a GPU would hold."""
    parts: tuple[tuple[Kind, int], ...] = (
        (Kind.WEIGHTS, memory.get("weights_in_ram_bytes") or 0),
        (Kind.SPILLED_KV, memory.get("spilled_bytes") or 0),
        (Kind.OFFLOAD_POOL, memory.get("pool_bytes") or 0),
    )
    if on_cpu:
        parts += tuple(part for part in _device_parts(memory) if part[0] is not Kind.ACTIVATIONS)
    known = sum(size for _, size in parts)
    return Claim(engine=engine, parts=parts, taken_bytes=known if taken_bytes is None else taken_bytes)


def _device_parts(memory: Sizes) -> tuple[tuple[Kind, int], ...]:
    return (
        (Kind.WEIGHTS, memory.get("weights_bytes") or 0),
        (Kind.USED_KV, memory.get("used_kv_bytes") or 0),
        (Kind.RESIDENT_KV, memory.get("resident_kv_bytes") or 0),
        (Kind.WINDOW, memory.get("window_bytes") or 0),
        (Kind.ACTIVATIONS, (memory.get("activation_bytes") or 0) + (memory.get("graph_bytes") or 0)),
    )


def memory_map(total_bytes: int, used_bytes: int, claims: Sequence[Claim]) -> list[Part]:
    """Parts of each engine, then other programs, then free memory; parts of 0 bytes are left out."""
    total = max(0, total_bytes)
    used = left = min(max(0, used_bytes), total)
    parts: list[Part] = []
    for claim in claims:
        taken = min(max(0, claim.taken_bytes or 0), left)
        left -= taken
        sizes: dict[Kind, int] = {}
        for kind, claimed in claim.parts:
            size = min(max(0, claimed), taken)
            taken -= size
            sizes[kind] = sizes.get(kind, 0) + size
        sizes[Kind.ENGINE_OTHER] = sizes.get(Kind.ENGINE_OTHER, 0) + taken
        parts += [Part(kind=kind, num_bytes=size, engine=claim.engine) for kind, size in sizes.items()]
    parts += [Part(kind=Kind.OTHER, num_bytes=left), Part(kind=Kind.FREE, num_bytes=total - used)]
    return [part for part in parts if part.num_bytes]


# Numbers of an engine on the dashboard: title, field of Metrics, Rates or Sizes, and unit.
_TIERS = (
    ("KV on the GPU", "resident_kv_bytes", "bytes"),
    ("KV granted", "granted_kv_bytes", "bytes"),
    ("spilled KV in RAM", "spilled_bytes", "bytes"),
    ("idle KV in RAM", "pool_used_bytes", "bytes"),
    ("pool for idle KV", "pool_bytes", "bytes"),
    ("KV in use", "kv_cache_use", "share"),
    ("resident blocks in use", "resident_blocks_used", ""),
    ("spilled blocks in use", "spilled_blocks_used", ""),
    ("tokens from RAM, in all", "ram_hit_tokens", "tokens"),
    ("prompt tokens", "prompt_tokens_per_s", "tok/s"),
    ("time per token", "tpot_s", "s"),
    ("RAM to GPU", "load_bytes_per_s", "bytes/s"),
    ("GPU to RAM", "store_bytes_per_s", "bytes/s"),
)


def engine_tiers(moment: Moment, engines: Sequence[Snapshot]) -> list[EngineTiers]:
    """Tiers of the engines whose numbers are known."""
    memory = {
        one.name: {**one.memory, "granted_kv_bytes": one.kv["granted"], "resident_kv_bytes": one.kv["held"]}
        if one.kv
        else one.memory
        for one in engines
    }
    return [
        EngineTiers(
            engine=name,
            is_stale=moment.sample.at - numbers.metrics.at > STALE_S,
            tiers=tuple(
                Tier(name=title, value=_number(numbers, memory.get(name, {}), field), unit=unit)
                for title, field, unit in _TIERS
            ),
        )
        for name, numbers in sorted(moment.engines.items())
    ]


def _number(numbers: EngineNumbers, memory: Sizes, field: str) -> float | None:
    """Value of a field; `pool_bytes` is in metrics and sizes, and the metric, which is current, comes first."""
    for source in (numbers.metrics, numbers.rates):
        if hasattr(source, field):
            value: float | None = getattr(source, field)
            return value
    return memory.get(field)
