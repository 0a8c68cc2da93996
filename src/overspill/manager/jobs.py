"""Jobs: benchmarks, comparisons and proofs started from the page, as processes with a log, one after the other."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from overspill.kv.errors import OverspillError
from overspill.manager import logs
from overspill.manager.engine import Engine
from overspill.manager.errors import ManagerError
from overspill.manager.fleet import Engines
from overspill.manager.job_commands import JobKind, command
from overspill.manager.records import Records
from overspill.manager.states import State
from overspill.measure.experiment import compare_results
from overspill.processes import identity, wait_until_none
from overspill.registry import Registry, Result, UnknownRecord, get_result, list_results

logger = logging.getLogger(__name__)

_KEPT_JOBS = 100
_PATIENCE_S = 60.0
_MOST_WAITING = 20
_LOOK_S = 0.2
_OUTLIVED = "the job outlived the manager that started it, so its exit code is unknown; its log shows how it ended"
# The first line of `overspill ab` and `overspill tune`, and the last of `overspill bench`. Time and model do not tell
# whose a result is: a terminal may measure the same model at the same time.
_EXPERIMENT = re.compile(r"^(?:experiment|tuning) (\S+): ", re.MULTILINE)
_RESULT = re.compile(r"^saved as result (\d+)$")
# The current one of several measurements, and the progress within a measurement.
_STEP = re.compile(r"^\[(\d+)/(\d+)\] ")
_REQUESTS = re.compile(r"(?:^|: )(\d+)/(\d+) requests in ")
_HEAD_BYTES = 64 * 1024
_LAST_LINES = 50
_LISTED = 20
_RESUMABLE: Mapping[str, tuple[str, ...]] = {JobKind.AB: (), JobKind.TUNE: ("budget", "dry_run")}
"""Kinds that can be resumed, with the fields that an experiment's definition lacks and a resume must repeat."""


class JobState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    """The manager that started the job ended first, so the job's outcome is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: int
    kind: str
    model: str
    given: Mapping[str, str] = field(default_factory=dict)
    stops_others: bool = False
    """Whether running engines are stopped first to free their memory."""
    state: JobState = JobState.WAITING
    argv: tuple[str, ...] = ()
    pid: int | None = None
    process: str | None = None
    log_file: str
    asked_at: float
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    error: str = ""

    @property
    def is_over(self) -> bool:
        return self.state not in (JobState.WAITING, JobState.RUNNING)

    @property
    def is_alive(self) -> bool:
        """Whether the job's process lives, even if an earlier manager started it."""
        if self.pid is None or self.process is None:
            return False
        try:
            return identity(self.pid) == self.process
        except OSError:  # unknown for now, as when too many files are open
            return True

    @property
    def needs_engine(self) -> bool:
        """True for a bench, which measures a served model; the other kinds start engines of their own."""
        return self.kind == JobKind.BENCH


def _seen_again(job: Job) -> Job:
    """A stored job, marked as lost if it ended unseen; in its own session, a job may outlive its manager."""
    if job.is_over or job.is_alive:
        return job
    when = "while the job was waiting" if job.state is JobState.WAITING else "while the job ran, and the job ended too"
    return replace(job, state=JobState.LOST, error=f"the manager ended {when}")


