"""One layer's share of one block, in bytes, under the engine settings that shape a KV cache."""

from dataclasses import dataclass, replace
from enum import StrEnum

from overspill.model import ModelError
from overspill.model.facts import Attention, Cache, LatentAttention, RecurrentState

# Bytes per number of the --kv-cache-dtype values whose size follows from the shape. The rest (nvfp4, turboquant,
# per-token-head scales, ds_mla) are packed in ways that an attention backend decides.
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
    """How vLLM is started, as far as its KV cache is concerned; the defaults are those of a CUDA engine.

    Of one GPU, with prefix caching, layers outermost, and without a draft model, whose layers would have caches of
    their own.
    """

    block_size: int = 16
    """Tokens. MLA backends want more: 64 (FlashMLA), 32 or 64 (FlashInfer), 128 (CUTLASS)."""
    kv_cache_dtype: str = "auto"
    max_num_batched_tokens: int = 2048
    """What windows and chunks must hold beside themselves. vLLM takes 8192 from 70 GB of GPU memory, 16384 from 160."""
    max_concurrent_batches: int = 2
    """2 under asynchronous scheduling, the default on CUDA; else 1 (config/vllm.py, max_concurrent_batches)."""
    kernel_block_multiple: int = 16
    """The attention backend reads blocks of any multiple of so many tokens: 16 on CUDA, 32 on the CPU."""

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
    """vLLM's names (KVCacheSpecKind)."""

    FULL = "full_attention"
    MLA = "mla_attention"
    SLIDING = "sliding_window"
    CHUNKED = "chunked_local_attention"
    MAMBA = "mamba"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What a layer keeps in one block. Layers share a group only if their pages are equal."""

    kind: Kind
    block_size: int
    """Tokens in a block."""
    num_heads: int = 1
    head_bytes: int = 0
    """Of one token in one head, key and value together."""
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
        """Whether a longer request always needs more of these."""
        return self.kind in (Kind.FULL, Kind.MLA)

    def blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Most blocks one request of `max_model_len` tokens holds at a time (max_memory_usage_bytes / page)."""
        match self.kind:
            case Kind.MAMBA:
                return self.states_per_request
            case Kind.SLIDING:
                # One more: a window need not begin where a block does.
                return ceil_div(min(self.window - 1 + max_in_flight_tokens, max_model_len), self.block_size) + 1
            case Kind.CHUNKED:
                return ceil_div(min(self.window + max_in_flight_tokens, max_model_len), self.block_size)
            case _:
                return ceil_div(max_model_len, self.block_size)

    def padded_to(self, size: int | None) -> "Page":
        return self if size is None else replace(self, padded_bytes=size)


def page_of(cache: Cache, settings: CacheSettings, *, dtype: str, kv_cache_dtype: str) -> Page:
    """`dtype` is what the model runs in, `kv_cache_dtype` what is left when the checkpoint's own wish was heard."""
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
    # Layers with a window choose the largest block the kernel reads that is no larger than the others'
    # (layers/attention/attention.py, _largest_kernel_block_within).
    multiple = settings.kernel_block_multiple
    return max(multiple, settings.block_size // multiple * multiple)


def _state_page(state: RecurrentState, settings: CacheSettings, dtype: str) -> Page:
    """Shapes as in vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator."""
    channels = state.conv_channels + state.conv_groups * state.conv_group_channels
    conv_bytes = channels * (state.conv_kernel - 1) * KV_CACHE_DTYPE_BYTES[dtype]
    head_bytes = state.head_state * KV_CACHE_DTYPE_BYTES[dtype if state.state_dtype == "auto" else state.state_dtype]
    return Page(
        kind=Kind.MAMBA,
        block_size=settings.block_size,
        state_bytes=conv_bytes + state.num_heads * head_bytes,
        # With prefix caching (mamba_cache_mode "align") the state before the current block is kept beside it.
        states_per_request=2 + state.keeps_checkpoint,
    )


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
