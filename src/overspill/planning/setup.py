"""Everything a plan is made from: a model, a device, vLLM's platform, RAM, and the user's wishes."""

import mmap
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeGuard

from overspill.figures import Known, assumed
from overspill.hardware.gpu import Gpu
from overspill.kv.sizes import GiB
from overspill.kv.spill.geometry import CUDA_GRANULARITY, most_graphed_tokens
from overspill.model.facts import Attention, Cache, LatentAttention, ModelFacts, RecurrentState
from overspill.model.kv import KVGeometry
from overspill.planning.connector_options import read_options
from overspill.planning.drafts import num_drafts
from overspill.planning.memory import (
    NO_OVERHEADS,
    Budget,
    Overheads,
    Profile,
    assumed_overheads,
    gpu_budget,
    measured_overheads,
    whole_budget,
)

MAX_NUM_SEQS = 64
AT_ONCE = 1
NO_CPU_ATTENTION = assumed(0, "not known")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The user's wishes; None leaves a choice to the plan."""

    max_model_len: int | None = None
    min_speed: float | None = None
    """Least tokens/s of one request at the context the plan is to find; None where the plan need not find one."""
    dtype: str = "auto"
    """vLLM's --dtype; the model's facts must have been read with the same."""
    has_bf16: bool = True
    """False where float32 was taken because the CPU cannot compute in bfloat16."""
    kv_cache_dtype: str | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    """Fraction of the whole card; None is vLLM's default."""
    max_num_batched_tokens: int | None = None
    at_once: int = AT_ONCE
    """Requests of `max_model_len` tokens whose KV must fit at the same time."""
    max_num_seqs: int = MAX_NUM_SEQS
    enforce_eager: bool = False
    ram_given: bool = True
    """Whether the user stated how much RAM may be used; else idle KV gets at most half of what is free."""
    offload_ram_bytes: int | None = None
    """RAM for idle KV; None leaves it to the plan, 0 is none."""
    weights_ram_bytes: int | None = None
    """Weights in RAM, rounded up to whole layers; 0 leaves them on the GPU."""
    offload_groups: tuple[int, int] | None = None
    """vLLM's offload_group_size and offload_num_in_group, if they choose the weights that go to RAM."""
    drafts: str = "off"
    """Drafts, as `overspill.planning.drafts` reads them."""
    tensor_parallel_size: int = 1
    """GPUs that each layer is divided among."""
    pipeline_parallel_size: int = 1
    """Stages that layers are divided among, each on `tensor_parallel_size` GPUs."""
    gpus: str | None = None
    """GPUs to use, as CUDA_VISIBLE_DEVICES names them; None takes the first ones."""
    kv_options: str = ""
    """Connector options other than sizes, as `overspill.planning.connector_options` reads them."""
    elastic: bool = False
    """Whether the engine's KV should grow and shrink while it runs."""
    elastic_weight: int = 1
    ledger: str = ""
    """File through which elastic engines divide the GPU; empty for anything but a server."""
    ledger_held_bytes: int = 0
    """Device memory for KV that other engines of the ledger hold or were granted."""
    force: bool = False
    """Whether to take the nearest way where none fits."""
    cards: bool = False
    """Whether to list the cards that would do, even if this one does."""

    @property
    def parks(self) -> bool:
        """Whether the engine is to be parked at times: its GPU memory freed, its weights kept in RAM."""
        return bool(read_options(self.kv_options).get("park", False))

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_seqs(self) -> int:
        """vLLM's max_num_seqs, at least `at_once`."""
        return max(self.max_num_seqs, self.at_once)


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    name: str
    """vLLM's name of the platform: cuda or cpu."""
    granularity: int
    """Granularity in bytes at which memory is mapped under spilled KV."""
    block_size: int
    """Default tokens per block."""
    latent_block_size: int
    """Default tokens per block of multi-head latent attention."""
    kernel_block_multiple: int
    state_dtype: str
    """Dtype of recurrent states; auto leaves it to the model."""
    max_concurrent_batches: int
    chunks: tuple[int, ...]
    """Values of max_num_batched_tokens worth trying on a device of common size."""
    profiles_memory: bool
    """Whether vLLM takes a fraction of the device's memory, and measures what is left of it for KV."""
    offloads_weights: bool

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def block_size_of(self, facts: ModelFacts) -> int:
        is_latent = any(isinstance(entry.cache, LatentAttention) for entry in facts.caches)
        return self.latent_block_size if is_latent else self.block_size


