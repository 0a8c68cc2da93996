"""Trials, the unit of `ab` and `tune`: a launch × a workload × a seed, measured and stored as a result.

Trials of one experiment run one after the other in one process, with one engine at a time. Each result holds the
experiment's definition, so that an experiment can be resumed from its results alone.
"""

import contextlib
import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from overspill.address import free_port
from overspill.errors import CannotServe
from overspill.figures import as_json
from overspill.files import state_folder
from overspill.kv.errors import OverspillError
from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.launch import Interrupted, MeasuredLaunch, Server
from overspill.measure.measurement import Tier, measure, require_tier
from overspill.measure.progress import Progress, Reporter, Say
from overspill.measure.provenance import Provenance, find_provenance
from overspill.measure.workload import Workload
from overspill.processes import on_stop_signals
from overspill.registry import (
    CannotNow,
    Registry,
    Result,
    UnknownRecord,
    list_results,
    save_result,
)  # fmt: skip
from overspill.serve.reporter import HEARTBEAT_S

INTERRUPTED = "interrupted"
_DYING_S = 5.0


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One repeat of one configuration."""

    repeat: int
    """Number of the repeat, counted from 1."""
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """Complete definition of an experiment, stored with each of its results."""

    COMMAND: ClassVar[str]
    KEY: ClassVar[str]
    """Key of the definition in a result's config, and its name in messages."""
    MOST_REPEATS: ClassVar[int]

    model: str
    """Model as named by the user."""
    workload: str = "multi-turn"
    """Workload as `overspill bench` takes it."""
    seed: int = 0
    repeats: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.repeats <= self.MOST_REPEATS:
            raise MeasureError(f"--repeats {self.repeats} is not possible; give 1 to {self.MOST_REPEATS}")
        if self.seed < 0:
            raise MeasureError(f"--seed {self.seed} is negative; give 0 or more")

    def seed_of(self, repeat: int) -> int:
        """Seed of a repeat: other requests in every repeat, the same for all configurations."""
        return self.seed + repeat - 1

    def as_json(self) -> dict[str, Any]:
        return dict(as_json(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise MeasureError(f"what is stored of this {cls.KEY} cannot be read; start it anew") from error

    @classmethod
    def load(cls, registry: Registry, name: str) -> tuple[Self, list[Result]]:
        """The stored definition, and the results so far in the order in which they were saved."""
        results = list_results(registry, experiment=name)[::-1]
        defined = next((one.config[cls.KEY] for one in results if cls.KEY in one.config), None)
        if defined is None:
            raise UnknownRecord(
                f"there is no {cls.KEY} {name!r:.80} in the registry; overspill results list names them"
            )
        return cls.from_json(defined), results

    @classmethod
    def new_name(cls, now: datetime | None = None) -> str:
        """Name that sorts by time; the random end keeps two of the same second apart."""
        return f"{cls.COMMAND}-{now or datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    step: Step
    launch: Callable[[], MeasuredLaunch]
    """Called when the trial begins, so that a plan that fails makes a failed trial."""
    text: str
    """The configuration, as `overspill ab` takes it."""
    workload: Workload
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the result's config."""
    expects: Tier | None = None
    is_last: bool = True
    """Whether the engine stops after this trial. If not, the next trial empties its caches."""


@dataclass(kw_only=True)
class Trials:
    """Runs the trials of an experiment; leaves no engine running, and saves everything known."""

    name: str
    definition: Definition
    registry: Registry
    folder: Path
    """Folder for vLLM's logs."""
    stop: threading.Event
    reporter: Reporter
    provenance: Provenance = field(default_factory=find_provenance)
    _server: Server | None = None

    def run(self, trial: Trial) -> Result:
        started_at = datetime.now(UTC)
        launch: MeasuredLaunch | None = None
        metrics: dict[str, Any] = {}
        problem: str | None = None
        is_serving = False
        try:
            launch = trial.launch()
            server = self._serve(trial, launch, metrics)
            is_serving = True
            problem = self._measure(trial, server, metrics)
        except Interrupted:
            problem = INTERRUPTED
        except OverspillError as error:
            problem = str(error)
        try:
            if problem is not None and self.stop.is_set():
                problem = INTERRUPTED
            elif problem is not None and is_serving and server.wait(_DYING_S) is not None:
                problem = f"{problem}; {server.epitaph()}"
            return self._save(trial, launch, metrics, started_at, problem)
        finally:
            if problem is not None or trial.is_last:
                self.end_server()

    def end_server(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _serve(self, trial: Trial, launch: MeasuredLaunch, metrics: dict[str, Any]) -> Server:
        """A new engine, or the kept one with its caches emptied."""
        if self._server is not None:
            self.reporter.say("emptying its caches")
            self._server.reset(_api_key())
            return self._server
        self.reporter.say("starting vLLM")
        log_file = self.folder / log_name(trial.step.label, trial.step.repeat)
        # Assigned before it starts, so that it is terminated whatever happens.
        self._server = server = Server(launch.on(free_port()), log_file, self.stop, can_reset=not trial.is_last)
        server.start(lambda: self.reporter.say_now_and_then(f"still {server.phase}", HEARTBEAT_S))
        metrics["load_s"] = server.load_s
        self.reporter.say(f"ready after {server.load_s:.0f} s; {trial.workload.as_text()}")
        return server

    def _measure(self, trial: Trial, server: Server, metrics: dict[str, Any]) -> str | None:
        """Measure into `metrics`, and return the problem if the measurement is incomplete."""

        def on_progress(at: Progress) -> None:
            self.reporter.say_now_and_then(at.as_text())

        outcome = measure(
            server.target(_api_key()), trial.workload, seed=self.definition.seed_of(trial.step.repeat),
            on_progress=on_progress, stop=self.stop,
        )  # fmt: skip
        metrics |= {**outcome.metrics, "answers": list(outcome.answers), "notes": list(outcome.notes)}
        if metrics.get("prompt_tokens") is not None and "offload" not in server.launch.tiers:
            metrics["tokens_from_ram"] = metrics["tokens_from_ram"] or 0  # vLLM has no counter without the tier
        if not outcome.is_complete:
            return outcome.problem or "not finished"
        if trial.expects in server.launch.tiers:
            metrics["tier_problem"] = require_tier(outcome, trial.expects)
        return None

    def _save(
        self, trial: Trial, launch: MeasuredLaunch | None, metrics: Mapping[str, Any], started_at: datetime,
        problem: str | None,
    ) -> Result:  # fmt: skip
        server, definition = self._server, self.definition
        config = {
            definition.KEY: definition.as_json(),
            "configuration": {"label": trial.step.label, "text": trial.text},
            "machine": dict(self.provenance.machine),
            "log_file": str(server.log_file) if server is not None else None,
            "warnings": list(launch.warnings) if launch is not None else [],
            **trial.config,
        }
        measurement = self.provenance.measurement(
            trial.workload, definition.seed_of(trial.step.repeat), config, model=definition.model,
            argv=server.launch.command if server is not None else (),
            environment=server.launch.environment if server is not None else {},
            plan=launch.plan_as_json if launch is not None else None, metrics={**metrics, "problem": problem},
            started_at=started_at, is_complete=problem is None, experiment=self.name, label=trial.step.label,
            repeat=trial.step.repeat,
        )  # fmt: skip
        return save_result(self.registry, measurement)


@contextlib.contextmanager
def resumable(trials: Trials, say: Say) -> Iterator[None]:
    """End the engine in any case; when results can no longer be saved, say how to resume the experiment."""
    try:
        yield
    except CannotNow:
        command = f"overspill {trials.definition.COMMAND} --resume {trials.name}"
        say(f"earlier measurements are kept; to resume: {command}")
        raise
    finally:
        trials.end_server()


@contextlib.contextmanager
def locked(folder: Path, experiment: str) -> Iterator[None]:
    """Lock an experiment: two processes would each start an engine for the same repeat, and share a log.

    Raises if another process holds the lock. However this process ends, the kernel releases it.
    """
    path = folder / f"{experiment}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CannotMeasure(
            f"{path} cannot be written: {error.strerror}. It keeps two processes from measuring the same experiment; "
            "make the folder writable, or name another with XDG_STATE_HOME"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The owner's pid, for a refused process. The file stays: removed and recreated, it could be locked twice.
        os.truncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        pid = os.pread(handle, 20, 0).decode(errors="replace").strip()
        os.close(handle)
        raise CannotMeasure(
            f"experiment {experiment} is being measured by {f'process {pid}' if pid else 'another process'}; wait "
            "until it ends, or stop it with Ctrl-C or SIGTERM, and resume then"
        ) from None
    except OSError as error:
        os.close(handle)
        raise CannotMeasure(
            f"{path} cannot be locked: {error.strerror}; name a folder on a disk of this machine with XDG_STATE_HOME"
        ) from error
    try:
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that the first stop signal sets; the second signal ends the program."""
    stop = threading.Event()
    with on_stop_signals(stop.set, once=True):
        yield stop


def logs_folder(command: str, experiment: str, environment: Mapping[str, str] = os.environ) -> Path:
    if (folder := state_folder(environment)) is None:
        raise CannotServe("there is no home folder for vLLM's logs; set XDG_STATE_HOME")
    return folder / command / experiment


def log_name(label: str, repeat: int) -> str:
    """File name of a log; each start of an engine has its own."""
    name = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in label)[:60].strip(".") or "_"
    return f"{name}-{repeat}.log"


def _api_key() -> str | None:
    return os.environ.get("VLLM_API_KEY") or None
