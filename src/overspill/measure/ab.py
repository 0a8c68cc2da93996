"""`overspill ab`: configurations measured in turn, each repeat saved as soon as it ends."""

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from overspill.launch.reference import ModelRef, look_up
from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.configuration import Configuration
from overspill.measure.experiment import Experiment
from overspill.measure.launch import MeasuredLaunch, make_launch, require_emptied
from overspill.measure.measurement import Tier
from overspill.measure.progress import Reporter, Say
from overspill.measure.provenance import changes, find_provenance
from overspill.measure.report import Report
from overspill.measure.trial import Step, Trial, Trials, locked, logs_folder, resumable
from overspill.measure.workload import parse_workload
from overspill.registry import Registry, Result, list_results, open_registry


def schedule(labels: Sequence[str], repeats: int, *, keeps_engines: bool) -> list[Step]:
    """Steps in order, interleaved as A B, B A, A B: a machine that slows down with time, such as a card that warms up,
    then affects all alike. Kept engines run their repeats back to back, since two do not fit on the GPU."""
    if keeps_engines:
        return [Step(repeat, label) for label in labels for repeat in range(1, repeats + 1)]
    return [
        Step(repeat, label)
        for repeat in range(1, repeats + 1)
        for label in (labels if repeat % 2 else list(reversed(labels)))
    ]


def remaining(planned: Sequence[Step], done: Collection[Step]) -> list[Step]:
    return [step for step in planned if step not in done]


def is_last_of_life(planned: Sequence[Step], index: int, *, keeps_engines: bool) -> bool:
    """Whether the step is the last one that its engine serves."""
    if not keeps_engines or index + 1 == len(planned):
        return True
    return planned[index + 1].label != planned[index].label


