"""A planned engine's share of its GPU, and how much of it KV gets once the engine's other needs are measured."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from overspill.kv.sizes import MiB

# Environment variable that hands the share to vLLM's workers. No OVERSPILL_ in front, since it is not a setting.
VARIABLE = "_OVERSPILL_DEVICE_SHARE"
# Two starts of one engine differ by some MiB of fragments and compiled kernels; the plan keeps more than that free.
_NOISE_BYTES = 128 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """GPU memory that a worker takes besides KV, as its own process counts it, unaffected by neighbours."""

    weights_bytes: int
    reserved_bytes: int
    """Memory PyTorch reserves after a step of the largest batch: weights, buffers, and the allocator's rounding."""
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    budget_bytes: int
    """Memory for weights, activations, graphs, libraries and KV: all but CUDA's context."""
    non_torch_bytes: int
    graph_bytes: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "DeviceShare | None":
        text = environment.get(VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else None

    def written(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}

    def kv_bytes(self, planned_bytes: int, taken: Taken) -> int:
        """The planned size, or less where the rest of the engine takes more than planned; may be negative."""
        left = self.budget_bytes - self._beside_kv(taken, self.graph_bytes)
        return planned_bytes if left >= planned_bytes - _NOISE_BYTES else left

    def excess_bytes(self, kv_bytes: int, taken: Taken, graph_bytes: int) -> int:
        """Bytes taken beyond the budget, with the graphs captured."""
        return max(0, kv_bytes + self._beside_kv(taken, graph_bytes) - self.budget_bytes)

    def _beside_kv(self, taken: Taken, graph_bytes: int) -> int:
        # The driver counts memory per card, not per process, so libraries outside PyTorch are taken as planned.
        kept = max(taken.weights_bytes + self.non_torch_bytes, taken.reserved_bytes)
        return kept + taken.activation_bytes + graph_bytes
