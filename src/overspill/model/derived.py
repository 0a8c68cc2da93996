"""The tensors of a checkpoint that is not at hand, derived one by one from config.json alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from overspill.model import ModelError
from overspill.model.architectures import head_dim, num_experts, num_kv_heads
from overspill.model.checkpoint import Tensor
from overspill.model.config import Config

Shapes = Iterator[tuple[str, tuple[int, ...]]]

ROUTER_BIAS = "e_score_correction_bias"


def _linear(name: str, out: int, width: int, *, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (out, width)
    if bias:
        yield f"{name}.bias", (out,)


def _gated(at: str, hidden: int, width: int, *, bias: bool = False) -> Shapes:
    for name in ("gate_proj", "up_proj"):
        yield from _linear(f"{at}{name}", width, hidden, bias=bias)
    yield from _linear(f"{at}down_proj", hidden, width, bias=bias)


def dense_mlp(config: Config, _: int, layer: str) -> Shapes:
    bias = config.boolean("mlp_bias", False)
    return _gated(f"{layer}mlp.", config.integer("hidden_size"), config.integer("intermediate_size"), bias=bias)


def fused_mlp(config: Config, _: int, layer: str) -> Shapes:
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    yield from _linear(f"{layer}mlp.gate_up_proj", 2 * width, hidden)
    yield from _linear(f"{layer}mlp.down_proj", hidden, width)


def mixtral_experts(config: Config, _: int, layer: str) -> Shapes:
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    experts = num_experts(config)
    yield f"{layer}block_sparse_moe.gate.weight", (experts, hidden)
    for expert in range(experts):
        at = f"{layer}block_sparse_moe.experts.{expert}."
        yield f"{at}w1.weight", (width, hidden)
        yield f"{at}w2.weight", (hidden, width)
        yield f"{at}w3.weight", (width, hidden)


def qwen3_experts(config: Config, i: int, layer: str) -> Shapes:
    dense_layers = config.integers("mlp_only_layers") or ()
    if i in dense_layers or (i + 1) % config.integer("decoder_sparse_step") or not num_experts(config):
        yield from dense_mlp(config, i, layer)
        return
    yield from _routed(config, layer)


def _routed(config: Config, layer: str) -> Shapes:
    hidden, experts = config.integer("hidden_size"), num_experts(config)
    yield f"{layer}mlp.gate.weight", (experts, hidden)
    for expert in range(experts):
        yield from _gated(f"{layer}mlp.experts.{expert}.", hidden, config.integer("moe_intermediate_size"))


def gpt_oss_experts(config: Config, _: int, layer: str) -> Shapes:
    hidden, width, experts = config.integer("hidden_size"), config.integer("intermediate_size"), num_experts(config)
    yield f"{layer}self_attn.sinks", (config.integer("num_attention_heads"),)
    yield from _linear(f"{layer}mlp.router", experts, hidden, bias=True)
    at = f"{layer}mlp.experts."
    yield f"{at}gate_up_proj_bias", (experts, 2 * width)
    yield f"{at}down_proj_bias", (experts, hidden)
    if "quantization_config" in config.raw:
        # MXFP4: 32 numbers share a scale of one byte and take half a byte each.
        for name, out, inner in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            yield f"{at}{name}_blocks", (experts, out, inner // 32, 16)
            yield f"{at}{name}_scales", (experts, out, inner // 32)
    else:
        yield f"{at}gate_up_proj", (experts, hidden, 2 * width)
        yield f"{at}down_proj", (experts, width, hidden)


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How a family's decoder layers depart from Llama's."""

    qkv_bias: bool | None = None
    """None follows attention_bias, for the output projection as well."""
    fused_qkv: bool = False
    qk_norm: Literal["head", "all"] | None = None
    """Norm of queries and keys, as wide as one head or as all heads together."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    mlp: Callable[[Config, int, str], Shapes] = dense_mlp
    is_latent: bool = False
    """Whether attention keeps one vector for all heads (MLA)."""


def decoder(style: Style, prefix: str = "model.") -> Callable[[Config], Shapes]:
    def shapes(config: Config) -> Shapes:
        hidden = config.integer("hidden_size")
        yield f"{prefix}embed_tokens.weight", (config.integer("vocab_size"), hidden)
        for i in range(config.integer("num_hidden_layers")):
            layer = f"{prefix}layers.{i}."
            for norm in style.norms:
                yield f"{layer}{norm}.weight", (hidden,)
            attention = _latent_attention if style.is_latent else _attention
            yield from attention(config, style, f"{layer}self_attn.")
            yield from style.mlp(config, i, layer)
        yield f"{prefix}norm.weight", (hidden,)

    return shapes


def _attention(config: Config, style: Style, at: str) -> Shapes:
    hidden, head = config.integer("hidden_size"), head_dim(config)
    q, kv = config.integer("num_attention_heads") * head, num_kv_heads(config) * head
    written = config.boolean("attention_bias", False)
    qkv_bias, out_bias = (written, written) if style.qkv_bias is None else (style.qkv_bias, False)
    parts = [("qkv_proj", q + 2 * kv)] if style.fused_qkv else [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
    for name, width in parts:
        yield from _linear(f"{at}{name}", width, hidden, bias=qkv_bias)
    yield from _linear(f"{at}o_proj", hidden, q, bias=out_bias)
    if style.qk_norm is not None:
        yield f"{at}q_norm.weight", (head if style.qk_norm == "head" else q,)
        yield f"{at}k_norm.weight", (head if style.qk_norm == "head" else kv,)


def deepseek_mlp(config: Config, i: int, layer: str) -> Shapes:
    hidden = config.integer("hidden_size")
    first, every = config.integer("first_k_dense_replace", minimum=0), config.integer("moe_layer_freq", 1)
    if i < first or i % every or not num_experts(config):
        yield from _gated(f"{layer}mlp.", hidden, config.integer("intermediate_size"))
        return
    yield from _routed(config, layer)
    if config.architecture == "DeepseekV3ForCausalLM":
        yield f"{layer}mlp.gate.{ROUTER_BIAS}", (num_experts(config),)
    if shared := config.optional_integer("n_shared_experts"):
        yield from _gated(f"{layer}mlp.shared_experts.", hidden, shared * config.integer("moe_intermediate_size"))


def _latent_attention(config: Config, _: Style, at: str) -> Shapes:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    bias = config.boolean("attention_bias", False)
    rank, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    nope, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    q_rank = config.optional_integer("q_lora_rank")
    if q_rank is None:
        yield from _linear(f"{at}q_proj", heads * (nope + rope), hidden)
    else:
        yield from _linear(f"{at}q_a_proj", q_rank, hidden, bias=bias)
        yield f"{at}q_a_layernorm.weight", (q_rank,)
        yield from _linear(f"{at}q_b_proj", heads * (nope + rope), q_rank)
    yield from _linear(f"{at}kv_a_proj_with_mqa", rank + rope, hidden, bias=bias)
    yield f"{at}kv_a_layernorm.weight", (rank,)
    yield from _linear(f"{at}kv_b_proj", heads * (nope + value), rank)
    yield from _linear(f"{at}o_proj", hidden, heads * value, bias=bias)


# Ten times as many as in the largest models.
MAX_EXPERTS = 250_000

_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def derive_tensors(config: Config, *, dtype: str, is_tied: bool, quantization: str | None) -> list[Tensor]:
    """All tensors of a checkpoint written in `dtype`."""
    shapes_of = SHAPES.get(config.architecture)
    if shapes_of is None:
        raise ModelError(
            f"{config.where} describes a {config.architecture}, and no weight files are beside it; there is no formula "
            "for their size, so fetch the safetensors files"
        )
    if quantization is not None and (config.architecture, quantization) != ("GptOssForCausalLM", "mxfp4"):
        raise ModelError(
            f"{config.where} describes weights quantised with {quantization}, and no weight files are beside it; only "
            "the headers of the safetensors files give their size, so fetch these"
        )
    if config.integer("num_hidden_layers") * num_experts(config) > MAX_EXPERTS:
        raise ModelError(
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
    # DeepSeek publishes the router bias, and vLLM keeps it, in float32 whatever the dtype of the rest.
    return "F32" if name.endswith(ROUTER_BIAS) else _STORED[dtype]


def _gemma3_with_vision(config: Config) -> Shapes:
    yield from decoder(GEMMA3, "language_model.model.")(config)
    vision = config.section("vision_config")
    width = vision.integer("hidden_size")
    yield "multi_modal_projector.mm_input_projection_weight", (width, config.integer("hidden_size"))
    yield "multi_modal_projector.mm_soft_emb_norm.weight", (width,)
    yield from _siglip(vision, "vision_tower.vision_model.")


def _siglip(vision: Config, at: str) -> Shapes:
    # Published Gemmas leave SigLIP's pooling head out, and their configs say so.
    if vision.boolean("vision_use_head", True):
        raise ModelError(
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
_DEEPSEEK = Style(mlp=deepseek_mlp, is_latent=True)
GEMMA3 = Style(qk_norm="head", norms=_FOUR_NORMS)
_OLMO2 = Style(qk_norm="all", norms=("post_attention_layernorm", "post_feedforward_layernorm"))

SHAPES: dict[str, Callable[[Config], Shapes]] = {
    "DeepseekV2ForCausalLM": decoder(_DEEPSEEK),
    "DeepseekV3ForCausalLM": decoder(_DEEPSEEK),
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
