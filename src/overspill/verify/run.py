"""The whole of it: a reference, then scenario after scenario, each compared with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overspill.figures import Origin
from overspill.model.facts import RecurrentState
from overspill.planning.planner import Plan
from overspill.verify.answers import Answer
from overspill.verify.children import Children
from overspill.verify.comparison import Tolerance, compare, most_noise, noise, parted, tolerance
from overspill.verify.engine_life import EngineLife, offload_life, reference_life, spill_life
from overspill.verify.errors import CannotVerify, TooNoisy
from overspill.verify.life import Died, Played, PlayJob, Reference, ReferenceJob
from overspill.verify.merging import merged
from overspill.verify.outcome import Outcome
from overspill.verify.progress import Progress
from overspill.verify.request import Request
from overspill.verify.scenarios import Scenario, Tier, drawn_options
from overspill.verify.stage import Stage
from overspill.verify.workload import make_workload

_ENVIRONMENT = {
    # The engine in the child itself, where its blocks can be reached.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TQDM_DISABLE": "1",
}
_BATCH_INVARIANT = {
    "VLLM_BATCH_INVARIANT": "1",
    # It would change which CUDA graphs there are, and a server has others.
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
}
# vllm/envs.py: from which compute capability on it works.
_LEAST_CAPABILITY = (9, 0)
_NO_WEIGHTS = "; no weights are there, and --load-format dummy verifies the model's shape with random ones"
# Lives of a scenario, where it is not one.
_LIVES = {"damaged": 2, "killed": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    seed: int
    """Of the last round: the one in which something differs, if something does."""
    rounds: int
    seconds: float
    batch_invariant: bool
    random_weights: bool = False
    noise: float
    tolerance: Tolerance
    outcomes: tuple[Outcome, ...]


def can_be_batch_invariant(plan: Plan) -> bool:
    """vLLM computes a request in the same way whatever runs beside it, on GPUs that have the kernels."""
    capability = plan.gpu.compute_capability
    has_state = any(isinstance(entry.cache, RecurrentState) for entry in plan.facts.caches)
    return not plan.platform.is_cpu and capability is not None and capability >= _LEAST_CAPABILITY and not has_state


def num_lives(scenarios: Sequence[Scenario], stage: Stage) -> int:
    return 1 + sum(_LIVES.get(one.name, 1) for one in scenarios if not _skipped(one, stage))


def verify(plan: Plan, stage: Stage, model: str, request: Request, progress: Progress) -> Result:
    """With a soak, rounds of other lengths and orders, until time is up or something differs."""
    if can_be_batch_invariant(plan):
        try:
            return _rounds(plan, stage, model, request, progress, invariant=True)
        except TooNoisy:
            raise  # nor would other kernels be closer to themselves
        except CannotVerify as error:
            progress.tell(f"not batch-invariant, since vLLM does not start so: {error}")
    return _rounds(plan, stage, model, request, progress, invariant=False)


def _rounds(plan: Plan, stage: Stage, model: str, request: Request, progress: Progress, *, invariant: bool) -> Result:
    seed = request.seed
    environment = {**_ENVIRONMENT, **(_BATCH_INVARIANT if invariant else {})}
    is_deterministic = plan.platform.is_cpu or invariant
    outcomes: tuple[Outcome, ...] = ()
    worst, rounds, parts = 0.0, 0, False
    with Children(environment) as children:
        while True:
            one = _Round(children, plan, stage, model, replace(request, seed=seed + rounds), progress)
            reference = one.reference()
            worst = max(worst, noise(reference.answers.values(), reference.again))
            require_quiet(plan.facts.dtype, worst)
            parts = parts or bool(parted(reference.answers.values(), reference.again))
            allowed = tolerance(plan.facts.dtype, worst, is_deterministic=is_deterministic, parts_from_itself=parts)
            outcomes = merged(outcomes, one.play_all(request.scenarios, reference, allowed))
            rounds += 1
            if not request.soak or progress.is_over or any(outcome.failure for outcome in outcomes):
                break
    return Result(
        seed=seed + rounds - 1, rounds=rounds, seconds=progress.elapsed_s, batch_invariant=invariant,
        random_weights=request.random_weights, noise=worst,
        tolerance=allowed, outcomes=outcomes,
    )  # fmt: skip


def require_quiet(dtype: str, noise: float) -> None:
    """A tolerance that follows what vLLM differs from itself would follow it anywhere."""
    if noise <= (most := most_noise(dtype)):
        return
    apart = f"by {noise:.2g} in log-probabilities" if math.isfinite(noise) else "in tokens that it held for unlikely"
    helps = "" if dtype == "float32" else " --dtype float32 rounds less, if the model fits so."
    raise TooNoisy(
        f"NOT VERIFIED: vLLM without Overspill differs from itself {apart} when it computes the same prompts in other "
        f"pieces, and beyond {most:.2g} {dtype} proves nothing.{helps} On a GPU of compute capability "
        "9.0 and up, or with --device cpu and vLLM's CPU build, it computes them alike"
    )


def _skipped(scenario: Scenario, stage: Stage) -> str:
    return stage.no_spill if scenario.tier is not Tier.OFFLOAD and not scenario.soak_only else ""


def _spilled_tokens(answer: Answer, bytes_per_token: int) -> int:
    """Whose KV lay in RAM while it was answered; windows take blocks beside, for tokens that count once."""
    return min(answer.spilled_bytes // bytes_per_token, answer.prompt_tokens + len(answer.tokens))


class _Round:
    """One seed."""

    def __init__(
        self, children: Children, plan: Plan, stage: Stage, model: str, request: Request, progress: Progress
    ) -> None:
        self._children, self._plan, self._stage, self._model = children, plan, stage, model
        self._seed, self._progress, self._soak = request.seed, progress, request.soak
        self._random_weights = request.random_weights

    def reference(self) -> Reference:
        self._progress.begin("vLLM without Overspill, as reference")
        workload = make_workload(self._stage, self._seed, varied=self._soak)
        life = replace(reference_life(self._plan, self._stage, self._model), random_weights=self._random_weights)
        told = self._children.run(ReferenceJob(life, workload, self._seed))
        if isinstance(told, Died):
            raise CannotVerify(f"vLLM cannot run the model even without Overspill: {told.reason}{self._hint}")
        assert isinstance(told, Reference)
        self._progress.end()
        return told

    @property
    def _hint(self) -> str:
        has_weights = self._plan.facts.weights.source is Origin.MEASURED
        return "" if has_weights or self._random_weights else _NO_WEIGHTS

    def play_all(self, scenarios: Sequence[Scenario], reference: Reference, allowed: Tolerance) -> tuple[Outcome, ...]:
        outcomes = []
        for scenario in scenarios:
            if skipped := _skipped(scenario, self._stage):
                outcomes.append(Outcome(scenario=scenario, skipped=skipped))
                continue
            self._progress.begin(f"{scenario.name}: {scenario.title}")
            began = self._progress.elapsed_s
            outcome = self._play(scenario, reference, allowed)
            outcomes.append(replace(outcome, seconds=self._progress.elapsed_s - began))
            self._progress.end(_LIVES.get(scenario.name, 1))
            if self._soak and (outcome.failure or self._progress.is_over):
                break
        return tuple(outcomes)

    def _play(self, scenario: Scenario, reference: Reference, allowed: Tolerance) -> Outcome:
        options = self._options(scenario)
        life = self._life(scenario, options)
        more: dict[str, int] = {}
        play = scenario.name
        if scenario.name == "killed":
            ended = self._children.kill_under_way(PlayJob(life, "until-killed", reference.script))
            if isinstance(ended, Died):
                return Outcome(scenario=scenario, died=ended.reason)
            if ended.left_behind:
                return Outcome(scenario=scenario, left_behind=ended.left_behind, figures={"injected": 1})
            more, play = {"injected": 1, "caught": 1}, "restarted"
        told = self._children.run(PlayJob(life, play, reference.script))
        if isinstance(told, Died):
            return Outcome(scenario=scenario, died=told.reason)
        assert isinstance(told, Played)
        outcome = self._outcome(scenario, told, reference, allowed, more)
        return self._with_sensitivity(outcome, reference, allowed) if scenario.name == "damaged" else outcome

    def _outcome(
        self, scenario: Scenario, told: Played, reference: Reference, allowed: Tolerance, more: Mapping[str, int]
    ) -> Outcome:
        spilled = sum(_spilled_tokens(answer, self._stage.bytes_per_token) for answer in told.answers)
        allowed = replace(allowed, same_pieces=allowed.same_pieces and scenario.same_pieces)
        return Outcome(
            scenario=scenario,
            compared=compare(told.answers, reference.answers, allowed),
            awaited=told.awaited,
            tied_share=allowed.tied_share,
            figures={**told.figures, "spilled_tokens": spilled, **more},
            left_behind=told.left_behind,
        )

    def _with_sensitivity(self, outcome: Outcome, reference: Reference, allowed: Tolerance) -> Outcome:
        """The same with nothing that looks. An answer that stays the same shows a model that cannot tell."""
        life = self._life(outcome.scenario, {**self._options(outcome.scenario), "verify": "off"})
        told = self._children.run(PlayJob(life, "damaged-unseen", reference.script))
        if isinstance(told, Died):
            return replace(outcome, untold=f"the engine died: {told.reason}")
        assert isinstance(told, Played)
        if not told.figures.get("injected"):
            return replace(outcome, untold="no fault could be injected")
        last: list[Answer] = list(told.answers[-1:])
        differs = compare(last, reference.answers, replace(allowed, same_pieces=False)).mismatches
        return replace(outcome, sensitive=bool(differs), must_be_sensitive=self._random_weights)

    def _options(self, scenario: Scenario) -> dict[str, Any]:
        return {**scenario.options, **(drawn_options(scenario, self._seed) if self._soak else {})}

    def _life(self, scenario: Scenario, options: Mapping[str, Any]) -> EngineLife:
        if scenario.tier is Tier.OFFLOAD or self._stage.spill is None:
            life = offload_life(self._plan, self._stage, self._model, options)
        else:
            offload = scenario.tier is Tier.BOTH
            life = spill_life(self._plan, self._stage, self._model, options, offload=offload)
        return replace(life, random_weights=self._random_weights)
