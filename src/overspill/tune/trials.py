"""One trial: an engine started for a candidate, measured, surely ended, and saved as a result."""

import os
import threading
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from overspill.address import free_port
from overspill.bench import Progress, Workload, measure
from overspill.experiment.configurations import read_configuration
from overspill.experiment.launches import Launch, Launcher, make_launcher
from overspill.experiment.log_files import log_name
from overspill.experiment.provenance import Provenance
from overspill.experiment.servers import Interrupted, Server
from overspill.kv.errors import OverspillError
from overspill.launch.reference import ModelRef
from overspill.registry import Measurement, Registry, Result, save_result
from overspill.tune.candidates import Candidate
from overspill.tune.definition import Definition
from overspill.tune.progress import Telling

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    candidate: Candidate
    workload: Workload
    repeat: int


@dataclass(kw_only=True)
class _Made:
    """What came of a trial so far."""

    log_file: Path
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    launcher: Launcher | None = None
    launch: Launch | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    experiment: str
    definition: Definition
    model: ModelRef
    registry: Registry
    provenance: Provenance
    folder: Path
    """For vLLM's logs."""
    stop: threading.Event

    def run(self, trial: Trial, telling: Telling) -> Result:
        """Whatever happens, no engine is left running, and what is known is saved."""
        made = _Made(log_file=self.folder / log_name(trial.candidate.label, trial.repeat))
        try:
            made.problem = self._try(trial, made, telling)
        except Interrupted:
            made.problem = INTERRUPTED
        except OverspillError as error:
            made.problem = str(error)
        if self.stop.is_set() and made.problem is not None:
            made.problem = INTERRUPTED
        return self._save(trial, made)

    def _try(self, trial: Trial, made: "_Made", telling: Telling) -> str | None:
        """What went wrong, if something did."""
        configuration = read_configuration("candidate", self._text(trial))
        made.launcher = make_launcher(replace(configuration, label=trial.candidate.label), self.model)
        made.launch = made.launcher.launch(free_port())
        telling.say("starting vLLM")
        with Server(made.launch, log_file=made.log_file, stop=self.stop) as server:
            made.metrics["load_s"] = server.load_s
            telling.say(f"ready after {server.load_s:.0f} s; {trial.workload.as_text()}")
            try:
                problem = self._measure(server, trial, made, telling)
            except OverspillError as error:
                problem = str(error)
            if problem is not None and not server.is_running:
                problem = f"{problem}; {server.epitaph()}"
        return problem

    def _measure(self, server: Server, trial: Trial, made: "_Made", telling: Telling) -> str | None:
        def on_progress(at: Progress) -> None:
            telling.say_now_and_then(at.as_text())

        outcome = measure(
            server.target(os.environ.get("VLLM_API_KEY") or None), trial.workload,
            seed=self.definition.seed_of(trial.repeat), on_progress=on_progress, stop=self.stop,
        )  # fmt: skip
        made.metrics |= {**outcome.metrics, "answers": list(outcome.answers), "notes": list(outcome.notes)}
        return None if outcome.is_complete else outcome.problem or "not finished"

    def _text(self, trial: Trial) -> str:
        return trial.candidate.text({**self.definition.pinned, **self.definition.given})

    def _save(self, trial: Trial, made: "_Made") -> Result:
        candidate, workload, launcher, launch = trial.candidate, trial.workload, made.launcher, made.launch
        found = self.provenance
        return save_result(
            self.registry,
            Measurement(
                benchmark=workload.name,
                model=self.definition.model,
                config={
                    "tuning": self.definition.as_json(),
                    "candidate": candidate.as_json(),
                    "configuration": {"label": candidate.label, "text": self._text(trial)},
                    "workload": workload.as_text(),
                    "parameters": dict(workload.parameters),
                    "seed": self.definition.seed_of(trial.repeat),
                    "machine": found.machine,
                    "log_file": str(made.log_file) if launch is not None else None,
                    "warnings": list(launcher.warnings) if launcher is not None else [],
                },
                argv=launch.command if launch is not None else (),
                environment=launch.environment if launch is not None else {},
                versions=found.versions,
                gpu=found.gpu,
                driver=found.driver,
                plan=launcher.plan_as_json if launcher is not None else None,
                git_revision=found.git_revision,
                metrics={**made.metrics, "problem": made.problem},
                started_at=made.started_at,
                is_complete=made.problem is None,
                experiment=self.experiment,
                label=candidate.label,
                repeat=trial.repeat,
            ),
        )