def run(
    definition: Experiment,
    registry: Registry,
    say: Say,
    *,
    resume: str | None = None,
    logs: Path | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Measure the missing repeats of an experiment, and report on all of them.

    Whatever happens, no engine is left running and finished repeats are kept. `stop` ends the run early.
    """
    configurations = {one.label: one for one in definition.read()}
    model = _with_whole_path(look_up(definition.model))
    launches = {label: make_launch(one, model) for label, one in configurations.items()}
    if definition.keeps_engines:
        require_emptied(list(configurations.values()))
    if definition.expects is not None and all(definition.expects not in one.tiers for one in launches.values()):
        raise MeasureError(f"--expect {definition.expects}: no configuration has this tier")
    for label, launch in launches.items():
        for warning in launch.warnings:
            say(f"warning: {label}: {warning}")
    name = resume or Experiment.new_name()
    folder = logs or logs_folder("ab", name)
    # Lock before reading the finished repeats: a process that still measures would add more a moment later.
    with locked(folder, name):
        earlier = Experiment.load(registry, name)[1] if resume is not None else []
        done = {Step(one.repeat, one.label) for one in earlier if one.is_complete and one.repeat and one.label}
        planned = schedule(list(launches), definition.repeats, keeps_engines=definition.keeps_engines)
        todo = remaining(planned, done)
        trials = Trials(
            name=name, definition=definition, registry=registry, folder=folder, stop=stop or threading.Event(),
            reporter=Reporter(say, total=len(todo), repeats=definition.repeats), provenance=find_provenance(),
        )  # fmt: skip
        require_same_model(earlier, model.source, name)
        for label, launch in launches.items():
            finished = [one for one in earlier if one.is_complete and one.label == label]
            if found := dict.fromkeys(each for one in finished for each in changes(one, launch, trials.provenance)):
                say(f"warning: {label} is not started as in its earlier repeats: {'; '.join(found)}")
        say(f"experiment {name}: {len(planned)} measurements, {len(done)} of them done; vLLM's logs: {folder}")
        with resumable(trials, say):
            _run(definition, configurations, launches, model, trials, todo, say)
    if not (results := list_results(registry, experiment=name)):
        raise CannotMeasure("interrupted before anything was measured")
    return Report.of_results(results[::-1])


def _run(
    definition: Experiment, configurations: Mapping[str, Configuration], launches: Mapping[str, MeasuredLaunch],
    model: ModelRef, trials: Trials, todo: Sequence[Step], say: Say,
) -> None:  # fmt: skip
    workload = parse_workload(definition.workload)
    failed: set[str] = set()
    for index, step in enumerate(todo):
        if trials.stop.is_set():
            return
        trials.reporter.begin(step.label, step.repeat, len(todo) - index)
        # An engine that failed to start, or died, would do so again; other configurations are still worth measuring.
        if step.label in failed:
            continue
        trial = Trial(
            step=step, launch=partial(launches.__getitem__, step.label), text=configurations[step.label].text,
            workload=workload, config={"source": model.source}, expects=cast(Tier | None, definition.expects),
            is_last=is_last_of_life(todo, index, keeps_engines=definition.keeps_engines),
        )  # fmt: skip
        result = trials.run(trial)
        if not result.is_complete:
            failed.add(step.label)
            say(f"{step.label}, repeat {step.repeat}: {result.metrics['problem']}")
        elif (unused := result.metrics.get("tier_problem")) is not None:
            say(f"warning: {step.label}, repeat {step.repeat}: {unused}")
        trials.reporter.end()


def require_same_model(results: Sequence[Result], source: str, experiment: str) -> None:
    """Raise if the model changed: a relative path or a registry name may stand for another model by now."""
    for one in results:
        if isinstance(was := one.config.get("source"), str) and was != source:
            raise MeasureError(
                f"experiment {experiment} measured {was}, and {one.model} is {source} here. Resume it where "
                f"{one.model} is the same, or start a new one without --resume"
            )


def _with_whole_path(model: ModelRef) -> ModelRef:
    """The model with an absolute path: a resume may run in another folder, where the name is another model or none."""
    is_folder = not os.path.isabs(model.source) and os.path.isdir(model.source)
    return replace(model, source=os.path.abspath(model.source)) if is_folder else model


# The demo's experiment: a tiny model on vLLM's CPU engine, returning conversations, offload off and on. Prompts are so
# long that recomputing one takes many times as long as copying its KV, even for a model this small, and the cache holds
# a single conversation.
_BLOCK_TOKENS = 32
_CONVERSATIONS, _TURNS = 4, 3
_FIRST_TURN, _NEXT_TURN, _ANSWER = 6000, 100, 8  # tokens
_LENGTH = _FIRST_TURN + (_TURNS - 1) * (_NEXT_TURN + _ANSWER) + _ANSWER
EXAMPLE_MEASURES = ("cold_mean_ttft_ms", "returning_mean_ttft_ms", "peak_ram_bytes", "prompt_tokens", "tokens_from_ram")


def run_example(model: Path, folder: Path, say: Say) -> Report:
    """Run the demo's experiment in a registry under `folder`; the demo shows `report.as_table(*EXAMPLE_MEASURES)`."""
    definition = Experiment(
        model=str(model),
        configurations=(("a", "stock vLLM = none"), ("b", "Overspill = overspill-eager:256MiB,reserve_bytes=0")),
        common=f"--skip-tokenizer-init --dtype float32 --enforce-eager --block-size {_BLOCK_TOKENS} --max-num-seqs 2 "
        f"--max-model-len {_LENGTH} --num-gpu-blocks-override {_LENGTH // _BLOCK_TOKENS + 3}",
        workload=f"multi-turn:conversations={_CONVERSATIONS},turns={_TURNS},first={_FIRST_TURN},input={_NEXT_TURN},"
        f"output={_ANSWER},think_time=0,concurrency=1",
        repeats=1,
        expects="offload",
    )
    with open_registry(f"sqlite:///{folder.absolute()}/registry.db") as registry:
        return run(definition, registry, say, logs=folder / "logs")
