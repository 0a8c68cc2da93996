"""The engine settings that shape a KV cache, under vLLM's names for them."""

from dataclasses import dataclass

from overspill.model.errors import BadSettings

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

    Of one pipeline stage, and without a draft model, whose layers would have caches of their own.
    """

    block_size: int = 16
    """Tokens. MLA backends want more: 64 (FlashMLA), 32 or 64 (FlashInfer), 128 (CUTLASS)."""
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int = 2048
    """What windows and chunks must hold beside themselves. vLLM takes 8192 from 70 GB of GPU memory, 16384 from 160."""
    max_concurrent_batches: int = 2
    """2 under asynchronous scheduling, the default on CUDA; else 1 (config/vllm.py, max_concurrent_batches)."""
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    block_outermost: bool = False
    """The layouts BL…, which Overspill's offload asks for; vLLM's default, and spill's, have layers outermost."""
    kernel_block_multiple: int = 16
    """The attention backend reads blocks of any multiple of so many tokens: 16 on CUDA, 32 on the CPU."""
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("block_size", "tensor_parallel_size", "max_num_batched_tokens", "max_concurrent_batches"):
            if (value := getattr(self, name)) < 1:
                raise BadSettings(f"{name} is {value}, and at least 1 was expected; raise it")
        known = ("auto", *KV_CACHE_DTYPE_BYTES)
        for name in ("kv_cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"):
            if (value := getattr(self, name)) not in known:
                raise BadSettings(f"{name} is {value!r}, whose size is not known here; use one of {', '.join(known)}")

    @property
    def max_in_flight_tokens(self) -> int:
        return self.max_concurrent_batches * self.max_num_batched_tokens
