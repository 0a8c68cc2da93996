"""What came of a scenario, and whether it proves anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from overspill.verify.comparison import Compared
from overspill.verify.scenarios import Scenario, Tier

# Overspill's own counts of trouble: 0 where nobody made any.
_TROUBLE = {
    "corrupt_blocks": "block(s) in RAM no longer held what was stored",
    "load_failures": "load(s) failed",
    "store_failures": "store(s) failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    scenario: Scenario
    seconds: float = 0.0
    compared: Compared = field(default_factory=Compared)
    figures: Mapping[str, int] = field(default_factory=dict)
    """Counted by Overspill, vLLM, and where faults were made."""
    skipped: str = ""
    """Why it was not tried."""
    died: str = ""
    """How the engine ended, where it should not have."""
    left_behind: str = ""
    sensitive: bool | None = None
    """Whether damage that nothing looked for changed the answer; None where that was not tried."""
    must_be_sensitive: bool = False
    """Random weights are made so that it does; a model's own may be as they are."""

    def figure(self, name: str) -> int:
        return self.figures.get(name, 0)

    @property
    def ram_tokens(self) -> int:
        return self.figure("hit_tokens") + self.figure("spilled_tokens")

    @property
    def ram_bytes(self) -> int:
        return self.figure("load_bytes") + self.figure("spill_in_bytes")

    @property
    def failure(self) -> str:
        """Why this scenario did not verify anything, in a sentence; empty if it did, or was not tried."""
        if self.skipped:
            return ""
        if self.died:
            return f"the engine died: {self.died}"
        if self.left_behind:
            return f"left behind: {self.left_behind}"
        if self.compared.mismatches:
            return f"{len(self.compared.mismatches)} of {self.compared.requests} answers differ"
        for name, meaning in self.scenario.required.items():
            if not self.figure(name):
                return f"{meaning}, so equal answers prove nothing"
        if self.sensitive is False and self.must_be_sensitive:
            return "damage that nothing caught did not change the answer, so equal answers prove nothing"
        return _trouble(self)


def _trouble(outcome: Outcome) -> str:
    injected = outcome.figure("injected")
    for name, meaning in _TROUBLE.items():
        count = outcome.figure(name)
        if name not in outcome.scenario.faults and count:
            return f"{count} {meaning}, and nobody made them"
        if name in outcome.scenario.faults and count != injected:
            return f"{injected} fault(s) were made, and {count} {meaning}"
    return ""


def is_sensitive(outcomes: Sequence[Outcome]) -> bool | None:
    """Whether the model can tell; None where that was not tried."""
    return next((outcome.sensitive for outcome in outcomes if outcome.sensitive is not None), None)


def verdict(outcomes: Sequence[Outcome]) -> str:
    """The last sentence."""
    tried = [outcome for outcome in outcomes if not outcome.skipped]
    failed = [outcome for outcome in tried if outcome.failure]
    if not tried:
        return "NOT VERIFIED: nothing could be tried with this model and these settings."
    if failed:
        named = "; ".join(dict.fromkeys(f"{one.scenario.name}: {one.failure}" for one in failed))
        return f"NOT VERIFIED: {named}."
    tokens = sum(outcome.compared.tokens for outcome in tried)
    from_ram = sum(outcome.ram_tokens for outcome in tried)
    ties = sum(len(outcome.compared.ties) for outcome in tried)
    tiers = _tiers(tried)
    text = f"Verified: {tokens:,} tokens with {tiers} are those without, while {from_ram:,} came from RAM"
    text += f"; {ties} answer(s) part at a tie of two tokens, as rounding may decide" if ties else ""
    if is_sensitive(tried) is False:
        text += (
            ". The proof is weaker than it looks: damage that nothing caught did not change this model's answer, so "
            "it might not show other errors either"
        )
    return text + "."


def _tiers(tried: Sequence[Outcome]) -> str:
    has_spill = any(outcome.scenario.tier is not Tier.OFFLOAD for outcome in tried)
    has_offload = any(outcome.scenario.tier is not Tier.SPILL for outcome in tried)
    return " and ".join(name for name, there in (("offload", has_offload), ("spill", has_spill)) if there)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    return int(verdict(outcomes).startswith("NOT VERIFIED"))
