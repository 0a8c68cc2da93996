"""The cache of each layer, by architecture, as the code in vllm/model_executor/models (0.32) decides it."""

from collections.abc import Callable
from difflib import get_close_matches

from overspill.model import ModelError
from overspill.model.config import EXPERT_KEYS, Config
from overspill.model.facts import Attention, Cache, LatentAttention, LayerCache, RecurrentState

Rule = Callable[[Config], list[LayerCache]]

SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"
# transformers renames the layer types of older files (remap_legacy_layer_types).
_LEGACY_LAYER_TYPES = {"attention": FULL, "mamba": LINEAR}


def layer_caches(config: Config) -> tuple[LayerCache, ...]:
    """Caches of all layers in the order in which vLLM registers them, which decides the layers that share a group."""
    rule = RULES.get(config.architecture)
    if rule is None:
        similar = get_close_matches(config.architecture, RULES, n=3)
        known = f" {len(RULES)} others can be planned{', ' + ', '.join(similar) + ' among them' if similar else ''}."
        raise ModelError(
            f"{config.where} names the architecture {config.architecture}, and how vLLM keeps its KV is not known "
            f"here, so it cannot be planned.{known} If vLLM knows it, vllm serve runs it, with Overspill's connector "
            "(--kv-transfer-config) if it generates; an encoder keeps no KV, and needs none"
        )
    return tuple(rule(config))


def attends_plainly(config: Config) -> bool:
    """Whether attention has no sinks (gpt-oss), no caps on scores (Gemma 2) and no ALiBi."""
    is_capped = any(config.get(key, None) for key in ("attn_logit_softcapping", "alibi"))
    return config.architecture != "GptOssForCausalLM" and not is_capped


def num_kv_heads(config: Config) -> int:
    if config.get("num_key_value_heads", None) is None:
        return config.integer("num_attention_heads")
    return config.integer("num_key_value_heads")


def head_dim(config: Config) -> int:
    # Some configs say null or 0 for "hidden_size / heads" (vllm, model_arch_config_convertor.get_head_size).
    size = config.optional_integer("head_dim")
    return size or config.integer("hidden_size") // config.integer("num_attention_heads")


def num_experts(config: Config) -> int:
    """Routed experts per layer; 0 for a dense model."""
    return config.first_integer(EXPERT_KEYS, 0)


def sliding_window(config: Config) -> int | None:
    """Window in tokens; None if the config switches it off or gives 0."""
    has_switch = "use_sliding_window" in config.text or config.model_type.startswith(("qwen", "smollm3"))
    if has_switch and not config.boolean("use_sliding_window", False):
        return None
    return config.optional_integer("sliding_window") or None


def layer_types(config: Config) -> tuple[str, ...] | None:
    """Layer types as written, or as transformers' config class fills them in; None for classes without them."""
    num_layers = config.integer("num_hidden_layers")
    written = config.strings("layer_types")
    if written is not None:
        if len(written) < num_layers:
            raise ModelError(
                f"{config.where} lists {len(written)} layer_types for {num_layers} layers; correct one of them"
            )
        return tuple(_LEGACY_LAYER_TYPES.get(kind, kind) for kind in written[:num_layers])
    match config.model_type:
        case "gemma3_text":
            return _every_nth(num_layers, config.integer("sliding_window_pattern", 6), FULL, SLIDING)
        case "gemma4_text":
            return (*_every_nth(num_layers, 6, FULL, SLIDING)[:-1], FULL)
        case "gemma2" | "gpt_oss":
            return _every_nth(num_layers, 2, FULL, SLIDING)
        case "cohere2":
            return _every_nth(num_layers, config.integer("sliding_window_pattern", 4), FULL, SLIDING)
        case "olmo3":
            return _every_nth(num_layers, 4, FULL, SLIDING)
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            return _every_nth(num_layers, config.integer("full_attention_interval", 4), FULL, LINEAR)
        case "granitemoehybrid":
            return (LINEAR,) * num_layers
        case "lfm2":
            attends = config.integers("full_attn_idxs")
            return tuple(FULL if attends is None or i in attends else "conv" for i in range(num_layers))
        case "qwen2" | "qwen3" | "qwen2_moe" | "qwen2_5_vl_text" | "qwen2_5_vl" | "smollm3":
            return _switched_layer_types(config, num_layers)
    return None


