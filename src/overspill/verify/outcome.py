"""The outcome of a scenario, and whether it proves anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from overspill.verify.comparison import Compared, Distance, too_far
from overspill.verify.scenarios import Scenario, Tier

WEAK = 3
"""Exit code: nothing differs, but damage did not change this model's answers either."""
# Overspill's own counts of trouble: 0 where nobody made any.
_TROUBLE = {
    "corrupt_blocks": "block(s) in RAM no longer held what was stored",
    "load_failures": "load(s) failed",
    "store_failures": "store(s) failed",
    "disk_bad_blocks": "block(s) on disk did not hold what was written",
    "disk_write_failures": "block(s) could not be written to disk",
    "remote_bad_blocks": "block(s) did not come from the store as they were put",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    scenario: Scenario
    seconds: float = 0.0
    compared: Compared = field(default_factory=Compared)
    awaited: int = 0
    """Answers that there should be."""
    tied_share: float = 0.0
    """Of the answers: so many may part at a tie."""
    figures: Mapping[str, int] = field(default_factory=dict)
    """Counted by Overspill, vLLM, and where faults were made."""
    skipped: str = ""
    """Why it was not tried."""
    died: str = ""
    """How the engine ended, where it should not have."""
    left_behind: str = ""
    sensitive: bool | None = None
    """Whether damage that nothing looked for changed the answer; None where that is not known."""
    must_be_sensitive: bool = False
    """Random weights are made so that it does; a model's own may be as they are."""
    unknown: str = ""
    """Why that is not known although it was tried."""
    distance: Distance = field(default_factory=Distance)
    """From the reference, where the CPU attends to a part."""
    yardstick: Distance = field(default_factory=Distance)
    """From the reference, of vLLM with another attention kernel."""
    yardstick_name: str = ""

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
        if self.compared.requests != self.awaited:
            return f"{self.awaited} answers were expected, and {self.compared.requests} came"
        for name, meaning in self.scenario.required.items():
            if not self.figure(name):
                return f"{meaning}, so equal answers prove nothing"
        if too_little := self._too_little():
            return too_little
        if self.yardstick_name and (further := too_far(self.distance, self.yardstick, self.yardstick_name)):
            return further
        if self.sensitive is False and self.must_be_sensitive:
            return "damage that nothing caught did not change the answer, so equal answers prove nothing"
        if trouble := self._trouble():
            return trouble
        return f"whether damage that nothing looks for shows is not known: {self.unknown}" if self.unknown else ""

    def _too_little(self) -> str:
        """What follows a tie is not compared: where most answers end so, wrong ones would too."""
        ties, requests = len(self.compared.ties), self.compared.requests
        if self.compared.tokens and ties <= self.tied_share * requests:
            return ""
        if not ties:
            return "no token was compared, so nothing is proven"
        return (
            f"{ties} of {requests} answers part at a tie of two tokens, more than the {int(self.tied_share * requests)}"
            f" that rounding may decide, and {self.compared.tokens:,} tokens were compared: too few to prove anything. "
            "Where vLLM's kernels are not batch-invariant (compute capability below 9.0), 16 bits round that much; "
            "--dtype float32 rounds less, if the model fits so"
        )

    def _trouble(self) -> str:
        injected = self.figure("injected")
        for name, meaning in _TROUBLE.items():
            count = self.figure(name)
            if name not in self.scenario.faults and count:
                return f"{count} {meaning}, and nobody made them"
            if name in self.scenario.faults and count != injected:
                return f"{injected} fault(s) were made, and {count} {meaning}"
        return ""


def merged(before: Sequence[Outcome], more: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Rounds of a soak together: one outcome for each scenario, in the order in which they were first tried."""
    found = {outcome.scenario.name: outcome for outcome in before}
    for outcome in more:
        known = found.get(outcome.scenario.name)
        if known is None or not outcome.skipped:
            found[outcome.scenario.name] = outcome if known is None else _sum(known, outcome)
    return tuple(found.values())


def _sum(one: Outcome, other: Outcome) -> Outcome:
    return replace(
        other,
        seconds=one.seconds + other.seconds,
        awaited=one.awaited + other.awaited,
        compared=one.compared + other.compared,
        figures={name: one.figure(name) + other.figure(name) for name in one.figures.keys() | other.figures.keys()},
        distance=one.distance + other.distance,
        yardstick=one.yardstick + other.yardstick,
        # A model that could tell once can tell.
        sensitive=other.sensitive if one.sensitive is None else one.sensitive or other.sensitive,
    )


def is_sensitive(outcomes: Sequence[Outcome]) -> bool | None:
    """Whether the model can tell; None where that is not known."""
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
    found = {one.scenario.tier for one in tried}
    tiers = " and ".join(
        name for name, absent in (("offload", {Tier.SPILL}), ("spill", {Tier.OFFLOAD})) if found - absent
    )
    cannot_tell = is_sensitive(tried) is False
    text = "WEAKLY VERIFIED" if cannot_tell else "Verified"
    text += f": {tokens:,} tokens with {tiers} are those without, while {from_ram:,} came from RAM"
    text += f"; {ties} answer(s) part at a tie of two tokens, as rounding may decide" if ties else ""
    if cannot_tell:
        text += (
            ". The proof is weaker than it looks: damage that nothing caught did not change this model's answer, so "
            "it might not show other errors either"
        )
    return text + "."


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 for a proof, 1 for none, and `WEAK` for one of a model that cannot tell: a script that only looks at the code
    must not take that for a proof."""
    tried = [outcome for outcome in outcomes if not outcome.skipped]
    if not tried or any(outcome.failure for outcome in tried):
        return 1
    return WEAK if is_sensitive(outcomes) is False else 0
