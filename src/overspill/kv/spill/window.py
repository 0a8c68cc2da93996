"""The window: each layer's spilled KV is in it while the layer attends, and nowhere else on the GPU.

A step is a fixed sequence of *accesses*, one for each attention layer. An access's half of the window is filled as soon
as the previous access to that half is over and what it wrote is back in the arena, so one half is being filled
while the other is being read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from overspill.kv.errors import OverspillError
from overspill.kv.jobs import Sample
from overspill.kv.sizes import MiB
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import GroupStep, SpillStep
from overspill.kv.spill.streams import Point, Streams
from overspill.kv.timing import Mark

# Less says more about the copy's start than about the link.
_BYTES_WORTH_TIMING = 4 * MiB


@dataclass(frozen=True, slots=True)
class Layer:
    """An attention layer, in the order of execution."""

    name: str
    group: int
    region: int
    # A layer may read another one's KV; it then writes none.
    is_owner: bool = True


@dataclass(frozen=True, slots=True)
class Access:
    layer: Layer
    half: int
    # Whether the half held another layer's KV before; if not, the layer reads what is there.
    is_filled: bool
    # The access of the same group that this one makes way for.
    next_in_half: int | None


def plan_accesses(layers: Sequence[Layer], geometry: Geometry) -> list[Access]:
    """Groups never meet in the window: a block id belongs to one of them, and its place there goes by its id."""
    accesses: list[Access] = []
    following: dict[tuple[int, int], tuple[int, int]] = {}  # (group, half) -> (index, region) of the next access
    filled: list[bool] = [True] * len(layers)
    for index in reversed(range(len(layers))):
        layer = layers[index]
        place = layer.group, geometry.half_of(layer.region)
        after = following.get(place)
        if after is not None and after[1] == layer.region:
            filled[after[0]] = False
        accesses.append(Access(layer, place[1], True, after[0] if after else None))
        following[place] = index, layer.region
    return [
        Access(access.layer, access.half, is_filled, access.next_in_half)
        for access, is_filled in zip(reversed(accesses), filled, strict=True)
    ]


class Window:
    """One step at a time: `begin`, then `before_read` and `after_read` of every layer, then `end`."""

    def __init__(self, accesses: Sequence[Access], streams: Streams) -> None:
        self._accesses = accesses
        self._names = {access.layer.name for access in accesses}
        self._streams = streams
        self._first: dict[int, list[int]] = {}  # group -> its first access to each half
        for index, access in enumerate(accesses):
            firsts = self._first.setdefault(access.layer.group, [])
            if all(accesses[first].half != access.half for first in firsts):
                firsts.append(index)
        self._free: dict[tuple[int, int], Point] = {}  # (group, half) -> where its last access was over
        self._writable: dict[int, Point] = {}
        self._readable: dict[int, Point] = {}
        self._timed: list[tuple[int, Mark, Mark]] = []
        self._step: SpillStep | None = None
        self._at = 0

    @property
    def is_active(self) -> bool:
        return self._step is not None

    def begin(self, step: SpillStep) -> None:
        """Start filling for the first layers; the step's compute is not queued yet."""
        self._step, self._at = step, 0
        self._writable.clear()
        self._readable.clear()
        for index in sorted(index for group in step.groups for index in self._first.get(group, ())):
            # A block may have been another group's in the step before.
            for (_, half), point in self._free.items():
                if half == self._accesses[index].half:
                    self._streams.fill_after(point)
            self._fill(index, step.groups[self._accesses[index].layer.group])
        self._allow_writes()

    def before_read(self, layer: str) -> None:
        if self._step is None or layer not in self._names:
            return
        expected = self._accesses[self._at].layer.name if self._at < len(self._accesses) else "the end of the step"
        if layer != expected:
            self._step = None
            raise OverspillError(
                f"spilled KV was prepared for {expected}, but {layer} runs: this model calls its attention layers in "
                "an order that Overspill does not know. Remove spill_bytes."
            )
        if self._at in self._readable:
            self._streams.compute_after(self._readable[self._at])

    def after_read(self, layer: str) -> None:
        """The layer's attention is queued: bring back what the step wrote, and make room for the next."""
        if self._step is None or layer not in self._names:
            return
        access = self._accesses[self._at]
        group = self._step.groups.get(access.layer.group)
        if group is not None:
            self._save(access, group)
            if access.next_in_half is not None and self._accesses[access.next_in_half].is_filled:
                self._fill(access.next_in_half, group)
        self._at += 1
        self._allow_writes()

    def end(self) -> None:
        """All of the step's compute is queued."""
        if self._step is None:
            return
        self._step = None
        if self._at != len(self._accesses):
            # For instance a FULL CUDA graph was replayed: it read whatever the window held.
            raise OverspillError(
                f"a step with spilled KV ran {self._at} of its {len(self._accesses)} attention layers through "
                "Overspill, so its tokens may be wrong; the engine stops"
            )

    def report(self, speed: Sample) -> None:
        """How fast the first layer's fills went, where that is known by now."""
        waiting = []
        for num_bytes, start, end in self._timed:
            seconds = start.seconds_until(end)
            if seconds is None:
                waiting.append((num_bytes, start, end))
            elif num_bytes >= _BYTES_WORTH_TIMING:
                speed.add(num_bytes, seconds)
        self._timed = waiting

    def _fill(self, index: int, group: GroupStep) -> None:
        access, streams = self._accesses[index], self._streams
        place = access.layer.group, access.half
        if place in self._free:
            streams.fill_after(self._free[place])
        start = streams.mark() if index == 0 else None
        if access.layer.is_owner:
            # vLLM writes new KV before it asks for the layer to be loaded, so blocks that are written on go first.
            streams.fill(access.layer.region, group.partial)
            self._writable[index] = streams.filled()
            streams.fill(access.layer.region, group.reads)
        else:
            # The owner wrote in this step, and another layer used the half since.
            streams.fill(access.layer.region, group.reads)
            streams.fill(access.layer.region, group.writes)
        if start is not None:
            self._timed.append((group.num_blocks_in() * streams.page_bytes, start, streams.mark()))
        self._readable[index] = streams.filled()

    def _allow_writes(self) -> None:
        """The next layer's new KV is written between the last attention and its own."""
        if self._at in self._writable:
            self._streams.compute_after(self._writable[self._at])

    def _save(self, access: Access, group: GroupStep) -> None:
        streams = self._streams
        streams.save_after(streams.computed())
        if access.layer.is_owner:
            streams.save(access.layer.region, group.writes)
        self._free[access.layer.group, access.half] = streams.saved()
