"""A model's facts from its config and the tensors of its checkpoint."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from overspill.figures import Origin
from overspill.model import ModelError
from overspill.model.architectures import attends_plainly, head_dim, layer_caches, num_experts, num_kv_heads
from overspill.model.checkpoint import Tensor
from overspill.model.config import Config
from overspill.model.derived import derive_tensors
from overspill.model.facts import ModelFacts, Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    method: str | None = None
    """vLLM's name for the method; None for a checkpoint in plain floating point."""
    kv_cache_dtype: str = "auto"


def quantization_of(config: Config, quant_file: Mapping[str, object] | None = None) -> Quantization:
    """The checkpoint's quantisation; ModelOpt describes it in hf_quant_config.json (`quant_file`), not config.json."""
    found = _quantization_config(config)
    if found is None:
        found = quant_file
    if found is None:
        return Quantization()
    method = _method(found, config.where)
    return Quantization(method=method, kv_cache_dtype=_kv_cache_dtype(method, found))


def _quantization_config(config: Config) -> Mapping[str, object] | None:
    for source in (config.raw, config.text):
        for key in ("quantization_config", "compression_config"):
            value = source.get(key)
            if isinstance(value, dict):
                return value
            if value is not None:
                raise ModelError(f"{config.where} gives {value!r} for {key}, and an object was expected; correct it")
    return None


def _method(found: Mapping[str, object], where: str) -> str:
    producer = found.get("producer")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        is_fp4 = str(_inner(found).get("quant_algo")).upper() == "NVFP4"
        return "modelopt_fp4" if is_fp4 else "modelopt"
    method = found.get("quant_method")
    if not isinstance(method, str) or not method:
        raise ModelError(
            f"{where} has a quantization_config without a quant_method, which says how to read the weights; "
            "fetch the file again"
        )
    return method.lower().replace("compressed_tensors", "compressed-tensors")


def _kv_cache_dtype(method: str, found: Mapping[str, object]) -> str:
    """Dtype that --kv-cache-dtype auto resolves to (utils/torch_utils.py, get_kv_cache_quant_algo_string)."""
    inner = _inner(found)
    if method == "compressed-tensors":
        return "fp8" if found.get("kv_cache_scheme") is not None else "auto"
    if not method.startswith("modelopt"):
        return "auto"
    wanted = next(
        (s[key] for key in ("kv_cache_scheme", "kv_cache_quant_algo") for s in (inner, found) if s.get(key)), None
    )
    match wanted:
        case str(name):
            return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(name.lower(), "auto")
        case {"dynamic": False, "num_bits": 8, "type": "float"}:
            return "fp8_e4m3"
        case {"num_bits": 4, "type": "float"}:
            return "nvfp4"
    return "auto"


def _inner(found: Mapping[str, object]) -> Mapping[str, object]:
    inner = found.get("quantization")
    return inner if isinstance(inner, dict) else found


# Prefixes of the language model; a vision tower's layers have others (vision_tower.encoder.layers.0).
_TEXT = r"^(?:model\.|language_model\.|text_model\.|backbone\.|transformer\.|thinker\.)*"
_LAYER = re.compile(_TEXT + r"(?:layers|h|blocks)\.(\d{1,6})\.")
_EMBEDDING = re.compile(_TEXT + r"(?:embed_tokens|tok_embeddings|word_embeddings|embeddings|wte)\.")
_LM_HEAD = re.compile(_TEXT + r"(?:lm_head|embed_out|output)\.")
# Routed experts: one tensor each, or all of a layer in one; GraniteMoe names the tensors by their function.
_EXPERT = re.compile(r"\.(?:experts\.|block_sparse_moe\.(?:input|output)_linear\.)")
# Tensors that vLLM keeps whole on each rank (ReplicatedLinear, RMSNorm).
_REPLICATED = re.compile(r"norm|\.router\.|\.gate\.|\.shared_expert_gate\.|(?:q|kv)_a_proj")
# Layers for multi-token prediction have their own prefix (Qwen3-Next) or follow the last layer (DeepSeek-V3).
_DRAFT = re.compile(_TEXT + r"mtp\.")
_BUFFER = re.compile(r"rotary_emb\.inv_freq$")

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_FLOAT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
# vLLM keeps these in float32 whatever the model's dtype: the router bias of DeepSeek-V3, and decay rates of states.
_KEPT = re.compile(r"(?:e_score_correction_bias|A_log)$")


