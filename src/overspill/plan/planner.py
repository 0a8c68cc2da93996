"""All ways to serve a context on a machine, what each costs, and which one to take."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from overspill.figures import Known, derived
from overspill.hardware.gpu import Gpu
from overspill.model.caches import Attention, LatentAttention, RecurrentState
from overspill.model.facts import ModelFacts, active_bytes
from overspill.model.kv import KVGeometry, kv_geometry
from overspill.model.settings import CacheSettings
from overspill.plan.memory import KvSplit, longest_context, split_kv
from overspill.plan.overheads import Overheads, assumed_overheads
from overspill.plan.speed import Load, Machine, decode_step_s, prefill_s
from overspill.plan.weights import NONE, WeightOffload, groupings

GIB = 2**30
# vLLM's own default (--gpu-memory-utilization).
UTILIZATION = 0.92
# What an engine process takes of RAM beside pools: libraries, the tokenizer, buffers.
PROCESS_RAM_BYTES = 3 * GIB
# A pool smaller than this is not worth its metadata.
_LEAST_OFFLOAD_BYTES = GIB
# Predictions are not so good that a smaller difference would mean something.
_NEARLY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asks for; None leaves it to the plan."""

    max_model_len: int | None = None
    kv_cache_dtype: str | None = None
    gpu_memory_bytes: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 64
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to serve one request of the context asked for."""

    kv_cache_dtype: str
    max_num_batched_tokens: int
    weights: WeightOffload
    kv: KvSplit
    offload_bytes: int
    overheads: Overheads
    decode_tokens_per_s: Known[float]
    ttft_s: Known[float]
    is_exact: bool
    """Whether tokens are those of the model as it is: a smaller KV dtype rounds."""

    @property
    def ram_bytes(self) -> int:
        """Pinned, beside the engine's own."""
        return self.weights.ram_bytes + self.kv.spilled_bytes + self.offload_bytes

    @property
    def num_mechanisms(self) -> int:
        return bool(self.weights.ram_bytes) + bool(self.kv.spilled_bytes)

    @property
    def name(self) -> str:
        parts = []
        if self.weights.ram_bytes:
            parts.append("weights in RAM")
        if self.kv.spilled_bytes:
            parts.append("KV spilled to RAM")
        where = " and ".join(parts) or "everything on the GPU"
        return where if self.is_exact else f"{where}, KV in {self.kv_cache_dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    facts: ModelFacts
    max_model_len: int
    usable_gpu_bytes: Known[int]
    gpu_memory_utilization: float
    max_num_seqs: int
    ram_bytes: Known[int]
    """That may be taken."""
    ways: tuple[Way, ...]
    """Fastest first, one of each kind."""
    longest_context: int
    """That fits by any of the exact ways."""

    @property
    def recommended(self) -> Way | None:
        """Of those that change no token, or if there is none of all, the fastest at full length; among nearly as fast
        ones, one that leaves weights on the GPU: spilled KV slows long requests only, weights in RAM every one."""
        choice = [way for way in self.ways if way.is_exact] or list(self.ways)
        if not choice:
            return None
        enough = _NEARLY * max(way.decode_tokens_per_s.value for way in choice)
        return min(
            (way for way in choice if way.decode_tokens_per_s.value >= enough),
            key=lambda way: (way.weights.ram_bytes > 0, way.num_mechanisms, -way.decode_tokens_per_s.value),
        )


def make_plan(facts: ModelFacts, gpu: Gpu, ram_bytes: Known[int], wishes: Wishes) -> Plan:
    usable, utilization = usable_memory(gpu, wishes.gpu_memory_bytes)
    length = wishes.max_model_len or facts.max_position_embeddings
    candidates = _ways(facts, gpu, usable, ram_bytes, length, wishes)
    best: dict[tuple[bool, bool, bool], Way] = {}
    for way in sorted(candidates, key=lambda way: (-way.decode_tokens_per_s.value, way.ram_bytes)):
        best.setdefault((way.weights.ram_bytes > 0, way.kv.spilled_bytes > 0, way.is_exact), way)
    chosen = tuple(_with_offload(way, ram_bytes) for way in _sensible(list(best.values())))
    return Plan(
        facts=facts,
        max_model_len=length,
        usable_gpu_bytes=usable,
        gpu_memory_utilization=utilization,
        max_num_seqs=wishes.max_num_seqs,
        ram_bytes=ram_bytes,
        ways=chosen,
        longest_context=_longest(facts, gpu, usable, ram_bytes, wishes),
    )


def _sensible(ways: list[Way]) -> list[Way]:
    """Where everything fits on the GPU, moving something to RAM only loses."""
    on_gpu = {way.kv_cache_dtype for way in ways if not way.num_mechanisms}
    return [way for way in ways if not way.num_mechanisms or way.kv_cache_dtype not in on_gpu]


def usable_memory(gpu: Gpu, budget_bytes: int | None) -> tuple[Known[int], float]:
    """GPU memory for vLLM, and the fraction that makes it so: vLLM takes a fraction of all, and demands it free."""
    total, free = gpu.total_bytes, gpu.free_bytes
    usable = min(int(total.value * UTILIZATION), free.value, budget_bytes or total.value)
    fraction = math.floor(usable / total.value * 1000) / 1000
    note = f"{fraction:.1%} of {total.value / GIB:.1f} GiB"
    return derived(int(total.value * fraction), total, free, note=note), fraction