def _switched_layer_types(config: Config, num_layers: int) -> tuple[str, ...]:
    """Layer types of classes where use_sliding_window switches the window on, each for its own choice of layers."""
    if sliding_window(config) is None:
        return (FULL,) * num_layers
    if config.model_type == "smollm3":
        rotary = _rotary_layers(config, num_layers)
        return tuple(FULL if rotary[i] else SLIDING for i in range(num_layers))
    bound = config.integer("max_window_layers", num_layers, minimum=0)
    if config.model_type == "qwen2_moe":
        return tuple(SLIDING if i % 2 == 0 and i < bound else FULL for i in range(num_layers))
    return tuple(SLIDING if i >= bound else FULL for i in range(num_layers))


def _rotary_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """A 1 for each layer with rotary positions, which is what no_rope_layers holds despite its name."""
    interval = config.integer("no_rope_layer_interval", 4)
    rotary = config.integers("no_rope_layers") or tuple(int((i + 1) % interval != 0) for i in range(num_layers))
    if len(rotary) < num_layers:
        raise ModelError(f"{config.where} lists {len(rotary)} no_rope_layers for {num_layers} layers; correct it")
    return rotary


def _every_nth(num_layers: int, n: int, nth: str, other: str) -> tuple[str, ...]:
    return tuple(other if (i + 1) % n else nth for i in range(num_layers))


def _common_window(config: Config) -> int | None:
    """Window of all layers: vLLM sets it only if no layer type says otherwise (engine/arg_utils.py, CacheConfig)."""
    kinds = layer_types(config)
    return sliding_window(config) if kinds is None or set(kinds) == {SLIDING} else None


def _softmax(config: Config, window: int | None) -> Attention:
    return Attention(num_kv_heads=num_kv_heads(config), head_size=head_dim(config), sliding_window=window)


def _each(config: Config, cache_of: Callable[[int], Cache | None]) -> list[LayerCache]:
    found = ((i, cache_of(i)) for i in range(config.integer("num_hidden_layers")))
    return [LayerCache(layer=i, cache=cache) for i, cache in found if cache is not None]


def _uniform(config: Config) -> list[LayerCache]:
    """Caches of models whose vLLM code ignores layer_types."""
    kinds = set(layer_types(config) or ())
    if config.model_type in ("qwen2", "qwen3") and len(kinds) > 1:
        raise ModelError(
            f"{config.where} asks for a sliding window in some layers only (max_window_layers), which vLLM refuses for "
            f"{config.architecture}; set use_sliding_window to false"
        )
    cache = _softmax(config, _common_window(config))
    return _each(config, lambda _: cache)


def _by_layer_type(config: Config) -> list[LayerCache]:
    """Caches where vLLM's code gives layers of type sliding_attention a window (llama.py, gemma3.py, transformers/)."""
    kinds = layer_types(config)
    full, sliding = _softmax(config, _common_window(config)), _softmax(config, sliding_window(config))
    return _each(config, lambda i: sliding if kinds is not None and kinds[i] == SLIDING else full)


def _gpt_oss(config: Config) -> list[LayerCache]:
    # gpt_oss.py gives the even layers a window, whatever layer_types says.
    full, sliding = _softmax(config, None), _softmax(config, sliding_window(config))
    return _each(config, lambda i: full if i % 2 else sliding)


def _cohere2(config: Config) -> list[LayerCache]:
    # commandr.py: a window of n sees n tokens before the current one.
    window, kinds = sliding_window(config), layer_types(config) or ()
    full, sliding = _softmax(config, None), _softmax(config, None if window is None else window + 1)
    return _each(config, lambda i: sliding if kinds[i] == SLIDING else full)


def _gemma4(config: Config) -> list[LayerCache]:
    """Full-attention layers have heads of their own size, and the last layers read the KV of earlier ones."""
    kinds = layer_types(config) or ()
    sliding = _softmax(config, sliding_window(config))
    global_heads = config.optional_integer("num_global_key_value_heads")
    if global_heads is None or not config.boolean("attention_k_eq_v", False):
        global_heads = sliding.num_kv_heads
    full = Attention(num_kv_heads=global_heads, head_size=config.integer("global_head_dim", 512))
    owners = config.integer("num_hidden_layers") - config.integer("num_kv_shared_layers", 0, minimum=0)
    return _each(config, lambda i: (sliding if kinds[i] == SLIDING else full) if i < owners else None)


def _llama4(config: Config) -> list[LayerCache]:
    """Layers without rotary positions attend to everything, the others to their chunk (llama4.py)."""
    rotary = _rotary_layers(config, config.integer("num_hidden_layers"))
    full = _softmax(config, None)
    chunk = config.optional_integer("attention_chunk_size") or None
    local = Attention(num_kv_heads=full.num_kv_heads, head_size=full.head_size, attention_chunk_size=chunk)
    return _each(config, lambda i: local if rotary[i] else full)