def sort_weights(
    tensors: Iterable[Tensor], *, num_layers: int, is_tied: bool, is_quantized: bool, dtype: str, source: Origin
) -> Weights:
    layers, experts, replicated = [0] * num_layers, [0] * num_layers, [0] * num_layers
    embedding = lm_head = rest = unused = checkpoint = 0
    for tensor in tensors:
        checkpoint += tensor.num_bytes
        size = tensor.num_bytes if is_quantized else served_bytes(tensor, dtype)
        found = _LAYER.match(tensor.name)
        layer = None if found is None else int(found[1])
        is_draft = _DRAFT.match(tensor.name) or (layer is not None and layer >= num_layers)
        if is_draft or _BUFFER.search(tensor.name):
            unused += size
        elif layer is not None:
            layers[layer] += size
            experts[layer] += size if _EXPERT.search(tensor.name) else 0
            replicated[layer] += size if _REPLICATED.search(tensor.name) else 0
        elif _EMBEDDING.match(tensor.name):
            embedding += size
        elif _LM_HEAD.match(tensor.name):
            lm_head, unused = (lm_head, unused + size) if is_tied else (lm_head + size, unused)
        else:
            rest += size
    return Weights(
        source=source,
        layer_bytes=tuple(layers),
        expert_bytes=tuple(experts),
        embedding_bytes=embedding,
        lm_head_bytes=lm_head,
        rest_bytes=rest,
        unused_bytes=unused,
        checkpoint_bytes=checkpoint,
        replicated_bytes=tuple(replicated),
    )


def common_dtype(tensors: Iterable[Tensor]) -> str | None:
    """Dtype of a checkpoint whose config names none: the widest of its floating-point types, or None without any."""
    found = {_FLOATS[tensor.dtype] for tensor in tensors if tensor.dtype in _FLOATS}
    if not found:
        return None
    # Neither half-precision type can hold the other's values.
    return found.pop() if len(found) == 1 else "float32"


def served_bytes(tensor: Tensor, dtype: str) -> int:
    """Bytes of a tensor after vLLM has converted it to the model's dtype while loading."""
    if tensor.dtype not in _FLOATS:
        return tensor.num_bytes
    return tensor.num_elements * (32 if _KEPT.search(tensor.name) else _FLOAT_BITS[dtype]) // 8


DTYPES = ("bfloat16", "float16", "float32")
# Cohere's models state their length beside the positions, and vLLM prefers it.
_LENGTH = "model_max_length"


def describe(
    config: Config,
    tensors: Sequence[Tensor] | None,
    *,
    name: str,
    folder: Path | None = None,
    quant_file: Mapping[str, object] | None = None,
    dtype: str = "auto",
) -> ModelFacts:
    """The facts of a model; `tensors` is None without weight files, and `dtype` is vLLM's --dtype."""
    caches = layer_caches(config)
    quantization = quantization_of(config, quant_file)
    written = _written_dtype(config, tensors)
    served = served_dtype(written, dtype)
    is_tied = _is_tied(config, tensors)
    num_layers = config.integer("num_hidden_layers")
    source = Origin.DERIVED if tensors is None else Origin.MEASURED
    if tensors is None:
        # A quantised checkpoint's sizes count as written. A config without a dtype would mean float32, in which nobody
        # writes the unquantised rest: it takes the served dtype.
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
        raise ModelError(
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
        max_position_embeddings=config.integer(_LENGTH if config.get(_LENGTH, None) else "max_position_embeddings"),
        is_tied=is_tied,
        num_experts=experts,
        num_experts_per_tok=config.first_integer(per_token_keys, 0) if experts else 0,
        caches=caches,
        weights=weights,
        reads_shared_kv=config.integer("num_kv_shared_layers", 0, minimum=0) > 0,
        attends_plainly=attends_plainly(config),
    )


def served_dtype(written: str, dtype: str) -> str:
    """Dtype that vLLM serves a model in (config/model.py, _resolve_auto_dtype): float32 only on explicit request."""
    wanted = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if wanted == "auto":
        return "bfloat16" if written == "float32" else written
    if wanted not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}, and vLLM knows auto, {', '.join(DTYPES)}; use one of these")
    return wanted


def _written_dtype(config: Config, tensors: Sequence[Tensor] | None) -> str:
    sources = (config.raw, config.text)
    value = next((s[key] for s in sources for key in ("dtype", "torch_dtype") if s.get(key) is not None), None)
    if value is None:
        value = common_dtype(tensors or ()) or "float32"
    written = str(value).removeprefix("torch.")
    if written not in DTYPES:
        raise ModelError(f"{config.where} gives {value!r} for dtype, and one of {', '.join(DTYPES)} was expected")
    return written


def _is_tied(config: Config, tensors: Sequence[Tensor] | None) -> bool:
    if tensors is not None and not any(_LM_HEAD.match(tensor.name) for tensor in tensors):
        return True
    # Multimodal models set the key in either config.
    written = [source["tie_word_embeddings"] for source in (config.raw, config.text) if "tie_word_embeddings" in source]
    return any(written) if written else config.boolean("tie_word_embeddings", False)
