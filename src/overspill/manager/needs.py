"""Needs: memory that a model requires and would take, by its plan for the machine with other engines gone."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import add, sub
from typing import Any

from overspill.figures import Known, derived
from overspill.hardware import Hardware, detect
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size
from overspill.launch.launch import Launch
from overspill.launch.machine import TooMuchRam
from overspill.launch.reference import ModelRef
from overspill.planning.attempts import PROCESS_RAM_BYTES, peak_ram_bytes
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.planning.report import longest_as_text, plan_as_json
from overspill.registry import ModelSettings

_LEAST_CONTEXT = 256
_MOST_STEPS = 512
SHORT_CONTEXT = 4096
"""Context of a usual request, shown beside the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Amounts of memory on each GPU and in RAM: needed, held or free."""

    gpus: tuple[int, ...] = ()
    """Bytes on each GPU, as NVML numbers them; 0 where left out. On a CPU, the RAM in place of a GPU."""
    ram_bytes: int = 0

    def __post_init__(self) -> None:
        last = max((at for at, size in enumerate(self.gpus) if size), default=-1)
        object.__setattr__(self, "gpus", self.gpus[: last + 1])  # a canonical form, since amounts are compared

    @property
    def gpu_bytes(self) -> int:
        return sum(self.gpus)

    def of_gpu(self, index: int) -> int:
        return self.gpus[index] if index < len(self.gpus) else 0

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(gpus=_each(add, self.gpus, other.gpus), ram_bytes=self.ram_bytes + other.ram_bytes)

    def __sub__(self, other: "Memory") -> "Memory":
        return Memory(gpus=_each(sub, self.gpus, other.gpus), ram_bytes=self.ram_bytes - other.ram_bytes)

    def holds(self, need: "Memory") -> bool:
        fits = _each(lambda have, want: want <= max(0, have), self.gpus, need.gpus)
        return all(fits) and need.ram_bytes <= max(0, self.ram_bytes)

    def where(self, limits: "Memory", otherwise: "Memory") -> "Memory":
        """These amounts where `limits` has a limit, and the other ones elsewhere."""
        places = range(max(len(self.gpus), len(otherwise.gpus)))
        gpus = tuple((otherwise if limits.of_gpu(at) == NO_LIMIT else self).of_gpu(at) for at in places)
        return Memory(gpus=gpus, ram_bytes=(otherwise if limits.ram_bytes == NO_LIMIT else self).ram_bytes)

    def where_needed(self, need: "Memory") -> "Memory":
        """Amounts only where something is needed: other places may have no limit."""
        gpus = tuple(self.of_gpu(index) if size else 0 for index, size in enumerate(need.gpus))
        return Memory(gpus=gpus, ram_bytes=self.ram_bytes if need.ram_bytes else 0)

    def __str__(self) -> str:
        is_first = len(self.gpus) == 1
        parts = [
            f"{format_size(max(0, size))} of GPU memory" + ("" if is_first else f" on GPU {index}")
            for index, size in enumerate(self.gpus)
            if size
        ]
        parts += [f"{format_size(max(0, self.ram_bytes))} of RAM"] if self.ram_bytes else []
        return " and ".join(parts) or "no memory"


def _each(how: Callable[[int, int], int], left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(how(one, other) for one, other in zip_longest(left, right, fillvalue=0))


def on_gpus(num_bytes: int, indices: Iterable[int] = (0,), ram_bytes: int = 0) -> Memory:
    """Memory of `num_bytes` on each of these GPUs."""
    chosen = set(indices)
    return Memory(gpus=tuple(num_bytes * (at in chosen) for at in range(max(chosen) + 1)), ram_bytes=ram_bytes)


NOTHING = Memory()
# In a budget: only what is free limits this memory.
NO_LIMIT = 1 << 60


def total(parts: list[Memory]) -> Memory:
    return sum(parts, NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    least: Memory = NOTHING
    """Least memory with which the model can be started."""
    takes: Memory = NOTHING
    """Memory the engine will hold on the machine as it is: without a limit an engine takes what is free."""
    refused: str = ""
    """Why the model cannot be started, whatever engines are stopped; empty if it can."""


def reckon(settings: ModelSettings, evictable: Memory) -> Need:
    """Need of a model once `evictable` is freed. Reads the model's files and the machine: not for the event loop.
    A model that cannot be planned needs nothing: starting it reports why."""
    try:
        launch = _planned(settings, with_more(detect(), evictable))
    except TooMuchRam as error:
        return Need(refused=str(error))
    except OverspillError:
        return Need()
    return need_of(launch.plan, launch.settings)


def need_of(plan: Plan, settings: Mapping[str, Any]) -> Need:
    way = plan.chosen
    if way is None:
        return Need(refused=refusal(plan))
    limit = plan.budget.limit_bytes.value
    is_given = any(settings.get(name) is not None for name in ("gpu_memory", "gpu_memory_utilization"))
    is_elastic = plan.wishes.elastic and way.offload_bytes > 0
    is_limited = (is_given and not is_elastic) or way.num_mechanisms > 0
    # Elastic KV grows and shrinks in pieces of up to a sixteenth.
    piece = way.kv.device_bytes // 16 if is_elastic else 0
    device = limit if is_limited else min(limit, plan.need_gpu_bytes + piece)
    kv_bytes = way.kv.spilled_bytes + (settings.get("offload_ram") or 0) // plan.num_ranks
    least_ram = plan.num_ranks * peak_ram_bytes(way.weights, kv_bytes + way.parked_bytes)
    takes_ram = way.peak_ram_bytes
    if plan.platform.is_cpu:
        kv = way.kv.device_bytes if is_elastic else 0
        least = _on_cpu(plan.num_ranks * device, least_ram, kv - (limit - device))
        return Need(least=least, takes=_on_cpu(plan.num_ranks * limit, takes_ram, kv))
    gpus = [gpu.index for gpu in plan.gpus]
    return Need(least=on_gpus(device, gpus, least_ram), takes=on_gpus(limit, gpus, takes_ram))


def _on_cpu(device_bytes: int, ram_bytes: int, elastic_bytes: int) -> Memory:
    """Memory on a CPU, where RAM replaces the GPU's; KV that engines share is counted apart, as on a GPU."""
    shared = max(0, elastic_bytes)
    return on_gpus(shared, ram_bytes=ram_bytes + device_bytes - shared)


