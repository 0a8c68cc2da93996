"""RAM that was stated or planned, compared with this machine's: refused before anything starts."""

from overspill.hardware.machine import Machine
from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.kv.sizes import GiB, format_size, parse_size
from overspill.planning.connector_options import read_options
from overspill.planning.planner import Plan

# Left to the rest of the machine where the RAM to use is not given.
RESERVE_BYTES = 4 * GiB


class TooMuchRam(OverspillError):
    """More RAM than this machine has, or has available."""


def require_total(machine: Machine, ram_bytes: int, stand_in_bytes: int = 0) -> None:
    """`--ram` is at most what the machine, or its cgroup, could ever give, beside the RAM that plays a GPU's memory."""
    limit, need = machine.ram_limit_bytes, ram_bytes + stand_in_bytes
    asked = f"--ram {format_size(ram_bytes)}"
    if stand_in_bytes:
        asked += f" beside {format_size(stand_in_bytes)} in place of a GPU's memory (--gpu-memory)"
    which = f"{limit.note} allows" if limit is machine.cgroup_limit_bytes else "this machine has"
    _require(
        need, limit.value, stand_in_bytes,
        f"{asked} needs {format_size(need)} of RAM, and {which} {format_size(limit.value)}",
        "To plan for another machine, state its card too, as with --gpu rtx4090",
    )  # fmt: skip


def require_available(machine: Machine, plan: Plan) -> None:
    """What the plan takes is there now: otherwise the engine would say so after loading the model."""
    way, available = plan.chosen, machine.ram_available_bytes
    if way is None:
        return
    stand_in = plan.budget.limit_bytes.value if plan.platform.is_cpu else 0
    takes, pools = way.peak_ram_bytes + stand_in, sum(way.connector_sizes.values())
    # The engine insists on its reserve beside its pools, and on none where it has no pools.
    reserve = parse_size(read_options(plan.wishes.kv_options).get("reserve_bytes", Options.reserve_bytes))
    reserved = f", of which {format_size(pools)} must leave {format_size(reserve)} free" if pools else ""
    _require(
        max(takes, pools + reserve if pools else 0), available.value, stand_in,
        f"the plan takes {format_size(takes)} of RAM{reserved}; {format_size(available.value)} is available now "
        f"({available.note})",
        "End other programs, or start it all the same with --force",
    )  # fmt: skip


def _require(need: int, have: int, stand_in: int, said: str, otherwise: str) -> None:
    if need <= have:
        return
    most = (have - stand_in - RESERVE_BYTES) // GiB
    advice = f"Use --ram {most}GiB, or leave" if most > 0 else "Leave"
    raise TooMuchRam(
        f"{said}. {advice} --ram out to use what is available less {format_size(RESERVE_BYTES)}. {otherwise}"
    )
