"""Jobs: benchmarks, comparisons and proofs that the page starts, as processes with a log, one after the other."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from overspill.files import replace_file
from overspill.kv.errors import OverspillError
from overspill.manager import logs
from overspill.manager.engines.fleet import Engines
from overspill.manager.errors import ManagerError
from overspill.manager.jobs.commands import JobKind, command, known_kinds, needs_engine
from overspill.processes import identity

_KEPT = 100
_PATIENCE_S = 60.0
_MOST_WAITING = 20


class JobState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    """The manager that ran it ended, and so did it, unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: int
    kind: str
    model: str
    given: Mapping[str, str] = field(default_factory=dict)
    stops_others: bool = False
    """Whether engines that run are stopped first, for their memory."""
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

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "argv": list(self.argv), "state": str(self.state)}


class Jobs:
    """They run one at a time: two measurements at once would measure each other."""

    def __init__(self, engines: Engines, folder: Path) -> None:
        self._engines, self._folder = engines, folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._jobs = {job.id: job for job in _read(folder)}
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped: set[int] = set()
        self._woken = asyncio.Event()

    def list(self) -> list[Job]:
        """The newest first."""
        return [self._jobs[number] for number in sorted(self._jobs, reverse=True)]

    def get(self, number: int) -> Job:
        if number not in self._jobs:
            raise UnknownJob(f"there is no job {number}; /api/jobs lists them")
        return self._jobs[number]

    def processes(self) -> dict[str, int]:
        """Of those that run, for measuring their memory."""
        return {f"job {one.id}": one.pid for one in self._jobs.values() if one.state is JobState.RUNNING and one.pid}

    async def add(self, kind: JobKind, model: str, given: Mapping[str, str], *, stops_others: bool = False) -> Job:
        if kind not in known_kinds():
            raise ManagerError(f"this version has no command overspill {kind}; there are {', '.join(known_kinds())}")
        await self._engines.require_known(model)
        command(kind, model, given)  # says what is wrong with it now
        if sum(not one.is_over for one in self._jobs.values()) >= _MOST_WAITING:
            raise ManagerError(f"{_MOST_WAITING} jobs wait already; stop some of them first")
        number = max(self._jobs, default=0) + 1
        job = Job(
            id=number, kind=str(kind), model=model, given=dict(given), stops_others=stops_others,
            log_file=str(self._folder / f"{number}.log"), asked_at=time.time(),
        )  # fmt: skip
        self._keep(job)
        self._forget_old()
        self._woken.set()
        return job

    async def stop(self, number: int) -> Job:
        """As Ctrl-C would: what it started is ended, and what it measured so far is kept."""
        job = self.get(number)
        if job.state is JobState.WAITING:
            self._keep(replace(job, state=JobState.STOPPED, ended_at=time.time()))
        elif job.state is JobState.RUNNING:
            # Asked a second time, it is not asked any more.
            self._signal(job, signal.SIGKILL if number in self._stopped else signal.SIGINT)
            self._stopped.add(number)
        return self.get(number)

    async def run(self) -> None:
        """For ever; cancelled, it ends the job that runs."""
        try:
            while True:
                waiting = [one for one in self._jobs.values() if one.state is JobState.WAITING]
                if not waiting:
                    self._woken.clear()
                    await self._woken.wait()
                    continue
                await self._run(min(waiting, key=lambda one: one.id))
        finally:
            await asyncio.to_thread(self._end_all)

    async def _run(self, job: Job) -> None:
        try:
            if needs_engine(JobKind(job.kind)):
                # Held while it is measured: it is neither unloaded as idle nor evicted.
                async with self._engines.using(job.model) as engine:
                    served = engine.served[0] if engine.served else job.model
                    words = command(JobKind(job.kind), job.model, job.given, url=engine.url, served=served)
                    await self._run_process(job, words)
                return
            if job.stops_others:
                running = [one.name for one in self._engines.snapshots() if one.pid is not None]
                await asyncio.gather(*(self._engines.stop(name, reason="a job needs its memory") for name in running))
            await self._run_process(job, command(JobKind(job.kind), job.model, job.given))
        except OverspillError as error:
            self._keep(replace(self.get(job.id), state=JobState.FAILED, ended_at=time.time(), error=str(error)))

    async def _run_process(self, job: Job, words: Sequence[str]) -> None:
        if self.get(job.id).is_over:  # stopped while its engine was starting
            return
        try:
            with open(job.log_file, "wb") as log:
                child = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    cwd=self._folder,
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
            await asyncio.sleep(0.2)
        del self._children[job.id]
        state = JobState.DONE if code == 0 else JobState.FAILED
        if job.id in self._stopped:
            self._stopped.discard(job.id)
            state = JobState.STOPPED
        why = "" if state is not JobState.FAILED else _last_error(Path(job.log_file))
        self._keep(replace(job, state=state, ended_at=time.time(), exit_code=code, error=why))

    def _end_all(self) -> None:
        """Blocks until what they started is gone."""
        for number, child in self._children.items():
            self._signal(self.get(number), signal.SIGINT)
            try:
                code = child.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._signal(self.get(number), signal.SIGKILL)
                code = child.wait()
            stopped = replace(self.get(number), state=JobState.STOPPED, ended_at=time.time(), exit_code=code)
            self._keep(replace(stopped, error="the manager was stopped"))
        self._children.clear()

    def _signal(self, job: Job, sign: signal.Signals) -> None:
        if job.pid is not None and identity(job.pid) == job.process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, sign) if sign is not signal.SIGKILL else os.killpg(job.pid, sign)

    def _keep(self, job: Job) -> None:
        self._jobs[job.id] = job
        with contextlib.suppress(OSError):  # a full disk: it goes on, and is forgotten by the next manager
            replace_file(self._folder / f"{job.id}.json", json.dumps(job.as_json()))

    def _forget_old(self) -> None:
        over = [number for number in sorted(self._jobs) if self._jobs[number].is_over]
        for number in over[: max(0, len(self._jobs) - _KEPT)]:
            del self._jobs[number]
            for suffix in ("json", "log"):
                with contextlib.suppress(OSError):
                    (self._folder / f"{number}.{suffix}").unlink()


class UnknownJob(ManagerError):
    """No job of that number."""


def _read(folder: Path) -> list[Job]:
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            told = json.loads(path.read_text())
            job = Job(**{**told, "state": JobState(told["state"]), "argv": tuple(told["argv"])})
            if not job.is_over:
                job = replace(job, state=JobState.LOST, error="the manager ended while it ran")
            found.append(job)
    return found


def _last_error(log: Path) -> str:
    lines = [line for line in logs.tail(log, 40) if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    return (said or lines or [""])[-1][:500]
