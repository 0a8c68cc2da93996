"""vLLM's layout of a model's caches under given settings: pages, groups, blocks, and how many tokens fit."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from overspill.model import ModelError
from overspill.model.facts import Attention, Cache, LatentAttention, ModelFacts, RecurrentState

# Bytes per number for --kv-cache-dtype values whose size follows from the shape. For the rest (nvfp4, turboquant,
# per-token-head scales, ds_mla) the attention backend decides how they are packed.
KV_CACHE_DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """vLLM's settings that affect the KV cache; the defaults are those of a CUDA engine.

    They describe one GPU, with prefix caching, layers outermost, and without a draft model, whose layers would have
    caches of their own.
    """

    block_size: int = 16
    """Tokens per block. MLA backends want more: 64 (FlashMLA), 32 or 64 (FlashInfer), 128 (CUTLASS)."""
    kv_cache_dtype: str = "auto"
    max_num_batched_tokens: int = 2048
    """Tokens that windows and chunks hold in addition. vLLM takes 8192 from 70 GB of GPU memory on, 16384 from 160."""
    max_concurrent_batches: int = 2
    """2 under asynchronous scheduling, the default on CUDA; else 1 (config/vllm.py, max_concurrent_batches)."""
    kernel_block_multiple: int = 16
    """Tokens; the attention backend reads blocks of any multiple of this: 16 on CUDA, 32 on the CPU."""
    state_dtype: str = "auto"
    """Dtype of recurrent states, whatever the model says, except for the inputs that a convolution keeps."""

    def __post_init__(self) -> None:
        known = ("auto", *KV_CACHE_DTYPE_BYTES)
        if (dtype := self.kv_cache_dtype) not in known:
            raise ModelError(
                f"kv_cache_dtype is {dtype!r}, whose size is not known here; use one of {', '.join(known)}"
            )

    @property
    def max_in_flight_tokens(self) -> int:
        return self.max_concurrent_batches * self.max_num_batched_tokens


class Kind(StrEnum):
    """Kinds of cache, under vLLM's names (KVCacheSpecKind)."""

    FULL = "full_attention"
    MLA = "mla_attention"
    SLIDING = "sliding_window"
    CHUNKED = "chunked_local_attention"
    MAMBA = "mamba"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A layer's part of one block. Layers share a group only if their pages are equal."""

    kind: Kind
    block_size: int
    """Tokens in a block."""
    num_heads: int = 1
    head_bytes: int = 0
    """Bytes of one token in one head, key and value together."""
    state_bytes: int = 0
    states_per_request: int = 0
    window: int = 0
    """Tokens a sliding window or a chunk spans."""
    padded_bytes: int | None = None

    @property
    def token_bytes(self) -> int:
        return self.num_heads * self.head_bytes

    @property
    def content_bytes(self) -> int:
        return self.state_bytes if self.kind is Kind.MAMBA else self.block_size * self.token_bytes

    @property
    def page_size_bytes(self) -> int:
        return self.padded_bytes or self.content_bytes

    @property
    def grows(self) -> bool:
        """Whether a longer request always needs more of these pages."""
        return self.kind in (Kind.FULL, Kind.MLA)

    def blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """The most blocks one request of `max_model_len` tokens holds at a time (max_memory_usage_bytes / page)."""
        match self.kind:
            case Kind.MAMBA:
                return self.states_per_request
            case Kind.SLIDING:
                # One more, since a window need not begin where a block does.
                return ceil_div(min(self.window - 1 + max_in_flight_tokens, max_model_len), self.block_size) + 1
            case Kind.CHUNKED:
                return ceil_div(min(self.window + max_in_flight_tokens, max_model_len), self.block_size)
            case _:
                return ceil_div(max_model_len, self.block_size)

    def padded_to(self, size: int | None) -> "Page":
        return self if size is None else replace(self, padded_bytes=size)


