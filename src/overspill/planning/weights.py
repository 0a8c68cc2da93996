"""Decoder layers whose weights go to RAM, in the terms of vLLM's two offloaders."""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB, format_size
from overspill.model.architectures import RUN_BY_TRANSFORMERS
from overspill.model.facts import ModelFacts, pinned_share
from overspill.planning.memory import Budget
from overspill.planning.setup import Setup

# Layers prefetched ahead. More would hide jitter that one layer's compute already hides, and cost a slot each.
PREFETCH_STEP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOffload:
    """Layers in RAM: with the prefetching offloader the last `num_in_group` of every `group_size` layers
    (`--offload-group-size`, `--offload-num-in-group`), and with the other, which the GPU reads in RAM (UVA), the first
    ones."""

    layers: tuple[int, ...]
    """Indices of the layers in RAM."""
    ram_bytes: int
    """Size of these layers' weights."""
    pinned_bytes: int
    """RAM that the weights take once they are loaded."""
    slot_bytes: int = 0
    """GPU memory for prefetching: the size of the largest of these layers, for each step ahead."""
    group_size: int = 0
    num_in_group: int = 0

    @property
    def is_uva(self) -> bool:
        return bool(self.layers) and not self.group_size

    @property
    def loading_bytes(self) -> int:
        """RAM that the weights take while loading. The prefetching offloader pins each twice; Overspill frees the first
        copies once all are loaded (overspill.weights.plugin), before it takes RAM for KV."""
        return 2 * self.pinned_bytes if self.group_size else self.pinned_bytes

    @property
    def num_runs(self) -> int:
        """Number of runs of neighbouring layers."""
        return sum(layer != before + 1 for before, layer in pairwise((-2, *self.layers)))

    @property
    def saved_bytes(self) -> int:
        return self.ram_bytes - self.slot_bytes

    @property
    def cpu_offload_gb(self) -> float:
        """GiB at which vLLM stops moving parameters; rounded down, since one parameter more would be a large one."""
        return self.ram_bytes * 10_000 // GiB / 10_000


NONE = WeightOffload(layers=(), ram_bytes=0, pinned_bytes=0)


@cache
def groupings(layer_bytes: tuple[int, ...], pinning: float = 1.0) -> tuple[WeightOffload, ...]:
    """Every amount that can be prefetched, least first; of groupings that move the same, the one with the smallest
    groups: layers in RAM then alternate with layers on the GPU, whose compute hides their copies.

    A layer takes `pinning` times its size in RAM.
    """
    found: dict[int, WeightOffload] = {}
    for group_size in range(1, len(layer_bytes) + 1):
        for num_in_group in range(1, group_size + 1):
            one = grouping(group_size, num_in_group, layer_bytes, pinning)
            found.setdefault(one.ram_bytes, one)
    return tuple(found[amount] for amount in sorted(found) if amount)


def uva_offloads(layer_bytes: tuple[int, ...], pinning: float = 1.0) -> list[WeightOffload]:
    """Offloads of whole layers from the first one on, as vLLM walks them (model_executor/offloader/uva.py).

    vLLM could split a layer, but at which parameter is not known here, and a start could not be checked against it.
    """
    amounts = accumulate(layer_bytes)
    return [
        WeightOffload(layers=tuple(range(i + 1)), ram_bytes=amount, pinned_bytes=int(pinning * amount))
        for i, amount in enumerate(amounts)
    ]


def grouping(group_size: int, num_in_group: int, layer_bytes: tuple[int, ...], pinning: float) -> WeightOffload:
    """Offload of the layers that vLLM's rule picks (model_executor/offloader/prefetch.py, wrap_modules)."""
    moved = [i for i in range(len(layer_bytes)) if i % group_size >= group_size - num_in_group]
    return WeightOffload(
        layers=tuple(moved),
        ram_bytes=sum(layer_bytes[i] for i in moved),
        pinned_bytes=int(pinning * sum(layer_bytes[i] for i in moved)),
        slot_bytes=PREFETCH_STEP * max((layer_bytes[i] for i in moved), default=0),
        group_size=group_size,
        num_in_group=num_in_group,
    )


