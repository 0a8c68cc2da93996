"""The facts of a model: what each layer keeps of a request, what its weights take, and its shape."""

from dataclasses import dataclass
from pathlib import Path

from overspill.figures import Origin


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """A key and a value per token and KV head.

    Of every token; or with `sliding_window` of that many last tokens; or with `attention_chunk_size` of the tokens of
    the chunk the request is in.
    """

    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """One vector per token for all heads (MLA): the latent and the rotary part of the key."""

    head_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentState:
    """A state per request, whatever its length: Mamba-2, gated delta net, short convolution.

    A convolution keeps its last `conv_kernel - 1` inputs, each `conv_channels` wide; Mamba-2 widens it by `conv_groups`
    groups of `conv_group_channels`. Each of `num_heads` heads keeps `head_state` numbers.
    """

    conv_kernel: int
    conv_channels: int
    conv_groups: int = 0
    conv_group_channels: int = 0
    num_heads: int = 0
    head_state: int = 0
    state_dtype: str = "auto"
    """What the model wants its heads' state in (the convolution's stays in the model's dtype)."""
    keeps_checkpoint: bool = False
    """Mamba-2 exports the state at a block boundary from inside a prefill, into one more block."""


Cache = Attention | LatentAttention | RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    layer: int
    cache: Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Bytes that vLLM holds once the model is loaded, by where they are used.

    Tensors are counted as they lie in the checkpoint. Only those of an unquantised one in another dtype than the
    model is served in count as served: vLLM converts them while loading.
    """

    source: Origin
    """Measured: read from the headers of the weight files. Derived: computed from config.json, for an architecture
    whose tensors are known one by one."""
    layer_bytes: tuple[int, ...]
    """Of each decoder layer, routed experts included."""
    expert_bytes: tuple[int, ...]
    """Of these, what routed experts take."""
    embedding_bytes: int
    lm_head_bytes: int
    """0 where it is tied to the embedding."""
    rest_bytes: int
    """Final norm, vision tower, projector."""
    unused_bytes: int
    """In the checkpoint, but not loaded: a tied lm_head, layers for multi-token prediction. Not part of the total."""
    checkpoint_bytes: int
    """Of all tensors in the files."""
    replicated_bytes: tuple[int, ...] = ()
    """Of each decoder layer, what every rank of tensor parallelism keeps whole: norms, routers, latent projections."""

    @property
    def total_bytes(self) -> int:
        return sum(self.layer_bytes) + self.embedding_bytes + self.lm_head_bytes + self.rest_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """A model as vLLM would serve it; what its settings change is left to the functions that take them."""

    name: str
    folder: Path | None
    """Where its files are, if on this machine."""
    architecture: str
    dtype: str
    """What it is served in: --dtype, or with "auto" the config's, a float32 model in bfloat16."""
    quantization: str | None
    """vLLM's name: fp8, awq, gptq, mxfp4, modelopt_fp4 (NVFP4), bitsandbytes, compressed-tensors, ..."""
    kv_cache_dtype: str
    """What the checkpoint asks for under --kv-cache-dtype auto; "auto" is the model's dtype."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of a dense MLP; of one expert where every layer routes."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    is_tied: bool
    """Whether the embedding serves as lm_head."""
    num_experts: int
    """Routed experts per layer; 0 for a dense model."""
    num_experts_per_tok: int
    caches: tuple[LayerCache, ...]
    weights: Weights
    reads_shared_kv: bool = False
    """Whether some layers read the KV of others."""
    attends_plainly: bool = True
    """Whether attention is a softmax of scaled products and nothing else: no sinks, no caps, no ALiBi."""


def active_bytes(facts: ModelFacts, num_tokens: int = 1) -> int:
    """Weight bytes that a step over `num_tokens` tokens is expected to read: all of a dense model's layers and lm_head.

    Of routed experts only those that a token is sent to, taking every choice as equally likely.
    """
    weights = facts.weights
    head = weights.embedding_bytes if facts.is_tied else weights.lm_head_bytes
    experts = sum(weights.expert_bytes)
    if facts.num_experts:
        untouched = (1 - facts.num_experts_per_tok / facts.num_experts) ** num_tokens
        touched = round(experts * (1 - untouched))
    else:
        touched = experts
    return sum(weights.layer_bytes) - experts + touched + head


_DTYPE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
# Four bits and a scale for each group of 16 to 128.
_FOUR_BITS = 0.55
_QUANTIZED_BYTES = {"awq": _FOUR_BITS, "gptq": _FOUR_BITS, "mxfp4": _FOUR_BITS, "modelopt_fp4": _FOUR_BITS,
                    "bitsandbytes": _FOUR_BITS}  # fmt: skip


def bytes_per_parameter(facts: ModelFacts) -> float:
    """Average bytes per parameter; quantisations whose name does not say it count as FP8."""
    if facts.quantization is None:
        return _DTYPE_BYTES[facts.dtype]
    return _QUANTIZED_BYTES.get(facts.quantization, 1.0)


def parameters_per_token(facts: ModelFacts) -> int:
    """That a token of a prompt is multiplied with: the lm_head only sees the last one."""
    head = facts.weights.embedding_bytes if facts.is_tied else facts.weights.lm_head_bytes
    return int((active_bytes(facts) - head) / bytes_per_parameter(facts))


def expert_size(facts: ModelFacts) -> int:
    """The inner size of one routed expert, which configs name in many ways: of three matrices of so many rows."""
    largest = max(facts.weights.expert_bytes)
    return round(largest / bytes_per_parameter(facts) / (facts.num_experts * 3 * facts.hidden_size))


def pinned_share(facts: ModelFacts) -> float:
    """How many times its size a layer takes in RAM: both of vLLM's offloaders pin through PyTorch, which rounds each
    tensor up to a power of two. By the matrices of a usual layer, as vLLM fuses them."""
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    rows = [queries + 2 * keys, queries]
    if facts.num_experts:
        rows += [facts.num_experts * 2 * expert_size(facts), facts.num_experts * expert_size(facts)]
    else:
        rows += [2 * facts.intermediate_size, facts.intermediate_size]
    sizes = [int(count * facts.hidden_size * bytes_per_parameter(facts)) for count in rows if count]
    return sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes)
