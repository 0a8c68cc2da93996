"""A step's copies beside a CUDA graph: in which order, and which flags order them against its layers.

A captured graph cannot be told what a step copies, and its layers cannot wait for events that are recorded later. So
both sides wait for *flags*, numbers in GPU memory that are 0 or 1. Whoever waits for a flag lowers it.

The graph, for each access:                 The copy stream:
    wait for `writable`, write new KV           raise `writable` when the half may be written
    wait for `readable`, attend                 raise `readable` when what the layer reads is there
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
    """Until the flag is up; then it is lowered."""

    flag: Flag


@dataclass(frozen=True, slots=True)
class Fill:
    """Arena to window."""

    region: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class Save:
    """Window to arena."""

    region: int
    runs: Runs


Operation = Raise | Wait | Fill | Save


def is_graphable(accesses: Sequence[Access]) -> bool:
    """A layer that reads another one's KV would need what the other wrote in the same step."""
    return all(access.layer.is_owner for access in accesses)


def before_writes(index: int, num_accesses: int) -> list[Operation]:
    """What the graph does behind the attention of the layer before, or in front of the model: new KV is written between
    that and the layer's own attention."""
    return [Wait(Flag(Kind.WRITABLE, index))] if index < num_accesses else []


def before_attention(index: int) -> list[Operation]:
    return [Wait(Flag(Kind.READABLE, index))]


def after_attention(index: int) -> list[Operation]:
    return [Raise([Flag(Kind.DONE, index)])]


def step_operations(accesses: Sequence[Access], step: SpillStep, *, with_far: bool = True) -> list[Operation]:
    """The copy stream's part of a step; the graph's is the same for every step. Without `with_far`, blocks that the CPU
    attends to stay in RAM."""
    groups = [step.groups.get(access.layer.group) for access in accesses]
    operations: list[Operation] = [Raise(_flags_up_at_once(groups))]
    last: dict[tuple[int, int], int] = {}  # (group, half) -> its last access
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
            # The layer writes before it asks for anything, so blocks that it writes on go first.
            operations += _fill(access, group.partial)
            operations.append(Raise([Flag(Kind.WRITABLE, index)]))
        operations += _fill(access, group.reads)
        operations += _fill(access, group.far if with_far else [])
        operations.append(Raise([Flag(Kind.READABLE, index)]))
    for index in open_accesses:
        operations += _end(index, accesses, groups[index])
    return operations


def _flags_up_at_once(groups: Sequence[GroupStep | None]) -> list[Flag]:
    """Layers of groups without spilled blocks wait for nothing, and a layer that writes none may write at any time."""
    up = [Flag(Kind.WRITABLE, index) for index, group in enumerate(groups) if group is None or not group.writes]
    return up + [Flag(Kind.READABLE, index) for index, group in enumerate(groups) if group is None]


def _fill(access: Access, runs: Runs) -> list[Operation]:
    return [Fill(access.layer.region, runs)] if runs else []


def _end(index: int, accesses: Sequence[Access], group: GroupStep | None) -> list[Operation]:
    operations: list[Operation] = [Wait(Flag(Kind.DONE, index))]
    if group is not None and group.writes:
        operations.append(Save(accesses[index].layer.region, group.writes))
    return operations