def weight_offloads(setup: Setup, budget: Budget) -> list[WeightOffload]:
    """Offloads to try, including none at all unless some is requested. Empty if the device cannot meet the request."""
    wishes = setup.wishes
    if wishes.offload_groups is None and not wishes.weights_ram_bytes:
        every = _every(setup, budget) if wishes.weights_ram_bytes is None else []
        return [NONE, *every]
    if not setup.platform.offloads_weights:
        raise OverspillError(
            "--weights-ram (vLLM's --cpu-offload-gb) does nothing on vLLM's CPU platform, where all weights are in "
            "RAM; remove it"
        )
    if wishes.offload_groups is not None:
        return _asked_groups(setup, *wishes.offload_groups)
    return _asked_amount(setup, budget, wishes.weights_ram_bytes or 0)


def least_for_weights(facts: ModelFacts) -> int:
    """Device memory that vLLM needs for weights before any move to RAM; 0 where layers move one by one."""
    # overspill.weights moves layers made by Transformers only after all of them were made on the GPU.
    return facts.weights.total_bytes + 1 if facts.architecture in RUN_BY_TRANSFORMERS else 0


def _every(setup: Setup, budget: Budget) -> list[WeightOffload]:
    facts = setup.facts
    layers, pinning = facts.weights.layer_bytes, pinned_share(facts)
    if not setup.platform.offloads_weights:
        return []
    if facts.architecture not in RUN_BY_TRANSFORMERS:
        return [*groupings(layers, pinning), *uva_offloads(layers, pinning)]
    return uva_offloads(layers, pinning) if least_for_weights(facts) <= budget.usable_bytes.value else []


def _asked_amount(setup: Setup, budget: Budget, asked: int) -> list[WeightOffload]:
    """The least amount of each offloader that reaches `asked`: vLLM, too, moves layers until it has moved that much."""
    facts = setup.facts
    most = sum(facts.weights.layer_bytes)
    if asked > most:
        raise OverspillError(
            f"--weights-ram is {format_size(asked * setup.wishes.num_ranks)}, and the layers of {facts.name} have "
            f"{format_size(most * setup.wishes.num_ranks)} of "
            "weights, which is all that can go to RAM; give at most that, or leave it to the plan"
        )
    enough = [one for one in _every(setup, budget) if one.ram_bytes >= asked]
    by_offloader = {is_uva: [one for one in enough if one.is_uva == is_uva] for is_uva in (False, True)}
    return [min(ones, key=lambda one: one.ram_bytes) for ones in by_offloader.values() if ones]


def _asked_groups(setup: Setup, group_size: int, num_in_group: int) -> list[WeightOffload]:
    facts = setup.facts
    if facts.architecture in RUN_BY_TRANSFORMERS:
        raise OverspillError(
            f"vLLM runs {facts.architecture} through Transformers, whose layers its prefetching offloader does not "
            "see: nothing would move to RAM. Use --weights-ram (or --cpu-offload-gb), which Overspill makes work for "
            "them, or leave weights to the plan"
        )
    if not 0 < num_in_group <= group_size:
        raise OverspillError(
            f"--offload-num-in-group {num_in_group} is how many of the {group_size} layers of a group go to RAM "
            f"(--offload-group-size); give 1 to {group_size}"
        )
    found = grouping(group_size, num_in_group, facts.weights.layer_bytes, pinned_share(facts))
    if not found.ram_bytes:
        raise OverspillError(
            f"--offload-group-size {group_size} moves nothing to RAM: {facts.name} has {facts.num_layers} layers, and "
            f"the last {num_in_group} of each group would move; give at most --offload-group-size {facts.num_layers}"
        )
    return [found]
