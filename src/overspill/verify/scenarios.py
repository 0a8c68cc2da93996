"""Scenarios: what is tried, what must have happened for it to count, and which ones the command line requests."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.settings import nearest

_MINUTES = 30
# Prompts are drawn from seeds; a larger seed is a typing mistake.
_MOST_SEED = 2**32
_MOST_MINUTES = 7 * 24 * 60
_PROMPTS, _MOST_PROMPTS = 8, 10_000


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
    """Counters that must not be 0, and what it means if they are."""
    same_pieces: bool = False
    """Whether answers to prompts that ran alone can be compared bit by bit."""
    faults: tuple[str, ...] = ()
    """Overspill's counters of the faults this scenario makes; its other trouble counters must be 0."""
    fault_text: str = "-"
    """Template of the table's text on faults, filled with the counters."""
    may_be_lazy: bool = False
    """Whether blocks leave the GPU one by one, so that stores have time to begin when blocks are near eviction."""
    has_disk: bool = False
    """Whether a first engine fills a disk and the answers of a second one are compared."""
    has_store: bool = False
    """Whether a first engine fills a store between machines and the answers of a second one are compared."""
    soak_only: bool = False
    shares_attention: bool = False
    """Whether the CPU attends to a part, so that answers are judged by the distance of another attention kernel."""
    lends_window: bool = False
    """Whether the window's memory moves to GPU blocks and back."""


_LOADED = {"hit_tokens": "no token came from RAM", "load_bytes": "no byte was loaded from RAM"}
_READ = _LOADED | {"disk_hit_tokens": "no token came from disk", "disk_read_bytes": "no byte was read from disk"}
_SHARED = {
    "remote_hit_tokens": "no token came from the store",
    "remote_failures": "no call noticed that the store was killed",
}
_STREAMED = {"spill_in_bytes": "no byte was streamed from RAM", "spilled_tokens": "no request spilled"}
_BROKEN = {"injected": "no fault could be injected"}
_CAUGHT = "{caught} of {injected} caught"

SCENARIOS = (
    Scenario(
        name="returning", title="conversations return after eviction", required=_LOADED, same_pieces=True,
        may_be_lazy=True,
    ),
    Scenario(
        name="preempted", title="requests are preempted",
        required=_LOADED | {"preemptions": "no request was preempted"}, fault_text="{preemptions} preempted",
    ),
    Scenario(
        name="aborted", title="requests are aborted", required=_LOADED | _BROKEN,
        fault_text="{injected} aborted, {caught} in a copy",
    ),
    Scenario(
        name="damaged", title="a block is damaged in RAM", required=_LOADED | _BROKEN,
        faults=("corrupt_blocks", "load_failures"), fault_text=_CAUGHT,
    ),
    Scenario(
        name="failed-load", title="a load fails", required=_LOADED | _BROKEN, faults=("load_failures",),
        fault_text=_CAUGHT,
    ),
    Scenario(
        name="killed", title="the engine is killed", required=_LOADED | _BROKEN, same_pieces=True,
        fault_text="{injected} killed",
    ),
    Scenario(
        name="stopped", title="the engine is stopped, and finds its KV on disk", required=_READ, same_pieces=True,
        has_disk=True,
    ),
    Scenario(
        name="torn", title="the disk is damaged and its journal torn", required=_READ | _BROKEN,
        faults=("disk_bad_blocks",), fault_text=_CAUGHT, has_disk=True,
    ),
    Scenario(
        name="store-killed", title="the store between machines is damaged, and killed",
        required=_LOADED | _BROKEN | _SHARED, faults=("remote_bad_blocks",), fault_text=_CAUGHT, has_store=True,
    ),
    Scenario(
        name="spilled", title="contexts are spilled", tier=Tier.SPILL, required=_STREAMED, same_pieces=True,
    ),
    Scenario(
        name="lent", title="the window's memory is lent, and taken back", tier=Tier.SPILL, lends_window=True,
        required={"window_moves": "no memory moved between GPU blocks and the window"},
    ),
    Scenario(
        name="spilled-and-offloaded", title="both", tier=Tier.BOTH, required=_LOADED | _STREAMED,
    ),
    Scenario(
        name="shared-attention", title="the CPU attends to a part", tier=Tier.SPILL, shares_attention=True,
        required=_STREAMED | {"spill_far_bytes": "the CPU attended to nothing"},
    ),
    Scenario(
        name="arrivals", title="random arrivals and aborts", tier=Tier.BOTH, required=_LOADED, soak_only=True,
        fault_text="{injected} aborted",
    ),
)  # fmt: skip
NAMES = tuple(scenario.name for scenario in SCENARIOS)