def _ways(
    facts: ModelFacts, gpu: Gpu, usable: Known[int], ram: Known[int], length: int, wishes: Wishes
) -> Iterator[Way]:
    for dtype, is_exact in _kv_dtypes(facts, wishes):
        for chunk in _chunks(usable.value, wishes):
            settings = CacheSettings(kv_cache_dtype=dtype, max_num_batched_tokens=chunk)
            geometry = kv_geometry(facts, settings)
            overheads = assumed_overheads(
                facts, max_num_batched_tokens=chunk, max_num_seqs=wishes.max_num_seqs,
                enforce_eager=wishes.enforce_eager,
            )  # fmt: skip
            room = usable.value - facts.weights.total_bytes - overheads.total.value
            for weights in (NONE, *groupings(facts.weights.layer_bytes)):
                for spill in (False, True):
                    if spill and not can_spill(facts, geometry):
                        continue
                    kv = split_kv(geometry, length, room + weights.saved_bytes, spill=spill)
                    if kv is None or (spill and not kv.spilled_bytes):
                        continue
                    if weights.ram_bytes + kv.spilled_bytes + PROCESS_RAM_BYTES > ram.value:
                        continue
                    yield _way(facts, gpu, geometry, length, chunk, dtype, is_exact, weights, kv, overheads)


def _way(
    facts: ModelFacts, gpu: Gpu, geometry: KVGeometry, length: int, chunk: int, dtype: str, is_exact: bool,
    weights: WeightOffload, kv: KvSplit, overheads: Overheads,
) -> Way:  # fmt: skip
    machine, sources = _machine(gpu)
    load = Load(
        active_weight_bytes=active_bytes(facts),
        weights_in_ram_bytes=weights.ram_bytes,
        kv_bytes=geometry.request_bytes(length),
        spilled_kv_bytes=kv.spilled_bytes,
        parameters_per_token=active_bytes(facts) // 2,
        attention_flops_per_token_pair=4 * facts.num_heads * facts.head_dim * _full_attention_layers(facts),
    )
    return Way(
        kv_cache_dtype=dtype,
        max_num_batched_tokens=chunk,
        weights=weights,
        kv=kv,
        offload_bytes=0,
        overheads=overheads,
        decode_tokens_per_s=derived(1 / decode_step_s(machine, load), *sources),
        ttft_s=derived(prefill_s(machine, load, length, chunk), *sources),
        is_exact=is_exact,
    )


def _machine(gpu: Gpu) -> tuple[Machine, list[Known[int]]]:
    memory, flops, link = gpu.memory_bytes_per_second, gpu.bf16_flops, gpu.link.h2d_bytes_per_second
    known = [figure for figure in (memory, flops, link) if figure is not None]
    return (
        Machine(
            # A card that nobody knows is taken for a slow one.
            memory_bytes_per_s=memory.value if memory is not None else 300e9,
            flops=flops.value if flops is not None else 50e12,
            link_bytes_per_s=link.value,
        ),
        known,
    )


def _kv_dtypes(facts: ModelFacts, wishes: Wishes) -> list[tuple[str, bool]]:
    if wishes.kv_cache_dtype is not None:
        return [(wishes.kv_cache_dtype, True)]  # what was asked for is the measure
    return [("auto", True), ("fp8", False)] if facts.kv_cache_dtype == "auto" else [("auto", True)]


def _chunks(usable_bytes: int, wishes: Wishes) -> tuple[int, ...]:
    """Prefill hides the link only in long chunks, and long chunks cost activations: both are tried."""
    if wishes.max_num_batched_tokens is not None:
        return (wishes.max_num_batched_tokens,)
    return (2048, 8192) if usable_bytes < 70 * GIB else (8192,)


def can_spill(facts: ModelFacts, geometry: KVGeometry) -> bool:
    """Spill needs attention layers only, and one page size (overspill.kv.spill.layers refuses the rest)."""
    has_state = any(isinstance(entry.cache, RecurrentState) for entry in facts.caches)
    pages = {member.page.page_size_bytes for group in geometry.groups for member in group.members}
    return not has_state and len(pages) == 1


def _full_attention_layers(facts: ModelFacts) -> int:
    return sum(
        1
        for entry in facts.caches
        if isinstance(entry.cache, LatentAttention)
        or (
            isinstance(entry.cache, Attention)
            and entry.cache.sliding_window is None
            and entry.cache.attention_chunk_size is None
        )
    )


def _with_offload(way: Way, ram: Known[int]) -> Way:
    """RAM that is left keeps idle KV warm; a pool smaller than the GPU's KV would only mirror it."""
    left = (ram.value - way.ram_bytes - PROCESS_RAM_BYTES) // GIB * GIB
    worth = left >= max(_LEAST_OFFLOAD_BYTES, way.kv.resident_bytes)
    return replace(way, offload_bytes=left if worth else 0)


def _longest(facts: ModelFacts, gpu: Gpu, usable: Known[int], ram: Known[int], wishes: Wishes) -> int:
    """Over all exact ways; the more weights in RAM, the more room for KV."""
    longest = 0
    dtype = wishes.kv_cache_dtype or "auto"
    for chunk in _chunks(usable.value, wishes):
        geometry = kv_geometry(facts, CacheSettings(kv_cache_dtype=dtype, max_num_batched_tokens=chunk))
        overheads = assumed_overheads(
            facts, max_num_batched_tokens=chunk, max_num_seqs=wishes.max_num_seqs, enforce_eager=wishes.enforce_eager
        )
        room = usable.value - facts.weights.total_bytes - overheads.total.value
        for weights in (NONE, *groupings(facts.weights.layer_bytes)):
            available = room + weights.saved_bytes
            left = ram.value - weights.ram_bytes - PROCESS_RAM_BYTES
            if available <= geometry.bytes_per_block or left < 0:
                continue
            spill = left if can_spill(facts, geometry) else 0
            longest = max(longest, longest_context(geometry, available, spill, facts.max_position_embeddings))
    return longest