def _latent(config: Config) -> list[LayerCache]:
    if "index_topk" in config.text:
        raise ModelError(
            f"{config.where} asks for sparse attention (index_topk), whose caches are not described here; dense "
            f"{config.architecture} is"
        )
    cache = LatentAttention(head_size=config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim"))
    return _each(config, lambda _: cache)


def _hybrid(state_of: Callable[[Config], RecurrentState]) -> Rule:
    def rule(config: Config) -> list[LayerCache]:
        kinds = layer_types(config)
        if kinds is None:
            raise ModelError(f"{config.where} has no layer_types, which {config.architecture} needs; add it")
        attention, state = _softmax(config, None), state_of(config)
        return _each(config, lambda i: attention if kinds[i] == FULL else state)

    return rule


def _delta_net(config: Config) -> RecurrentState:
    key_heads, key_dim = config.integer("linear_num_key_heads"), config.integer("linear_key_head_dim")
    value_heads, value_dim = config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")
    # vLLM takes the state's dtype from Qwen3.5's config (models/config.py), and ignores Qwen3-Next's.
    dtype = config.get("mamba_ssm_dtype", None) if config.model_type.startswith("qwen3_5") else None
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ModelError(f"{config.where} gives {dtype!r} for mamba_ssm_dtype, and a float type was expected")
    return RecurrentState(
        conv_kernel=config.integer("linear_conv_kernel_dim"),
        conv_channels=2 * key_heads * key_dim + value_heads * value_dim,
        num_heads=value_heads,
        head_state=key_dim * value_dim,
        state_dtype=str(dtype or "auto"),
    )


def _mamba2(config: Config) -> RecurrentState:
    inner = config.integer("mamba_expand") * config.integer("hidden_size")
    heads = config.integer("mamba_n_heads")
    dim = inner // heads if config.get("mamba_d_head") == "auto" else config.integer("mamba_d_head")
    state_size = config.integer("mamba_d_state")
    return RecurrentState(
        conv_kernel=config.integer("mamba_d_conv"),
        conv_channels=inner,
        conv_groups=config.integer("mamba_n_groups"),
        conv_group_channels=2 * state_size,
        num_heads=heads,
        head_state=dim * state_size,
        keeps_checkpoint=True,
    )


def _short_conv(config: Config) -> RecurrentState:
    width = config.integer("conv_dim", config.integer("hidden_size"))
    return RecurrentState(conv_kernel=config.integer("conv_L_cache"), conv_channels=width)


_BY_RULE: dict[Rule, str] = {
    _uniform: (
        "CohereForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM MixtralForCausalLM "
        "OlmoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2_5_VLForConditionalGeneration "
        "Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3VLForConditionalGeneration "
        "Qwen3VLMoeForConditionalGeneration"
    ),
    _cohere2: "Cohere2ForCausalLM",
    _latent: "DeepseekV2ForCausalLM DeepseekV3ForCausalLM",
    _by_layer_type: (
        "Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration GraniteForCausalLM "
        "GraniteMoeForCausalLM LlamaForCausalLM Ministral3ForCausalLM MistralForCausalLM "
        "Mistral3ForConditionalGeneration Olmo2ForCausalLM Olmo3ForCausalLM Phi3ForCausalLM "
        "SeedOssForCausalLM SmolLM3ForCausalLM Starcoder2ForCausalLM"
    ),
    _gemma4: "Gemma4ForCausalLM Gemma4ForConditionalGeneration",
    _gpt_oss: "GptOssForCausalLM",
    _hybrid(_mamba2): "GraniteMoeHybridForCausalLM",
    _hybrid(_short_conv): "Lfm2ForCausalLM Lfm2MoeForCausalLM",
    _llama4: "Llama4ForCausalLM Llama4ForConditionalGeneration",
    _hybrid(_delta_net): (
        "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM "
        "Qwen3_5MoeForConditionalGeneration"
    ),
}
RULES = {architecture: rule for rule, names in _BY_RULE.items() for architecture in names.split()}

# vLLM 0.32 has no code of its own for these: Transformers creates their layers.
RUN_BY_TRANSFORMERS = frozenset({
    "ArceeForCausalLM", "CwmForCausalLM", "FlexOlmoForCausalLM", "GPTBigCodeForCausalLM", "GPTNeoXForCausalLM",
    "GlmForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "Jais2ForCausalLM",
    "MellumForCausalLM", "NanbeigeForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoForCausalLM",
    "PhiForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM", "VaultGemmaForCausalLM",
})  # fmt: skip
