"""Jobs: what they are promised while they run, and what becomes of them when they are stopped or their manager dies."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill.kv.sizes import GiB
from overspill.manager import jobs
from overspill.manager.errors import NoRoom
from overspill.manager.fleet import Engines
from overspill.manager.job_commands import JobKind
from overspill.manager.jobs import Job, Jobs, JobState, _seen_again
from overspill.manager.records import Records
from overspill.manager.states import State
from overspill.processes import identity
from tests.managed_process import ManagedProcess, QuickPlace, managed_process, until
from tests.manager_process import IMPATIENT, Place, eventually, managing

SLEEPS = (sys.executable, "-S", "-c", "import time; time.sleep(600)")


@pytest.fixture
def program(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What every job runs, in place of `overspill bench` and the others."""
    words = [*SLEEPS, str(place.folder)]
    monkeypatch.setattr(jobs, "command", lambda kind, model, given, **more: list(words))
    return words


@contextlib.asynccontextmanager
async def queued(engines: Engines, folder: Path) -> AsyncIterator[Jobs]:
    jobs = Jobs(engines, folder)
    task = asyncio.create_task(jobs.run())
    try:
        yield jobs
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def with_jobs(place: Place, run: Callable[[Engines, Jobs], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with managing(place, **options) as engines, queued(engines, place.folder / "jobs") as jobs:
            await run(engines, jobs)

    asyncio.run(main())


async def until_it_is(jobs: Jobs, number: int, state: JobState) -> None:
    await eventually(lambda: jobs.get(number).state is state)


def test_a_bench_stopped_during_a_load_does_not_block_the_next(place: Place, program: list[str]) -> None:
    """The bench failed later, when its engine did not start, and the next job waited for that engine."""
    place.add("slow", behaviour={"start_s": 60})
    place.add("a")

    async def run(engines: Engines, jobs: Jobs) -> None:
        await jobs.add(JobKind.BENCH, "slow", {})
        await jobs.add(JobKind.BENCH, "a", {})
        await eventually(lambda: engines.snapshot("slow").state is State.STARTING)
        assert (await jobs.stop(1)).state is JobState.STOPPED
        await until_it_is(jobs, 2, JobState.RUNNING)
        assert engines.snapshot("slow").state is State.STARTING, "the second job waited for the first one's engine"
        await engines.stop("slow")  # which refuses all that wait for it
        await asyncio.sleep(0.1)
        assert jobs.get(1).state is JobState.STOPPED and jobs.get(1).pid is None

    with_jobs(place, run)


def test_an_unexpected_error_in_a_job_does_not_block_the_next(
    place: Place, program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add("a")
    real = Jobs._run_process

    async def fails_once(self: Jobs, job: Job, words: list[str]) -> None:
        if job.id == 1:
            raise ZeroDivisionError("division by zero")
        await real(self, job, words)

    monkeypatch.setattr(Jobs, "_run_process", fails_once)

    async def run(engines: Engines, jobs: Jobs) -> None:
        for _ in range(2):
            await jobs.add(JobKind.BENCH, "a", {})
        await until_it_is(jobs, 2, JobState.RUNNING)
        failed = jobs.get(1)
        assert failed.state is JobState.FAILED and failed.error.startswith("ZeroDivisionError: division by zero")

    with_jobs(place, run)


def test_the_engine_of_a_bench_is_not_stopped_for_another_model(place: Place, program: list[str]) -> None:
    """A request for another model drained it, and stopped it in the middle of the measurement."""
    for name in ("a", "b"):
        place.add(name, ram=2 * GiB)

    async def run(engines: Engines, jobs: Jobs) -> None:
        job = await jobs.add(JobKind.BENCH, "a", {})
        await until_it_is(jobs, job.id, JobState.RUNNING)
        with pytest.raises(NoRoom, match="a is being measured"):
            await engines.ensure_ready("b")
        await asyncio.sleep(0.3)  # longer than least_service_s and drain_s together
        assert engines.snapshot("a").state is State.READY and not engines.snapshot("a").is_draining
        await jobs.stop(job.id)
        await until_it_is(jobs, job.id, JobState.STOPPED)
        await engines.ensure_ready("b")
        assert len(place.starts("a")) == 1

    with_jobs(place, run, timing=dataclasses.replace(IMPATIENT, drain_s=0.05, least_service_s=0.0))


def test_engines_stopped_for_a_job_stay_stopped_until_it_ends(place: Place, program: list[str]) -> None:
    """The next request restarted them, in the memory that the job was promised."""
    place.add("a", behaviour={"start_s": 60})
    place.add("b")

    async def run(engines: Engines, jobs: Jobs) -> None:
        await engines.ensure_ready("b")
        asking = asyncio.create_task(engines.ensure_ready("a"))
        await eventually(lambda: engines.snapshot("a").state is State.STARTING)
        job = await jobs.add(JobKind.VERIFY, "a", {}, stops_others=True)
        await until_it_is(jobs, job.id, JobState.RUNNING)
        assert (await asyncio.gather(asking, return_exceptions=True))[0] is not None
        for name in ("a", "b"):
            assert engines.snapshot(name).state is State.STOPPED
            with pytest.raises(NoRoom, match=rf"job {job.id} \(verify of a\) .*stop it, or wait for it"):
                await engines.ensure_ready(name)
            with pytest.raises(NoRoom):
                await engines.start(name)
        await jobs.stop(job.id)
        await until_it_is(jobs, job.id, JobState.STOPPED)
        await engines.ensure_ready("b")

    with_jobs(place, run)


def test_a_job_that_stops_nobody_reserves_nothing(place: Place, program: list[str]) -> None:
    place.add("a")

    async def run(engines: Engines, jobs: Jobs) -> None:
        job = await jobs.add(JobKind.VERIFY, "a", {})
        await until_it_is(jobs, job.id, JobState.RUNNING)
        await engines.ensure_ready("a")

    with_jobs(place, run)


# The manager's crash: jobs have sessions of their own, and outlive it.


@contextlib.contextmanager
def left_behind(
    place: Place, code: str = "import time; time.sleep(600)", **job: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    """A job as a manager leaves it that is killed: its process runs, and its record says so."""
    records, log_file = Records(place.folder / "jobs", Job), place.folder / "jobs/1.log"
    words = [sys.executable, "-S", "-c", code, str(place.folder)]
    with log_file.open("wb") as log:
        child = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.PIPE, start_new_session=True)
    told: dict[str, Any] = {"kind": "verify", "model": "a", "asked_at": 1.0, "started_at": 1.0, **job}
    process = identity(child.pid)
    running = Job(id=1, state=JobState.RUNNING, pid=child.pid, process=process, log_file=str(log_file), **told)
    records.write("1", running)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def test_a_job_outliving_its_manager_is_awaited_and_stoppable(place: Place, program: list[str]) -> None:
    """The job was shown as lost while it ran on, nothing could stop it, and the next job measured beside it."""
    place.add("a")

    async def run(engines: Engines, jobs: Jobs) -> None:
        assert jobs.get(1).state is JobState.RUNNING
        assert jobs.processes() == {"job 1": child.pid}
        job = await jobs.add(JobKind.VERIFY, "a", {})
        await asyncio.sleep(0.5)
        assert jobs.get(job.id).state is JobState.WAITING
        await jobs.stop(1)
        await until_it_is(jobs, job.id, JobState.RUNNING)
        assert child.wait(5) == -signal.SIGINT and jobs.get(1).state is JobState.STOPPED

    with left_behind(place) as child:
        with_jobs(place, run)


@pytest.mark.parametrize(
    ("says", "state", "told"),
    [
        ("error: the engine at X does not answer", JobState.FAILED, "error: the engine at X does not answer"),
        ("saved as result 7", JobState.LOST, "its exit code is unknown; its log shows how it ended"),
    ],
)
def test_the_end_of_a_left_behind_job_is_read_from_its_log(place: Place, says: str, state: JobState, told: str) -> None:
    place.add("a")

    async def run(engines: Engines, jobs: Jobs) -> None:
        child.communicate(b"go on")
        await until_it_is(jobs, 1, state)
        assert told in jobs.get(1).error and jobs.get(1).exit_code is None and jobs.get(1).ended_at

    with left_behind(place, code=f"input(); print({says!r})") as child:
        with_jobs(place, run)


def test_a_left_behind_job_is_stopped_with_the_next_manager(place: Place) -> None:
    place.add("a")

    async def run(engines: Engines, jobs: Jobs) -> None:
        await asyncio.sleep(0.1)
        assert jobs.get(1).state is JobState.RUNNING

    with left_behind(place) as child:
        with_jobs(place, run)
        assert child.poll() == -signal.SIGINT
    (job,) = Records(place.folder / "jobs", Job).read_all()
    assert job.state is JobState.STOPPED and "the manager was stopped" in job.error


def test_jobs_running_or_waiting_at_a_crash_are_lost(place: Place) -> None:
    place.add("a")
    with left_behind(place) as child:
        pass
    records = Records(place.folder / "jobs", Job)
    records.write("2", Job(id=2, kind="verify", model="a", log_file="2.log", asked_at=1.0))
    # Another process has its number by now.
    stranger = Job(id=3, kind="verify", model="a", log_file="3.log", asked_at=1.0, state=JobState.RUNNING)
    stranger = dataclasses.replace(stranger, pid=os.getpid(), process="another boot:1")
    records.write("3", stranger)
    assert child.returncode is not None
    assert {job.id: _seen_again(job).state for job in records.read_all()} == dict.fromkeys((1, 2, 3), JobState.LOST)


def test_a_left_behind_job_keeps_its_reservations(place: Place, program: list[str]) -> None:
    for name in ("a", "b"):
        place.add(name, ram=2 * GiB)

    async def bench(engines: Engines) -> None:
        await engines.ensure_ready("a")
        async with queued(engines, place.folder / "jobs"):
            await eventually(lambda: engines.traffic("a").in_flight)
            with pytest.raises(NoRoom, match="a is being measured"):
                await engines.ensure_ready("b")
        await engines.ensure_ready("b")

    async def verify(engines: Engines) -> None:
        async with queued(engines, place.folder / "jobs"):
            await eventually(lambda: engines._swaps.reserved_for)
            with pytest.raises(NoRoom, match=r"job 1 \(verify of a\)"):
                await engines.ensure_ready("b")
        await engines.ensure_ready("b")

    async def bench_without_engine(engines: Engines) -> None:
        async with queued(engines, place.folder / "jobs"):
            await asyncio.sleep(0.3)
        assert not place.starts("a"), "an engine was started for a job that asks another one"

    async def main(run: Callable[[Engines], Awaitable[None]]) -> None:
        async with managing(place) as engines:
            await run(engines)

    with left_behind(place, kind="bench"):
        asyncio.run(main(bench_without_engine))
    with left_behind(place, kind="bench"):
        asyncio.run(main(bench))
    with left_behind(place, kind="verify", stops_others=True):
        asyncio.run(main(verify))


def test_a_bench_goes_on_over_a_crash_of_the_whole_manager(tmp_path: Path) -> None:
    place = QuickPlace(tmp_path)
    place.add("a")
    slow = {"kind": "bench", "model": "a", "given": {"workload": "multi-turn:conversations=1,turns=50,think_time=60"}}
    crashed = ManagedProcess(place)
    try:
        crashed.wait_until_it_answers()
        with crashed.client() as client:
            assert client.post("/api/jobs", json=slow).status_code == 201
            until(lambda: client.get("/api/jobs/1").json()["state"] == "running")
            began = client.get("/api/jobs/1").json()
    finally:
        crashed.process.kill()
        crashed.process.wait()
    with managed_process(place) as running, running.client() as client:
        found = client.get("/api/jobs/1").json()
        assert (found["state"], found["pid"]) == ("running", began["pid"])
        until(lambda: client.get("/api/engines/a").json()["traffic"]["in_flight"] >= 1)
        client.post("/api/jobs/1/stop")
        until(lambda: client.get("/api/jobs/1").json()["state"] == "stopped")
        assert identity(began["pid"]) is None
