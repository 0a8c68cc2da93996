"""What is tried, and what must have happened for it to count."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Tier(StrEnum):
    OFFLOAD = "offload"
    SPILL = "spill"
    BOTH = "offload and spill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    title: str
    tier: Tier = Tier.OFFLOAD
    required: Mapping[str, str] = field(default_factory=dict)
    """Figures that must not be 0, and what it means if they are."""
    options: Mapping[str, Any] = field(default_factory=dict)
    same_pieces: bool = False
    """Whether answers can be compared bit by bit where they were asked alone."""
    faults: tuple[str, ...] = ()
    """Figures of Overspill that count what this scenario breaks; those of others must be 0."""
    may_be_lazy: bool = False
    """Whether blocks leave the GPU one after the other, so that stores have time to begin when they are near."""
    soak_only: bool = False


_LOADED = {"hit_tokens": "no token came from RAM", "load_bytes": "no byte was loaded from RAM"}
_STREAMED = {"spill_in_bytes": "no byte was streamed from RAM", "spilled_tokens": "no request spilled"}
_BROKEN = {"injected": "no fault could be injected"}
DAMAGE = ("corrupt_blocks", "load_failures")

SCENARIOS = (
    Scenario(
        name="returning", title="conversations return after eviction", required=_LOADED, same_pieces=True,
        may_be_lazy=True,
    ),
    Scenario(
        name="preempted", title="requests are preempted",
        required=_LOADED | {"preemptions": "no request was preempted"},
    ),
    Scenario(name="aborted", title="requests are aborted", required=_LOADED | _BROKEN),
    Scenario(name="damaged", title="a block is damaged in RAM", required=_LOADED | _BROKEN, faults=DAMAGE),
    Scenario(name="failed-load", title="a load fails", required=_LOADED | _BROKEN, faults=("load_failures",)),
    Scenario(name="killed", title="the engine is killed", required=_LOADED | _BROKEN, same_pieces=True),
    Scenario(
        name="spilled", title="contexts are spilled", tier=Tier.SPILL, required=_STREAMED, same_pieces=True,
    ),
    Scenario(
        name="spilled-and-offloaded", title="both", tier=Tier.BOTH, required=_LOADED | _STREAMED,
    ),
    Scenario(
        name="arrivals", title="random arrivals and aborts", tier=Tier.BOTH, required=_LOADED, soak_only=True,
    ),
)  # fmt: skip
NAMES = tuple(scenario.name for scenario in SCENARIOS)


def chosen(names: tuple[str, ...], *, soak: bool) -> tuple[Scenario, ...]:
    """Those that were named, or all."""
    if names:
        return tuple(scenario for scenario in SCENARIOS if scenario.name in names)
    return tuple(scenario for scenario in SCENARIOS if soak or not scenario.soak_only)


def drawn_options(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Of a soak. From a seed of the scenario's own: what it draws must not depend on which others are tried, or it
    could not be repeated alone."""
    draw = random.Random(f"{seed}/{scenario.name}")
    options = {"eviction": draw.choice(("lru", "arc"))}
    if scenario.may_be_lazy:
        options["store"] = draw.choice(("eager", "lazy"))
    return options
