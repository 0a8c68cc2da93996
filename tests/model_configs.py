"""config.json of published models, cut down to the keys that decide sizes, and small ones of other architectures."""

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]


# Shapes of the next three: from the config.json files that the project keeps for planning and for runs with random
# weights on a GPU. The others: the config.json in the model's repository on the hub.


def llama_3_1_8b() -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }


def olmo_2_7b() -> Config:
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
    }


def qwen2_5_7b() -> Config:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 152064,
    }


def qwen3_8b() -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def qwen3_30b_a3b() -> Config:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def qwen3_coder_30b_a3b() -> Config:
    return {**qwen3_30b_a3b(), "intermediate_size": 5472, "max_position_embeddings": 262144}


def mistral_7b_v0_1() -> Config:
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    }


def mixtral_8x7b() -> Config:
    return {
        **mistral_7b_v0_1(),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "sliding_window": None,
    }


def phi_3_mini_4k() -> Config:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    }


def gemma_3_4b() -> Config:
    """As published: nested, and with little more than what differs from the class."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


def gemma_3_4b_text() -> Config:
    """Its language model alone, written out."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        "torch_dtype": "bfloat16",
        "vocab_size": 262208,
    }


def deepseek_v2_lite() -> Config:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102400,
    }


def deepseek_v3_bf16() -> Config:
    """Without its quantization_config: the shapes are what counts."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 129280,
    }


def gpt_oss_20b() -> Config:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 201088,
    }


def gpt_oss_20b_bf16() -> Config:
    return {key: value for key, value in gpt_oss_20b().items() if key != "quantization_config"}


def llama_4_scout_text() -> Config:
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 1048576,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "torch_dtype": "bfloat16",
        "vocab_size": 202048,
    }


def qwen3_next_80b_a3b() -> Config:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }


def qwen3_6_27b_text() -> Config:
    """16 of 64 layers hold KV; its file asks for a state in float32."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 248320,
    }


PUBLISHED: dict[str, Callable[[], Config]] = {
    "Llama-3.1-8B": llama_3_1_8b,
    "OLMo-2-7B": olmo_2_7b,
    "Qwen3-Coder-30B-A3B": qwen3_coder_30b_a3b,
    "Qwen2.5-7B": qwen2_5_7b,
    "Qwen3-8B": qwen3_8b,
    "Qwen3-30B-A3B": qwen3_30b_a3b,
    "Mistral-7B-v0.1": mistral_7b_v0_1,
    "Mixtral-8x7B": mixtral_8x7b,
    "Phi-3-mini-4k": phi_3_mini_4k,
    "gemma-3-4b": gemma_3_4b,
    "gemma-3-4b, text only": gemma_3_4b_text,
    "DeepSeek-V2-Lite": deepseek_v2_lite,
    "DeepSeek-V3 in bf16": deepseek_v3_bf16,
    "gpt-oss-20b": gpt_oss_20b,
    "gpt-oss-20b in bf16": gpt_oss_20b_bf16,
    "Llama-4-Scout, text only": llama_4_scout_text,
    "Qwen3-Next-80B-A3B": qwen3_next_80b_a3b,
    "Qwen3.6-27B, text only": qwen3_6_27b_text,
}


_SHAPE: Config = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_CONV: Config = {
    "layer_types": ["conv", "conv", "full_attention"] * 2,
    "block_auto_adjust_ff_dim": False,
    "block_dim": 256,
    "block_ff_dim": 512,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 256,
    "norm_eps": 1e-5,
}
_GEMMA4: Config = {"head_dim": 64, "hidden_size_per_layer_input": 0, "sliding_window": 256}


def _small(architecture: str, model_type: str, **keys: Any) -> Config:
    return {"architectures": [architecture], "model_type": model_type, **_SHAPE, **keys}


def _nested(architecture: str, model_type: str, text: Config, vision: Config) -> Config:
    text = {**_SHAPE, **text}
    config = {"architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16"}
    return {**config, "text_config": text, "vision_config": vision}


