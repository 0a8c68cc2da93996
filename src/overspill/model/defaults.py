"""Keys that a config.json may leave out: the defaults of transformers' config classes, by model_type.

Nested configs are written as differences from these (gemma-3-4b-it names neither its heads nor its vocabulary). Only
keys that the rest of this package reads, and values that are neither null nor false, are here.
"""


def _shape(*, vocab: int, hidden: int, layers: int, heads: int, mlp: int | None = None) -> dict[str, object]:
    mlps = {} if mlp is None else {"intermediate_size": mlp}
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        **mlps,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


SHAPE_KEYS = frozenset(_shape(vocab=1, hidden=1, layers=1, heads=1, mlp=1))

_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}

_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

DEFAULTS: dict[str, dict[str, object]] = {
    "cohere": {"max_position_embeddings": 8192, "tie_word_embeddings": True},
    "cohere2": {"max_position_embeddings": 8192, "sliding_window": 4096, "tie_word_embeddings": True},
    "deepseek_v2": {**_LATENT, "n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0},
    "deepseek_v3": {
        **_LATENT,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    },
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **_shape(vocab=262208, hidden=2304, mlp=9216, layers=26, heads=8),
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {
        **_shape(vocab=262144, hidden=2304, mlp=9216, layers=30, heads=8),
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072},
    "glm4_moe": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "lfm2": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
    },
    "lfm2_moe": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "conv_L_cache": 3,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": True,
    },
    "llama4_text": {
        **_shape(vocab=202048, hidden=5120, mlp=8192, layers=48, heads=40),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
    "ministral3": {
        **_shape(vocab=131072, hidden=4096, mlp=14336, layers=34, heads=32),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
    },
    "mistral": {
        **_shape(vocab=32000, hidden=4096, mlp=14336, layers=32, heads=32),
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmo3": {"sliding_window": 4096},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "qwen2": {"num_key_value_heads": 32, **_QWEN_WINDOW},
    "qwen2_5_vl_text": {
        **_shape(vocab=152064, hidden=8192, mlp=29568, layers=80, heads=64),
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 80,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
        **_QWEN_WINDOW,
    },
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
    "qwen3_5_text": {
        **_shape(vocab=248320, hidden=4096, mlp=12288, layers=32, heads=16),
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        **_DELTA_NET,
    },
    "qwen3_5_moe_text": {
        **_shape(vocab=248320, hidden=2048, layers=40, heads=16),
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        **_DELTA_NET,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        **_DELTA_NET,
    },
    "qwen3_vl_moe_text": {
        **_shape(vocab=151936, hidden=2048, mlp=5632, layers=24, heads=16),
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    "qwen3_vl_text": {
        **_shape(vocab=151936, hidden=4096, mlp=22016, layers=32, heads=32),
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
    },
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "starcoder2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
}
