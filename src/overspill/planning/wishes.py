"""What a plan is asked for."""

from dataclasses import dataclass

MAX_NUM_SEQS = 64
AT_ONCE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """None leaves it to the plan."""

    max_model_len: int | None = None
    dtype: str = "auto"
    """vLLM's --dtype; the model's facts must have been read with the same."""
    kv_cache_dtype: str | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    """Of the whole card; None is vLLM's default."""
    max_num_batched_tokens: int | None = None
    at_once: int = AT_ONCE
    """Requests of `max_model_len` tokens whose KV is to fit at a time."""
    max_num_seqs: int = MAX_NUM_SEQS
    enforce_eager: bool = False
    offload_ram_bytes: int | None = None
    """RAM for idle KV; None is what is left, 0 none."""
    weights_ram_bytes: int | None = None
    """Weights in RAM, rounded up to whole layers; 0 leaves them on the GPU."""
    offload_groups: tuple[int, int] | None = None
    """vLLM's offload_group_size and offload_num_in_group, where they say which weights go to RAM."""
    tensor_parallel_size: int = 1
    """Of vLLM's own flags; the plan is for one GPU all the same, and says so."""
    kv_options: str = ""
    """Of the connector, beside its sizes, as `overspill.planning.connector_options` reads them."""
    force: bool = False
    """Whether to give the nearest way where none fits."""
    cards: bool = False
    """Whether to tell which cards would do although this one does."""

    @property
    def num_seqs(self) -> int:
        """vLLM's max_num_seqs: at least as many as are to fit at once."""
        return max(self.max_num_seqs, self.at_once)