_VISION: Config = {"depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 256}

SMALL: dict[str, Config] = {
    "deepseek": {**deepseek_v2_lite(), "num_hidden_layers": 3},
    "gpt-oss": {**gpt_oss_20b_bf16(), "num_hidden_layers": 5},
    "llama4": {**llama_4_scout_text(), "num_hidden_layers": 10, "attention_chunk_size": 129},
    "qwen3-next": {**qwen3_next_80b_a3b(), "num_hidden_layers": 10},
    "cohere": _small("CohereForCausalLM", "cohere"),
    "cohere2": _small("Cohere2ForCausalLM", "cohere2", sliding_window=257),
    "gemma": _small("GemmaForCausalLM", "gemma", head_dim=64),
    "gemma2": _small("Gemma2ForCausalLM", "gemma2", head_dim=64, sliding_window=256),
    "gemma2, kinds almost even": _small(
        "Gemma2ForCausalLM", "gemma2", head_dim=64, num_hidden_layers=7, sliding_window=257
    ),
    "gemma4": _small("Gemma4ForCausalLM", "gemma4_text", **_GEMMA4, global_head_dim=128, num_hidden_layers=12),
    "gemma4, keys as values": _small(
        "Gemma4ForCausalLM",
        "gemma4_text",
        **_GEMMA4,
        attention_k_eq_v=True,
        global_head_dim=128,
        num_global_key_value_heads=1,
        num_hidden_layers=13,
    ),
    "gemma4, shared KV, pages that must be padded": _small(
        "Gemma4ForCausalLM",
        "gemma4_text",
        **_GEMMA4,
        global_head_dim=192,
        num_hidden_layers=17,
        num_kv_shared_layers=5,
    ),
    "glm4": _small("Glm4ForCausalLM", "glm4", head_dim=32, partial_rotary_factor=0.5, attention_bias=True),
    "glm4 with experts": _small(
        "Glm4MoeForCausalLM", "glm4_moe", head_dim=32, n_routed_experts=4, n_group=1, topk_group=1, **_EXPERTS
    ),
    "granite": _small("GraniteForCausalLM", "granite"),
    "granite with experts": _small("GraniteMoeForCausalLM", "granitemoe", num_local_experts=4, num_experts_per_tok=2),
    "granite with mamba": _small(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        attention_multiplier=0.1,
        layer_types=["mamba", "mamba", "attention"] * 2,
        mamba_d_head=32,
        mamba_d_state=64,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_n_heads=16,
        num_experts_per_tok=0,
        num_local_experts=0,
        position_embedding_type="rope",
        shared_intermediate_size=128,
    ),
    "lfm2": _small("Lfm2ForCausalLM", "lfm2", **_CONV),
    "lfm2 with experts": _small("Lfm2MoeForCausalLM", "lfm2_moe", **_CONV, **_EXPERTS, num_experts=4),
    "llama, MHA as in old files": {
        key: value for key, value in _small("LlamaForCausalLM", "llama").items() if key != "num_key_value_heads"
    },
    "llama, layer types": _small(
        "LlamaForCausalLM",
        "llama",
        layer_types=["sliding_attention", "full_attention", "full_attention"] * 2,
        sliding_window=256,
    ),
    "llama, biases": _small("LlamaForCausalLM", "llama", attention_bias=True, mlp_bias=True),
    "llama, a window of 0": _small("LlamaForCausalLM", "llama", sliding_window=0),
    "ministral3": _small("Ministral3ForCausalLM", "ministral3", head_dim=32),
    "mistral, no word about a window": _small("MistralForCausalLM", "mistral"),
    "mistral, window off": _small("MistralForCausalLM", "mistral", sliding_window=None),
    "mistral3": _nested(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        {
            "model_type": "pixtral",
            "head_dim": 32,
            "hidden_size": 64,
            "image_size": 56,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
        },
    ),
    "olmo3": _small("Olmo3ForCausalLM", "olmo3", sliding_window=256),
    "olmo3, a group that falls short": _small("Olmo3ForCausalLM", "olmo3", sliding_window=256, num_hidden_layers=9),
    "olmoe": _small("OlmoeForCausalLM", "olmoe", num_experts=4, num_experts_per_tok=2),
    "qwen2, a window in every layer": _small(
        "Qwen2ForCausalLM", "qwen2", max_window_layers=0, sliding_window=256, use_sliding_window=True
    ),
    "qwen2 with experts": _small(
        "Qwen2MoeForCausalLM", "qwen2_moe", num_experts=4, shared_expert_intermediate_size=64, **_EXPERTS
    ),
    "qwen2 with experts, window on": _small(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        num_experts=4,
        shared_expert_intermediate_size=64,
        sliding_window=256,
        use_sliding_window=True,
        **_EXPERTS,
    ),
    "qwen2.5-vl, flat as published": _small(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        max_window_layers=2,
        rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]},
        sliding_window=256,
        use_sliding_window=False,
        vision_config=_VISION,
    ),
    "qwen3, window on for no layer": _small(
        "Qwen3ForCausalLM", "qwen3", head_dim=32, max_window_layers=6, sliding_window=256, use_sliding_window=True
    ),
    "qwen3 with experts, window on": _small(
        "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=4, sliding_window=256, use_sliding_window=True, **_EXPERTS
    ),
    "qwen3-vl": _nested(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {
            "model_type": "qwen3_vl_text",
            "head_dim": 32,
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
        },
        {**_VISION, "deepstack_visual_indexes": []},
    ),
    "seed-oss": _small("SeedOssForCausalLM", "seed_oss", head_dim=32),
    "smollm3": _small("SmolLM3ForCausalLM", "smollm3", sliding_window=256),
    "smollm3, window on": _small("SmolLM3ForCausalLM", "smollm3", sliding_window=256, use_sliding_window=True),
    "starcoder2": _small("Starcoder2ForCausalLM", "starcoder2", sliding_window=256),
}
