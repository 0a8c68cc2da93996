"""GPU memory: what vLLM may take, what it takes beside weights and KV, and how KV is divided between it and RAM."""

import hashlib
import json
import math
import re
from dataclasses import dataclass

from overspill.figures import Known, assumed, derived, measured
from overspill.hardware.gpu import Gpu
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB, format_size
from overspill.kv.spill.geometry import least_spilled_blocks, num_resident_blocks, window_bytes
from overspill.model.facts import ModelFacts, expert_size
from overspill.model.kv import KVGeometry

# Where no other source is named: H200, vLLM 0.32, Llama-3.1-8B in bf16, 64 requests; measured by benchmarks/spill.py
# and benchmarks/prediction.py.

# vLLM does not count CUDA's context: it looks at the GPU's memory when its context is there already.
_CONTEXT_BYTES = int(0.51 * GiB)
# cuBLAS, NCCL, kernels, and what the allocator rounds weights up by: 0.28 (OLMo-2-7B) to 0.35 GiB
# (Qwen3-Coder-30B-A3B).
_NON_TORCH_BYTES = int(0.32 * GiB)
# NCCL's channels to the other ranks, and vLLM's own buffers for small all-reduces. Not measured here.
_PEERS_BYTES = int(0.4 * GiB)
# What vLLM sets aside for graphs: 0.14 GiB for 7 batch sizes, 0.21 for 19. On an H100 0.51 to 1.85 were seen, for how
# many sizes is not reported (llm-d-planner, accuracy report, 52 runs with vLLM 0.19).
_GRAPHS_BYTES, _GRAPH_BYTES = int(0.10 * GiB), int(0.006 * GiB)
# At the peak an MLP's two inputs to the activation and their product are alive, and so many tensors of hidden size:
# 0.84 GiB for chunks of 8192 tokens. Compiled in pieces, some more: 0.86 GiB for OLMo-2-7B, and 0.38 beside the
# workspace of Qwen3-Coder-30B-A3B.
_MLP_COPIES, _HIDDEN_COPIES, _COMPILED_HIDDEN_COPIES = 3, 3, 6
# Logits twice, in 4 bytes, while vLLM tries its sampler with every request: 0.08 GiB for 64 requests and a vocabulary
# of 151,936.
_SAMPLER_BYTES = 8
_LARGEST_GRAPH = 512
# How far from all this another model may be.
_LEAST_DOUBT_BYTES, _DOUBT = GiB // 4, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Memory that an engine was measured to take on one GPU, beside weights and KV."""

    non_torch_bytes: int
    activation_bytes: int
    graph_bytes: int
    """That CUDA graphs took; where vLLM sized KV itself, what it set aside for them."""
    context_bytes: int
    """CUDA's context, which vLLM does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    context_bytes: Known[int]
    """Not part of the total: it comes on top of what vLLM counts."""
    non_torch_bytes: Known[int]
    activation_bytes: Known[int]
    graph_bytes: Known[int]
    doubt_bytes: int = 0
    """How much more it may be: a plan should work even then, if it can."""

    @property
    def total(self) -> Known[int]:
        parts = (self.non_torch_bytes, self.activation_bytes, self.graph_bytes)
        return derived(sum(part.value for part in parts), *parts)


_NOTHING = measured(0)
NO_OVERHEADS = Overheads(
    context_bytes=_NOTHING, non_torch_bytes=_NOTHING, activation_bytes=_NOTHING, graph_bytes=_NOTHING
)


def assumed_overheads(
    facts: ModelFacts, *, max_num_batched_tokens: int, max_num_seqs: int, enforce_eager: bool = False,
    num_ranks: int = 1,
) -> Overheads:  # fmt: skip
    """What vLLM takes while it profiles: a batch of so many tokens, then the logits of so many requests. `facts` are
    a rank's."""
    number = 2 * max_num_batched_tokens  # bytes of one in bf16, for each token
    copies = _HIDDEN_COPIES if enforce_eager else _COMPILED_HIDDEN_COPIES
    batch = number * (facts.hidden_size * copies + _layer_states(facts))
    sampler = max_num_seqs * facts.vocab_size * _SAMPLER_BYTES
    num_graphs = 0 if enforce_eager else num_graph_sizes(max_num_seqs)
    # A first start compiles while it profiles, and something there is as large as the embedding: with chunks of 2048
    # and 8192 tokens 1.00 and 1.08 GiB were taken, of which the embedding is 0.98. It is gone when experts get theirs.
    compiling = 0 if enforce_eager else facts.weights.embedding_bytes + number * facts.hidden_size
    activations = max(max(batch, sampler) + number * _workspace(facts), compiling)
    graphs = _GRAPHS_BYTES + num_graphs * _GRAPH_BYTES if num_graphs else 0
    return Overheads(
        context_bytes=assumed(_CONTEXT_BYTES, "not counted by vLLM"),
        non_torch_bytes=assumed(_NON_TORCH_BYTES + (_PEERS_BYTES if num_ranks > 1 else 0), "libraries and kernels"),
        activation_bytes=assumed(activations, f"for batches of {max_num_batched_tokens} tokens"),
        graph_bytes=assumed(graphs, f"for {num_graphs} batch sizes"),
        doubt_bytes=_LEAST_DOUBT_BYTES + int(_DOUBT * (activations + graphs)),
    )