class Jobs:
    """Queue of jobs that run one at a time: two measurements at once would measure each other."""

    def __init__(self, engines: Engines, folder: Path) -> None:
        self._engines, self._records = engines, Records(folder, Job)
        self._jobs = {job.id: _seen_again(job) for job in self._records.read_all()}
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped: set[int] = set()
        self._turn: dict[int, asyncio.Task[None]] = {}
        """Task of the current job, by number; at most one."""
        self._woken = asyncio.Event()

    def list(self) -> list[Job]:
        """All jobs, newest first."""
        return [self._jobs[number] for number in sorted(self._jobs, reverse=True)]

    def get(self, number: int) -> Job:
        if number not in self._jobs:
            raise UnknownJob(f"there is no job {number}; /api/jobs lists them")
        return self._jobs[number]

    def is_stopping(self, number: int) -> bool:
        """Whether the job got SIGINT and has not ended yet; a second stop kills it."""
        return number in self._stopped

    def processes(self) -> dict[str, int]:
        """Pids of running jobs, for measuring their memory."""
        return {f"job {one.id}": one.pid for one in self._jobs.values() if one.state is JobState.RUNNING and one.pid}

    async def add(self, kind: JobKind, model: str, given: Mapping[str, str], *, stops_others: bool = False) -> Job:
        await self._engines.known(model)
        command(kind, model, given)  # raises now if the form is invalid
        if sum(not one.is_over for one in self._jobs.values()) >= _MOST_WAITING:
            raise ManagerError(f"{_MOST_WAITING} jobs wait already; stop some of them first")
        number = max(self._jobs, default=0) + 1
        job = Job(
            id=number, kind=str(kind), model=model, given=dict(given), stops_others=stops_others,
            log_file=str(self._log_file(number)), asked_at=time.time(),
        )  # fmt: skip
        self._keep(job)
        self._forget_old()
        self._woken.set()
        return job

    async def stop(self, number: int) -> Job:
        """Stop a job as Ctrl-C would: its processes end, and its measurements so far are kept."""
        job = self.get(number)
        if job.state is JobState.WAITING:
            self._keep(replace(job, state=JobState.STOPPED, ended_at=time.time()))
            if number in self._turn:  # it waits for its engine, and blocks the jobs behind it
                self._turn[number].cancel()
        elif job.state is JobState.RUNNING:
            self._signal(job, signal.SIGKILL if number in self._stopped else signal.SIGINT)
            self._stopped.add(number)
        return self.get(number)

    async def run(self) -> None:
        """Run jobs for ever; on cancellation, end the running job."""
        try:
            while True:
                due = [one for one in self._jobs.values() if not one.is_over]
                if not due:
                    self._woken.clear()
                    await self._woken.wait()
                    continue
                # A job that an earlier manager started goes first: it already runs.
                job = min(due, key=lambda one: (one.state is JobState.WAITING, one.id))
                turn = self._turn[job.id] = asyncio.create_task(self._run(job), name=f"job {job.id}")
                try:
                    await asyncio.wait({turn})
                finally:
                    turn.cancel()
                    del self._turn[job.id]
                if not turn.cancelled() and (error := turn.exception()) is not None:
                    # Only this job fails: those that wait must not wait for ever.
                    logger.error("Overspill: job %d failed", job.id, exc_info=error)
                    why = f"{type(error).__name__}: {error}; the manager's log says where"
                    self._keep(replace(self.get(job.id), state=JobState.FAILED, ended_at=time.time(), error=why))
        finally:
            await asyncio.to_thread(self._end_all)

    async def _run(self, job: Job) -> None:
        if job.state is JobState.RUNNING:
            await self._outlast(job)
            return
        try:
            async with self._promised(job) as engine:
                url, served = (None, "") if engine is None else (engine.url, next(iter(engine.served), job.model))
                words = command(JobKind(job.kind), job.model, job.given, url=url, served=served)
                await self._run_process(job, words)
        except OverspillError as error:
            self._keep(replace(self.get(job.id), state=JobState.FAILED, ended_at=time.time(), error=str(error)))

    @contextlib.asynccontextmanager
    async def _promised(self, job: Job) -> AsyncIterator[Engine | None]:
        """Hold what a job needs while it runs: the engine it measures, or the memory of all engines."""
        if job.needs_engine:
            # The engine is neither unloaded as idle nor evicted, however long other requests wait.
            async with self._engines.using(job.model, hold=True) as engine:
                yield engine
        elif job.stops_others:
            why = f"job {job.id} ({job.kind} of {job.model}) uses the memory of all engines; stop it, or wait for it"
            with self._engines.reserved(why):
                over = (State.STOPPED, State.FAILED)
                running = [one.name for one in self._engines.snapshots() if one.state not in over]
                reason = f"job {job.id} ({job.kind} of {job.model}) needs its memory"
                await asyncio.gather(*(self._engines.stop(name, reason=reason) for name in running))
                yield None
        else:
            yield None

    async def _run_process(self, job: Job, words: Sequence[str]) -> None:
        try:
            with open(job.log_file, "wb") as log:
                child = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    cwd=self._records.folder,
                )  # fmt: skip
        except OSError as error:
            raise ManagerError(f"the job could not be started: {error}") from error
        self._children[job.id] = child
        job = replace(
            job, state=JobState.RUNNING, argv=tuple(words), pid=child.pid, process=identity(child.pid),
            started_at=time.time(),
        )  # fmt: skip
        self._keep(job)
        while (code := child.poll()) is None:
            await asyncio.sleep(_LOOK_S)
        del self._children[job.id]
        self._note_end(job, JobState.DONE if code == 0 else JobState.FAILED, code)

    async def _outlast(self, job: Job) -> None:
        """Wait for a job that outlived its manager, as two measurements would disturb each other."""
        holding = asyncio.create_task(self._hold(job))
        try:
            while job.is_alive:
                await asyncio.sleep(_LOOK_S)
        finally:
            holding.cancel()
        # The exit code went to the process that adopted the job.
        self._note_end(job, JobState.FAILED if _said(_last_lines(Path(job.log_file))) else JobState.LOST, None)

    async def _hold(self, job: Job) -> None:
        is_gone = job.needs_engine and self._engines.snapshot(job.model).pid is None
        if is_gone:  # the job will report that; another engine would not help it
            return
        with contextlib.suppress(OverspillError):
            async with self._promised(job):
                await asyncio.Event().wait()

    def _note_end(self, job: Job, state: JobState, code: int | None) -> None:
        if job.id in self._stopped:
            self._stopped.discard(job.id)
            state = JobState.STOPPED
        why = _last_error(Path(job.log_file)) if state is JobState.FAILED else ""
        why = _OUTLIVED if state is JobState.LOST else why
        self._keep(replace(job, state=state, ended_at=time.time(), exit_code=code, error=why))

    def _end_all(self) -> None:
        """End running jobs, and block until their processes are gone."""
        for job in self.list():
            if job.state is JobState.RUNNING:
                self._end(job)

    def _end(self, job: Job) -> None:
        self._signal(job, signal.SIGINT)
        if not wait_until_none(lambda: [job.id] if job.is_alive else [], _PATIENCE_S):
            self._signal(job, signal.SIGKILL)
        child = self._children.pop(job.id, None)
        code = child.wait() if child is not None else None
        why = "the manager was stopped"
        self._keep(replace(job, state=JobState.STOPPED, ended_at=time.time(), exit_code=code, error=why))

    def _signal(self, job: Job, sign: signal.Signals) -> None:
        if job.pid is not None and job.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, sign) if sign is not signal.SIGKILL else os.killpg(job.pid, sign)

    def _keep(self, job: Job) -> None:
        self._jobs[job.id] = job
        with contextlib.suppress(OSError):  # a full disk: the job continues, but the next manager will not know it
            self._records.write(str(job.id), job)

    def _log_file(self, number: int) -> Path:
        return self._records.folder / f"{number}.log"

    def _forget_old(self) -> None:
        over = [number for number in sorted(self._jobs) if self._jobs[number].is_over]
        for number in over[: max(0, len(self._jobs) - _KEPT_JOBS)]:
            del self._jobs[number]
            with contextlib.suppress(OSError):
                self._records.remove(str(number))
                self._log_file(number).unlink(missing_ok=True)