def page_of(cache: Cache, settings: CacheSettings, *, dtype: str, kv_cache_dtype: str) -> Page:
    """Page of a cache. `dtype` is the model's; `kv_cache_dtype` already includes the checkpoint's own choice."""
    bytes_each = KV_CACHE_DTYPE_BYTES[dtype if kv_cache_dtype == "auto" else kv_cache_dtype]
    match cache:
        case Attention():
            kind, window = Kind.FULL, 0
            if cache.sliding_window is not None:
                kind, window = Kind.SLIDING, cache.sliding_window
            elif cache.attention_chunk_size is not None:
                kind, window = Kind.CHUNKED, cache.attention_chunk_size
            return Page(
                kind=kind,
                block_size=_window_block_size(settings) if kind is Kind.SLIDING else settings.block_size,
                num_heads=cache.num_kv_heads,
                head_bytes=2 * cache.head_size * bytes_each,
                window=window,
            )
        case LatentAttention():
            return Page(kind=Kind.MLA, block_size=settings.block_size, head_bytes=cache.head_size * bytes_each)
        case RecurrentState():
            return _state_page(cache, settings, dtype)


def _window_block_size(settings: CacheSettings) -> int:
    # Layers with a window choose the largest block that the kernel reads and that is no larger than the other layers'
    # (layers/attention/attention.py, _largest_kernel_block_within).
    multiple = settings.kernel_block_multiple
    return max(multiple, settings.block_size // multiple * multiple)


def _state_page(state: RecurrentState, settings: CacheSettings, dtype: str) -> Page:
    """Page of a state, with shapes as in vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator."""
    channels = state.conv_channels + state.conv_groups * state.conv_group_channels
    conv_bytes = channels * (state.conv_kernel - 1) * KV_CACHE_DTYPE_BYTES[dtype]
    state_dtype = next(name for name in (settings.state_dtype, state.state_dtype, dtype) if name != "auto")
    head_bytes = state.head_state * KV_CACHE_DTYPE_BYTES[state_dtype]
    return Page(
        kind=Kind.MAMBA,
        block_size=settings.block_size,
        state_bytes=conv_bytes + state.num_heads * head_bytes,
        # With prefix caching (mamba_cache_mode "align") the state before the current block is kept beside it.
        states_per_request=2 + state.keeps_checkpoint,
    )


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPage:
    layer: int
    page: Page


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers whose blocks are allocated together: one block id holds a page of each layer."""

    members: tuple[LayerPage, ...]

    @property
    def block_size(self) -> int:
        return self.members[0].page.block_size

    @property
    def bytes_per_block(self) -> int:
        return sum(member.page.page_size_bytes for member in self.members)

    def blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return max(member.page.blocks_per_request(max_model_len, max_in_flight_tokens) for member in self.members)


def _one_type(members: Iterable[LayerPage]) -> bool:
    """Whether all layers need the same number of blocks, whatever their pages' sizes (UniformTypeKVCacheSpecs)."""

    def needs(page: Page) -> tuple[object, ...]:
        full = Kind.FULL if page.grows else page.kind
        size = page.page_size_bytes if page.kind is Kind.MAMBA else 0
        return full, page.block_size, page.window, page.states_per_request, size

    return len({needs(member.page) for member in members}) <= 1


def _unified(members: Sequence[LayerPage]) -> list[LayerPage]:
    """Give all pages one size: smaller pages get more tokens, or padding if the sizes do not divide evenly."""
    largest = max(member.page.page_size_bytes for member in members)

    def unify(page: Page) -> Page:
        if page.page_size_bytes == largest:
            return page
        if page.kind is not Kind.MAMBA and largest % page.page_size_bytes == 0:
            return replace(page, block_size=page.block_size * (largest // page.page_size_bytes))
        if page.kind is Kind.MLA:
            raise ModelError(
                f"a page of latent attention takes {page.page_size_bytes} bytes and must be padded to {largest}, which "
                "vLLM does not do; choose another block_size"
            )
        return page.padded_to(largest)

    return [replace(member, page=unify(member.page)) for member in members]


def _equal_groups(members: Sequence[LayerPage]) -> tuple[CacheGroup, ...]:
    """Groups of equally many layers, so that a block of any group takes the same bytes; the last may fall short."""
    alike: dict[Page, list[LayerPage]] = {}
    for member in members:
        alike.setdefault(member.page, []).append(member)
    fewest, most = min(map(len, alike.values())), max(map(len, alike.values()))
    size = most if most < fewest * 1.5 else fewest
    groups = []
    for bucket in alike.values():
        count = ceil_div(len(bucket), size)
        groups += [CacheGroup(members=tuple(bucket[i::count])) for i in range(count)]
    return tuple(groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGeometry:
    """The KV cache of one rank, except for the number of blocks. Bytes are exact: they are vLLM's own sums."""

    groups: tuple[CacheGroup, ...]
    settings: CacheSettings
    """Settings after vLLM's own changes: a recurrent state makes blocks larger."""

    @property
    def block_size(self) -> int:
        return self.settings.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in the pool, whichever group it is allocated to (_pool_bytes_per_block)."""
        return max((group.bytes_per_block for group in self.groups), default=0)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of the largest page; all are equal unless a single group mixes sizes."""
        return max((m.page.page_size_bytes for group in self.groups for m in group.members), default=0)

    @property
    def num_regions(self) -> int:
        """Contiguous ranges of the buffer: one per layer of the largest group."""
        return max((len(group.members) for group in self.groups), default=0)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one more token costs a request longer than every window; states and windows then cost no more."""
        blocks = sum(Fraction(1, group.block_size) for group in self.groups if group.members[0].page.grows)
        return math.ceil(blocks * self.bytes_per_block)

    def blocks_per_request(self, max_model_len: int) -> int:
        """The most blocks one request of `max_model_len` tokens holds at a time, over all groups."""
        in_flight = self.settings.max_in_flight_tokens
        return sum(group.blocks_per_request(max_model_len, in_flight) for group in self.groups)

    @property
    def states_per_request(self) -> int:
        """Blocks of a request that hold recurrent states, whatever its length."""
        return sum(group.members[0].page.states_per_request for group in self.groups)

    def request_bytes(self, max_model_len: int) -> int:
        """Bytes that vLLM requires at startup for one such request (_max_memory_usage_bytes_from_groups)."""
        return self.bytes_per_block * self.blocks_per_request(max_model_len)

    def num_blocks(self, kv_cache_memory_bytes: int) -> int:
        """Blocks in the pool, including the first one, the null block, which is never allocated."""
        return kv_cache_memory_bytes // self.bytes_per_block if self.groups else 0

    def fits(self, max_model_len: int, kv_cache_memory_bytes: int) -> bool:
        """Whether vLLM would start (_check_enough_kv_cache_memory, which sets the null block aside)."""
        return self.request_bytes(max_model_len) <= kv_cache_memory_bytes - self.bytes_per_block

    def longest_context(self, kv_cache_memory_bytes: int, limit: int) -> int:
        """Tokens of the longest request that fits, up to `limit`; 0 if not even one token fits."""
        return bisect_left(range(1, limit + 1), True, key=lambda tokens: not self.fits(tokens, kv_cache_memory_bytes))


def kv_geometry(facts: ModelFacts, settings: CacheSettings | None = None) -> KVGeometry:
    settings = settings or CacheSettings()
    settings = replace(settings, block_size=_block_size(facts, settings))
    pages = _pages(facts, settings)
    attention_bytes = max((page.page_size_bytes for page in pages if page.kind is not Kind.MAMBA), default=None)
    members = [
        LayerPage(layer=entry.layer, page=page.padded_to(attention_bytes) if page.kind is Kind.MAMBA else page)
        for entry, page in zip(facts.caches, pages, strict=True)
    ]
    one = (CacheGroup(members=tuple(members)),)
    return KVGeometry(groups=one if _one_type(members) else _equal_groups(_unified(members)), settings=settings)


def _pages(facts: ModelFacts, settings: CacheSettings) -> list[Page]:
    kv_cache_dtype = facts.kv_cache_dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    if kv_cache_dtype not in ("auto", *KV_CACHE_DTYPE_BYTES):
        raise ModelError(
            f"the checkpoint asks for a KV cache in {kv_cache_dtype}, whose size is not known here; "
            "set kv_cache_dtype to fp8 or bfloat16"
        )
    return [page_of(c.cache, settings, dtype=facts.dtype, kv_cache_dtype=kv_cache_dtype) for c in facts.caches]


def _block_size(facts: ModelFacts, settings: CacheSettings) -> int:
    """Block size, raised until an attention page can hold a state, which is padded to it (_align_hybrid_block_size)."""
    pages = _pages(facts, settings)
    state_bytes = max((page.state_bytes for page in pages), default=0)
    token_bytes = max((page.token_bytes for page in pages), default=0)
    if not state_bytes or not token_bytes:
        return settings.block_size
    multiple = settings.kernel_block_multiple
    step = max(settings.block_size, multiple)
    block_size = step * ceil_div(state_bytes, step * token_bytes)
    return multiple * ceil_div(block_size, multiple)