def holds_of(plan: Mapping[str, Any]) -> Memory:
    """Memory of an engine started by this plan, given as JSON; none without a plan."""
    if not plan:
        return NOTHING
    parts = ("weights_pinned_bytes", "spilled_kv_bytes", "offload_bytes", "parked_bytes")
    gpus = gpus_of(plan)
    ranks = len(gpus)
    ram = sum(int(plan.get(name) or 0) for name in parts) + ranks * PROCESS_RAM_BYTES
    given = plan.get("gpu_bytes")
    device = int(given["value"] if isinstance(given, Mapping) else given or 0)
    if plan.get("device") == "cpu":
        return _on_cpu(ranks * device, ram, int(plan.get("resident_kv_bytes") or 0) if plan.get("elastic") else 0)
    return on_gpus(device, gpus, ram)


def gpus_of(plan: Mapping[str, Any]) -> list[int]:
    """GPU index of each rank of an engine, by its plan as JSON."""
    return [rank.get("index") or 0 for rank in plan.get("ranks") or [{}]]


def free_memory() -> Memory:
    """Free memory of this machine: on each GPU, or the RAM in its place, and RAM."""
    hardware = detect()
    ram = hardware.machine.ram_available_bytes.value
    gpus = [on_gpus(gpu.free_bytes.value, [gpu.index]) for gpu in hardware.gpus]
    return total([*(gpus or [on_gpus(ram)]), Memory(ram_bytes=ram)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A model's plan at a context of the user's choice."""

    plan: Plan
    limit: int
    """Longest context that the model was made for."""
    short: Plan | None = None
    """Plan of a short request on the same engine."""
    ram_total_bytes: int = 0
    ram_free_bytes: int = 0
    """Free RAM before the model is started."""

    @property
    def fits(self) -> bool:
        return self.plan.recommended is not None

    @property
    def why_not(self) -> str:
        return "" if self.fits else refusal(self.plan)

    @property
    def longest(self) -> str:
        """Sentence on the longest context with and without RAM."""
        return longest_as_text(self.plan)

    @property
    def step(self) -> int:
        """Step of a slider over all contexts, in tokens."""
        step = _LEAST_CONTEXT
        while self.limit / step > _MOST_STEPS:
            step *= 2
        return step

    def as_json(self) -> dict[str, Any]:
        return {**plan_as_json(self.plan), "why_not": self.why_not, "limit": self.limit}


def replan(settings: ModelSettings, changes: Mapping[str, Any], own: Memory) -> Replanned:
    """Plan with `changes`, given as parsed values; `own` is what the model's engine holds now. Reads files. Blocks."""
    hardware = with_more(detect(), own)
    plan = _planned(settings.changed(changes), hardware).plan
    short = None
    if plan.chosen is not None and plan.max_model_len > SHORT_CONTEXT:
        same = {"max_model_len": SHORT_CONTEXT, "weights_ram": plan.chosen.weights.ram_bytes * plan.num_ranks}
        with suppress(OverspillError):
            short = _planned(settings.changed({**changes, **same}), hardware).plan
    return Replanned(
        plan=plan,
        limit=max(plan.facts.max_position_embeddings, plan.max_model_len),
        short=short,
        ram_total_bytes=hardware.machine.ram_total_bytes.value,
        ram_free_bytes=hardware.machine.ram_available_bytes.value,
    )


def _planned(settings: ModelSettings, hardware: Hardware) -> Launch:
    return Launch.of(ModelRef.of_model(settings.source, settings), {}, found=hardware)


def with_more(hardware: Hardware, evictable: Memory) -> Hardware:
    """The hardware with more memory free, as if engines holding `evictable` had stopped."""
    machine = hardware.machine
    ram = _more(machine.ram_available_bytes, evictable.ram_bytes, machine.ram_total_bytes.value)
    freer = tuple(
        replace(gpu, free_bytes=_more(gpu.free_bytes, evictable.of_gpu(gpu.index), gpu.total_bytes.value))
        for gpu in hardware.gpus
    )
    return replace(hardware, machine=replace(machine, ram_available_bytes=ram), gpus=freer)


def _more(figure: Known[int], num_bytes: int, most: int) -> Known[int]:
    if not num_bytes:
        return figure
    note = "; ".join(filter(None, (figure.note, "with what other engines hold")))
    return derived(min(most, figure.value + num_bytes), figure, note=note)
