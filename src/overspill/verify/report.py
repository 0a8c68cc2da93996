"""Outcomes of scenarios, whether they prove anything, and the proof as a table for the terminal and as JSON."""

import math
import platform
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import overspill
from overspill.figures import aligned
from overspill.kv.sizes import format_size
from overspill.planning.planner import Plan
from overspill.planning.report import plan_as_json
from overspill.registry.runs import installed_versions
from overspill.verify.comparison import Compared, Difference, Distance, Tolerance, too_far
from overspill.verify.scenarios import Scenario, Tier
from overspill.verify.stage import Stage

WEAK = 3
"""Exit code if nothing differs, but damage did not change this model's answers either."""
# Overspill's own counters of trouble, with what they mean: 0 unless a scenario makes some.
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
    """Number of answers expected."""
    tied_share: float = 0.0
    """Share of the answers that may diverge at a tie."""
    figures: Mapping[str, int] = field(default_factory=dict)
    """Counters of Overspill, of vLLM, and of injected faults."""
    skipped: str = ""
    """Why the scenario was not tried; empty if it was."""
    died: str = ""
    """Why the engine died; empty if it did not."""
    left_behind: str = ""
    sensitive: bool | None = None
    """Whether damage changed the answer with checks off; None if unknown."""
    must_be_sensitive: bool = False
    """True for random weights, which are drawn to be sensitive; a model's own need not be."""
    unknown: str = ""
    """Why sensitivity is unknown although it was tested; empty otherwise."""
    distance: Distance = field(default_factory=Distance)
    """Distance from the reference, where the CPU attends to a part."""
    yardstick: Distance = field(default_factory=Distance)
    """Distance of vLLM with another attention kernel from the reference."""
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
        """Why this scenario verified nothing, in a sentence; empty if it did, or was not tried."""
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
            return "undetected damage did not change the answer, so equal answers prove nothing"
        if trouble := self._trouble():
            return trouble
        return (
            f"it is not known whether undetected damage would change the answer: {self.unknown}" if self.unknown else ""
        )

    def _too_little(self) -> str:
        """Why too little was compared: nothing after a tie is, so where most answers tie, wrong ones would too."""
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
                return f"{count} {meaning}, although no fault was injected"
            if name in self.scenario.faults and count != injected:
                return f"{injected} fault(s) were injected, and {count} {meaning}"
        return ""


def merged(before: Sequence[Outcome], more: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Outcomes of a soak's rounds merged into one per scenario, in the order in which they were first tried."""
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
        # A model that was sensitive once is sensitive.
        sensitive=other.sensitive if one.sensitive is None else one.sensitive or other.sensitive,
    )


def is_sensitive(outcomes: Sequence[Outcome]) -> bool | None:
    """Whether damage changes the model's answers; None if unknown."""
    return next((outcome.sensitive for outcome in outcomes if outcome.sensitive is not None), None)


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Last sentence of the proof."""
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
            ". The proof is weaker than it looks: undetected damage did not change this model's answer, so "
            "it might not show other errors either"
        )
    return text + "."


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 for a proof, 1 for none, and `WEAK` if the model is not sensitive to damage: a script that only looks at the
    code must not take that for a proof."""
    tried = [outcome for outcome in outcomes if not outcome.skipped]
    if not tried or any(outcome.failure for outcome in tried):
        return 1
    return WEAK if is_sensitive(outcomes) is False else 0


