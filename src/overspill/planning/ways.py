"""One way to serve a context: where everything lies, and how fast it will be."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from overspill.figures import Known, derived
from overspill.kv.sizes import GiB
from overspill.model.facts import LatentAttention, ModelFacts, active_bytes, parameters_per_token
from overspill.model.kv import Kind, KVGeometry
from overspill.planning.attempts import PROCESS_RAM_BYTES, Attempt, Fit, peak_ram_bytes
from overspill.planning.connector_options import read_options
from overspill.planning.memory import KvSplit
from overspill.planning.setup import Setup, attends_to_all, runs_spilled_graphs, shares_with_cpu
from overspill.planning.speed import (
    ALL_REDUCE_NVLINK_S,
    ALL_REDUCE_PCIE_S,
    UVA_TOKENS_PER_READ,
    Load,
    Machine,
    decode_step_s,
    prefill_s,
)
from overspill.planning.weights import WeightOffload

# A pool smaller than this is not worth its metadata.
LEAST_OFFLOAD_BYTES = GiB
# Ways are compared by the time of a prompt of the full context and an answer of this many tokens.
_ANSWER_TOKENS = 512
# Length of most requests in tokens, for the speed of many at once.
SHORT_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Way(Attempt):
    """An attempt with its KV and speeds; sizes are of one rank, speeds of all ranks together."""

    kv: KvSplit
    offload_bytes: int
    """RAM for idle KV."""
    num_ranks: int = 1
    decode_tokens_per_s: Known[float]
    """Decode speed of one request of the full context."""
    ttft_s: Known[float]
    at_once: int
    """Requests of the full context that run together."""
    at_once_tokens_per_s: Known[float]
    """Decode speed of the `at_once` requests together."""
    at_once_prefill_s: float
    """Prefill time of one of their prompts, with the GPU's KV divided among them."""
    short_requests: int
    """Requests of `SHORT_TOKENS` tokens that run at once without spilling."""
    short_tokens_per_s: Known[float]
    """Decode speed of the short requests together."""

    @property
    def ram_bytes(self) -> int:
        """RAM for all ranks' weights and KV; the weights really take `weights.pinned_bytes`."""
        return self.num_ranks * (self.weights.ram_bytes + self.kv.spilled_bytes + self.offload_bytes)

    @property
    def peak_ram_bytes(self) -> int:
        """Most RAM that the engine takes at any time, all in all."""
        later_bytes = self.kv.spilled_bytes + self.offload_bytes + self.parked_bytes
        return self.num_ranks * peak_ram_bytes(self.weights, later_bytes)

    @property
    def connector_sizes(self) -> dict[str, int]:
        """The connector's RAM for all ranks, by its options' names; empty if the way needs no connector."""
        sizes = {"host_bytes": self.offload_bytes, "spill_bytes": self.kv.spilled_bytes}
        return {name: self.num_ranks * size for name, size in sizes.items() if size}

    @property
    def parks(self) -> bool:
        """Whether the engine can be parked, which the connector does."""
        return self.parked_bytes > 0 and bool(self.connector_sizes)

    @property
    def num_mechanisms(self) -> int:
        return bool(self.weights.ram_bytes) + bool(self.kv.spilled_bytes)

    @property
    def front_bytes(self) -> int:
        """KV near eviction, of which lazy stores keep copies while the GPU still has it (overspill.kv.scheduler)."""
        blocks = 2 * sum(-(-self.max_num_batched_tokens // group.block_size) for group in self.geometry.groups)
        return min(blocks * self.geometry.bytes_per_block, self.kv.resident_bytes // 2)

    @property
    def name(self) -> str:
        parts = []
        if self.weights.ram_bytes:
            parts.append("weights in RAM (UVA)" if self.weights.is_uva else "weights in RAM")
        if self.kv.spilled_bytes:
            parts.append("KV spilled to RAM")
        where = " and ".join(parts) or "everything on the GPU"
        return where if self.is_exact else f"{where}, KV in {self.kv_cache_dtype}"

    @property
    def request_s(self) -> float:
        """Time of `at_once` long requests: their prompts one after the other, then their answers together."""
        return self.at_once * self.at_once_prefill_s + _ANSWER_TOKENS * self.at_once / self.at_once_tokens_per_s.value

    @property
    def warm_tokens(self) -> int:
        """Tokens of idle conversations that the pool in RAM keeps."""
        return self.tokens_in(self.offload_bytes)

    def tokens_in(self, num_bytes: int) -> int:
        """Tokens whose KV fits `num_bytes` of one rank, if sliding windows and states take none of it."""
        per_token = self.geometry.kv_bytes_per_token
        return num_bytes // per_token if per_token else 0

    def requests_at_once(self, num_tokens: int) -> int:
        """Requests of `num_tokens` tokens that fit in resident and spilled KV; one block is vLLM's null block."""
        blocks = (self.kv.resident_bytes + self.kv.spilled_bytes) // self.geometry.bytes_per_block - 1
        return blocks // self.geometry.blocks_per_request(num_tokens)


def make_way(setup: Setup, fit: Fit) -> Way:
    facts, attempt, kv = setup.facts, fit.attempt, fit.kv
    geometry, chunk = attempt.geometry, attempt.max_num_batched_tokens
    machine, sources = _machine(setup)
    shared = _shared_part(setup, geometry, attempt.kv_cache_dtype)
    length = setup.max_model_len
    is_eager = setup.wishes.enforce_eager and not setup.platform.is_cpu
    at_once = setup.wishes.at_once

    def long_load(num_requests: int) -> Load:
        request = num_requests * geometry.request_bytes(length)
        # Resident blocks are taken first, and one of them is vLLM's null block.
        streamed = max(0, request - (kv.resident_bytes - geometry.bytes_per_block)) if kv.spilled_bytes else 0
        load = _weights_load(facts, attempt.weights, num_requests)
        is_graphed = runs_spilled_graphs(setup, num_requests)
        return replace(
            load, kv_bytes=request, spilled_kv_bytes=streamed, is_eager=is_eager, is_graphed=is_graphed,
            shared_kv_bytes=round(shared * streamed) if is_graphed else 0,
        )  # fmt: skip

    long, together = long_load(1), long_load(at_once)
    share = replace(long, spilled_kv_bytes=together.spilled_kv_bytes // at_once)
    resident_blocks = kv.resident_bytes // geometry.bytes_per_block - 1
    short_tokens = min(SHORT_TOKENS, length)
    num_short = min(setup.wishes.num_seqs, resident_blocks // geometry.blocks_per_request(short_tokens))
    short = replace(
        _weights_load(facts, attempt.weights, max(1, num_short)),
        kv_bytes=num_short * geometry.request_bytes(short_tokens),
        is_eager=is_eager,
    )
    if together.shared_kv_bytes and setup.cpu_attention.value:
        sources.append(setup.cpu_attention)
    way = Way(
        **{field.name: getattr(attempt, field.name) for field in fields(attempt)},
        kv=kv,
        offload_bytes=0,
        num_ranks=setup.wishes.num_ranks,
        decode_tokens_per_s=derived(1 / decode_step_s(machine, long), *sources),
        ttft_s=derived(prefill_s(machine, long, length, chunk), *sources),
        at_once=at_once,
        at_once_tokens_per_s=derived(at_once / decode_step_s(machine, together), *sources),
        at_once_prefill_s=prefill_s(machine, share, length, chunk),
        short_requests=num_short,
        short_tokens_per_s=derived(num_short / decode_step_s(machine, short), *sources),
    )
    return replace(way, offload_bytes=_offload_bytes(setup, way))


def _offload_bytes(setup: Setup, way: Way) -> int:
    """RAM left for idle KV: all of it where the user stated how much RAM to use. RAM that merely is free belongs to the
    machine, and half of it stays free."""
    if setup.wishes.offload_ram_bytes is not None:
        return setup.wishes.offload_ram_bytes
    taken = way.weights.pinned_bytes + way.parked_bytes + way.kv.spilled_bytes + PROCESS_RAM_BYTES
    free = setup.ram_bytes.value
    left = min(free - taken, free if setup.wishes.ram_given else free // 2) // GiB * GiB
    options = read_options(setup.wishes.kv_options)
    is_mirror = is_small_mirror(replace(way, offload_bytes=left), options) and not setup.wishes.elastic
    return 0 if left < LEAST_OFFLOAD_BYTES or is_mirror else left


def is_small_mirror(way: Way, options: Mapping[str, Any]) -> bool:
    """Whether a pool would hold next to nothing but what the GPU still has, which is of use only for parking, and for
    other engines through a remote store."""
    return way.offload_bytes < min(way.kv.resident_bytes, 2 * way.front_bytes) and not _needs_mirror(options)


def stores_lazily(way: Way, options: Mapping[str, Any]) -> bool:
    """Whether a pool smaller than the GPU's KV should get what the GPU drops, and not copies of everything."""
    is_smaller = 2 * way.front_bytes <= way.offload_bytes < way.kv.resident_bytes
    return is_smaller and "store" not in options and not _needs_mirror(options)


def _needs_mirror(options: Mapping[str, Any]) -> bool:
    return bool(options.get("remote") or options.get("park"))


def _weights_load(facts: ModelFacts, weights: WeightOffload, num_requests: int) -> Load:
    uva = _active_layer_bytes(facts, weights, num_requests) if weights.is_uva else 0
    return Load(
        weight_bytes=active_bytes(facts, num_requests) - uva,
        prefetched_weight_bytes=0 if weights.is_uva else weights.ram_bytes,
        num_prefetched_layers=0 if weights.is_uva else len(weights.layers),
        num_prefetched_runs=0 if weights.is_uva else weights.num_runs,
        uva_weight_bytes=uva,
        uva_prompt_weight_bytes=weights.ram_bytes if weights.is_uva else 0,
        uva_bytes_per_prompt_token=_active_layer_bytes(facts, weights, 1) / UVA_TOKENS_PER_READ
        if weights.is_uva
        else 0,
        num_requests=num_requests,
        num_layers=facts.num_layers,
        hidden_bytes=2 * facts.hidden_size,
        has_experts=bool(facts.num_experts),
        parameters_per_token=parameters_per_token(facts),
        attention_flops_per_token_pair=4 * facts.num_heads * facts.head_dim * _full_attention_layers(facts),
    )


def _active_layer_bytes(facts: ModelFacts, weights: WeightOffload, num_tokens: int) -> int:
    """Bytes that a step over `num_tokens` tokens reads of the layers in RAM."""
    sizes, experts = facts.weights.layer_bytes, facts.weights.expert_bytes
    untouched = (1 - facts.num_experts_per_tok / facts.num_experts) ** num_tokens if facts.num_experts else 0.0
    return sum(sizes[i] - round(experts[i] * untouched) for i in weights.layers)


def _shared_part(setup: Setup, geometry: KVGeometry, kv_cache_dtype: str) -> float:
    """Share of a long request's KV that belongs to layers for which the CPU may attend."""
    if not shares_with_cpu(setup, kv_cache_dtype):
        return 0.0
    in_flight = geometry.settings.max_in_flight_tokens
    blocks = [
        (group.blocks_per_request(setup.max_model_len, in_flight), group.members[0].page.kind is Kind.FULL)
        for group in geometry.groups
    ]
    return sum(number for number, is_full in blocks if is_full) / sum(number for number, _ in blocks)


def _machine(setup: Setup) -> tuple[Machine, list[Known[int]]]:
    gpu = setup.gpu
    memory, flops, link = gpu.memory_bytes_per_second, gpu.bf16_flops, gpu.link
    known = [figure for figure in (memory, flops, link) if figure is not None]
    if setup.wishes.num_ranks > 1:
        known.append(gpu.peer_link)
    return (
        Machine(
            # An unknown card is taken for a slow one.
            memory_bytes_per_s=memory.value if memory is not None else 300e9,
            flops=flops.value if flops is not None else 50e12,
            link_bytes_per_s=link.value,
            cpu_bytes_per_s=setup.cpu_attention.value,
            tensor_parallel_size=setup.wishes.tensor_parallel_size,
            pipeline_parallel_size=setup.wishes.pipeline_parallel_size,
            all_reduce_s=ALL_REDUCE_PCIE_S if gpu.nvlink is None else ALL_REDUCE_NVLINK_S,
            peer_bytes_per_s=gpu.peer_link.value,
        ),
        known,
    )


def _full_attention_layers(facts: ModelFacts) -> int:
    return sum(1 for entry in facts.caches if isinstance(entry.cache, LatentAttention) or attends_to_all(entry.cache))
