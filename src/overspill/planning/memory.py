"""GPU memory that vLLM may take, and how KV is divided between it and RAM."""

import math
from dataclasses import dataclass

from overspill.figures import Known, derived
from overspill.hardware.gpu import Gpu
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB, format_size
from overspill.kv.spill.geometry import least_spilled_blocks, num_resident_blocks, window_bytes
from overspill.model.kv import KVGeometry

# vLLM's own default (--gpu-memory-utilization).
UTILIZATION = 0.92
# Taken after the size of KV is settled: block tables, the sampler's buffers, the allocator's rounding. An
# H200 with vLLM 0.32 used 0.70 to 0.90 GiB more than the fraction given, of which the context was 0.51: most where what
# was compiled earlier came from its cache, so that vLLM saw less of it (benchmarks/spill.py, benchmarks/prediction.py).
SLACK_BYTES = int(0.4 * GiB)
# vLLM gets four digits: of a card of 140 GiB the third would be 0.14 GiB.
_FRACTIONS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    limit_bytes: Known[int]
    """What may be used in all, CUDA's context included."""
    context_bytes: Known[int]
    usable_bytes: Known[int]
    """What vLLM counts: weights, activations, graphs, libraries and KV."""
    gpu_memory_utilization: float | None
    """None where vLLM is given the bytes of its KV cache instead."""

    @property
    def used_bytes(self) -> Known[int]:
        """What an engine will be seen to use: all that vLLM counts, and the context. What may come on top is kept
        free."""
        return derived(self.usable_bytes.value + self.context_bytes.value, self.usable_bytes, self.context_bytes)


def gpu_budget(gpu: Gpu, gpu_memory_bytes: int | None, context: Known[int], utilization: float | None = None) -> Budget:
    """vLLM takes a fraction of the whole card, and demands it free beside its own context; of a fraction
    that was requested, as much as is free."""
    total, free = gpu.total_bytes, gpu.free_bytes
    if gpu_memory_bytes is not None and utilization is not None:
        raise OverspillError(
            f"--gpu-memory {format_size(gpu_memory_bytes)} and --gpu-memory-utilization {utilization:g} both say how "
            "much of the GPU to take; leave one of the two out"
        )
    if gpu_memory_bytes is not None and gpu_memory_bytes > total.value:
        raise OverspillError(
            f"--gpu-memory is {format_size(gpu_memory_bytes)}, and {gpu.name} has {format_size(total.value)}; give at "
            "most that, or leave --gpu-memory out"
        )
    beside = context.value + SLACK_BYTES
    limit = min(free.value, gpu_memory_bytes or total.value)
    possible = math.floor(max(0, limit - beside) / total.value * _FRACTIONS) / _FRACTIONS
    fraction = min(UTILIZATION if utilization is None else utilization, possible)
    if fraction == utilization:
        limit = min(limit, int(total.value * fraction) + beside)
    usable = int(total.value * fraction)
    return Budget(
        limit_bytes=derived(limit, total, free, note=_limit_note(gpu, gpu_memory_bytes, utilization, limit)),
        context_bytes=context,
        usable_bytes=derived(usable, total, free, note=f"{fraction:.2%} of {total.value / GiB:.1f} GiB"),
        gpu_memory_utilization=fraction,
    )


def card_bytes(counted_bytes: int, context_bytes: int, utilization: float | None = None) -> int:
    """The smallest card of which vLLM takes so much for what it counts."""
    least = max(counted_bytes / (utilization or UTILIZATION), counted_bytes + context_bytes + SLACK_BYTES)
    return math.ceil(least * (1 + 1 / _FRACTIONS))  # which the rounding of the fraction may cost


def whole_budget(gpu: Gpu, context: Known[int]) -> Budget:
    """Where nothing is profiled all of it is for weights and KV."""
    total = gpu.total_bytes
    return Budget(limit_bytes=total, context_bytes=context, usable_bytes=total, gpu_memory_utilization=None)


def _limit_note(gpu: Gpu, gpu_memory_bytes: int | None, utilization: float | None, limit: int) -> str:
    if gpu_memory_bytes is not None and limit == gpu_memory_bytes:
        return f"of {gpu.name}, by --gpu-memory"
    if utilization is not None and limit < gpu.free_bytes.value:
        return f"of {gpu.name}, by --gpu-memory-utilization"
    if limit < gpu.total_bytes.value:
        return f"of {gpu.name}: other programs use the rest"
    return gpu.name


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSplit:
    """One rank's KV: what is resident, what the window takes, and what lies in RAM."""

    resident_bytes: int
    window_bytes: int
    spilled_bytes: int
    table_bytes: int = 0
    """Block tables, which spill takes off the memory vLLM found (overspill.kv.spill.capacity)."""

    @property
    def device_bytes(self) -> int:
        return self.resident_bytes + self.window_bytes + self.table_bytes


def split_kv(
    geometry: KVGeometry,
    max_model_len: int,
    available_bytes: int,
    *,
    spill: bool,
    granularity: int,
    max_num_seqs: int,
    at_once: int = 1,
    doubt_bytes: int = 0,
) -> KvSplit | None:
    """KV for requests of `max_model_len` in so much device memory, with the least in RAM; None if there is no way.

    Should there be less device memory, by up to `doubt_bytes`, they still fit: RAM makes up for it.
    """
    block_bytes = geometry.bytes_per_block
    need = at_once * geometry.blocks_per_request(max_model_len) + 1  # and vLLM's null block
    if need * block_bytes <= available_bytes - doubt_bytes:
        return KvSplit(resident_bytes=available_bytes // block_bytes * block_bytes, window_bytes=0, spilled_bytes=0)
    tables = table_bytes(geometry, max_model_len, max_num_seqs)
    room = available_bytes - tables
    if not spill or room <= doubt_bytes:
        return None
    page, regions = geometry.page_size_bytes, geometry.num_regions
    spilled = least_spilled_blocks(need, room - doubt_bytes, page, regions, granularity)
    if not spilled:
        return None
    resident = num_resident_blocks(room, spilled, page, regions, granularity)
    if resident <= at_once * geometry.states_per_request:
        return None  # recurrent states do not spill
    return KvSplit(
        resident_bytes=resident * block_bytes,
        window_bytes=window_bytes(spilled, page, regions),
        spilled_bytes=spilled * block_bytes,
        table_bytes=tables,
    )


def table_bytes(geometry: KVGeometry, max_model_len: int, max_num_seqs: int) -> int:
    """Two copies of 32-bit block ids, for every request that may run."""
    entries = sum(-(-max_model_len // group.block_size) for group in geometry.groups)
    return 2 * 4 * max_num_seqs * entries
