"""GPU memory that is neither weights nor KV: assumed until a run has measured it."""

from dataclasses import dataclass

from overspill.figures import Known, assumed, derived
from overspill.model.facts import ModelFacts

GIB = 2**30
# CUDA's context, cuBLAS and NCCL on one GPU. Seen on an H100 with vLLM 0.19: 0.27 GiB beside torch's own
# (llm-d-planner, accuracy report, 52 runs).
_NON_TORCH_BYTES = int(0.4 * GIB)
# CUDA graphs in the same report: 0.51 to 1.85 GiB, 1.04 on average.
_GRAPH_BYTES = int(1.0 * GIB)
# Copies of a step's hidden states, and of its MLP's intermediate ones, that are alive at the peak.
_HIDDEN_COPIES, _INTERMEDIATE_COPIES = 6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    non_torch_bytes: Known[int]
    activation_bytes: Known[int]
    graph_bytes: Known[int]

    @property
    def total(self) -> Known[int]:
        parts = (self.non_torch_bytes, self.activation_bytes, self.graph_bytes)
        return derived(sum(part.value for part in parts), *parts)


def assumed_overheads(
    facts: ModelFacts, *, max_num_batched_tokens: int, max_num_seqs: int, enforce_eager: bool = False
) -> Overheads:
    """What vLLM takes while it profiles: a batch of so many tokens, and the logits of so many requests."""
    states = facts.hidden_size * _HIDDEN_COPIES + facts.intermediate_size * _INTERMEDIATE_COPIES
    batch = max_num_batched_tokens * states * 2  # bf16
    logits = max_num_seqs * facts.vocab_size * 4 * 2  # float32, and a copy to sample from
    return Overheads(
        non_torch_bytes=assumed(_NON_TORCH_BYTES, "CUDA context and libraries"),
        activation_bytes=assumed(batch + logits, f"for batches of {max_num_batched_tokens} tokens"),
        graph_bytes=assumed(0 if enforce_eager else _GRAPH_BYTES, "CUDA graphs"),
    )
