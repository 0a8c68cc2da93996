"""Jobs: benchmarks, comparisons and proofs that the page starts, as processes with a log, one after the other."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from overspill.kv.errors import OverspillError
from overspill.manager import logs
from overspill.manager.engines.engine import Engine
from overspill.manager.engines.fleet import Engines
from overspill.manager.engines.states import State
from overspill.manager.errors import ManagerError
from overspill.manager.jobs.commands import JobKind, command, known_kinds, needs_engine
from overspill.manager.jobs.records import Job, JobState, Records
from overspill.processes import identity, wait_until_none

logger = logging.getLogger(__name__)

_KEPT = 100
_PATIENCE_S = 60.0
_MOST_WAITING = 20
_LOOK_S = 0.2
_OUTLIVED = "it outlived the manager that began it, so its exit code is not known; its log says how it ended"


class Jobs:
    """They run one at a time: two measurements at once would measure each other."""

    def __init__(self, engines: Engines, folder: Path) -> None:
        self._engines, self._records = engines, Records(folder)
        self._jobs = {job.id: job for job in self._records.read_all()}
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped: set[int] = set()
        self._turn: dict[int, asyncio.Task[None]] = {}
        """Whose turn it is: one job at most."""
        self._woken = asyncio.Event()

    def list(self) -> list[Job]:
        """The newest first."""
        return [self._jobs[number] for number in sorted(self._jobs, reverse=True)]

    def get(self, number: int) -> Job:
        if number not in self._jobs:
            raise UnknownJob(f"there is no job {number}; /api/jobs lists them")
        return self._jobs[number]

    def is_stopping(self, number: int) -> bool:
        """Whether it was asked to end, and has not yet: asked again, it is killed."""
        return number in self._stopped

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
            log_file=str(self._records.log_file(number)), asked_at=time.time(),
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
            if number in self._turn:  # it waits for its engine, and would keep others waiting
                self._turn[number].cancel()
        elif job.state is JobState.RUNNING:
            # Asked a second time, it is not asked any more.
            self._signal(job, signal.SIGKILL if number in self._stopped else signal.SIGINT)
            self._stopped.add(number)
        return self.get(number)

    async def run(self) -> None:
        """For ever; cancelled, it ends the job that runs."""
        try:
            while True:
                due = [one for one in self._jobs.values() if not one.is_over]
                if not due:
                    self._woken.clear()
                    await self._woken.wait()
                    continue
                # One that an earlier manager began goes first: it runs already.
                job = min(due, key=lambda one: (one.state is JobState.WAITING, one.id))
                turn = self._turn[job.id] = asyncio.create_task(self._run(job), name=f"job {job.id}")
                try:
                    await asyncio.wait({turn})
                finally:
                    turn.cancel()
                    del self._turn[job.id]
                if not turn.cancelled() and (error := turn.exception()) is not None:
                    # Of this job: those that wait must not wait for ever.
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
        """What a job has while it runs: the engine that it measures, or the memory of all of them."""
        if needs_engine(JobKind(job.kind)):
            # Neither unloaded as idle nor evicted, however long others wait.
            async with self._engines.using(job.model, hold=True) as engine:
                yield engine
        elif job.stops_others:
            why = f"job {job.id}, a {job.kind} of {job.model}, has the memory of all; stop it, or ask again after it"
            with self._engines.reserved(why):
                over = (State.STOPPED, State.FAILED)
                running = [one.name for one in self._engines.snapshots() if one.state not in over]
                told = f"job {job.id}, a {job.kind} of {job.model}, needs its memory"
                await asyncio.gather(*(self._engines.stop(name, reason=told) for name in running))
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
        """A job that outlived the manager that began it: waited for, as nothing may be measured beside it."""
        holding = asyncio.create_task(self._hold(job))
        try:
            while job.is_alive:
                await asyncio.sleep(_LOOK_S)
        finally:
            holding.cancel()
        # Its exit code went to whoever adopted it.
        self._note_end(job, JobState.FAILED if _said(_last_lines(Path(job.log_file))) else JobState.LOST, None)

    async def _hold(self, job: Job) -> None:
        is_gone = needs_engine(JobKind(job.kind)) and self._engines.snapshot(job.model).pid is None
        if is_gone:  # the job will say so; another engine would not help it
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
        """Blocks until what they started is gone."""
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
        self._records.write(job)

    def _forget_old(self) -> None:
        over = [number for number in sorted(self._jobs) if self._jobs[number].is_over]
        for number in over[: max(0, len(self._jobs) - _KEPT)]:
            del self._jobs[number]
            self._records.remove(number)


class UnknownJob(ManagerError):
    """No job of that number."""


def _last_error(log: Path) -> str:
    lines = _last_lines(log)
    return (_said(lines) or lines or [""])[-1][:500]


def _last_lines(log: Path) -> list[str]:
    return [line for line in logs.tail(log, 40) if line.strip()]


def _said(lines: Sequence[str]) -> list[str]:
    """What a command gave as the reason, as all of them do."""
    return [line for line in lines if line.startswith("error: ")]