class UnknownJob(ManagerError):
    """No job has this number."""


def _last_error(log: Path) -> str:
    lines = _last_lines(log)
    return (_said(lines) or lines or [""])[-1][:500]


def _last_lines(log: Path) -> list[str]:
    return [line for line in logs.tail(log, 40) if line.strip()]


def _said(lines: Sequence[str]) -> list[str]:
    """Lines with an error, in the form that all commands print."""
    return [line for line in lines if line.startswith("error: ")]


# Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results that a job's output names and the registry still has."""

    results: tuple[int, ...] = ()
    """Numbers of the results; only the newest if there are many."""
    experiment: str | None = None
    """Name under which the results are compared."""
    can_go_on: bool = False


def measured(registry: Registry, job: Job) -> Measured:
    """Results of a job, read from its log and the registry. Blocks."""
    log = Path(job.log_file)
    if job.kind == JobKind.BENCH:
        result = _saved_result(registry, log)
        return Measured() if result is None else Measured(results=(result.id,), experiment=result.experiment)
    name = experiment_of(log)
    results = list_results(registry, experiment=name) if name is not None else []
    if not results:
        return Measured()
    numbers = tuple(sorted(one.id for one in results)[-_LISTED:])
    return Measured(results=numbers, experiment=name, can_go_on=_is_cut_short(job, results))


def progress(job: Job) -> tuple[float | None, str] | None:
    """Share of the work done, if the output shows it, and the last log line; None before the first line."""
    lines = _last_lines(Path(job.log_file))
    if not lines:
        return None
    step, requests = _STEP.match(lines[-1]), _REQUESTS.search(lines[-1])
    share = int(requests[1]) / max(1, int(requests[2])) if requests else None
    if step is not None:
        share = (int(step[1]) - 1 + (share or 0.0)) / int(step[2])
    return share, lines[-1]


def experiment_of(log: Path) -> str | None:
    try:
        with log.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:  # the job never ran
        return None
    found = _EXPERIMENT.search(head)
    return found[1] if found else None


def given_to_resume(job: Job, experiment: str) -> dict[str, str]:
    """Form fields of a new job that does the rest of this one."""
    kept = {name: job.given[name] for name in _RESUMABLE[job.kind] if name in job.given}
    return {"resume": experiment, **kept}


def _saved_result(registry: Registry, log: Path) -> Result | None:
    found = [match[1] for line in logs.tail(log, _LAST_LINES) if (match := _RESULT.match(line))]
    try:
        return get_result(registry, int(found[-1])) if found else None
    except UnknownRecord:  # the registry was replaced since
        return None


def _is_cut_short(job: Job, results: list[Result]) -> bool:
    if job.kind not in _RESUMABLE or job.state not in (JobState.STOPPED, JobState.FAILED, JobState.LOST):
        return False
    # A comparison also fails if a tier served nothing, but then no measurement is missing.
    return job.kind != JobKind.AB or not compare_results(results[::-1]).is_complete
