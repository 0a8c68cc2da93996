"""Tensors sorted by where they are used: decoder layers, experts, embedding, lm_head, the rest."""

import re
from collections.abc import Iterable

from overspill.figures import Origin
from overspill.model.facts import Weights
from overspill.model.tensors import Tensor

# The language model's own prefixes; a vision tower's layers stand behind others (vision_tower.encoder.layers.0).
_TEXT = r"^(?:model\.|language_model\.|text_model\.|backbone\.|transformer\.|thinker\.)*"
_LAYER = re.compile(_TEXT + r"(?:layers|h|blocks)\.(\d{1,6})\.")
_EMBEDDING = re.compile(_TEXT + r"(?:embed_tokens|tok_embeddings|word_embeddings|embeddings|wte)\.")
_LM_HEAD = re.compile(_TEXT + r"(?:lm_head|embed_out|output)\.")
# One tensor per expert, or all of a layer's in one; GraniteMoe calls them by what they do.
_EXPERT = re.compile(r"\.(?:experts\.|block_sparse_moe\.(?:input|output)_linear\.)")
# Layers for multi-token prediction stand apart (Qwen3-Next) or behind the last layer (DeepSeek-V3).
_DRAFT = re.compile(_TEXT + r"mtp\.")
_BUFFER = re.compile(r"rotary_emb\.inv_freq$")

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_FLOAT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
# vLLM keeps these in float32 whatever the model runs in: the routers' bias of DeepSeek-V3, and decay rates of states.
_KEPT = re.compile(r"(?:e_score_correction_bias|A_log)$")


def sort_weights(
    tensors: Iterable[Tensor], *, num_layers: int, is_tied: bool, is_quantized: bool, dtype: str, source: Origin
) -> Weights:
    layers, experts = [0] * num_layers, [0] * num_layers
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
    )


def has_lm_head(tensors: Iterable[Tensor]) -> bool:
    return any(_LM_HEAD.match(tensor.name) for tensor in tensors)


def common_dtype(tensors: Iterable[Tensor]) -> str | None:
    """What the checkpoint is written in, for a config that does not say: the widest of its floating-point types."""
    found = {_FLOATS[tensor.dtype] for tensor in tensors if tensor.dtype in _FLOATS}
    if not found:
        return None
    # Neither of the two half types holds the other.
    return found.pop() if len(found) == 1 else "float32"


def served_bytes(tensor: Tensor, dtype: str) -> int:
    """Of a tensor that vLLM converts to the model's dtype while loading it."""
    if tensor.dtype not in _FLOATS:
        return tensor.num_bytes
    return tensor.num_elements * (32 if _KEPT.search(tensor.name) else _FLOAT_BITS[dtype]) // 8
