"""`overspill tune`: candidates tried in short runs, clearly worse ones dropped, and the best one chosen."""

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from overspill.launch.reference import ModelRef
from overspill.measure.candidates import Candidate
from overspill.measure.configuration import read_configuration
from overspill.measure.launch import MeasuredLaunch, make_launch
from overspill.measure.progress import Reporter, Say, duration
from overspill.measure.search import next_length, trials_left
from overspill.measure.subject import Subject
from overspill.measure.trial import INTERRUPTED, Step, Trial, Trials, locked, logs_folder, resumable
from overspill.measure.tuning import Tuning, length_of, measure_of, one_prompt
from overspill.measure.tuning_report import TuningReport, tokens_per_s
from overspill.measure.workload import Workload, parse_workload
from overspill.registry import Registry, Result, running_runs


def run(
    definition: Tuning,
    subject: Subject,
    registry: Registry,
    say: Say,
    *,
    resume: str | None = None,
    budget_s: float | None = None,
    logs: Path | None = None,
    stop: threading.Event | None = None,
) -> TuningReport:
    """Run the missing trials, and report on all of them; `stop` ends the run early and keeps finished results."""
    name = resume or Tuning.new_name()
    folder = logs or logs_folder("tune", name)
    # Lock before reading the results: a process that still measures would add more a moment later.
    with locked(folder, name):
        results = Tuning.load(registry, name)[1] if resume is not None else []
        trials = Trials(
            name=name, definition=definition, registry=registry, folder=folder, stop=stop or threading.Event(),
            reporter=Reporter(say),
        )  # fmt: skip
        _announce(definition, trials, say)
        running = _Run(definition, subject.named, trials, say, budget_s)
        running.state = replace(running.state, results=tuple(results))
        with resumable(trials, say):
            running.go()
    is_interrupted = trials.stop.is_set() and not running.is_out_of_time
    return replace(running.state, is_interrupted=is_interrupted, is_out_of_time=running.is_out_of_time)


def _announce(definition: Tuning, trials: Trials, say: Say) -> None:
    what = f"{len(definition.candidates)} candidates" if definition.candidates else f"up to {definition.longest} tokens"
    say(f"tuning {trials.name}: {what} for {definition.goal}; vLLM's logs: {trials.folder}")
    for candidate in definition.candidates:
        say(f"  {candidate.label}: {candidate.text(definition.given)}")
    if definition.subject is None:
        say(
            f"warning: {trials.name} was begun by a version that did not record the settings of {definition.name}; "
            "make sure that nobody has changed them since, or start anew"
        )
    for each in running_runs(trials.registry):
        say(f"warning: {each.model} is running ({each.process_text}); candidates share memory and compute with it")


class _Run:
    def __init__(self, definition: Tuning, model: ModelRef, trials: Trials, say: Say, budget_s: float | None) -> None:
        self._definition, self._model, self._trials, self._say = definition, model, trials, say
        self._budget_s = budget_s
        self.state = TuningReport(experiment=trials.name, definition=definition, results=())
        self.is_out_of_time = False

    def go(self) -> None:
        trials, reporter = self._trials, self._trials.reporter
        deadline = None if self._budget_s is None else time.monotonic() + self._budget_s
        timer = threading.Timer(self._budget_s or 0.0, self._end_time)
        timer.daemon = True
        if deadline is not None:
            timer.start()
        try:
            while not trials.stop.is_set() and (found := self._next()) is not None:
                trial, left = found
                if deadline is not None and time.monotonic() + reporter.usual_s > deadline:
                    self.is_out_of_time = True
                    self._say(f"no time left for {trial.step.label}; a longer --budget may allow it")
                    return
                reporter.begin(trial.step.label, trial.step.repeat, left)
                result = trials.run(trial)
                self.state = replace(self.state, results=(*self.state.results, result))
                reporter.end(self._found(result))
        finally:
            timer.cancel()

    def _next(self) -> tuple[Trial, int] | None:
        """The next trial, and about how many are left, itself included; None when nothing is left."""
        definition = self._definition
        if self.state.is_of_context:
            lengths = self.state.lengths
            if (length := next_length(definition.longest, lengths)) is None:
                return None
            trial = self._trial(definition.of_length(length), one_prompt(length), 1)
            return trial, trials_left(definition.longest, lengths)
        stand = self.state.standing
        if stand.next is None:
            return None
        candidate = next(each for each in definition.candidates if each.label == stand.next.label)
        return self._trial(candidate, parse_workload(definition.workload), stand.next.repeat), stand.steps_left

    def _trial(self, candidate: Candidate, workload: Workload, repeat: int) -> Trial:
        text = candidate.text({**self._definition.pinned, **self._definition.given})
        return Trial(
            step=Step(repeat, candidate.label), launch=partial(_launch, text, candidate.label, self._model),
            text=text, workload=workload, config={"candidate": candidate.as_json()},
        )  # fmt: skip

    def _end_time(self) -> None:
        if not self._trials.stop.is_set():
            self.is_out_of_time = True
            self._trials.stop.set()

    def _found(self, result: Result) -> str:
        if not result.is_complete:
            problem = str(result.metrics.get("problem"))
            if problem == INTERRUPTED and self.is_out_of_time:
                return f"stopped: the --budget of {duration(self._budget_s or 0)} is used up"
            return problem
        if self.state.is_of_context:
            is_enough = self.state.lengths.get(length_of(result), False)
            slow = "" if is_enough else f", less than {self._definition.least_tokens_per_s:g}"
            return f"{tokens_per_s(result) or 0:.3g} tok/s{slow}"
        measure = measure_of(self._definition.goal)
        return f"{measure.name} {measure.shown(measure.value(result.metrics))}"


def _launch(text: str, label: str, model: ModelRef) -> MeasuredLaunch:
    return make_launch(replace(read_configuration("candidate", text), label=label), model)
