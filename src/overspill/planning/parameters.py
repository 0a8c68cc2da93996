"""Numbers of parameters, from the bytes they take."""

from overspill.model.facts import ModelFacts, active_bytes

_DTYPE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
# Four bits and a scale for each group of 16 to 128.
_FOUR_BITS = 0.55
_QUANTIZED_BYTES = {"awq": _FOUR_BITS, "gptq": _FOUR_BITS, "mxfp4": _FOUR_BITS, "modelopt_fp4": _FOUR_BITS,
                    "bitsandbytes": _FOUR_BITS}  # fmt: skip


def bytes_per_parameter(facts: ModelFacts) -> float:
    """Average bytes per parameter; quantisations whose name does not say it count as FP8."""
    if facts.quantization is None:
        return _DTYPE_BYTES[facts.dtype]
    return _QUANTIZED_BYTES.get(facts.quantization, 1.0)


def parameters_per_token(facts: ModelFacts) -> int:
    """That a token of a prompt is multiplied with: the lm_head only sees the last one."""
    head = facts.weights.embedding_bytes if facts.is_tied else facts.weights.lm_head_bytes
    return int((active_bytes(facts) - head) / bytes_per_parameter(facts))


def expert_size(facts: ModelFacts) -> int:
    """The inner size of one routed expert, which configs name in many ways: of three matrices of so many rows."""
    largest = max(facts.weights.expert_bytes)
    return round(largest / bytes_per_parameter(facts) / (facts.num_experts * 3 * facts.hidden_size))


def pinned_share(facts: ModelFacts) -> float:
    """How many times its size a layer takes in RAM: both of vLLM's offloaders pin through PyTorch, which rounds each
    tensor up to a power of two. By the matrices of a usual layer, as vLLM fuses them."""
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    rows = [queries + 2 * keys, queries]
    if facts.num_experts:
        rows += [facts.num_experts * 2 * expert_size(facts), facts.num_experts * expert_size(facts)]
    else:
        rows += [2 * facts.intermediate_size, facts.intermediate_size]
    sizes = [int(count * facts.hidden_size * bytes_per_parameter(facts)) for count in rows if count]
    return sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes)
