"""Where a GPU's memory and the machine's RAM go. Parts add up to the total, and none is negative."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from overspill.serve.engine_report import Report


class Kind(StrEnum):
    WEIGHTS = "weights"
    RESIDENT_KV = "KV cache"
    WINDOW = "window for spilled KV"
    ACTIVATIONS = "activations and graphs"
    SPILLED_KV = "spilled KV"
    OFFLOAD_POOL = "pool for idle KV"
    ENGINE_OTHER = "other of this engine"
    OTHER = "other programs"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    kind: Kind
    num_bytes: int
    engine: str | None = None
    """Whose it is; None for what is no engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What an engine says, or its plan, and what the driver or the kernel counts for it."""

    engine: str
    parts: tuple[tuple[Kind, int], ...]
    """The surest first: where less is in use than they say, as while an engine starts, the last are cut."""
    taken_bytes: int | None
    """As counted from outside; None where nobody counts, as for GPU memory under WSL."""


def gpu_claim(engine: str, report: Report, taken_bytes: int | None) -> Claim:
    """Of one worker on its GPU."""
    resident = report.resident_bytes if report.resident_bytes is not None else report.kv_bytes
    graphs = report.captured_graph_bytes if report.captured_graph_bytes is not None else report.graph_bytes
    parts = (
        (Kind.WEIGHTS, report.weights_bytes or 0),
        (Kind.RESIDENT_KV, resident or 0),
        (Kind.WINDOW, report.window_bytes or 0),
        (Kind.ACTIVATIONS, (report.activation_bytes or 0) + (graphs or 0)),
    )
    known = sum(size for _, size in parts) + (report.non_torch_bytes or 0) + (report.context_bytes or 0)
    # Nobody counts: what the engine itself says is all there is.
    return Claim(engine=engine, parts=parts, taken_bytes=known if taken_bytes is None else taken_bytes)


def ram_claim(engine: str, reports: Sequence[Report], taken_bytes: int | None, *, on_cpu: bool = False) -> Claim:
    """Of an engine with all its workers. On the CPU platform what would be the GPU's is in RAM as well."""
    parts = [
        (Kind.WEIGHTS, sum(report.weights_in_ram_bytes or 0 for report in reports)),
        (Kind.SPILLED_KV, sum(report.arena.num_bytes for report in reports if report.arena is not None)),
        (Kind.OFFLOAD_POOL, sum(report.pool.num_bytes for report in reports if report.pool is not None)),
    ]
    if on_cpu:
        of_device = [gpu_claim(engine, report, None).parts for report in reports]
        kinds = (Kind.WEIGHTS, Kind.RESIDENT_KV, Kind.WINDOW)
        parts += [(kind, sum(dict(parts_of_one)[kind] for parts_of_one in of_device)) for kind in kinds]
    known = sum(size for _, size in parts)
    return Claim(engine=engine, parts=tuple(parts), taken_bytes=known if taken_bytes is None else taken_bytes)


def memory_map(total_bytes: int, used_bytes: int, claims: Sequence[Claim]) -> list[Part]:
    """The parts of each engine, then other programs', then what is free; parts of 0 bytes are left out."""
    total = max(0, total_bytes)
    used = min(max(0, used_bytes), total)
    left = used
    parts: list[Part] = []
    for claim in claims:
        taken = min(max(0, claim.taken_bytes or 0), left)
        left -= taken
        parts += _parts(claim, taken)
    parts.append(Part(kind=Kind.OTHER, num_bytes=left))
    parts.append(Part(kind=Kind.FREE, num_bytes=total - used))
    return [part for part in parts if part.num_bytes]


def _parts(claim: Claim, taken: int) -> list[Part]:
    sizes: dict[Kind, int] = {}
    for kind, claimed in claim.parts:
        size = min(max(0, claimed), taken)
        taken -= size
        sizes[kind] = sizes.get(kind, 0) + size
    sizes[Kind.ENGINE_OTHER] = sizes.get(Kind.ENGINE_OTHER, 0) + taken
    return [Part(kind=kind, num_bytes=size, engine=claim.engine) for kind, size in sizes.items()]
