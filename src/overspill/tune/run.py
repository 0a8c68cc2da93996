"""Tuning from beginning to end: candidates tried in turn, and the best of them known."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from overspill.bench import parse_workload
from overspill.experiment.lock import locked
from overspill.experiment.log_files import logs_folder
from overspill.experiment.progress import Tell, duration
from overspill.experiment.provenance import find_provenance
from overspill.registry import CannotNow, Registry, Result, running_runs
from overspill.tune.candidates import Candidate
from overspill.tune.definition import Definition, load, new_name
from overspill.tune.goals import Goal, measure_of, one_prompt
from overspill.tune.lengths import longest_working, next_length, trials_left
from overspill.tune.progress import Telling
from overspill.tune.report import Report, length_of, scores_of, tokens_per_s, tried_lengths
from overspill.tune.search import choose, standing
from overspill.tune.subject import Subject
from overspill.tune.trials import INTERRUPTED, Trial, Trials


def run(
    definition: Definition,
    subject: Subject,
    registry: Registry,
    tell: Tell,
    *,
    resume: str | None = None,
    budget_s: float | None = None,
    logs: Path | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Tries what is missing, and reports on all of it. `stop` ends it early; what was measured is kept."""
    experiment = resume or new_name()
    folder = logs or logs_folder("tune", experiment)
    # Before it is known what was tried: a process that still tries would have more of it a moment later.
    with locked(folder, experiment):
        trials = Trials(
            experiment=experiment, definition=definition, model=subject.named, registry=registry,
            provenance=find_provenance(), folder=folder, stop=stop or threading.Event(),
        )  # fmt: skip
        results = load(registry, experiment)[1] if resume is not None else []
        return _tried(trials, results, tell, budget_s)


def _tried(trials: Trials, results: list[Result], tell: Tell, budget_s: float | None) -> Report:
    definition, experiment, stop = trials.definition, trials.experiment, trials.stop
    what = f"{len(definition.candidates)} candidates" if definition.candidates else f"up to {definition.longest} tokens"
    tell(f"tuning {experiment}: {what} for {definition.goal}; vLLM's logs: {trials.folder}")
    for candidate in definition.candidates:
        tell(f"  {candidate.label}: {candidate.text(definition.given)}")
    if definition.subject is None:
        tell(
            f"warning: {experiment} was begun by an Overspill that did not keep what {definition.name} was; make sure "
            "that nobody changed it since, or start anew"
        )
    for each in running_runs(trials.registry):
        tell(
            f"warning: {each.model} is running ({each.process_text}); candidates have what it leaves of memory and time"
        )
    running = _Run(definition=definition, trials=trials, tell=tell, results=results, stop=stop, budget_s=budget_s)
    try:
        running.go()
    except CannotNow:
        tell(f"what was measured before is kept; to go on: overspill tune --resume {experiment}")
        raise
    return Report(
        experiment=experiment, definition=definition, results=tuple(running.results), winner=running.winner(),
        is_interrupted=stop.is_set() and not running.is_out_of_time, is_out_of_time=running.is_out_of_time,
    )  # fmt: skip


@dataclass(kw_only=True)
class _Run:
    definition: Definition
    trials: Trials
    tell: Tell
    results: list[Result]
    stop: threading.Event
    budget_s: float | None
    is_out_of_time: bool = False
    telling: Telling = field(init=False)

    def go(self) -> None:
        self.telling = Telling(self.tell)
        self._deadline = None if self.budget_s is None else time.monotonic() + self.budget_s
        timer = None if self.budget_s is None else threading.Timer(self.budget_s, self._end_time)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            while not self.stop.is_set() and (step := self._next()) is not None:
                trial, left = step
                if self._is_too_late():
                    self.is_out_of_time = True
                    self.tell(f"no time left for {trial.candidate.label}; more --budget would tell")
                    return
                self.telling.begin(trial.candidate.label, trial.repeat, left)
                result = self.trials.run(trial, self.telling)
                self.results.append(result)
                self.telling.end(self._found(result))
        finally:
            if timer is not None:
                timer.cancel()

    def winner(self) -> Candidate | None:
        definition = self.definition
        if definition.goal is Goal.CONTEXT:
            longest = longest_working(self._tried())
            return definition.of_length(longest) if longest is not None else None
        better = measure_of(definition.goal).better
        scores = scores_of(definition, self.results)
        alive = standing(definition.candidates, scores, definition.repeats, better).alive
        return choose(alive, scores, better)

    def _next(self) -> tuple[Trial, int] | None:
        """With about how many trials are left."""
        definition = self.definition
        if definition.goal is Goal.CONTEXT:
            tried = self._tried()
            length = next_length(definition.longest, tried)
            if length is None:
                return None
            trial = Trial(candidate=definition.of_length(length), workload=one_prompt(length), repeat=1)
            return trial, trials_left(definition.longest, tried)
        better = measure_of(definition.goal).better
        stand = standing(definition.candidates, scores_of(definition, self.results), definition.repeats, better)
        if stand.next is None:
            return None
        candidate = next(each for each in definition.candidates if each.label == stand.next.label)
        workload = parse_workload(definition.workload)
        return Trial(candidate=candidate, workload=workload, repeat=stand.next.repeat), stand.steps_left

    def _tried(self) -> dict[int, bool]:
        return tried_lengths(self.definition, self.results)

    def _is_too_late(self) -> bool:
        return self._deadline is not None and time.monotonic() + self.telling.usual_s > self._deadline

    def _end_time(self) -> None:
        if not self.stop.is_set():
            self.is_out_of_time = True
            self.stop.set()

    def _found(self, result: Result) -> str:
        if not result.is_complete:
            problem = str(result.metrics.get("problem"))
            if problem == INTERRUPTED and self.is_out_of_time:
                return f"broken off: the {duration(self.budget_s or 0)} of --budget are over"
            return problem
        if self.definition.goal is Goal.CONTEXT:
            speed = tokens_per_s(result)
            is_enough = self._tried().get(length_of(result), False)
            slow = "" if is_enough else f", less than {self.definition.least_tokens_per_s:g}"
            return f"{speed or 0:.3g} tok/s{slow}"
        measure = measure_of(self.definition.goal)
        return f"{measure.name} {measure.shown(measure.value(result.metrics))}"
