"""Tiny, sensitive models for the demo and the tests.

Each maker writes a random-weight Hugging Face checkpoint (``config.json`` and safetensors) that
vLLM loads from disk. With the usual initialisation such a model emits one token for ever whatever
it reads, and would hide a corrupted cache; here the weights are scaled so that greedy output
varies from token to token and depends on the whole context.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 512
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
MAX_POSITIONS = 32768
WINDOW = 64
"""Tokens a sliding-window layer of `make_gemma3` sees."""
CHUNK = 128
"""Tokens in a local-attention chunk of `make_chunked_local`."""


class Maker(Protocol):
    """Writes a checkpoint to ``path`` and returns ``path``; the same seed writes the same weights."""

    def __call__(self, path: Path, *, layers: int = ..., seed: int = 0) -> Path: ...


def make_llama(path: Path, *, layers: int = 4, seed: int = 0) -> Path:
    """Full attention in every layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_common(layers), head_dim=HEAD_DIM)
    return _write(LlamaForCausalLM, config, path, seed)


def make_gemma3(path: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Sliding-window attention, with full attention in every third layer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_common(layers),
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=WINDOW,
        layer_types=_every_third(layers, "full_attention", "sliding_attention"),
        tie_word_embeddings=False,
    )
    return _write(Gemma3ForCausalLM, config, path, seed)


def make_mamba_hybrid(path: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Mamba2 (Granite 4), with full attention in every third layer.

    vLLM's CPU kernel cannot save a state from inside a chunk, so with prefix caching a CPU engine
    must prefill one block at a time: ``max_num_batched_tokens`` equal to ``block_size``.
    """
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_common(layers),
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
    return _write(GraniteMoeHybridForCausalLM, config, path, seed)


def make_gdn_hybrid(path: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Gated delta net (Qwen3-Next), with full attention in every third layer.

    On a CPU vLLM runs it in bfloat16 only, and refuses linear heads of 32.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_common(layers),
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
    return _write(Qwen3NextForCausalLM, config, path, seed)


def make_chunked_local(path: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Chunked local attention (Llama 4, without experts), with full attention in every third layer."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **_common(layers),
        intermediate_size_mlp=2 * HIDDEN,
        moe_layers=[],
        interleave_moe_layer_step=0,
        head_dim=HEAD_DIM,
        # Normalised queries and keys would make attention almost uniform.
        use_qk_norm=False,
        attention_chunk_size=CHUNK,
        no_rope_layers=[int(kind == "local") for kind in _every_third(layers, "full", "local")],
    )
    return _write(Llama4ForCausalLM, config, path, seed)


def make_mla(path: Path, *, layers: int = 4, seed: int = 0) -> Path:
    """Multi-head latent attention (DeepSeek V2, without experts).

    On a CPU vLLM runs it in bfloat16 only, with latents of DeepSeek's size.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_common(layers) | {"num_key_value_heads": HEADS},
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
    return _write(DeepseekV2ForCausalLM, config, path, seed)


MODELS: dict[str, Maker] = {
    "llama": make_llama,
    "gemma3": make_gemma3,
    "mamba-hybrid": make_mamba_hybrid,
    "gdn-hybrid": make_gdn_hybrid,
    "chunked-local": make_chunked_local,
    "mla": make_mla,
}


def _common(layers: int) -> dict[str, int]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _every_third(layers: int, third: str, other: str) -> list[str]:
    if layers < 3:
        raise ValueError(f"a hybrid model needs at least 3 layers, not {layers}")
    return [third if index % 3 == 2 else other for index in range(layers)]


def _write(architecture: type[PreTrainedModel], config: PreTrainedConfig, path: Path, seed: int) -> Path:
    import torch

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = architecture(config).float()
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # Heads that forget within tens of tokens, up to ones that remember thousands.
                parameter.copy_(torch.linspace(math.log(0.05), math.log(0.0002), len(parameter)))
            elif name.endswith("dt_bias"):
                parameter.zero_()
            elif name.endswith("q_norm.weight"):
                # The gain is 1 + weight; a gain of 1 would make attention almost uniform.
                parameter.fill_(4.0)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 1.0 if name.startswith("lm_head") else 0.35)
    model.save_pretrained(path)
    return path