CUDA = Platform(
    name="cuda",
    granularity=CUDA_GRANULARITY,
    block_size=16,
    latent_block_size=64,  # FlashMLA's
    kernel_block_multiple=16,
    state_dtype="auto",
    max_concurrent_batches=2,
    # Prefill hides the link only in long chunks, and long chunks cost activations: both are tried.
    chunks=(2048, 8192),
    profiles_memory=True,
    offloads_weights=True,
)
# vllm/platforms/cpu.py. It schedules one batch at a time, and its offloaders need CUDA.
CPU = Platform(
    name="cpu",
    # Equal to overspill.kv.buffer's, which cannot be imported without torch.
    granularity=mmap.PAGESIZE,
    block_size=128,
    latent_block_size=16,
    kernel_block_multiple=32,
    state_dtype="auto",
    max_concurrent_batches=1,
    chunks=(2048,),
    profiles_memory=False,
    offloads_weights=False,
)


def cpu_with(features: Collection[str]) -> Platform:
    """vLLM's CPU platform on a CPU with these features, under the kernel's names."""
    return replace(
        CPU,
        # Without AMX it insists on blocks of 16 for latent attention.
        latent_block_size=128 if "amx_tile" in features else CPU.latent_block_size,
        # With AVX-512 BF16 its kernels for states want float32.
        state_dtype="float32" if "avx512_bf16" in features else CPU.state_dtype,
    )


Profiles = Callable[[int, str], Profile | None]
"""Returns the profile measured for a max_num_batched_tokens and a kv_cache_dtype; None if there is none."""

# Where vLLM itself defaults to longer chunks (arg_utils.py, get_batch_defaults), their memory does not matter.
_LARGE_BYTES, _LARGE_CHUNK = 70 * GiB, 8192
# Compute capability from which on every card has kernels for KV in fp8.
_FP8_CAPABILITY = (8, 9)


def nothing_measured(max_num_batched_tokens: int, kv_cache_dtype: str) -> Profile | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Input for planning one rank: its part of the model, its GPU, and its part of the RAM."""

    facts: ModelFacts
    gpu: Gpu
    ram_bytes: Known[int]
    wishes: Wishes
    """The user's wishes, with amounts of RAM reduced to this rank's part."""
    platform: Platform
    profiles: Profiles
    cpu_attention: Known[int] = NO_CPU_ATTENTION
    """Bytes of KV in RAM that the CPU attends to per second."""

    @property
    def max_model_len(self) -> int:
        return self.wishes.max_model_len or self.facts.max_position_embeddings

    @property
    def kv_cache_dtypes(self) -> list[tuple[str, bool]]:
        """KV dtypes to try, each with whether tokens stay those of the unchanged model."""
        if self.wishes.kv_cache_dtype is not None:
            return [(self.wishes.kv_cache_dtype, True)]  # the requested dtype is the baseline
        capability = self.gpu.compute_capability
        has_fp8 = not self.platform.is_cpu and (capability is None or capability >= _FP8_CAPABILITY)
        is_small = self.facts.kv_cache_dtype != "auto"
        return [("auto", True), ("fp8", False)] if has_fp8 and not is_small else [("auto", True)]

    @property
    def chunks(self) -> tuple[int, ...]:
        if self.wishes.max_num_batched_tokens is not None:
            return (self.wishes.max_num_batched_tokens,)
        least = self.wishes.num_seqs  # each request of a step has a token
        is_large = self.platform.profiles_memory and self.gpu.total_bytes.value >= _LARGE_BYTES
        is_large = is_large and (self.wishes.gpu_memory_bytes or _LARGE_BYTES) >= _LARGE_BYTES
        is_large = is_large and (self.wishes.gpu_memory_utilization or 1) * self.gpu.total_bytes.value >= _LARGE_BYTES
        chunks = (_LARGE_CHUNK,) if is_large else self.platform.chunks
        return tuple(dict.fromkeys(max(chunk, least) for chunk in chunks))

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
            num_ranks=self.wishes.num_ranks,
        )

    def budget(self) -> Budget:
        """One budget for all ways: CUDA's context has the same size whatever runs in it, so the largest seen counts."""
        contexts = [
            self.overheads(chunk, dtype).context_bytes for chunk in self.chunks for dtype, _ in self.kv_cache_dtypes
        ]
        context = max(contexts, key=lambda figure: figure.value)
        if not self.platform.profiles_memory:
            return whole_budget(self.gpu, context)
        return gpu_budget(self.gpu, self.wishes.gpu_memory_bytes, context, self.wishes.gpu_memory_utilization)


