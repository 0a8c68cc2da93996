"""Which amounts of weights in RAM a plan tries: all that can be, or the one that was asked for."""

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size
from overspill.model.facts import ModelFacts
from overspill.model.transformers_backend import RUN_BY_TRANSFORMERS
from overspill.planning.budget import Budget
from overspill.planning.parameters import pinned_share
from overspill.planning.setup import Setup
from overspill.planning.weights import NONE, WeightOffload, grouping, groupings, uva_offloads


def weight_offloads(setup: Setup, budget: Budget) -> list[WeightOffload]:
    """None at all among them, unless some are asked for. Empty if what is asked for cannot be on this device."""
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
    """Device memory that vLLM must have for weights, whatever moves to RAM later; 0 where layers move one by one."""
    # overspill.weights moves layers that Transformers makes when all of them have been made on the GPU.
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
    """The least amount of each offloader that is as much: vLLM, too, goes on until it has moved what it was told."""
    facts = setup.facts
    most = sum(facts.weights.layer_bytes)
    if asked > most:
        raise OverspillError(
            f"--weights-ram is {format_size(asked)}, and the layers of {facts.name} have {format_size(most)} of "
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
    found = grouping(group_size, num_in_group, facts.weights.layer_bytes, pinned_share(facts))
    if not found.ram_bytes:
        raise OverspillError(
            f"--offload-group-size {group_size} moves nothing to RAM: {facts.name} has {facts.num_layers} layers, and "
            f"the last {num_in_group} of each group would move; give at most --offload-group-size {facts.num_layers}"
        )
    return [found]
