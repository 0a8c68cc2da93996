"""The facts of a model: the cache of each layer, the bytes of its weights, and its shape."""

from dataclasses import dataclass
from pathlib import Path

from overspill.figures import Origin


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """A key and a value per token and KV head.

    A layer keeps all tokens; with `sliding_window`, that many last ones; with `attention_chunk_size`, those of the
    current chunk.
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
    """A state of fixed size per request: Mamba-2, gated delta net, short convolution.

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
    """Dtype of the heads' state (the convolution's state has the model's dtype)."""
    keeps_checkpoint: bool = False
    """Whether a prefill exports the state at a block boundary into one more block, as in Mamba-2."""


Cache = Attention | LatentAttention | RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    layer: int
    cache: Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Bytes that vLLM holds once the model is loaded, by where they are used.

    Tensors count as stored in the checkpoint, except those of an unquantised one in a dtype other than the served
    dtype: vLLM converts these while loading, so they count as served.
    """

    source: Origin
    """Measured: read from the headers of the weight files. Derived: computed from config.json, for an architecture
    whose tensors are known one by one."""
    layer_bytes: tuple[int, ...]
    """Bytes of each decoder layer, routed experts included."""
    expert_bytes: tuple[int, ...]
    """Bytes of the routed experts in each decoder layer."""
    embedding_bytes: int
    lm_head_bytes: int
    """Bytes of the lm_head; 0 if it is tied to the embedding."""
    rest_bytes: int
    """Bytes of the final norm, vision tower and projector."""
    unused_bytes: int
    """Bytes that are not loaded: a tied lm_head, layers for multi-token prediction. Not part of the total."""
    checkpoint_bytes: int
    """Bytes of all tensors in the files."""
    replicated_bytes: tuple[int, ...] = ()
    """Bytes per decoder layer that each tensor-parallel rank keeps whole: norms, routers, latent projections."""

    @property
    def total_bytes(self) -> int:
        return sum(self.layer_bytes) + self.embedding_bytes + self.lm_head_bytes + self.rest_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """A model as vLLM would serve it; the effects of settings are left to the functions that take them."""

    name: str
    folder: Path | None
    """Folder of the model's files, if they are on this machine."""
    architecture: str
    dtype: str
    """Served dtype: --dtype, or with "auto" the config's, with bfloat16 in place of float32."""
    quantization: str | None
    """vLLM's name for the method: fp8, awq, gptq, mxfp4, modelopt_fp4 (NVFP4), bitsandbytes, compressed-tensors, ..."""
    kv_cache_dtype: str
    """The checkpoint's choice for --kv-cache-dtype auto; "auto" means the model's dtype."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Inner size of a dense MLP, or of one expert if every layer routes."""
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
    """Weight bytes that a step over `num_tokens` tokens is expected to read: the layers and the lm_head.

    Routed experts count only if a token is sent to them, taking every choice as equally likely.
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
# Bytes per parameter: four bits, and a scale for each group of 16 to 128.
_FOUR_BITS = 0.55
_QUANTIZED_BYTES = {"awq": _FOUR_BITS, "gptq": _FOUR_BITS, "mxfp4": _FOUR_BITS, "modelopt_fp4": _FOUR_BITS,
                    "bitsandbytes": _FOUR_BITS}  # fmt: skip


def bytes_per_parameter(facts: ModelFacts) -> float:
    """Average bytes per parameter; quantisations whose name does not give the width count as FP8."""
    if facts.quantization is None:
        return _DTYPE_BYTES[facts.dtype]
    return _QUANTIZED_BYTES.get(facts.quantization, 1.0)


def parameters_per_token(facts: ModelFacts) -> int:
    """Parameters that each prompt token is multiplied with, without the lm_head, which sees only the last token."""
    head = facts.weights.embedding_bytes if facts.is_tied else facts.weights.lm_head_bytes
    return int((active_bytes(facts) - head) / bytes_per_parameter(facts))


def expert_size(facts: ModelFacts) -> int:
    """Inner size of one routed expert, from the bytes of its three matrices: configs name this size in many ways."""
    largest = max(facts.weights.expert_bytes)
    return round(largest / bytes_per_parameter(facts) / (facts.num_experts * 3 * facts.hidden_size))


def pinned_share(facts: ModelFacts) -> float:
    """Factor by which a layer grows in pinned RAM: both of vLLM's offloaders pin through PyTorch, which rounds each
    tensor up to a power of two. Computed from the matrices of a typical layer, as vLLM fuses them."""
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    rows = [queries + 2 * keys, queries]
    if facts.num_experts:
        rows += [facts.num_experts * 2 * expert_size(facts), facts.num_experts * expert_size(facts)]
    else:
        rows += [2 * facts.intermediate_size, facts.intermediate_size]
    sizes = [int(count * facts.hidden_size * bytes_per_parameter(facts)) for count in rows if count]
    return sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes)
