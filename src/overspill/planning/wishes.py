"""What a plan is asked for."""

from dataclasses import dataclass

MAX_NUM_SEQS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """None leaves it to the plan."""

    max_model_len: int | None = None
    dtype: str = "auto"
    """vLLM's --dtype; the model's facts must have been read with the same."""
    kv_cache_dtype: str | None = None
    gpu_memory_bytes: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    enforce_eager: bool = False
    offload_ram_bytes: int | None = None
    """RAM for idle KV; None is what is left, 0 none."""
    force: bool = False
    """Whether to give the nearest way where none fits."""
    cards: bool = False
    """Whether to tell which cards would do although this one does."""