def measured_overheads(profile: Profile) -> Overheads:
    note = "on an earlier run"
    return Overheads(
        context_bytes=measured(profile.context_bytes, note),
        non_torch_bytes=measured(profile.non_torch_bytes, note),
        activation_bytes=measured(profile.activation_bytes, note),
        graph_bytes=measured(profile.graph_bytes, note),
    )


def num_graph_sizes(max_num_seqs: int) -> int:
    """Batch sizes that vLLM captures: up to twice the most requests, at most 512 (config/vllm.py)."""
    largest = min(2 * max_num_seqs, _LARGEST_GRAPH)
    small = sum(size <= largest for size in (1, 2, 4))
    return small + len(range(8, min(largest + 1, 256), 8)) + len(range(256, largest + 1, 16))


def _layer_states(facts: ModelFacts) -> int:
    """Numbers per token, of the MLP or of attention: its inputs, queries once more, and its output. Experts have a
    workspace instead: 0.30 and 0.08 GiB for chunks of 8192 and 2048 tokens, with Qwen3-Coder-30B-A3B."""
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    attention = 3 * queries + 2 * keys
    return attention if facts.num_experts else max(attention, _MLP_COPIES * facts.intermediate_size)


def _workspace(facts: ModelFacts) -> int:
    """Numbers per token that vLLM's fused experts keep from the first batch on (fused_moe, workspace_shapes): what goes
    into both products and what comes out of them."""
    if not facts.num_experts:
        return 0
    expert, hidden = expert_size(facts), facts.hidden_size
    return facts.num_experts_per_tok * (max(expert, hidden) + max(2 * expert, hidden)) + hidden


def fingerprint(
    facts: ModelFacts, gpu: Gpu, *, vllm_version: str, max_num_batched_tokens: int, max_num_seqs: int,
    enforce_eager: bool, kv_cache_dtype: str,
) -> str:  # fmt: skip
    """What a profile holds for: a few readable words, and a hash over everything it depends on."""
    shape = ("architecture", "dtype", "quantization", "num_layers", "hidden_size", "intermediate_size", "num_heads",
             "num_experts", "vocab_size")  # fmt: skip
    decides = {
        **{name: getattr(facts, name) for name in shape},
        "weights_bytes": facts.weights.total_bytes,
        "gpu": gpu.name,
        "gpu_bytes": gpu.total_bytes.value,
        "driver": gpu.driver_version,
        "vllm": vllm_version,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": enforce_eager,
        "kv_cache_dtype": kv_cache_dtype,
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    words = f"{facts.architecture}-{gpu.name}-vllm{vllm_version}-{max_num_batched_tokens}x{max_num_seqs}"
    return f"{re.sub(r'[^a-z0-9.]+', '-', words.lower())[:100]}-{digest}"


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
