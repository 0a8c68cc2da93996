"""What a measurement found."""

from dataclasses import dataclass
from typing import Any, Literal

Tier = Literal["offload", "spill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    metrics: dict[str, Any]
    """By the names of `vllm bench serve`; then ours, None where it is not known."""
    is_complete: bool
    """Every request was answered."""
    problem: str | None = None
    """Why it is not complete."""
    answers: list[str]
    """A hash of each answer's tokens, in the order of the requests; empty for one that was not answered."""
    notes: tuple[str, ...] = ()
    """What a reader of the numbers must know."""
    part: dict[str, Any] | None = None
    """Of one that is not complete: what `measure` needs to go on."""


def require_tier(outcome: Outcome, expects: Tier | None) -> str | None:
    """A sentence if the tier under test was not used, or if nobody can tell."""
    if expects is None:
        return None
    name, what = _PROOFS[expects]
    counted = outcome.metrics.get(name)
    if counted is None:
        return f"whether {expects} was used cannot be told: the server did not count {what}"
    if not counted:
        return f"{expects} was not used: {what} did not grow. {_ADVICE[expects]}"
    return None


_PROOFS: dict[Tier, tuple[str, str]] = {
    "offload": ("tokens_from_ram", "vllm:external_prefix_cache_hits_total"),
    "spill": ("spill_in_bytes", "overspill_spill_in_bytes_total"),
}
_ADVICE: dict[Tier, str] = {
    "offload": "Send more than the GPU's KV cache holds, and let it come back; and serve with --offload-ram",
    "spill": "Send a request that is longer than the GPU's KV cache; and serve with a --max-model-len that needs --ram",
}
