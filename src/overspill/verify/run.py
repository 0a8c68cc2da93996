"""Course of a proof, from a model and its settings: a reference, then every scenario compared with it."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overspill.figures import Origin
from overspill.kv.disk.folder import JOURNAL, kept_in
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import MiB
from overspill.launch.launch import Launch
from overspill.launch.machine import rank_environment
from overspill.launch.vllm import Vllm, installed_vllm, wrong_build
from overspill.model.facts import RecurrentState
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.settings import GivenBy, as_flags, plain
from overspill.verify import CannotVerify, TooNoisy
from overspill.verify.children import ChildDied, Children
from overspill.verify.comparison import (
    Tolerance,
    bounded,
    compare,
    distance,
    most_noise,
    noise,
    parted,
    tolerance,
)
from overspill.verify.mooncake import missing, mooncake
from overspill.verify.report import Outcome, Proof, merged
from overspill.verify.scenarios import Request, Scenario, drawn_options
from overspill.verify.stage import EngineSpec, Stage, engine_spec, make_stage, other_attention, sharing
from overspill.verify.workload import Answer, Played, Reference, make_workload

# Each of a dozen engines would compile and capture graphs, for a minute on a GPU, to run for seconds.
DEFAULTS = {"enforce_eager": True}
_ENVIRONMENT = {
    # Keeps the engine in the child itself, where its blocks can be reached.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TQDM_DISABLE": "1",
}
_BATCH_INVARIANT = {
    "VLLM_BATCH_INVARIANT": "1",
    # Otherwise there would be other CUDA graphs than on a server.
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
}
# Least compute capability for batch invariance (vllm/envs.py).
_LEAST_CAPABILITY = (9, 0)
_NO_WEIGHTS = "; no weights are there, and --load-format dummy verifies the model's shape with random ones"
_UNSHARED = (
    "the CPU does not share attention in this engine: its layers or its attention backend do not support it, or the "
    "kernel for this CPU is missing"
)
# Cut off the journal's last frame.
_TORN_BYTES = 10
# Number of engines that a scenario starts, if more than one.
_ENGINES = {"damaged": 2, "killed": 2, "stopped": 2, "torn": 2, "store-killed": 2, "shared-attention": 2}


def prove(launch: Launch, request: Request, say: Callable[[str], None]) -> Proof:
    """Verify a launch and return the proof, or raise `CannotVerify`; `say` gets a line whenever something begins."""
    plan = launch.plan
    require_this_machine(plan)
    if request.random_weights and plan.num_ranks > 1:
        # The loader that draws them is registered in one process, and ranks are others.
        raise CannotVerify("--load-format dummy verifies a model on one GPU; use --tensor-parallel-size 1")
    stage = make_stage(plan)
    progress = Progress(say, engines=num_engines(request.scenarios, stage), seconds=request.seconds)
    proof = verify(plan, stage, launch.ref.source, request, progress)
    # Environment and config.toml supply the other settings again.
    given = {name: one.value for name, one in launch.values.items() if one.origin is GivenBy.FLAG}
    command = ("overspill", "verify", launch.ref.name, *request.words, *as_flags(given))
    return replace(proof, command=command, settings=plain(launch.values))


def require_this_machine(plan: Plan, vllm: Vllm | None = None) -> None:
    """Raise unless the plan is for this machine: plans can be for any, but a proof is made here."""
    vllm = vllm or installed_vllm()
    if vllm is None:
        raise CannotVerify(
            "vLLM is not installed in this Python environment, and verify needs it; install it with: "
            "pip install 'overspill[cuda]'"
        )
    if plan.chosen is None:
        raise CannotVerify(refusal(plan))
    if plan.gpu.is_stated and not plan.platform.is_cpu:
        raise OverspillError(
            "--gpu names a card to plan for, and a proof runs on this machine's GPU; leave --gpu out, or use "
            "--gpu-memory to limit the GPU memory"
        )
    if (why := wrong_build(plan, vllm)) is not None:
        raise CannotVerify(why)


@dataclass(slots=True)
class Progress:
    """Prints what begins and about how long the rest will take, or how much of the time limit is left."""

    say: Callable[[str], None]
    engines: int
    """Number of engines that will be started, in all."""
    seconds: float | None = None
    done: int = 0
    _began: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """Whether the time limit is used up."""
        return self.seconds is not None and self.elapsed_s >= self.seconds

    def begin(self, what: str) -> None:
        elapsed = self.elapsed_s
        self.say(f"[{elapsed:5.0f} s] {what}{remaining(self.done, self.engines, elapsed, self.seconds)}")


def remaining(done: int, engines: int, elapsed_s: float, seconds: float | None) -> str:
    """Text on the time left; without a limit, empty until the first engine is done."""
    if seconds is not None:
        return f" ({max(0.0, seconds - elapsed_s):.0f} s left)"
    return f" (about {elapsed_s / done * max(0, engines - done):.0f} s left)" if done else ""


def can_be_batch_invariant(plan: Plan) -> bool:
    """Whether vLLM has kernels here that compute a request the same way whatever else is in the batch."""
    capability = plan.gpu.compute_capability
    has_state = any(isinstance(entry.cache, RecurrentState) for entry in plan.facts.caches)
    return not plan.platform.is_cpu and capability is not None and capability >= _LEAST_CAPABILITY and not has_state


def num_engines(scenarios: Sequence[Scenario], stage: Stage) -> int:
    return 1 + sum(_ENGINES.get(one.name, 1) for one in scenarios if not stage.skips(one))


def verify(plan: Plan, stage: Stage, model: str, request: Request, progress: Progress) -> Proof:
    """Run all scenarios; a soak repeats them with other lengths and orders until time is up or something differs."""
    if can_be_batch_invariant(plan):
        try:
            return _rounds(plan, stage, model, request, progress, invariant=True)
        except TooNoisy:
            raise  # other kernels would be no closer to themselves
        except CannotVerify as error:
            progress.say(f"not batch-invariant, since vLLM does not start so: {error}")
    return _rounds(plan, stage, model, request, progress, invariant=False)


def _rounds(plan: Plan, stage: Stage, model: str, request: Request, progress: Progress, *, invariant: bool) -> Proof:
    environment = {**_ENVIRONMENT, **(_BATCH_INVARIANT if invariant else {}), **rank_environment(plan)}
    outcomes: tuple[Outcome, ...] = ()
    worst, rounds, parts = 0.0, 0, False
    with Children("overspill.verify.plays", environment, have_children=plan.num_ranks > 1) as children:
        while True:
            one = _Round(children, plan, stage, model, replace(request, seed=request.seed + rounds), progress)
            reference = one.reference()
            worst = max(worst, noise(reference.answers.values(), reference.again))
            require_quiet(plan.facts.dtype, worst)
            parts = parts or bool(parted(reference.answers.values(), reference.again))
            deterministic = plan.platform.is_cpu or invariant
            allowed = tolerance(plan.facts.dtype, worst, is_deterministic=deterministic, parts_from_itself=parts)
            outcomes = merged(outcomes, one.play_all(reference, allowed))
            rounds += 1
            if not request.soak or progress.is_over or any(outcome.failure for outcome in outcomes):
                break
    return Proof(
        plan=plan, stage=stage, seed=request.seed + rounds - 1, rounds=rounds, seconds=progress.elapsed_s,
        batch_invariant=invariant, random_weights=request.random_weights, noise=worst, tolerance=allowed,
        outcomes=outcomes,
    )  # fmt: skip


def require_quiet(dtype: str, noise: float) -> None:
    """Raise if vLLM differs too much from itself: a tolerance that follows this noise would follow it anywhere."""
    if noise <= (most := most_noise(dtype)):
        return
    apart = f"by {noise:.2g} in log-probabilities" if math.isfinite(noise) else "in tokens it considered unlikely"
    helps = "" if dtype == "float32" else " --dtype float32 rounds less, if the model fits so."
    raise TooNoisy(
        f"NOT VERIFIED: vLLM without Overspill differs from itself {apart} when it computes the same prompts in other "
        f"chunks, and beyond {most:.2g} {dtype} proves nothing.{helps} On a GPU of compute capability 9.0 and up, or "
        "with --device cpu and vLLM's CPU build, it computes them alike"
    )


@dataclass(frozen=True, slots=True)
class _Round:
    """All scenarios with one seed."""

    children: Children
    plan: Plan
    stage: Stage
    model: str
    request: Request
    progress: Progress

    def reference(self) -> Reference:
        self.progress.begin("vLLM without Overspill, as reference")
        prompts = self.request.prompts if any(one.shares_attention for one in self.request.scenarios) else 0
        workload = make_workload(self.stage, self.request.seed, varied=self.request.soak, prompts=prompts)
        try:
            reference: Reference = self.children.run("reference", self._spec(None, {}), workload, self.request.seed)
        except ChildDied as error:
            has_weights = self.plan.facts.weights.source is Origin.MEASURED or self.request.random_weights
            hint = "" if has_weights else _NO_WEIGHTS
            raise CannotVerify(f"vLLM cannot run the model even without Overspill: {error}{hint}") from error
        self.progress.done += 1
        return reference

    def play_all(self, reference: Reference, allowed: Tolerance) -> tuple[Outcome, ...]:
        outcomes = []
        for scenario in self.request.scenarios:
            if skipped := self.stage.skips(scenario):
                outcomes.append(Outcome(scenario=scenario, skipped=skipped))
                continue
            self.progress.begin(f"{scenario.name}: {scenario.title}")
            began = self.progress.elapsed_s
            try:
                outcome = self._play(scenario, reference, allowed)
            except ChildDied as error:
                outcome = Outcome(scenario=scenario, died=str(error))
            outcomes.append(replace(outcome, seconds=self.progress.elapsed_s - began))
            self.progress.done += _ENGINES.get(scenario.name, 1)
            if self.request.soak and (outcome.failure or self.progress.is_over):
                break
        return tuple(outcomes)

    def _play(self, scenario: Scenario, reference: Reference, allowed: Tolerance) -> Outcome:
        options = drawn_options(scenario, self.request.seed) if self.request.soak else {}
        spec = self._spec(scenario, options)
        if scenario.lends_window:
            spec = replace(spec, options={**(spec.options or {}), "spill_lends": True})
        if scenario.shares_attention:
            return self._share(scenario, sharing(self.plan, spec), reference, allowed)
        if scenario.has_store and (why := missing()):
            return Outcome(scenario=scenario, skipped=f"{why}; docs/store.md says what it needs")
        more: dict[str, int] = {}
        play = scenario.name
        if scenario.name == "killed":
            left = self.children.kill_under_way("play", spec, "until-killed", reference.script)
            if left:
                return Outcome(scenario=scenario, left_behind=left, figures={"injected": 1})
            more, play = {"injected": 1, "caught": 1}, "restarted"
        played: Played = (
            self._restart(scenario, options, reference)
            if scenario.has_disk
            else self._lose_store(scenario, options, reference)
            if scenario.has_store
            else self.children.run("play", spec, play, reference.script)
        )
        strict = replace(allowed, same_pieces=allowed.same_pieces and scenario.same_pieces)
        outcome = self._outcome(scenario, played, reference, strict, more)
        if scenario.name != "damaged":
            return outcome
        return self._with_sensitivity(outcome, self._spec(scenario, {**options, "verify": "off"}), reference, allowed)

    def _restart(self, scenario: Scenario, options: Mapping[str, Any], reference: Reference) -> Played:
        """Let an engine fill a disk and stop, then play the scenario on a second engine that finds the KV there."""
        with tempfile.TemporaryDirectory(prefix="overspill-verify-") as folder:
            root = Path(folder) / "kv"
            disk = {"disk_bytes": self.stage.host_bytes, "disk_path": str(root)}
            spec = self._spec(scenario, {**options, **disk})
            self.children.run("play", spec, f"{scenario.name}-filled", reference.script)
            if scenario.name == "torn":
                for kept in kept_in(root):
                    journal = kept.path / JOURNAL
                    os.truncate(journal, max(0, journal.stat().st_size - _TORN_BYTES))
            played: Played = self.children.run("play", spec, scenario.name, reference.script)
            return played

    def _lose_store(self, scenario: Scenario, options: Mapping[str, Any], reference: Reference) -> Played:
        """Let an engine fill a store, then play the scenario on a second engine and kill the store on its request."""
        num_bytes = max(64 * MiB, 2 * self.stage.host_bytes)  # Mooncake evicts before its memory is full
        with (
            tempfile.TemporaryDirectory(prefix="overspill-verify-") as folder,
            mooncake(Path(folder), num_bytes) as store,
        ):
            spec = self._spec(scenario, {**options, "remote": store.address})
            self.children.run("play", spec, f"{scenario.name}-filled", reference.script)
            played: Played = self.children.run(
                "play", spec, scenario.name, reference.script, hear=lambda said: store.close()
            )
            return played

    def _share(self, scenario: Scenario, spec: EngineSpec, reference: Reference, allowed: Tolerance) -> Outcome:
        """Compare by distance: the CPU rounds differently, and another attention kernel shows how much is usual."""
        played: Played = self.children.run("play", spec, scenario.name, reference.script)
        if played.figures.get("unshared"):
            return Outcome(scenario=scenario, skipped=_UNSHARED)
        name, other = other_attention(self.plan, self._spec(None, {}))
        try:
            yardstick: Played = self.children.run("play", other, scenario.name, reference.script)
        except ChildDied as error:
            raise ChildDied(f"with {name}, for comparison: {error}") from error
        apart = distance(yardstick.answers, reference.answers)
        return replace(
            self._outcome(scenario, played, reference, bounded(allowed, apart), {}),
            distance=distance(played.answers, reference.answers), yardstick=apart, yardstick_name=name,
        )  # fmt: skip

    def _outcome(
        self, scenario: Scenario, played: Played, reference: Reference, allowed: Tolerance, more: Mapping[str, int]
    ) -> Outcome:
        spilled = sum(_spilled_tokens(answer, self.stage.bytes_per_token) for answer in played.answers)
        return Outcome(
            scenario=scenario, compared=compare(played.answers, reference.answers, allowed), awaited=played.awaited,
            tied_share=allowed.tied_share, figures={**played.figures, "spilled_tokens": spilled, **more},
            left_behind=played.left_behind,
        )  # fmt: skip

    def _with_sensitivity(
        self, outcome: Outcome, spec: EngineSpec, reference: Reference, allowed: Tolerance
    ) -> Outcome:
        """Repeat the damage with checks off: an answer that stays the same shows a model that is not sensitive."""
        try:
            played: Played = self.children.run("play", spec, "damaged-unseen", reference.script)
        except ChildDied as error:
            return replace(outcome, unknown=f"the engine died: {error}")
        if not played.figures.get("injected"):
            return replace(outcome, unknown="no fault could be injected")
        differs = compare(played.answers[-1:], reference.answers, replace(allowed, same_pieces=False)).mismatches
        return replace(outcome, sensitive=bool(differs), must_be_sensitive=self.request.random_weights)

    def _spec(self, scenario: Scenario | None, options: Mapping[str, Any]) -> EngineSpec:
        tier = scenario.tier if scenario is not None else None
        spec = engine_spec(self.plan, self.stage, self.model, tier, options)
        return replace(spec, random_weights=self.request.random_weights)


def _spilled_tokens(answer: Answer, bytes_per_token: int) -> int:
    """Tokens whose KV was in RAM, at most all of them: windows take extra blocks for tokens that count once."""
    return min(answer.spilled_bytes // bytes_per_token, answer.prompt_tokens + len(answer.tokens))
