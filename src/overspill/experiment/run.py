"""An experiment from beginning to end: engines started in turn, and every repeat saved as soon as it is known."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from overspill.address import free_port
from overspill.bench import BenchError, Outcome, Progress, Tier, Workload, measure, parse_workload, require_tier
from overspill.errors import CannotServe
from overspill.experiment.changes import Setup, changes, require_same_model
from overspill.experiment.definition import Definition, new_name
from overspill.experiment.errors import CannotCompare, ExperimentError
from overspill.experiment.launches import Launcher, make_launcher, require_emptied
from overspill.experiment.lock import locked
from overspill.experiment.log_files import log_name, logs_folder
from overspill.experiment.progress import Tell, Telling
from overspill.experiment.provenance import Provenance, find_provenance
from overspill.experiment.report import Report
from overspill.experiment.schedule import Step, is_last_of_life, remaining, steps
from overspill.experiment.servers import Interrupted, Server
from overspill.experiment.stored import load_experiment
from overspill.launch.reference import ModelRef, look_up
from overspill.registry import CannotNow, Measurement, Registry, Result, UnknownRecord, save_result

INTERRUPTED = "interrupted"


def run(
    definition: Definition,
    registry: Registry,
    tell: Tell,
    *,
    resume: str | None = None,
    logs: Path | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Does what is missing of an experiment, and reports on all of it.

    Whatever happens, no engine is left running and finished repeats are kept. A signal, or `stop`, ends it early.
    """
    workload = parse_workload(definition.workload)
    configurations = definition.read()
    model = _with_whole_path(look_up(definition.model))
    launchers = {one.label: make_launcher(one, model) for one in configurations}
    if definition.keeps_engines:
        require_emptied(list(launchers.values()))
    if definition.expects is not None and all(definition.expects not in one.tiers for one in launchers.values()):
        raise ExperimentError(f"--expect {definition.expects}: none of the configurations has it")
    for label, launcher in launchers.items():
        for warning in launcher.warnings:
            tell(f"warning: {label}: {warning}")
    name = resume or new_name()
    folder = logs or logs_folder("ab", name)
    # Before it is known what is done: a process that still measures would have more of it a moment later.
    with locked(folder, name):
        earlier = load_experiment(registry, name) if resume is not None else None
        done = earlier.done if earlier is not None else set()
        provenance = find_provenance()
        if earlier is not None:
            require_same_model(earlier.results, model.source, name)
            _tell_changes(earlier.results, launchers, provenance, tell)
        planned = steps(list(launchers), definition.repeats, keeps_engines=definition.keeps_engines)
        tell(f"experiment {name}: {len(planned)} measurements, {len(done)} of them done; vLLM's logs: {folder}")
        running = _Run(
            name=name, definition=definition, workload=workload, model=model, launchers=launchers, registry=registry,
            todo=remaining(planned, done), folder=folder, stop=stop or threading.Event(), tell=tell,
            provenance=provenance,
        )  # fmt: skip
        with _stopping_on_signals(running.stop):
            try:
                running.go()
            except CannotNow:
                tell(f"what was finished before is kept; to go on: overspill ab --resume {name}")
                raise
    try:
        return Report.of_experiment(load_experiment(registry, name))
    except UnknownRecord:
        raise CannotCompare("interrupted before anything was measured") from None


