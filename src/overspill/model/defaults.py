"""Defaults of keys that a config.json may leave out: those of transformers' config classes, by model_type.

Nested configs are written as differences from these (gemma-3-4b-it names neither its heads nor its vocabulary). The
table lists only keys that the rest of this package reads, and only values that are neither null nor false.
"""

_SHAPE = {
    "vocab": "vocab_size", "hidden": "hidden_size", "mlp": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}  # fmt: skip
_SHORT = _SHAPE | {
    "kv_heads": "num_key_value_heads", "head": "head_dim", "positions": "max_position_embeddings",
    "window": "sliding_window", "per_token": "num_experts_per_tok", "expert_mlp": "moe_intermediate_size",
    "tied": "tie_word_embeddings",
}  # fmt: skip
SHAPE_KEYS = frozenset(_SHAPE.values())


def _family(**values: int | str) -> dict[str, object]:
    """Defaults of one family, given by the short names above or the config's own."""
    return {_SHORT.get(name, name): value for name, value in values.items()}


_DELTA_NET = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

DEFAULTS: dict[str, dict[str, object]] = {
    "cohere": _family(positions=8192, tied=True),
    "cohere2": _family(positions=8192, window=4096, tied=True),
    "deepseek_v2": _family(n_routed_experts=64, n_shared_experts=2, first_k_dense_replace=0, **_LATENT),
    "deepseek_v3": _family(
        kv_heads=128, per_token=8, expert_mlp=2048, n_routed_experts=256, n_shared_experts=1,
        first_k_dense_replace=3, **_LATENT,
    ),
    "gemma": _family(kv_heads=16, head=256, positions=8192, tied=True),
    "gemma2": _family(kv_heads=4, head=256, positions=8192, window=4096, tied=True),
    "gemma3_text": _family(
        vocab=262208, hidden=2304, mlp=9216, layers=26, heads=8, kv_heads=4, head=256, positions=131072, window=4096,
        tied=True,
    ),
    "gemma4_text": _family(
        vocab=262144, hidden=2304, mlp=9216, layers=30, heads=8, kv_heads=4, head=256, positions=131072, window=512,
        tied=True,
    ),
    "glm4": _family(kv_heads=2, head=128, positions=131072),
    "glm4_moe": _family(kv_heads=8, positions=131072, per_token=8, n_routed_experts=128),
    "gpt_oss": _family(
        kv_heads=8, head=64, positions=131072, window=128, per_token=4, attention_bias=True, num_local_experts=128,
    ),
    "granitemoe": _family(per_token=2, num_local_experts=8),
    "granitemoehybrid": _family(
        per_token=2, num_local_experts=8, mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256,
        mamba_d_head="auto", mamba_d_conv=4, mamba_expand=2,
    ),
    "lfm2": _family(kv_heads=8, positions=128000, conv_L_cache=3, tied=True),
    "lfm2_moe": _family(kv_heads=8, positions=128000, per_token=4, conv_L_cache=3, num_experts=32, tied=True),
    "llama4_text": _family(
        vocab=202048, hidden=5120, mlp=8192, layers=48, heads=40, kv_heads=8, head=128, positions=131072,
        per_token=1, attention_chunk_size=8192, no_rope_layer_interval=4, num_local_experts=16,
    ),
    "ministral3": _family(
        vocab=131072, hidden=4096, mlp=14336, layers=34, heads=32, kv_heads=8, head=128, positions=262144,
    ),
    "mistral": _family(
        vocab=32000, hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8, positions=131072, window=4096,
    ),
    "mixtral": _family(kv_heads=8, per_token=2, num_local_experts=8),
    "olmo3": _family(window=4096),
    "olmoe": _family(per_token=8, num_experts=64),
    "qwen2": _family(kv_heads=32, window=4096, max_window_layers=28),
    "qwen2_5_vl_text": _family(
        vocab=152064, hidden=8192, mlp=29568, layers=80, heads=64, kv_heads=8, positions=32768, window=4096,
        max_window_layers=80,
    ),
    "qwen2_moe": _family(
        kv_heads=16, window=4096, per_token=4, expert_mlp=1408, num_experts=60, shared_expert_intermediate_size=5632,
        decoder_sparse_step=1, max_window_layers=28,
    ),
    "qwen3": _family(kv_heads=32, head=128, window=4096, max_window_layers=28),
    "qwen3_5_text": _family(
        vocab=248320, hidden=4096, mlp=12288, layers=32, heads=16, kv_heads=4, head=256, positions=32768,
        **_DELTA_NET,
    ),
    "qwen3_5_moe_text": _family(
        vocab=248320, hidden=2048, layers=40, heads=16, kv_heads=2, head=256, positions=32768, per_token=8,
        num_experts=256, **_DELTA_NET,
    ),
    "qwen3_moe": _family(kv_heads=4, window=4096, per_token=8, expert_mlp=768, num_experts=128, decoder_sparse_step=1),
    "qwen3_next": _family(kv_heads=2, head=256, per_token=10, num_experts=512, **_DELTA_NET),
    "qwen3_vl_moe_text": _family(
        vocab=151936, hidden=2048, mlp=5632, layers=24, heads=16, kv_heads=16, positions=128000, per_token=4,
        num_experts=60,
    ),
    "qwen3_vl_text": _family(
        vocab=151936, hidden=4096, mlp=22016, layers=32, heads=32, kv_heads=32, head=128, positions=128000,
    ),
    "seed_oss": _family(kv_heads=8, head=128),
    "smollm3": _family(kv_heads=4, tied=True),
    "starcoder2": _family(kv_heads=2, tied=True),
}  # fmt: skip
