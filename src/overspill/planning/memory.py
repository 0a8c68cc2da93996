"""GPU memory: what vLLM may take, what it takes besides weights and KV, and how KV is split between GPU and RAM."""

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

# vLLM does not count CUDA's context: it measures the GPU's memory when its context already exists.
_CONTEXT_BYTES = int(0.51 * GiB)
# cuBLAS, NCCL, kernels, and the allocator's rounding of weights: 0.28 (OLMo-2-7B) to 0.35 GiB (Qwen3-Coder-30B-A3B).
_NON_TORCH_BYTES = int(0.32 * GiB)
# NCCL's channels to the other ranks, and vLLM's own buffers for small all-reduces. Not measured here.
_PEERS_BYTES = int(0.4 * GiB)
# What vLLM sets aside for graphs: 0.14 GiB for 7 batch sizes, 0.21 for 19. An H100 took 0.51 to 1.85, for
# numbers of sizes that are not reported (llm-d-planner, accuracy report, 52 runs with vLLM 0.19).
_GRAPHS_BYTES, _GRAPH_BYTES = int(0.10 * GiB), int(0.006 * GiB)
# At the peak an MLP's two inputs to the activation and their product are alive, plus this many tensors of hidden size:
# 0.84 GiB for chunks of 8192 tokens. Compiled in pieces, a few more: 0.86 GiB for OLMo-2-7B, and 0.38 besides the
# workspace of Qwen3-Coder-30B-A3B.
_MLP_COPIES, _HIDDEN_COPIES, _COMPILED_HIDDEN_COPIES = 3, 3, 6
# Two copies of the logits, 4 bytes each, while vLLM tries its sampler with all requests: 0.08 GiB for 64 requests and a
# vocabulary of 151,936.
_SAMPLER_BYTES = 8
_LARGEST_GRAPH = 512
# How far another model may be from all this.
_LEAST_DOUBT_BYTES, _DOUBT = GiB // 4, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Memory that an engine was measured to take on one GPU besides weights and KV."""

    non_torch_bytes: int
    activation_bytes: int
    graph_bytes: int
    """Memory of CUDA graphs, or what vLLM set aside for them where it sized KV itself."""
    context_bytes: int
    """CUDA's context, which vLLM does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    context_bytes: Known[int]
    """CUDA's context, on top of what vLLM counts and so not part of the total."""
    non_torch_bytes: Known[int]
    activation_bytes: Known[int]
    graph_bytes: Known[int]
    doubt_bytes: int = 0
    """How much larger the overheads may turn out: a plan should work even then, if it can."""

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
    """Memory vLLM takes while it profiles: a batch of `max_num_batched_tokens`, then the logits of `max_num_seqs`
    requests. `facts` are one rank's."""
    number = 2 * max_num_batched_tokens  # bytes per number in bf16, for all tokens
    copies = _HIDDEN_COPIES if enforce_eager else _COMPILED_HIDDEN_COPIES
    batch = number * (facts.hidden_size * copies + _layer_states(facts))
    sampler = max_num_seqs * facts.vocab_size * _SAMPLER_BYTES
    num_graphs = 0 if enforce_eager else num_graph_sizes(max_num_seqs)
    # A first start compiles while it profiles, which takes something as large as the embedding: 1.00 and 1.08 GiB
    # with chunks of 2048 and 8192 tokens, of which the embedding is 0.98. It is freed before experts get a workspace.
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
    """Number of batch sizes vLLM captures, up to twice `max_num_seqs` and at most 512 (config/vllm.py)."""
    largest = min(2 * max_num_seqs, _LARGEST_GRAPH)
    small = sum(size <= largest for size in (1, 2, 4))
    return small + len(range(8, min(largest + 1, 256), 8)) + len(range(256, largest + 1, 16))


def _layer_states(facts: ModelFacts) -> int:
    """Numbers per token in the MLP or in attention: its inputs, queries once more, and its output. Instead of the MLP
    experts have a workspace: 0.30 and 0.08 GiB for chunks of 8192 and 2048 tokens, with Qwen3-Coder-30B-A3B."""
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    attention = 3 * queries + 2 * keys
    return attention if facts.num_experts else max(attention, _MLP_COPIES * facts.intermediate_size)


def _workspace(facts: ModelFacts) -> int:
    """Numbers per token that vLLM's fused experts keep from the first batch on (fused_moe, workspace_shapes): inputs
    and outputs of both products."""
    if not facts.num_experts:
        return 0
    expert, hidden = expert_size(facts), facts.hidden_size
    return facts.num_experts_per_tok * (max(expert, hidden) + max(2 * expert, hidden)) + hidden


def fingerprint(
    facts: ModelFacts, gpu: Gpu, *, vllm_version: str, max_num_batched_tokens: int, max_num_seqs: int,
    enforce_eager: bool, kv_cache_dtype: str,
) -> str:  # fmt: skip
    """Key of a profile: a few readable words, and a hash over everything the profile depends on."""
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
# Memory taken after KV is sized: block tables, the sampler's buffers, the allocator's rounding. An H200 with vLLM 0.32
# used 0.70 to 0.90 GiB more than the fraction given, of which the context was 0.51: the most where compiled code came
# from a cache, so that vLLM's profiling saw less of it (benchmarks/spill.py, benchmarks/prediction.py).
SLACK_BYTES = int(0.4 * GiB)
# The fraction has four digits: steps of the third would be 0.14 GiB on a card of 140 GiB.
_FRACTIONS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    limit_bytes: Known[int]
    """GPU memory that may be used in all, CUDA's context included."""
    context_bytes: Known[int]
    usable_bytes: Known[int]
    """Memory that vLLM counts: weights, activations, graphs, libraries and KV."""
    gpu_memory_utilization: float | None
    """vLLM's fraction; None where vLLM gets the bytes of its KV cache instead."""

    @property
    def used_bytes(self) -> Known[int]:
        """Memory an engine will be seen to use: all that vLLM counts, and the context, but not the slack kept free."""
        return derived(self.usable_bytes.value + self.context_bytes.value, self.usable_bytes, self.context_bytes)


def gpu_budget(gpu: Gpu, gpu_memory_bytes: int | None, context: Known[int], utilization: float | None = None) -> Budget:
    """Budget on a GPU: a fraction of the whole card, which vLLM demands free besides its own context. A requested
    fraction is lowered to what is free."""
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
    """Size of the smallest card of which vLLM takes `counted_bytes` for what it counts."""
    least = max(counted_bytes / (utilization or UTILIZATION), counted_bytes + context_bytes + SLACK_BYTES)
    return math.ceil(least * (1 + 1 / _FRACTIONS))  # the fraction's rounding may cost that


def whole_budget(gpu: Gpu, context: Known[int]) -> Budget:
    """Budget where vLLM profiles nothing: all memory is for weights and KV."""
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
    """One rank's KV memory: resident, the window's, and spilled to RAM."""

    resident_bytes: int
    window_bytes: int
    spilled_bytes: int
    table_bytes: int = 0
    """Block tables, which spill deducts from the memory vLLM found (overspill.kv.spill.capacity)."""

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
    """KV of `at_once` requests of `max_model_len`, split so that the least is in RAM; None if there is no way.

    With up to `doubt_bytes` less device memory the requests still fit: RAM makes up for it.
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
    """Bytes of block tables: two copies of 32-bit block ids for every request that may run."""
    entries = sum(-(-max_model_len // group.block_size) for group in geometry.groups)
    return 2 * 4 * max_num_seqs * entries
