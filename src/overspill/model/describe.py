"""A model's facts from its config and the tensors of its checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from overspill.figures import Origin
from overspill.model.architectures import head_dim, layer_caches, num_experts, num_kv_heads
from overspill.model.config import Config
from overspill.model.derived import derive_tensors
from overspill.model.errors import BadCheckpoint, BadConfig
from overspill.model.facts import ModelFacts
from overspill.model.quantization import quantization_of
from overspill.model.tensors import Tensor
from overspill.model.weights import common_dtype, has_lm_head, sort_weights

DTYPES = ("bfloat16", "float16", "float32")


def describe(
    config: Config,
    tensors: Sequence[Tensor] | None,
    *,
    name: str,
    folder: Path | None = None,
    quant_file: Mapping[str, object] | None = None,
    dtype: str = "auto",
) -> ModelFacts:
    """`tensors` is None where there are no weight files; `dtype` is vLLM's --dtype."""
    caches = layer_caches(config)
    quantization = quantization_of(config, quant_file)
    written = _written_dtype(config, tensors)
    served = served_dtype(written, dtype)
    is_tied = _is_tied(config, tensors)
    num_layers = config.integer("num_hidden_layers")
    source = Origin.DERIVED if tensors is None else Origin.MEASURED
    if tensors is None:
        # Of a quantised checkpoint sizes count as written, and nobody writes the rest of one in float32, which is what
        # a config without a dtype would mean: it takes what vLLM runs it in.
        rest = served if quantization.method is not None else written
        tensors = derive_tensors(config, dtype=rest, is_tied=is_tied, quantization=quantization.method)
    weights = sort_weights(
        tensors,
        num_layers=num_layers,
        is_tied=is_tied,
        is_quantized=quantization.method is not None,
        dtype=served,
        source=source,
    )
    if not all(weights.layer_bytes):
        raise BadCheckpoint(
            f"{config.where} describes {num_layers} layers, and the weight files hold nothing for layer "
            f"{weights.layer_bytes.index(0)}; fetch the files again"
        )
    experts = num_experts(config)
    per_token_keys = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
    return ModelFacts(
        name=name,
        folder=folder,
        architecture=config.architecture,
        dtype=served,
        quantization=quantization.method,
        kv_cache_dtype=quantization.kv_cache_dtype,
        num_layers=num_layers,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.first_integer(("intermediate_size", "moe_intermediate_size"), 0),
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        is_tied=is_tied,
        num_experts=experts,
        num_experts_per_tok=config.first_integer(per_token_keys, 0) if experts else 0,
        caches=caches,
        weights=weights,
    )


def served_dtype(written: str, dtype: str) -> str:
    """What vLLM runs a model in (config/model.py, _resolve_auto_dtype): it serves no model in float32 unasked."""
    wanted = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if wanted == "auto":
        return "bfloat16" if written == "float32" else written
    if wanted not in DTYPES:
        raise BadConfig(f"dtype is {dtype!r}, and vLLM knows auto, {', '.join(DTYPES)}; use one of these")
    return wanted


def _written_dtype(config: Config, tensors: Sequence[Tensor] | None) -> str:
    sources = (config.raw, config.text)
    value = next((s[key] for s in sources for key in ("dtype", "torch_dtype") if s.get(key) is not None), None)
    if value is None:
        value = common_dtype(tensors or ()) or "float32"
    written = str(value).removeprefix("torch.")
    if written not in DTYPES:
        raise BadConfig(f"{config.where} gives {value!r} for dtype, and one of {', '.join(DTYPES)} was expected")
    return written


def _is_tied(config: Config, tensors: Sequence[Tensor] | None) -> bool:
    if tensors is not None and not has_lm_head(tensors):
        return True
    # Multimodal models say it in either config.
    written = [source["tie_word_embeddings"] for source in (config.raw, config.text) if "tie_word_embeddings" in source]
    return any(written) if written else config.boolean("tie_word_embeddings", False)
