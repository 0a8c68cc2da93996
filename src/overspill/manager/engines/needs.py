"""What a model needs and what it would take, by its plan for the machine as it would be with other engines gone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from overspill.figures import Known, derived
from overspill.hardware import Hardware, detect
from overspill.kv.errors import OverspillError
from overspill.launch.launch import Launch
from overspill.launch.machine import TooMuchRam
from overspill.launch.reference import ModelRef
from overspill.manager.engines.memory import NOTHING, Memory
from overspill.planning.attempts import peak_ram_bytes
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.registry import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    least: Memory = NOTHING
    """With which it can be started."""
    takes: Memory = NOTHING
    """What it would hold on the machine as it is: without a limit an engine takes what is free."""
    refused: str = ""
    """Why it cannot be started, whatever is stopped for it."""


def reckon(settings: ModelSettings, evictable: Memory) -> Need:
    """Reads the model's files and looks at the machine: not for the event loop. What cannot be planned needs nothing:
    starting it says why."""
    try:
        launch = Launch.of(ModelRef.of_model(settings.source, settings), {}, found=with_more(detect(), evictable))
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
    is_limited = is_given or way.num_mechanisms > 0
    device = limit if is_limited else min(limit, plan.need_gpu_bytes)
    least_ram = peak_ram_bytes(way.weights, way.kv.spilled_bytes + (settings.get("offload_ram") or 0))
    takes_ram = way.peak_ram_bytes
    if plan.platform.is_cpu:
        # RAM plays the GPU's memory.
        return Need(least=Memory(ram_bytes=least_ram + device), takes=Memory(ram_bytes=takes_ram + limit))
    return Need(least=Memory(gpu_bytes=device, ram_bytes=least_ram), takes=Memory(gpu_bytes=limit, ram_bytes=takes_ram))


def free_memory() -> Memory:
    """Now, on this machine: of the GPU an engine would take, and of RAM."""
    hardware = detect()
    gpu = hardware.gpus[0].free_bytes.value if hardware.gpus else 0
    return Memory(gpu_bytes=gpu, ram_bytes=hardware.machine.ram_available_bytes.value)


def with_more(hardware: Hardware, evictable: Memory) -> Hardware:
    """As if engines that hold so much were gone."""
    machine = hardware.machine
    ram = _more(machine.ram_available_bytes, evictable.ram_bytes, machine.ram_total_bytes.value)
    gpus = hardware.gpus
    if gpus:
        first = replace(gpus[0], free_bytes=_more(gpus[0].free_bytes, evictable.gpu_bytes, gpus[0].total_bytes.value))
        gpus = (first, *gpus[1:])
    return replace(hardware, machine=replace(machine, ram_available_bytes=ram), gpus=gpus)


def _more(figure: Known[int], num_bytes: int, most: int) -> Known[int]:
    if not num_bytes:
        return figure
    return derived(min(most, figure.value + num_bytes), figure, note="; ".join(filter(None, (figure.note, _NOTE))))


_NOTE = "with what other engines hold"
