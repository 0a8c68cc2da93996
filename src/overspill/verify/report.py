"""A proof, or the opposite of one: the table on the terminal, and the same as JSON."""

import math
import platform
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import overspill
from overspill.kv.sizes import format_size
from overspill.planning.planner import Plan
from overspill.planning.report import plan_as_json
from overspill.registry.runs import installed_versions
from overspill.verify.comparison import Difference, Distance, Tolerance
from overspill.verify.outcome import Outcome, exit_code, verdict
from overspill.verify.stage import Stage

_COLUMNS = ("scenario", "requests", "tokens", "from RAM", "bytes", "faults", "ties", "mismatches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    plan: Plan
    stage: Stage
    seed: int
    """Of the last round: the one in which something differs, if something does."""
    rounds: int
    seconds: float
    batch_invariant: bool
    random_weights: bool = False
    noise: float
    tolerance: Tolerance
    outcomes: tuple[Outcome, ...]
    command: tuple[str, ...] = ("overspill", "verify")
    """That repeats it, except for the seed."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return exit_code(self.outcomes)

    @property
    def repeating(self) -> str:
        """The command that does again what failed, and nothing else."""
        failed = [word for one in self.outcomes if one.failure for word in ("--scenario", one.scenario.name)]
        return shlex.join([*self.command, "--seed", str(self.seed), *failed])

    def as_text(self) -> str:
        lines = [*_table([_COLUMNS, *map(_row, self.outcomes)]), "", *_notes(self)]
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
    """What was done to the engine, and what became of it."""
    return outcome.scenario.fault_text.format_map(defaultdict(int, outcome.figures))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]


def _notes(proof: Proof) -> list[str]:
    """What the numbers mean, and what they leave open."""
    plan, stage = proof.plan, proof.stage
    compared = [outcome.compared for outcome in proof.outcomes if not outcome.yardstick_name]
    same, total = sum(one.identical_logprobs for one in compared), sum(one.logprobs for one in compared)
    how = "batch-invariant, " if proof.batch_invariant else ""
    how += "random weights, " if proof.random_weights else ""
    # A server has them by default.
    how += "without CUDA graphs, " if plan.wishes.enforce_eager and not plan.platform.is_cpu else ""
    apart = sum(len(one.mismatches) for one in compared)
    within = f"within {proof.tolerance.logprob:.3g}"
    rest = f"{apart} answers are not {within}" if apart else f"the rest was computed in other pieces and is {within}"
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
                f"{outcome.scenario.name}: the CPU attended to {attended}. Log-probabilities apart from the "
                f"reference's: {outcome.distance} differ.",
                f"With {name} instead: {outcome.yardstick} differ.",
            ]
        if outcome.sensitive is not None:
            notes.append(
                "Damage that nothing looked for changed the answer: the model can tell."
                if outcome.sensitive
                else "Damage that nothing looked for did NOT change the answer: the model cannot tell."
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
    """JSON has no number without end."""
    largest = distance.largest if math.isfinite(distance.largest) else None
    return {"tokens": distance.tokens, "differing_tokens": distance.differing, "logprobs": distance.logprobs,
            "mean": distance.mean if largest is not None else None, "largest": largest}  # fmt: skip