_MOST_HEAD_SIZE, _HEAD_SIZE_STEP = 256, 16
# Major compute capabilities for which vLLM takes FlashAttention, the backend that the CPU shares with
# (platforms/cuda.py); the second tuple is for KV in fp8.
_FLASH_ATTENTION, _FLASH_ATTENTION_FP8 = (8, 9, 12), (9,)


def runs_spilled_graphs(setup: Setup, num_requests: int) -> bool:
    """Whether decode steps of `num_requests` stream spilled KV inside FULL CUDA graphs (kv.spill.worker)."""
    of_request = 1 + num_drafts(setup.wishes.drafts)
    return (
        not setup.platform.is_cpu
        and not setup.wishes.enforce_eager
        and read_options(setup.wishes.kv_options).get("spill_graphs", True)
        and not setup.facts.reads_shared_kv
        and num_requests * of_request <= most_graphed_tokens(of_request)
    )


def shares_with_cpu(setup: Setup, kv_cache_dtype: str) -> bool:
    """Whether the CPU may attend for layers of this model if it is fast enough (overspill.kv.spill.far)."""
    facts, capability = setup.facts, setup.gpu.compute_capability
    full = [entry.cache for entry in facts.caches if attends_to_all(entry.cache)]
    kept_as = facts.kv_cache_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    able = _FLASH_ATTENTION if kept_as in ("auto", "bfloat16", "float16") else _FLASH_ATTENTION_FP8
    return (
        read_options(setup.wishes.kv_options).get("spill_compute", "auto") == "auto"
        and runs_spilled_graphs(setup, 1)
        and (capability is None or capability[0] in able)
        and facts.attends_plainly
        and bool(full)
        and all(one.head_size <= _MOST_HEAD_SIZE and one.head_size % _HEAD_SIZE_STEP == 0 for one in full)
    )


def attends_to_all(cache: Cache) -> TypeGuard[Attention]:
    """Whether a layer keeps keys and values of every token, and attends to all of them."""
    return isinstance(cache, Attention) and cache.sliding_window is None and cache.attention_chunk_size is None


def can_spill(facts: ModelFacts, geometry: KVGeometry, wishes: Wishes) -> bool:
    """Whether KV can spill: with attention, one page size (else overspill.kv.spill.capacity refuses), and one stage."""
    has_attention = any(not isinstance(entry.cache, RecurrentState) for entry in facts.caches)
    pages = {member.page.page_size_bytes for group in geometry.groups for member in group.members}
    return has_attention and len(pages) == 1 and wishes.pipeline_parallel_size == 1
