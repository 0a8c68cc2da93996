"""Room for engines: measured while others come and go, held by jobs, and blocked by what hangs."""

import asyncio
import contextlib
import dataclasses
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from overspill import processes
from overspill.address import free_port
from overspill.kv.sizes import GiB
from overspill.manager.errors import NoRoom, StartFailed, StillLoading
from overspill.manager.needs import Memory, Need
from overspill.manager.states import State
from overspill.manager.web.setup import limit
from overspill.registry import Model
from overspill.serve.engine_report import Phase
from overspill.serve.status import Reached, Status, folder_of, write_status
from tests.manager_process import IMPATIENT, ROOT, Place, eventually, managing, of_folder, reckon

MACHINE = 3 * GiB


def measured(place: Place, monkeypatch: pytest.MonkeyPatch, *, late_s: float = 0.0) -> None:
    """A machine on which every engine takes 2 GiB as soon as it runs, and which has them back late after its end."""
    seen: dict[int, float] = {}

    def free() -> Memory:
        now = time.monotonic()
        seen.update(dict.fromkeys(of_folder(place.folder), now))
        return Memory(ram_bytes=MACHINE - 2 * GiB * sum(now - at <= late_s for at in seen.values()))

    monkeypatch.setattr("overspill.manager.fleet.free_memory", free)


def test_a_model_waits_while_another_loads_and_then_has_its_turn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other one has taken already must not count twice, or this one would be told that it can never fit."""
    measured(place, monkeypatch)
    place.add("a", ram=2 * GiB, behaviour={"start_s": 1.0})
    place.add("b", ram=2 * GiB)

    async def run() -> None:
        async with managing(place, memory=None) as engines:
            first = asyncio.create_task(engines.ensure_ready("a"))
            await eventually(lambda: place.starts("a"))
            await engines.ensure_ready("b")
            await first
            assert engines.snapshot("b").state is State.READY

    asyncio.run(run())


def test_memory_that_comes_back_late_is_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(place, monkeypatch, late_s=0.7)
    place.add("a", ram=2 * GiB)
    place.add("b", ram=2 * GiB)

    async def run() -> None:
        async with managing(place, memory=None, timing=dataclasses.replace(IMPATIENT, settle_s=20.0)) as engines:
            await engines.ensure_ready("a")
            await engines.ensure_ready("b")

    asyncio.run(run())


def swap_on_one_gpu(
    place: Place, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Any], None], ram: str | None = None
) -> None:
    """Two models that take 10 of 16 GiB have a turn; `meanwhile` runs between measuring and telling what is free."""

    def running() -> list[str]:
        return [name for name in ("a", "b") if engines.snapshot(name).pid is not None]

    def free() -> Memory:
        measured = Memory(gpus=(16 * GiB - 10 * GiB * len(running()),), ram_bytes=64 * GiB)
        meanwhile(engines)
        return measured

    def needs(model: Model, evictable: Memory) -> Need:
        memory = Memory(gpus=(10 * GiB,), ram_bytes=GiB)
        return Need(least=memory, takes=memory)

    monkeypatch.setattr("overspill.manager.fleet.free_memory", free)
    place.add("a")
    place.add("b")

    async def run() -> None:
        nonlocal engines
        async with managing(place, memory=limit(ram, None), reckon=needs) as engines:
            await engines.ensure_ready("a")
            await engines.ensure_ready("b")
            assert running() == ["b"]

    engines: Any = None
    asyncio.run(run())


@pytest.mark.parametrize("ram", [None, "9GiB"])
def test_a_limit_on_one_memory_leaves_the_other_to_what_is_free(
    place: Place, monkeypatch: pytest.MonkeyPatch, ram: str | None
) -> None:
    """With --ram alone, models were started on a GPU that was full."""
    swap_on_one_gpu(place, monkeypatch, lambda engines: None, ram)


def test_memory_is_measured_again_where_an_engine_ended_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model was refused: its room was counted as taken, and the engine that took it as gone."""
    ended: list[int] = []

    def until_it_ended(engines: Any) -> None:
        here = engines.snapshot("a")
        if here.state is State.STOPPING and here.pid is not None:
            while engines.snapshot("a").pid is not None:
                time.sleep(0.01)
            ended.append(here.pid)

    swap_on_one_gpu(place, monkeypatch, until_it_ended)
    assert ended, "memory was never measured while the engine ended"


