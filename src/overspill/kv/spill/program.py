"""Order of a step's copies beside a CUDA graph, and the flags that order them against the graph's layers.

A captured graph cannot know what a step copies, and its layers cannot wait for events that are recorded later. So both
sides wait for *flags*: numbers in GPU memory, 0 or 1. The side that waited for a flag lowers it.

The graph, for each access:                 The copy stream:
    wait for `writable`, write new KV           raise `writable` when the half may be written
    wait for `readable`, attend                 raise `readable` when the layer's reads are filled in
    raise `done`                                wait for `done` before the half is filled again
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from overspill.kv.spill.steps import GroupStep, Runs, SpillStep
from overspill.kv.spill.window import Access


class Kind(Enum):
    WRITABLE = 0
    READABLE = 1
    DONE = 2


@dataclass(frozen=True, slots=True)
class Flag:
    kind: Kind
    access: int


@dataclass(frozen=True, slots=True)
class Raise:
    flags: Sequence[Flag]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the flag is up, then lower it."""

    flag: Flag


@dataclass(frozen=True, slots=True)
class Fill:
    """Copy from the arena to the window."""

    region: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class Save:
    """Copy from the window to the arena."""

    region: int
    runs: Runs


Operation = Raise | Wait | Fill | Save


def is_graphable(accesses: Sequence[Access]) -> bool:
    """Whether all layers own their KV: a layer that reads another's would need KV written in the same step."""
    return all(access.layer.is_owner for access in accesses)


def before_writes(index: int, num_accesses: int) -> list[Operation]:
    """The graph's operations after the previous layer's attention, or before the model: the layer writes its new KV
    between that point and its own attention."""
    return [Wait(Flag(Kind.WRITABLE, index))] if index < num_accesses else []


def before_attention(index: int) -> list[Operation]:
    return [Wait(Flag(Kind.READABLE, index))]


def after_attention(index: int) -> list[Operation]:
    return [Raise([Flag(Kind.DONE, index)])]


def step_operations(accesses: Sequence[Access], step: SpillStep, *, with_far: bool = True) -> list[Operation]:
    """The copy stream's operations in a step; the graph's are the same for every step. Without `with_far`, blocks that
    the CPU attends to stay in RAM."""
    groups = [step.groups.get(access.layer.group) for access in accesses]
    operations: list[Operation] = [Raise(_flags_up_at_once(groups))]
    last: dict[tuple[int, int], int] = {}  # (group, half) -> index of its latest access
    open_accesses = dict.fromkeys(range(len(accesses)))
    for index, (access, group) in enumerate(zip(accesses, groups, strict=True)):
        if group is None:
            continue
        place = access.layer.group, access.half
        if place in last:
            operations += _end(last[place], accesses, group)
            del open_accesses[last[place]]
        last[place] = index
        if group.writes:
            # The layer writes before it waits for its reads, so partly filled blocks go first.
            operations += _fill(access, group.partial)
            operations.append(Raise([Flag(Kind.WRITABLE, index)]))
        operations += _fill(access, group.reads)
        operations += _fill(access, group.far if with_far else [])
        operations.append(Raise([Flag(Kind.READABLE, index)]))
    for index in open_accesses:
        operations += _end(index, accesses, groups[index])
    return operations


def _flags_up_at_once(groups: Sequence[GroupStep | None]) -> list[Flag]:
    """Flags raised at once: groups without spilled blocks wait for nothing, groups that write none may always write."""
    up = [Flag(Kind.WRITABLE, index) for index, group in enumerate(groups) if group is None or not group.writes]
    return up + [Flag(Kind.READABLE, index) for index, group in enumerate(groups) if group is None]


def _fill(access: Access, runs: Runs) -> list[Operation]:
    return [Fill(access.layer.region, runs)] if runs else []


def _end(index: int, accesses: Sequence[Access], group: GroupStep | None) -> list[Operation]:
    operations: list[Operation] = [Wait(Flag(Kind.DONE, index))]
    if group is not None and group.writes:
        operations.append(Save(accesses[index].layer.region, group.writes))
    return operations