def chosen(names: tuple[str, ...], *, soak: bool) -> tuple[Scenario, ...]:
    """The named scenarios, or else all, with those of a soak only if `soak`."""
    if names:
        return tuple(scenario for scenario in SCENARIOS if scenario.name in names)
    return tuple(scenario for scenario in SCENARIOS if soak or not scenario.soak_only)


def drawn_options(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Options of a soak, drawn from a seed of the scenario's own: if they depended on which other scenarios are tried,
    none could be repeated alone."""
    draw = random.Random(f"{seed}/{scenario.name}")
    options = {"eviction": draw.choice(("lru", "arc"))}
    if scenario.may_be_lazy:
        options["store"] = draw.choice(("eager", "lazy"))
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    soak: bool
    seconds: float | None
    """Time limit of a soak; None without one."""
    seed: int
    scenarios: tuple[Scenario, ...]
    random_weights: bool = False
    """Whether random weights replace the model's, which need not exist."""
    prompts: int = _PROMPTS
    """Number of prompts in scenarios in which the CPU attends to a part."""

    @property
    def words(self) -> tuple[str, ...]:
        """Flags that repeat the request, without seed and scenarios; for a soak, those of its first round."""
        weights = ("--load-format", "dummy") if self.random_weights else ()
        prompts = ("--prompts", str(self.prompts)) if self.prompts != _PROMPTS else ()
        return (*weights, *prompts, *(("--soak", "--minutes", "1") if self.soak else ()))


def read_request(
    *, quick: bool, soak: bool, minutes: str | None, seed: str | None, scenarios: Sequence[str],
    load_format: str | None = None, prompts: str | None = None,
) -> Request:  # fmt: skip
    if load_format not in (None, "auto", "dummy"):
        raise OverspillError(
            f"--load-format: {load_format!r} is neither auto nor dummy; leave it out for the model's own weights"
        )
    if quick and soak:
        raise OverspillError("--quick and --soak exclude each other; leave one of them out")
    if minutes is not None and not soak:
        raise OverspillError("--minutes sets how long --soak runs; add --soak, or leave --minutes out")
    names = tuple(dict.fromkeys(scenarios))
    for name in names:
        if name not in NAMES:
            known = ", ".join(NAMES)
            raise OverspillError(f"--scenario: there is no {name!r}; {nearest(name, NAMES)} Scenarios: {known}")
    found = chosen(names, soak=soak)
    if prompts is not None and not any(one.shares_attention for one in found):
        raise OverspillError("--prompts is for --scenario shared-attention; add that, or leave it out")
    if not soak and (only := next((one.name for one in found if one.soak_only), None)):
        raise OverspillError(f"--scenario {only} is part of --soak; add that")
    seconds = 60 * _number("--minutes", minutes or str(_MINUTES), 1, _MOST_MINUTES) if soak else None
    return Request(soak=soak, seconds=seconds, seed=_number("--seed", seed or "0", 0, _MOST_SEED), scenarios=found,
                   random_weights=load_format == "dummy",
                   prompts=_number("--prompts", prompts or str(_PROMPTS), 2, _MOST_PROMPTS))  # fmt: skip


def _number(flag: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise OverspillError(f"{flag}: {text!r} is not a whole number from {least} to {most}; write for example 7")
    return int(text)
