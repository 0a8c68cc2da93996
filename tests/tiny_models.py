"""Tiny, sensitive models of several architectures, beside the Llama of `overspill.tiny`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

from overspill.tiny import HEAD_DIM, HEADS, HIDDEN, common_config, make_llama, write_checkpoint

WINDOW = 64
"""Tokens a sliding-window layer of `make_gemma3` sees."""
CHUNK = 128
"""Tokens in a local-attention chunk of `make_chunked_local`."""


class Maker(Protocol):
    """Writes a checkpoint to ``path`` and returns ``path``; the same seed writes the same weights."""

    def __call__(self, path: Path, *, layers: int = ..., seed: int = 0) -> Path: ...


def make_gemma3(path: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Sliding-window attention, with full attention in every third layer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **common_config(layers),
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=WINDOW,
        layer_types=_every_third(layers, "full_attention", "sliding_attention"),
        tie_word_embeddings=False,
    )
    return write_checkpoint(Gemma3ForCausalLM, config, path, seed)


def make_mamba_hybrid(path: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Mamba2 (Granite 4), with full attention in every third layer.

    vLLM's CPU kernel cannot save a state from inside a chunk, so with prefix caching a CPU engine
    must prefill one block at a time: ``max_num_batched_tokens`` equal to ``block_size``.
    """
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **common_config(layers),
        shared_intermediate_size=2 * HIDDEN,
        num_local_experts=0,
        num_experts_per_tok=0,
        attention_multiplier=1 / math.sqrt(HEAD_DIM),
        position_embedding_type="rope",
        layer_types=_every_third(layers, "full_attention", "linear_attention"),
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_expand=1,
        mamba_d_state=16,
        mamba_n_groups=1,
    )
    return write_checkpoint(GraniteMoeHybridForCausalLM, config, path, seed)


def make_gdn_hybrid(path: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Gated delta net (Qwen3-Next), with full attention in every third layer.

    On a CPU vLLM runs it in bfloat16 only, and refuses linear heads of 32.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **common_config(layers),
        # vLLM insists on one layer with experts.
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=HIDDEN,
        shared_expert_intermediate_size=HIDDEN,
        mlp_only_layers=list(range(1, layers)),
        head_dim=64,
        layer_types=_every_third(layers, "full_attention", "linear_attention"),
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    return write_checkpoint(Qwen3NextForCausalLM, config, path, seed)


def make_chunked_local(path: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Chunked local attention (Llama 4, without experts), with full attention in every third layer."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **common_config(layers),
        intermediate_size_mlp=2 * HIDDEN,
        moe_layers=[],
        interleave_moe_layer_step=0,
        head_dim=HEAD_DIM,
        # Normalised queries and keys would make attention almost uniform.
        use_qk_norm=False,
        attention_chunk_size=CHUNK,
        no_rope_layers=[int(kind == "local") for kind in _every_third(layers, "full", "local")],
    )
    return write_checkpoint(Llama4ForCausalLM, config, path, seed)


def make_mla(path: Path, *, layers: int = 4, seed: int = 0) -> Path:
    """Multi-head latent attention (DeepSeek V2, without experts).

    On a CPU vLLM runs it in bfloat16 only, with latents of DeepSeek's size.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **common_config(layers) | {"num_key_value_heads": HEADS},
        first_k_dense_replace=layers,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=HIDDEN,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        head_dim=64,
    )
    return write_checkpoint(DeepseekV2ForCausalLM, config, path, seed)


MODELS: dict[str, Maker] = {
    "llama": make_llama,
    "gemma3": make_gemma3,
    "mamba-hybrid": make_mamba_hybrid,
    "gdn-hybrid": make_gdn_hybrid,
    "chunked-local": make_chunked_local,
    "mla": make_mla,
}


def _every_third(layers: int, third: str, other: str) -> list[str]:
    if layers < 3:
        raise ValueError(f"a hybrid model needs at least 3 layers, not {layers}")
    return [third if index % 3 == 2 else other for index in range(layers)]