def test_a_model_that_can_never_fit_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only once no other model is loading."""
    measured(place, monkeypatch)
    place.add("a", ram=2 * GiB, behaviour={"start_s": 0.5})
    place.add("huge", ram=4 * GiB)

    async def run() -> None:
        async with managing(place, memory=None) as engines:
            first = asyncio.create_task(engines.ensure_ready("a"))
            await eventually(lambda: place.starts("a"))
            with pytest.raises(NoRoom, match="would not be enough"):
                await engines.ensure_ready("huge")
            await first

    asyncio.run(run())


def test_a_refusal_reports_only_the_kind_of_memory_that_is_short(place: Place) -> None:
    place.add("huge", ram=8 * GiB)

    async def run() -> None:
        async with managing(place, memory=Memory(gpus=(1 << 60,), ram_bytes=2 * GiB)) as engines:
            with pytest.raises(NoRoom, match=r"^huge needs 8 GiB of RAM; 2 GiB of RAM is free, "):
                await engines.ensure_ready("huge")

    asyncio.run(run())


def test_a_model_that_cannot_be_planned_keeps_nobody_waiting(place: Place) -> None:
    def broken(model: Model, evictable: Memory) -> Need:
        if model.name == "bad":
            raise KeyError("num_attention_heads")
        return reckon(model, evictable)

    place.add("bad")
    place.add("b")

    async def run() -> None:
        async with managing(place, reckon=broken) as engines:
            bad = asyncio.create_task(engines.ensure_ready("bad"))
            await engines.ensure_ready("b")
            with pytest.raises(
                NoRoom, match=r"the memory that bad needs is unknown \(KeyError: 'num_attention_heads'\)"
            ):
                await bad

    asyncio.run(run())


def test_a_hung_start_is_evicted_for_a_waiting_model(place: Place) -> None:
    place.add("hung", ram=2 * GiB, behaviour={"start_s": 1000})
    place.add("b", ram=GiB)

    async def run() -> None:
        async with managing(place, timing=dataclasses.replace(IMPATIENT, load_s=1.5)) as engines:
            with pytest.raises(StillLoading):
                await engines.ensure_ready("hung")
            await engines.ensure_ready("b", within=20)
            assert engines.snapshot("hung").state is State.STOPPED

    asyncio.run(run())


def test_a_start_does_not_last_for_ever(place: Place) -> None:
    place.add("hung", behaviour={"start_s": 1000})

    async def run() -> None:
        async with managing(place, timing=dataclasses.replace(IMPATIENT, start_s=0.5)) as engines:
            with pytest.raises(StartFailed, match=r"while it was starting after it had not answered for 0\.5 s"):
                await engines.ensure_ready("hung")

    asyncio.run(run())


def test_an_engine_that_is_held_is_not_stopped_for_another(place: Place) -> None:
    place.add("a", ram=2 * GiB)
    place.add("b", ram=2 * GiB)

    async def run() -> None:
        async with managing(place, timing=dataclasses.replace(IMPATIENT, drain_s=0.2)) as engines:
            async with engines.using("a", hold=True):
                with pytest.raises(NoRoom, match=r"a is being measured\. Ask again later") as raised:
                    await engines.ensure_ready("b")
                assert raised.value.retry_after_s
                assert engines.snapshot("a").state is State.READY
            await engines.ensure_ready("b")

    asyncio.run(run())


def test_nothing_is_started_while_the_machine_is_reserved(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place) as engines:
            with engines.reserved("job 7 has the machine"):
                with pytest.raises(NoRoom, match="a is not started now: job 7 has the machine"):
                    await engines.ensure_ready("a")
                assert not place.starts("a")
            await engines.ensure_ready("a")

    asyncio.run(run())


def test_a_reservation_stops_a_start_being_planned(place: Place) -> None:
    """The engine was started all the same, inside the job's reservation."""
    place.add("a")
    is_planning, may_end = threading.Event(), threading.Event()

    def slow(model: Model, evictable: Memory) -> Need:
        is_planning.set()
        may_end.wait(30)
        return reckon(model, evictable)

    async def run() -> None:
        async with managing(place, reckon=slow) as engines:
            starting = asyncio.create_task(engines.ensure_ready("a"))
            await eventually(is_planning.is_set)
            with engines.reserved("job 7 has the machine"):
                may_end.set()
                with pytest.raises(NoRoom, match="a is not started now: job 7 has the machine"):
                    await starting
                assert not place.starts("a")

    asyncio.run(run())


