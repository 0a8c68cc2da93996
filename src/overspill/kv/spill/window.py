"""The window: the only GPU memory for spilled KV, which holds each layer's while the layer attends.

A step is a fixed sequence of *accesses*, one for each attention layer. An access's half of the window is filled as soon
as the previous access to that half has completed and its writes are saved to the arena, so one half is filled while the
other is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.kv.jobs import Sample
from overspill.kv.sizes import MiB
from overspill.kv.speeds import Mark
from overspill.kv.spill.capacity import is_state
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import GroupStep, Runs, SpillStep, count
from overspill.kv.spill.streams import Event, Streams
from overspill.kv.vllm_api import (
    KVCacheConfig,
    calls_connector,
    kv_owner,
)

# Smaller copies measure latency rather than the link.
_BYTES_WORTH_TIMING = 4 * MiB


@dataclass(frozen=True, slots=True)
class Layer:
    """An attention layer, its cache group, and its region of the KV buffer."""

    name: str
    group: int
    region: int
    # False if the layer reads another layer's KV, and writes none.
    is_owner: bool = True


def attention_layers(modules: Mapping[str, Any], kv_cache_config: KVCacheConfig, geometry: Geometry) -> list[Layer]:
    """Attention layers in the order of the model's construction, which is the order of execution; `Window` checks it.

    `modules` is vLLM's static forward context.
    """
    groups = {
        name: i
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
        if not is_state(group.kv_cache_spec)
    }
    regions = {
        name: (tensor.offset + index * tensor.layer_stride) // geometry.region_bytes
        for tensor in kv_cache_config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
        if name in groups
    }
    layers = []
    for name, module in modules.items():
        owner = kv_owner(module, name)
        if owner in regions:
            layers.append(Layer(name, groups[owner], regions[owner], is_owner=owner == name))
    missing = regions.keys() - {layer.name for layer in layers}
    unhooked = [layer.name for layer in layers if not calls_connector(modules[layer.name])]
    if missing or unhooked:
        name = next(iter(missing or unhooked))
        raise OverspillError(f"spill does not know when layer {name} reads its KV cache. Remove spill_bytes")
    return layers


@dataclass(frozen=True, slots=True)
class Access:
    layer: Layer
    half: int
    # Whether the half must be filled; not if it already holds this region.
    is_filled: bool
    # The group's next access to the same half.
    next_in_half: int | None


def plan_accesses(layers: Sequence[Layer], geometry: Geometry) -> list[Access]:
    """A step's accesses in order. Groups do not collide in the window: a block id belongs to one group, and determines
    the block's place."""
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
    """Orders the copies of one step at a time: `begin`, then `before_read` and `after_read` per layer, then `end`."""

    def __init__(self, accesses: Sequence[Access], streams: Streams) -> None:
        self.accesses = self._accesses = accesses
        self._names = {access.layer.name for access in accesses}
        self._streams = streams
        self._first: dict[int, list[int]] = {}  # group -> its first access to each half
        for index, access in enumerate(accesses):
            firsts = self._first.setdefault(access.layer.group, [])
            if all(accesses[first].half != access.half for first in firsts):
                firsts.append(index)
        self._free: dict[tuple[int, int], Event] = {}  # (group, half) -> end of its last access
        self._writable: dict[int, Event] = {}
        self._readable: dict[int, Event] = {}
        self._timed: list[tuple[int, Mark, Mark]] = []
        self._step: SpillStep | None = None
        self._at = 0
        self._with_far = True

    @property
    def is_active(self) -> bool:
        return self._step is not None

    def begin(self, step: SpillStep, *, with_far: bool = True) -> None:
        """Queue fills for the first layers, before any compute of the step is queued."""
        self._step, self._at, self._with_far = step, 0, with_far
        self._writable.clear()
        self._readable.clear()
        for index in sorted(index for group in step.groups for index in self._first.get(group, ())):
            # A block may have belonged to another group in the previous step.
            for (_, half), event in self._free.items():
                if half == self._accesses[index].half:
                    self._streams.fill_after(event)
            self._fill(index, step.groups[self._accesses[index].layer.group])
        self._allow_writes()

    def begin_graphed(self) -> None:
        """Let the copies of a step whose layers run in a graph follow those of earlier steps; they are queued next."""
        for point in self._free.values():
            self._streams.fill_after(point)

    def end_graphed(self) -> None:
        over = self._streams.fill_event()
        self._free = {(access.layer.group, access.half): over for access in self._accesses}

    @contextmanager
    def timed(self, runs: Runs) -> Iterator[None]:
        """Time the fills queued inside this context, to measure the link's speed."""
        start = self._streams.mark()
        yield
        self._timed.append((count(runs) * self._streams.page_bytes, start, self._streams.mark()))

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
        """Save the layer's writes and fill the half for its next access, once the layer's attention is queued."""
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
        """End the step once all of its compute is queued; raise if layers bypassed the window."""
        if self._step is None:
            return
        self._step = None
        if self._at != len(self._accesses):
            # For instance, a replayed FULL CUDA graph read whatever the window held.
            raise OverspillError(
                f"a step with spilled KV ran {self._at} of its {len(self._accesses)} attention layers through "
                "Overspill, so its tokens may be wrong; the engine stops"
            )

    def report(self, speed: Sample) -> None:
        """Add completed timings of the first layer's fills to `speed`."""
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
            # vLLM writes new KV before wait_for_layer_load, so partly filled blocks go first.
            streams.fill(access.layer.region, group.partial)
            self._writable[index] = streams.fill_event()
            streams.fill(access.layer.region, group.reads)
            streams.fill(access.layer.region, group.far if self._with_far else [])
        else:
            # The owner wrote these blocks in this step, and another layer has used the half since.
            streams.fill(access.layer.region, group.reads)
            streams.fill(access.layer.region, group.far if self._with_far else [])
            streams.fill(access.layer.region, group.writes)
        if start is not None:
            self._timed.append((group.num_blocks_in() * streams.page_bytes, start, streams.mark()))
        self._readable[index] = streams.fill_event()

    def _allow_writes(self) -> None:
        """Let compute wait for the next layer's partly filled blocks, which the layer writes before its attention."""
        if self._at in self._writable:
            self._streams.compute_after(self._writable[self._at])

    def _save(self, access: Access, group: GroupStep) -> None:
        streams = self._streams
        over = streams.compute_event()
        if group.writes:
            streams.save_after(over)
            if access.layer.is_owner:
                streams.save(access.layer.region, group.writes)
            over = streams.save_event()
        self._free[access.layer.group, access.half] = over
