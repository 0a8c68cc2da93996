"""Which decoder layers' weights go to RAM, in the terms of vLLM's prefetching offloader."""

from collections.abc import Sequence
from dataclasses import dataclass

# Layers prefetched ahead. More hides a jitter that one layer's compute already hides, and costs a slot each.
PREFETCH_STEP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOffload:
    """The last `num_in_group` layers of every `group_size` (`--offload-group-size`, `--offload-num-in-group`)."""

    group_size: int
    num_in_group: int
    ram_bytes: int
    """Weights that lie in RAM, and cross the link in every step."""
    slot_bytes: int
    """GPU memory through which they are read: as much as the largest of these layers, for each step ahead."""

    @property
    def saved_bytes(self) -> int:
        return self.ram_bytes - self.slot_bytes


NONE = WeightOffload(group_size=0, num_in_group=0, ram_bytes=0, slot_bytes=0)


def groupings(layer_bytes: Sequence[int]) -> list[WeightOffload]:
    """Every amount that can be moved, from the least; of groupings that move the same, the one of smallest groups:
    layers in RAM then alternate with layers on the GPU, whose compute hides them."""
    found: dict[int, WeightOffload] = {}
    for group_size in range(1, len(layer_bytes) + 1):
        for num_in_group in range(1, group_size + 1):
            one = _offload(group_size, num_in_group, layer_bytes)
            found.setdefault(one.ram_bytes, one)
    return [found[amount] for amount in sorted(found) if amount]


def offload_at_least(need_bytes: int, layer_bytes: Sequence[int]) -> WeightOffload | None:
    """The grouping that frees so much GPU memory and moves the least over the link; None if none does."""
    if need_bytes <= 0:
        return NONE
    return next((one for one in groupings(layer_bytes) if one.saved_bytes >= need_bytes), None)


def _offload(group_size: int, num_in_group: int, layer_bytes: Sequence[int]) -> WeightOffload:
    """vLLM's rule (model_executor/offloader/prefetch.py, wrap_modules)."""
    moved = [size for i, size in enumerate(layer_bytes) if i % group_size >= group_size - num_in_group]
    return WeightOffload(
        group_size=group_size,
        num_in_group=num_in_group,
        ram_bytes=sum(moved),
        slot_bytes=PREFETCH_STEP * max(moved, default=0),
    )