@contextlib.contextmanager
def started_by_hand(place: Place, port: int) -> "Iterator[subprocess.Popen[bytes]]":
    program = [sys.executable, "-S", str(ROOT / "tests/fake_server.py"), str(place.behaviours), "a"]
    child = subprocess.Popen([*program, "--host", "127.0.0.1", "--port", str(port)], start_new_session=True)
    now = datetime.now(UTC).isoformat()
    status = Status(
        pid=child.pid, process=processes.identity(child.pid), host=platform.node(), model="a", source="x",
        served_name="a", url=f"http://127.0.0.1:{port}", phase=Phase.READY,
        phases=(Reached(phase=Phase.READY, at=now),), started_at=now, ready_at=now, plan={"device": "cpu"},
    )  # fmt: skip
    try:
        write_status(status, folder_of())
        yield child
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()


def test_a_paused_unmanaged_server_is_not_killed(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        timing = dataclasses.replace(IMPATIENT, silent_s=0.3, health_s=0.2, look_ready_s=0.1)
        with started_by_hand(place, free_port()) as child:
            async with managing(place, timing=timing) as engines:
                await eventually(lambda: engines.snapshot("a").state is State.READY)
                assert not engines.snapshot("a").is_managed
                child.send_signal(signal.SIGSTOP)
                await eventually(lambda: engines.snapshot("a").state is not State.READY)
                await asyncio.sleep(2 * timing.stop_patience_s)
                assert child.poll() is None and engines.snapshot("a").state is State.STARTING
                child.send_signal(signal.SIGCONT)
                await eventually(lambda: engines.snapshot("a").state is State.READY)

    asyncio.run(run())


def test_an_unreadable_process_is_not_taken_for_dead() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    own: Callable[[], str | None] = lambda: processes.identity(os.getpid())  # noqa: E731
    alive = own()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 256), before[1]))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            own()
        with pytest.raises(OSError, match="Too many open files"):
            list(processes.processes())
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert alive is not None and own() == alive


def test_an_engine_survives_the_manager_running_out_of_files(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        timing = dataclasses.replace(IMPATIENT, stop_patience_s=0.2, look_ready_s=0.05)
        async with managing(place, timing=timing) as engines:
            pid = (await engines.start("a")).pid
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            for _ in range(2):
                opened: list[int] = []
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 256), before[1]))
                try:
                    with contextlib.suppress(OSError):
                        while True:
                            opened.append(os.open("/dev/null", os.O_RDONLY))
                    await asyncio.sleep(0.5)
                finally:
                    for descriptor in opened:
                        os.close(descriptor)
                    resource.setrlimit(resource.RLIMIT_NOFILE, before)
                await asyncio.sleep(1.5)
            snapshot = engines.snapshot("a")
            assert (snapshot.state, snapshot.pid) == (State.READY, pid), snapshot.error

    asyncio.run(run())
