"""The weights of a model that is not at hand: every tensor its checkpoint would hold, from config.json alone."""

from collections.abc import Callable

from overspill.model.architectures import num_experts
from overspill.model.config import Config
from overspill.model.decoders import (
    ROUTER_BIAS,
    Shapes,
    Style,
    decoder,
    deepseek,
    fused_mlp,
    gpt_oss_experts,
    mixtral_experts,
    qwen3_experts,
)
from overspill.model.errors import UnknownWeights
from overspill.model.tensors import Tensor

# Ten times those of the largest models.
MAX_EXPERTS = 250_000

_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def derive_tensors(config: Config, *, dtype: str, is_tied: bool, quantization: str | None) -> list[Tensor]:
    """`dtype` is what the checkpoint would be written in."""
    shapes_of = SHAPES.get(config.architecture)
    if shapes_of is None:
        raise UnknownWeights(
            f"{config.where} describes a {config.architecture}, and no weight files are beside it; there is no formula "
            "for their size, so fetch the safetensors files"
        )
    if quantization is not None and (config.architecture, quantization) != ("GptOssForCausalLM", "mxfp4"):
        raise UnknownWeights(
            f"{config.where} describes weights quantised with {quantization}, and no weight files are beside it; their "
            "size stands in the headers of the safetensors files only, so fetch these"
        )
    if config.integer("num_hidden_layers") * num_experts(config) > MAX_EXPERTS:
        raise UnknownWeights(
            f"{config.where} describes {num_experts(config)} experts in each of {config.integer('num_hidden_layers')} "
            f"layers, and more than {MAX_EXPERTS} are not counted one by one; fetch the safetensors files"
        )
    shapes = list(shapes_of(config))
    if not is_tied:
        prefix = "language_model." if config.architecture == "Gemma3ForConditionalGeneration" else ""
        shapes.append((f"{prefix}lm_head.weight", (config.integer("vocab_size"), config.integer("hidden_size"))))
    return [Tensor(name=name, dtype=_stored_as(name, dtype), shape=shape) for name, shape in shapes]


def _stored_as(name: str, dtype: str) -> str:
    if name.endswith(("_blocks", "_scales")):  # MXFP4
        return "U8"
    # DeepSeek publishes it, and vLLM keeps it, in float32 whatever the rest is in.
    return "F32" if name.endswith(ROUTER_BIAS) else _STORED[dtype]


def _gemma3_with_vision(config: Config) -> Shapes:
    yield from decoder(GEMMA3, "language_model.model.")(config)
    vision = config.section("vision_config")
    width = vision.integer("hidden_size")
    yield "multi_modal_projector.mm_input_projection_weight", (width, config.integer("hidden_size"))
    yield "multi_modal_projector.mm_soft_emb_norm.weight", (width,)
    yield from _siglip(vision, "vision_tower.vision_model.")


def _siglip(vision: Config, at: str) -> Shapes:
    # The published Gemmas leave SigLIP's pooling head out, and say so.
    if vision.boolean("vision_use_head", True):
        raise UnknownWeights(
            f"{vision.where} asks for a pooling head, for whose size there is no formula; fetch the safetensors files"
        )
    hidden, mlp = vision.integer("hidden_size"), vision.integer("intermediate_size")
    patch = vision.integer("patch_size")
    patches = (vision.integer("image_size") // patch) ** 2
    yield f"{at}embeddings.patch_embedding.weight", (hidden, vision.integer("num_channels", 3), patch, patch)
    yield f"{at}embeddings.patch_embedding.bias", (hidden,)
    yield f"{at}embeddings.position_embedding.weight", (patches, hidden)
    for i in range(vision.integer("num_hidden_layers")):
        layer = f"{at}encoder.layers.{i}."
        linears = [(f"self_attn.{name}_proj", hidden, hidden) for name in ("q", "k", "v", "out")]
        linears += [("mlp.fc1", mlp, hidden), ("mlp.fc2", hidden, mlp)]
        for name, out, inner in linears:
            yield f"{layer}{name}.weight", (out, inner)
            yield f"{layer}{name}.bias", (out,)
        for norm in ("layer_norm1", "layer_norm2"):
            yield from _layer_norm(f"{layer}{norm}", hidden)
    yield from _layer_norm(f"{at}post_layernorm", hidden)


def _layer_norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GEMMA3 = Style(qk_norm="head", norms=_FOUR_NORMS)
_OLMO2 = Style(qk_norm="all", norms=("post_attention_layernorm", "post_feedforward_layernorm"))

SHAPES: dict[str, Callable[[Config], Shapes]] = {
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
    "GemmaForCausalLM": decoder(Style()),
    "Gemma2ForCausalLM": decoder(Style(norms=_FOUR_NORMS)),
    "Gemma3ForCausalLM": decoder(GEMMA3),
    "Gemma3ForConditionalGeneration": _gemma3_with_vision,
    "GptOssForCausalLM": decoder(Style(mlp=gpt_oss_experts)),
    "GraniteForCausalLM": decoder(Style()),
    "LlamaForCausalLM": decoder(Style()),
    "MistralForCausalLM": decoder(Style(qkv_bias=False)),
    "MixtralForCausalLM": decoder(Style(qkv_bias=False, mlp=mixtral_experts)),
    "Olmo2ForCausalLM": decoder(_OLMO2),
    "Olmo3ForCausalLM": decoder(_OLMO2),
    "Phi3ForCausalLM": decoder(Style(qkv_bias=False, fused_qkv=True, mlp=fused_mlp)),
    "Qwen2ForCausalLM": decoder(Style(qkv_bias=True)),
    "Qwen3ForCausalLM": decoder(Style(qk_norm="head")),
    "Qwen3MoeForCausalLM": decoder(Style(qk_norm="head", mlp=qwen3_experts)),
    "SmolLM3ForCausalLM": decoder(Style()),
}
