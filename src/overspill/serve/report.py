"""What an engine says of its own start: one JSON file for each worker, in a folder that the server was told of."""

import dataclasses
import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# Names a folder. It has no OVERSPILL_ in front, for it is no setting; serve gives it to the processes it starts.
VARIABLE = "_OVERSPILL_START_REPORT"


class Phase(StrEnum):
    """Of a start, in order; each value is the line that is shown."""

    STARTING = "starting vLLM"
    LOADING = "loading the model"
    PROFILING = "profiling its memory"
    ALLOCATING = "allocating the KV cache"
    WARMING_UP = "compiling and capturing graphs"
    STARTED = "starting to listen"
    READY = "ready"


_ORDER = list(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryReport:
    """RAM of the connector's: the pool of offload or the arena of spill."""

    num_bytes: int
    pinned_bytes: int
    is_prepared: bool
    """Whether filling and pinning it, which goes on in the background, is over."""
    refused: str
    """Why pinning was refused; empty if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """None is what is not known yet, or not on this platform."""

    phase: Phase
    weights_bytes: int | None = None
    """On the device, slots for those in RAM included."""
    offloader: str | None = None
    """vLLM's class."""
    weights_in_ram_bytes: int | None = None
    num_blocks: int | None = None
    kv_bytes: int | None = None
    """Of all blocks, resident and spilled."""
    resident_bytes: int | None = None
    spilled_bytes: int | None = None
    window_bytes: int | None = None
    pool: HostMemoryReport | None = None
    arena: HostMemoryReport | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_bytes: int | None = None
    """Set aside for CUDA graphs."""
    captured_graph_bytes: int | None = None
    """What they took."""
    context_bytes: int | None = None
    cudagraph_mode: str | None = None
    attention_backend: str | None = None
    max_model_len: int | None = None

    @property
    def host_memory(self) -> list[HostMemoryReport]:
        return [memory for memory in (self.pool, self.arena) if memory is not None]

    @property
    def is_prepared(self) -> bool:
        return all(memory.is_prepared for memory in self.host_memory)


def write(report: Report, folder: Path, rank: int) -> None:
    """Readers see the report before or this one, never a part."""
    path = folder / f"rank-{rank}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(dataclasses.asdict(report)))
    os.replace(new, path)


def read(folder: Path) -> list[Report]:
    """Of all ranks, in order; those that have not said anything are missing."""
    paths = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return [_parse(path.read_text()) for path in paths]


def earliest(reports: list[Report]) -> Phase:
    """The phase of the slowest worker."""
    return min((report.phase for report in reports), key=_ORDER.index, default=Phase.STARTING)


def _parse(text: str) -> Report:
    told = json.loads(text)
    for name in ("pool", "arena"):
        if told[name] is not None:
            told[name] = HostMemoryReport(**told[name])
    return Report(**{**told, "phase": Phase(told["phase"])})
