"""What a layer keeps of a request: keys and values, a latent, or a state; by shape, before any engine setting."""

from dataclasses import dataclass


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
