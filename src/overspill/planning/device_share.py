"""A planned engine's share of its GPU, and how much of it is KV once the engine has shown what it takes."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from overspill.kv.sizes import MiB

# Names the share for vLLM's workers. No OVERSPILL_ in front: it is not a setting.
VARIABLE = "_OVERSPILL_DEVICE_SHARE"
# Between two starts of one engine lie some MiB of fragments and compiled kernels, for which the plan keeps more free.
_NOISE_BYTES = 128 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """GPU memory that a worker takes beside KV, as its own process knows it: nothing that a neighbour does changes
    it."""

    weights_bytes: int
    reserved_bytes: int
    """PyTorch's, after a step of the largest batch: weights, buffers, and what the allocator rounds them up by."""
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    budget_bytes: int
    """For weights, activations, graphs, libraries and KV: all but CUDA's context."""
    non_torch_bytes: int
    graph_bytes: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "DeviceShare | None":
        text = environment.get(VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else None

    def written(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}

    def kv_bytes(self, planned_bytes: int, taken: Taken) -> int:
        """The planned size; less where the rest of the engine takes more than was planned, and maybe less than none."""
        left = self.budget_bytes - self._beside_kv(taken, self.graph_bytes)
        return planned_bytes if left >= planned_bytes - _NOISE_BYTES else left

    def excess_bytes(self, kv_bytes: int, taken: Taken, graph_bytes: int) -> int:
        """Taken beyond the budget, now that the graphs are there."""
        return max(0, kv_bytes + self._beside_kv(taken, graph_bytes) - self.budget_bytes)

    def _beside_kv(self, taken: Taken, graph_bytes: int) -> int:
        # The driver counts a card's memory, and not a process's: what libraries take beside PyTorch is as planned.
        kept = max(taken.weights_bytes + self.non_torch_bytes, taken.reserved_bytes)
        return kept + taken.activation_bytes + graph_bytes