@dataclass(kw_only=True)
class _Run:
    name: str
    definition: Definition
    workload: Workload
    model: ModelRef
    launchers: dict[str, Launcher]
    registry: Registry
    todo: list[Step]
    folder: Path
    stop: threading.Event
    tell: Tell
    provenance: Provenance
    server: Server | None = None

    def go(self) -> None:
        self.telling = Telling(self.tell, self.todo, self.definition.repeats)
        failed: set[str] = set()
        try:
            for index, step in enumerate(self.todo):
                if self.stop.is_set():
                    return
                self.telling.begin(step)
                # One that did not start or died would do so again; the others are still worth knowing.
                if step.label in failed:
                    continue
                if not self._measured(step):
                    failed.add(step.label)
                    self._end_server()
                elif is_last_of_life(self.todo, index, keeps_engines=self.definition.keeps_engines):
                    self._end_server()
                self.telling.end()
        finally:
            self._end_server()

    def _measured(self, step: Step) -> bool:
        """Whether the repeat was finished; what was is saved in any case."""
        started_at = datetime.now(UTC)
        launcher = self.launchers[step.label]
        metrics: dict[str, Any] = {}
        problem: str | None = None
        is_serving = False
        try:
            fresh = self._serve(step, launcher)
            assert self.server is not None
            is_serving = True
            if fresh:
                metrics["load_s"] = self.server.load_s
            outcome = self._measure(step, self.server)
            metrics |= {**outcome.metrics, "answers": list(outcome.answers), "notes": list(outcome.notes)}
            if metrics.get("prompt_tokens") is not None and "offload" not in launcher.tiers:
                metrics["tokens_from_ram"] = metrics["tokens_from_ram"] or 0  # vLLM does not count what is not there
            problem = None if outcome.is_complete else outcome.problem or "not finished"
            if problem is None and self.definition.expects in launcher.tiers:
                metrics["tier_problem"] = require_tier(outcome, cast(Tier, self.definition.expects))
        except Interrupted:
            problem = INTERRUPTED
        except (CannotServe, BenchError) as error:
            problem = str(error)
        if self.stop.is_set():
            problem = INTERRUPTED if problem is not None else None
        elif problem is not None and is_serving and self.server is not None and not self._is_alive():
            problem = f"{problem}; {self.server.epitaph()}"
        self._save(step, launcher, metrics, started_at, problem)
        if problem is not None:
            self.tell(f"{step.label}, repeat {step.repeat}: {problem}")
        elif (unused := metrics.get("tier_problem")) is not None:
            self.tell(f"warning: {step.label}, repeat {step.repeat}: {unused}")
        return problem is None

    def _serve(self, step: Step, launcher: Launcher) -> bool:
        """Whether the engine is a new one. One that is kept is emptied."""
        keeps = self.definition.keeps_engines
        if self.server is not None:
            self.telling.say("emptying its caches")
            self.server.reset(_api_key())
            return False
        self.telling.say("starting vLLM")
        log_file = self.folder / log_name(step.label, step.repeat)
        # Known before it starts: whatever happens then, it is ended.
        self.server = Server(launcher.launch(free_port()), log_file=log_file, stop=self.stop, can_reset=keeps)
        self.server.__enter__()
        self.telling.say(f"ready after {self.server.load_s:.0f} s; {self.workload.as_text()}")
        return True

    def _measure(self, step: Step, server: Server) -> Outcome:
        def on_progress(at: Progress) -> None:
            self.telling.say_now_and_then(at.as_text())

        seed = self.definition.seed_of(step.repeat)
        return measure(server.target(_api_key()), self.workload, seed=seed, on_progress=on_progress, stop=self.stop)

    def _is_alive(self) -> bool:
        """A server that was killed takes a moment to be gone."""
        deadline = time.monotonic() + 5
        while self.server is not None and self.server.is_running and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.server is not None and self.server.is_running

    def _save(
        self, step: Step, launcher: Launcher, metrics: Mapping[str, Any], started_at: datetime, problem: str | None
    ) -> None:
        launch = self.server.launch if self.server is not None else None
        configuration = launcher.configuration
        found = self.provenance
        save_result(
            self.registry,
            Measurement(
                benchmark=self.workload.name,
                model=self.definition.model,
                config={
                    "experiment": self.definition.as_json(),
                    "configuration": {"label": configuration.label, "text": configuration.text},
                    "workload": self.workload.as_text(),
                    "parameters": dict(self.workload.parameters),
                    "seed": self.definition.seed_of(step.repeat),
                    "source": self.model.source,
                    "machine": found.machine,
                    "log_file": str(self.server.log_file) if self.server is not None else None,
                    "warnings": list(launcher.warnings),
                },
                argv=launch.command if launch is not None else (),
                environment=launch.environment if launch is not None else {},
                versions=found.versions,
                gpu=found.gpu,
                driver=found.driver,
                plan=launcher.plan_as_json,
                git_revision=found.git_revision,
                metrics={**metrics, "problem": problem},
                started_at=started_at,
                is_complete=problem is None,
                experiment=self.name,
                label=step.label,
                repeat=step.repeat,
            ),
        )

    def _end_server(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


def _with_whole_path(model: ModelRef) -> ModelRef:
    """A resume may be asked for in another folder, where the same name is another model or none."""
    is_folder = not os.path.isabs(model.source) and os.path.isdir(model.source)
    return replace(model, source=os.path.abspath(model.source)) if is_folder else model


def _tell_changes(
    results: Sequence[Result], launchers: Mapping[str, Launcher], provenance: Provenance, tell: Tell
) -> None:
    now = {
        label: Setup(
            command=launcher.known.command, environment=launcher.known.environment, versions=provenance.versions,
            gpu=provenance.gpu, driver=provenance.driver, cpu=provenance.machine["cpu"],
        )
        for label, launcher in launchers.items()
    }  # fmt: skip
    for label, told in changes(results, now).items():
        tell(f"warning: {label} is not started as in its earlier repeats: {'; '.join(told)}")


def _api_key() -> str | None:
    return os.environ.get("VLLM_API_KEY") or None


@contextlib.contextmanager
def _stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    """Whatever waits looks at `stop`; nothing is torn away in the middle of saving or stopping."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signals.append(signal.SIGHUP)
    before = {sign: signal.signal(sign, lambda *_: stop.set()) for sign in signals}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
