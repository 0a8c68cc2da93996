"""Everything a plan is made from: a model, a device, RAM, and what is wished for."""

from collections.abc import Callable
from dataclasses import dataclass

from overspill.figures import Known
from overspill.hardware.gpu import Gpu
from overspill.kv.sizes import GiB
from overspill.model.caches import RecurrentState
from overspill.model.facts import ModelFacts
from overspill.model.kv import KVGeometry
from overspill.planning.budget import Budget, gpu_budget, whole_budget
from overspill.planning.overheads import NO_OVERHEADS, Overheads, assumed_overheads, measured_overheads
from overspill.planning.platform import Platform
from overspill.planning.profiles import Profile
from overspill.planning.wishes import Wishes

Profiles = Callable[[int, str], Profile | None]
"""What was measured for a max_num_batched_tokens and a kv_cache_dtype."""

# Where vLLM itself takes longer chunks (arg_utils.py, get_batch_defaults), memory is no matter.
_LARGE_BYTES, _LARGE_CHUNK = 70 * GiB, 8192
# Cards from which on kernels for KV in fp8 are everywhere.
_FP8_CAPABILITY = (8, 9)


def nothing_measured(max_num_batched_tokens: int, kv_cache_dtype: str) -> Profile | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    facts: ModelFacts
    gpu: Gpu
    ram_bytes: Known[int]
    wishes: Wishes
    platform: Platform
    profiles: Profiles

    @property
    def max_model_len(self) -> int:
        return self.wishes.max_model_len or self.facts.max_position_embeddings

    @property
    def kv_cache_dtypes(self) -> list[tuple[str, bool]]:
        """And whether tokens stay those of the model as it is."""
        if self.wishes.kv_cache_dtype is not None:
            return [(self.wishes.kv_cache_dtype, True)]  # what was asked for is the measure
        capability = self.gpu.compute_capability
        has_fp8 = not self.platform.is_cpu and (capability is None or capability >= _FP8_CAPABILITY)
        is_small = self.facts.kv_cache_dtype != "auto"
        return [("auto", True), ("fp8", False)] if has_fp8 and not is_small else [("auto", True)]

    @property
    def chunks(self) -> tuple[int, ...]:
        if self.wishes.max_num_batched_tokens is not None:
            return (self.wishes.max_num_batched_tokens,)
        is_large = self.platform.profiles_memory and self.gpu.total_bytes.value >= _LARGE_BYTES
        is_large = is_large and (self.wishes.gpu_memory_bytes or _LARGE_BYTES) >= _LARGE_BYTES
        is_large = is_large and (self.wishes.gpu_memory_utilization or 1) * self.gpu.total_bytes.value >= _LARGE_BYTES
        return (_LARGE_CHUNK,) if is_large else self.platform.chunks

    def overheads(self, chunk: int, kv_cache_dtype: str) -> Overheads:
        if not self.platform.profiles_memory:
            return NO_OVERHEADS
        if (profile := self.profiles(chunk, kv_cache_dtype)) is not None:
            return measured_overheads(profile)
        return assumed_overheads(
            self.facts,
            max_num_batched_tokens=chunk,
            max_num_seqs=self.wishes.num_seqs,
            enforce_eager=self.wishes.enforce_eager,
        )

    def budget(self) -> Budget:
        """One for all ways: a context is the same size whatever runs in it, so the largest one seen counts."""
        contexts = [
            self.overheads(chunk, dtype).context_bytes for chunk in self.chunks for dtype, _ in self.kv_cache_dtypes
        ]
        context = max(contexts, key=lambda figure: figure.value)
        if not self.platform.profiles_memory:
            return whole_budget(self.gpu, context)
        return gpu_budget(self.gpu, self.wishes.gpu_memory_bytes, context, self.wishes.gpu_memory_utilization)


def can_spill(facts: ModelFacts, geometry: KVGeometry) -> bool:
    """Spill needs attention layers, and one page size (overspill.kv.spill.layers refuses the rest)."""
    has_attention = any(not isinstance(entry.cache, RecurrentState) for entry in facts.caches)
    pages = {member.page.page_size_bytes for group in geometry.groups for member in group.members}
    return has_attention and len(pages) == 1
