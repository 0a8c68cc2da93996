"""Which decoder layers' weights go to RAM, in the terms of vLLM's two offloaders."""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from overspill.kv.sizes import GiB

# Layers prefetched ahead. More hides a jitter that one layer's compute already hides, and costs a slot each.
PREFETCH_STEP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOffload:
    """Of the prefetching offloader the last `num_in_group` layers of every `group_size` (`--offload-group-size`,
    `--offload-num-in-group`); of the other, which the GPU reads in RAM (UVA), the first `num_layers`."""

    layers: tuple[int, ...]
    """Which lie in RAM."""
    ram_bytes: int
    """Their weights."""
    pinned_bytes: int
    """RAM that they take there, once they are loaded."""
    slot_bytes: int = 0
    """GPU memory through which they are prefetched: as much as the largest of these layers, for each step ahead."""
    group_size: int = 0
    num_in_group: int = 0

    @property
    def is_uva(self) -> bool:
        return bool(self.layers) and not self.group_size

    @property
    def loading_bytes(self) -> int:
        """RAM that they take while they are loaded. The prefetching offloader pins each twice; Overspill returns the
        first copy when all are loaded (overspill.weights.pinned_leftovers), before it takes RAM for KV."""
        return 2 * self.pinned_bytes if self.group_size else self.pinned_bytes

    @property
    def num_runs(self) -> int:
        """Of neighbouring layers."""
        return sum(layer != before + 1 for before, layer in pairwise((-2, *self.layers)))

    @property
    def saved_bytes(self) -> int:
        return self.ram_bytes - self.slot_bytes

    @property
    def cpu_offload_gb(self) -> float:
        """vLLM moves parameter by parameter until it has so many GiB; rounded down, for one more would be a large
        one."""
        return self.ram_bytes * 10_000 // GiB / 10_000


NONE = WeightOffload(layers=(), ram_bytes=0, pinned_bytes=0)


@cache
def groupings(layer_bytes: tuple[int, ...], pinning: float = 1.0) -> tuple[WeightOffload, ...]:
    """Every amount that can be prefetched, from the least; of groupings that move the same, the one of smallest
    groups: layers in RAM then alternate with layers on the GPU, whose compute hides them.

    `pinning` is how many times its size a layer takes in RAM.
    """
    found: dict[int, WeightOffload] = {}
    for group_size in range(1, len(layer_bytes) + 1):
        for num_in_group in range(1, group_size + 1):
            one = grouping(group_size, num_in_group, layer_bytes, pinning)
            found.setdefault(one.ram_bytes, one)
    return tuple(found[amount] for amount in sorted(found) if amount)


def uva_offloads(layer_bytes: tuple[int, ...], pinning: float = 1.0) -> list[WeightOffload]:
    """Whole layers from the first one on, as vLLM walks them (model_executor/offloader/uva.py).

    It could split a layer, but by which parameter is not known here, and a start could not be checked against it.
    """
    amounts = accumulate(layer_bytes)
    return [
        WeightOffload(layers=tuple(range(i + 1)), ram_bytes=amount, pinned_bytes=int(pinning * amount))
        for i, amount in enumerate(amounts)
    ]


def grouping(group_size: int, num_in_group: int, layer_bytes: tuple[int, ...], pinning: float) -> WeightOffload:
    """vLLM's rule (model_executor/offloader/prefetch.py, wrap_modules)."""
    moved = [i for i in range(len(layer_bytes)) if i % group_size >= group_size - num_in_group]
    return WeightOffload(
        layers=tuple(moved),
        ram_bytes=sum(layer_bytes[i] for i in moved),
        pinned_bytes=int(pinning * sum(layer_bytes[i] for i in moved)),
        slot_bytes=PREFETCH_STEP * max((layer_bytes[i] for i in moved), default=0),
        group_size=group_size,
        num_in_group=num_in_group,
    )
