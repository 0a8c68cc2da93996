"""A plan for a named model on this machine, or on one that is stated: the effects around the arithmetic."""

from collections.abc import Mapping
from typing import Any

from overspill.figures import Known, derived
from overspill.hardware import detect, with_stated
from overspill.model.read import read_model
from overspill.plan.planner import GIB, Plan, Wishes, make_plan

# Left to the rest of the machine where the RAM to use is not given.
_RESERVE_BYTES = 4 * GIB


def plan_for(model: str, settings: Mapping[str, Any]) -> Plan:
    """`settings` are the values of `overspill.settings`, by name."""
    facts = read_model(model)
    ram = settings.get("ram")
    hardware = with_stated(
        detect(), gpu=settings.get("gpu"), ram=None if ram is None else f"{ram}B", link=settings.get("link")
    )
    available = hardware.machine.ram_available_bytes
    wishes = Wishes(
        max_model_len=settings.get("max_model_len"),
        gpu_memory_bytes=settings.get("gpu_memory"),
        kv_cache_dtype=settings.get("kv_cache_dtype"),
    )
    return make_plan(facts, hardware.first_gpu(), available if ram is not None else _less_reserve(available), wishes)


def _less_reserve(available: Known[int]) -> Known[int]:
    note = "; ".join(filter(None, (available.note, "less 4 GiB for the rest of the machine")))
    return derived(max(0, available.value - _RESERVE_BYTES), available, note=note)