_COLUMNS = ("scenario", "requests", "tokens", "from RAM", "bytes", "faults", "ties", "mismatches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    plan: Plan
    stage: Stage
    seed: int
    """Seed of the last round, which is the one in which something differs, if anything does."""
    rounds: int
    seconds: float
    batch_invariant: bool
    random_weights: bool = False
    noise: float
    tolerance: Tolerance
    outcomes: tuple[Outcome, ...]
    command: tuple[str, ...] = ("overspill", "verify")
    """Words of the command that repeats the proof, without the seed."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return exit_code(self.outcomes)

    @property
    def repeating(self) -> str:
        """Command that repeats the scenarios that failed, and nothing else."""
        failed = [word for one in self.outcomes if one.failure for word in ("--scenario", one.scenario.name)]
        return shlex.join([*self.command, "--seed", str(self.seed), *failed])

    def as_text(self) -> str:
        lines = [aligned([_COLUMNS, *map(_row, self.outcomes)], left=(0,)), "", *_notes(self)]
        for outcome in self.outcomes:
            name = outcome.scenario.name
            lines += [_mismatch_line(name, mismatch, self.seed) for mismatch in outcome.compared.mismatches[:3]]
            lines += [f"tie in {name}, {tie.request}, token {tie.position}: {tie.token} or "
                      f"{tie.expected_token}, {tie.gap:.3g} apart" for tie in outcome.compared.ties]  # fmt: skip
        if any(outcome.failure for outcome in self.outcomes):
            lines.append(f"to repeat it: {self.repeating}")
        return "\n".join([*lines, verdict(self.outcomes)])

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "verified": self.exit_code == 0,
            "verdict": verdict(self.outcomes),
            "seed": self.seed,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 1),
            "command": shlex.join(self.command),
            "settings": dict(self.settings),
            "versions": {"overspill": overspill.__version__, **installed_versions()},
            "hardware": {
                "device": plan.platform.name,
                "name": plan.gpu.name,
                "memory_bytes": plan.gpu.total_bytes.value,
                "ram_bytes": plan.ram_bytes.value,
                "compute_capability": plan.gpu.compute_capability,
                "machine": platform.machine(),
                "kernel": platform.release(),
            },
            "plan": plan_as_json(plan),
            "stage": asdict(self.stage) | {"max_model_len": self.stage.max_model_len},
            "reference": {
                "batch_invariant": self.batch_invariant,
                "random_weights": self.random_weights,
                "dtype": plan.facts.dtype,
                "noise": self.noise,
                "tolerance": asdict(self.tolerance),
            },
            "scenarios": [_outcome_as_json(outcome) for outcome in self.outcomes],
        }


def _row(outcome: Outcome) -> tuple[str, ...]:
    name, compared = outcome.scenario.name, outcome.compared
    if outcome.skipped:
        return (name, *["-"] * (len(_COLUMNS) - 1))
    return (
        name, f"{compared.requests:,}", f"{compared.tokens:,}", f"{outcome.ram_tokens:,}",
        format_size(outcome.ram_bytes), faults(outcome), str(len(compared.ties)), str(len(compared.mismatches)),
    )  # fmt: skip


def faults(outcome: Outcome) -> str:
    """Table cell on the faults made to the engine and their effect."""
    return outcome.scenario.fault_text.format_map(defaultdict(int, outcome.figures))


def _notes(proof: Proof) -> list[str]:
    """Sentences on what the numbers mean, and what they leave open."""
    plan, stage = proof.plan, proof.stage
    compared = [outcome.compared for outcome in proof.outcomes if not outcome.yardstick_name]
    same, total = sum(one.identical_logprobs for one in compared), sum(one.logprobs for one in compared)
    how = "batch-invariant, " if proof.batch_invariant else ""
    how += "random weights, " if proof.random_weights else ""
    # Servers have CUDA graphs by default.
    how += "without CUDA graphs, " if plan.wishes.enforce_eager and not plan.platform.is_cpu else ""
    apart = sum(len(one.mismatches) for one in compared)
    within = f"within {proof.tolerance.logprob:.3g}"
    rest = f"{apart} answers are not {within}" if apart else f"the rest was computed in other chunks and is {within}"
    notes = [
        f"Reference: vLLM without Overspill, {how}{plan.facts.dtype}, each prompt alone, up to {stage.max_model_len:,} "
        "tokens.",
        f"{same:,} of {total:,} log-probabilities are the same bit by bit; {rest}, where vLLM differs from itself by "
        f"{proof.noise:.2g}."
        if same < total or apart
        else f"All {total:,} log-probabilities are the same bit by bit.",
    ]
    if not stage.is_whole:
        notes.append(
            f"The settings' longest context, {plan.max_model_len:,} tokens, does not fit the reference, which holds "
            f"{stage.reference_tokens:,}: contexts of up to {stage.max_model_len:,} tokens were spilled instead, with "
            "less of the GPU's memory."
        )
    for outcome in proof.outcomes:
        if outcome.skipped:
            notes.append(f"{outcome.scenario.name} was not tried: {outcome.skipped}.")
        if name := outcome.yardstick_name:
            attended = format_size(outcome.figure("spill_far_bytes"))
            notes += [
                f"{outcome.scenario.name}: the CPU attended to {attended}. Difference in log-probability from the "
                f"reference: {outcome.distance} differ.",
                f"With {name} instead: {outcome.yardstick} differ.",
            ]
        if outcome.sensitive is not None:
            notes.append(
                "Undetected damage changed the answer, so wrong KV shows with this model."
                if outcome.sensitive
                else "Undetected damage did NOT change the answer, so wrong KV may not show with this model."
            )
    return notes


def _mismatch_line(scenario: str, mismatch: Difference, seed: int) -> str:
    def shown(token: int, logprob: float | None) -> str:
        return f"{token} ({'?' if logprob is None else f'{logprob:.6f}'})"

    return (
        f"MISMATCH seed {seed}, scenario {scenario}, request {mismatch.request}, token "
        f"{mismatch.position}: {shown(mismatch.token, mismatch.logprob)} instead of "
        f"{shown(mismatch.expected_token, mismatch.expected_logprob)}: {mismatch.reason}"
    )


def _outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.scenario.name,
        "tier": str(outcome.scenario.tier),
        "seconds": round(outcome.seconds, 1),
        "skipped": outcome.skipped,
        "failure": outcome.failure,
        "awaited": outcome.awaited,
        **asdict(outcome.compared),
        "ram_tokens": outcome.ram_tokens,
        "ram_bytes": outcome.ram_bytes,
        "faults_injected": outcome.figure("injected"),
        "faults_caught": outcome.figure("caught"),
        "sensitive": outcome.sensitive,
        "yardstick": outcome.yardstick_name,
        "distance": _distance_as_json(outcome.distance),
        "yardstick_distance": _distance_as_json(outcome.yardstick),
        "left_behind": outcome.left_behind,
        "figures": dict(outcome.figures),
    }


def _distance_as_json(distance: Distance) -> dict[str, Any]:
    """A distance with None for infinity, which JSON lacks."""
    largest = distance.largest if math.isfinite(distance.largest) else None
    return {"tokens": distance.tokens, "differing_tokens": distance.differing, "logprobs": distance.logprobs,
            "mean": distance.mean if largest is not None else None, "largest": largest}  # fmt: skip
