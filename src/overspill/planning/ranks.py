"""One rank's part of a model that several GPUs serve: its weights, heads and KV, and which sizes divide a model."""

from collections.abc import Iterator
from dataclasses import replace

from overspill.kv.errors import OverspillError
from overspill.model.facts import (
    Attention,
    Cache,
    LayerCache,
    ModelFacts,
    RecurrentState,
    Weights,
    bytes_per_parameter,
    expert_size,
)

# Largest size to suggest where another is refused: machines have up to this many GPUs.
_MOST_GPUS = 16
# vLLM pads the vocabulary to multiples of this (layers/vocab_parallel_embedding.py).
_VOCAB_MULTIPLE = 64


def rank_facts(facts: ModelFacts, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> ModelFacts:
    """One rank's part of the model, in a pipeline that of the largest stage. Raises for sizes that do not divide it."""
    for flag, size, check in (
        ("--tensor-parallel-size", tensor_parallel_size, _undivided),
        ("--pipeline-parallel-size", pipeline_parallel_size, _unstaged),
    ):
        if why := check(facts, size):
            sizes = [str(other) for other in range(1, _MOST_GPUS + 1) if not check(facts, other)]
            raise OverspillError(f"{flag} {size} does not divide {facts.name}: {why}; use one of {', '.join(sizes)}")
    divided = facts if tensor_parallel_size == 1 else _tensor_rank(facts, tensor_parallel_size)
    return divided if pipeline_parallel_size == 1 else _stage(divided, pipeline_parallel_size)


def _undivided(facts: ModelFacts, size: int) -> str:
    """First dimension that vLLM cannot divide among `size` ranks, in words; empty if there is none."""
    return next((f"it has {number} {what}" for what, number, divides in _dimensions(facts, size) if not divides), "")


def _dimensions(facts: ModelFacts, size: int) -> Iterator[tuple[str, int, bool]]:
    """Dimensions checked by vllm/config/model.py (verify_with_parallel_config) and by the assertions of its layers."""
    yield "attention heads", facts.num_heads, facts.num_heads % size == 0
    for number in sorted({one.cache.num_kv_heads for one in facts.caches if isinstance(one.cache, Attention)}):
        # With fewer heads than ranks, several ranks keep the same head.
        yield "KV heads", number, number % size == 0 or size % number == 0
    for state in (one.cache for one in facts.caches if isinstance(one.cache, RecurrentState)):
        yield "heads with a state", state.num_heads, state.num_heads % size == 0
        yield "channels in a convolution", state.conv_channels, state.conv_channels % size == 0
    yield "rows in an MLP", facts.intermediate_size, facts.intermediate_size % size == 0
    if facts.num_experts and facts.quantization is None:  # else only known approximately
        yield "rows in an expert", expert_size(facts), expert_size(facts) % size == 0
    vocab = -(-facts.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    yield "tokens in its padded vocabulary", vocab, vocab % size == 0


def _unstaged(facts: ModelFacts, size: int) -> str:
    """Why stages would not be alike, as host pools of equally many slots (overspill.kv.connector) need them to be."""
    if facts.num_layers % size:
        return f"it has {facts.num_layers} layers, and stages must be equal"
    if size > 1 and len({one.cache for one in facts.caches}) * len(facts.caches) != facts.num_layers:
        return "its layers keep KV of several kinds, and stages must be equal"
    return ""


def _tensor_rank(facts: ModelFacts, size: int) -> ModelFacts:
    return replace(
        facts,
        num_heads=facts.num_heads // size,
        num_kv_heads=max(1, facts.num_kv_heads // size),
        intermediate_size=facts.intermediate_size // size,
        caches=tuple(LayerCache(layer=one.layer, cache=_rank_cache(one.cache, size)) for one in facts.caches),
        weights=_rank_weights(facts, size),
    )


def _rank_cache(cache: Cache, size: int) -> Cache:
    """One rank's part of a cache; latent attention keeps one vector for all heads, so every rank has all of it."""
    if isinstance(cache, Attention):
        return replace(cache, num_kv_heads=max(1, cache.num_kv_heads // size))
    if isinstance(cache, RecurrentState):
        return replace(
            cache, num_heads=cache.num_heads // size, conv_channels=cache.conv_channels // size,
            conv_groups=-(-cache.conv_groups // size),
        )  # fmt: skip
    return cache


def _rank_weights(facts: ModelFacts, size: int) -> Weights:
    weights = facts.weights
    whole = weights.replicated_bytes or (0,) * facts.num_layers
    # With fewer KV heads than ranks, each rank has one whole head, and its matrices.
    heads = 1 / min(size, facts.num_kv_heads) - 1 / size
    keys = int(2 * facts.num_kv_heads * facts.head_dim * facts.hidden_size * bytes_per_parameter(facts) * heads)
    return replace(
        weights,
        layer_bytes=tuple(
            each + -(-(total - each) // size) + keys for total, each in zip(weights.layer_bytes, whole, strict=True)
        ),
        expert_bytes=tuple(-(-each // size) for each in weights.expert_bytes),
        replicated_bytes=whole,
        embedding_bytes=-(-weights.embedding_bytes // size),
        lm_head_bytes=-(-weights.lm_head_bytes // size),
    )


def _stage(facts: ModelFacts, size: int) -> ModelFacts:
    """Facts covering any stage: the first has the embedding and the last the lm_head, of which the larger counts."""
    num_layers, weights = facts.num_layers // size, facts.weights
    return replace(
        facts,
        num_layers=num_layers,
        is_tied=True,
        caches=facts.caches[:num_layers],
        weights=replace(
            weights,
            layer_bytes=_largest_stage(weights.layer_bytes, num_layers),
            expert_bytes=_largest_stage(weights.expert_bytes, num_layers),
            replicated_bytes=weights.replicated_bytes[:num_layers],
            embedding_bytes=max(weights.embedding_bytes, weights.lm_head_bytes),
            lm_head_bytes=0,
        ),
    )


def _largest_stage(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    return max((layers[i : i + num_layers] for i in range(0, len(layers), num_layers)), key=sum)
