"""Engines from start to stop, with real processes: those that behave, and those that do not."""

import asyncio
import contextlib
import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overspill.address import free_port
from overspill.kv.sizes import GiB
from overspill.manager import logs
from overspill.manager.backend import EngineProcess, OwnProcesses, identify
from overspill.manager.errors import AlreadyManaged, NoRoom, QueueFull, StartFailed, StillLoading, Stopped
from overspill.manager.needs import Memory
from overspill.manager.records import how_it_ended
from overspill.manager.states import State
from overspill.manager.swaps import Queue, Swaps
from overspill.registry import RunEnd, UnknownModel, edit_model, list_runs, start_run
from tests.manager_process import IMPATIENT, QUICK_TO_END, ROOT, Place, eventually, managing, of_folder, reckon


def test_an_engine_starts_is_ready_and_stops(place: Place) -> None:
    place.add("a", behaviour={"start_s": 0.2})

    async def run() -> None:
        async with managing(place) as engines:
            assert engines.snapshot("a").state is State.STOPPED
            starting = asyncio.create_task(engines.start("a"))
            await eventually(lambda: engines.snapshot("a").state is State.STARTING)
            ready = await starting
            assert ready.state is State.READY and ready.is_managed and ready.served_names == ("a",)
            assert ready.url is not None and ready.url.startswith("http://127.0.0.1:")
            assert ready.pid is not None and os.getsid(ready.pid) == ready.pid != os.getsid(0)
            assert ready.holds == Memory(ram_bytes=GiB)
            again = await engines.start("a")
            assert (again.pid, len(place.starts("a"))) == (ready.pid, 1)
            stopped = await engines.stop("a")
            assert stopped.state is State.STOPPED and stopped.pid is None and identify(ready.pid) is None
            assert (await engines.stop("a")).state is State.STOPPED
            assert "serves a on port" in "\n".join(logs.tail(engines.log_file("a")))

    asyncio.run(run())


def test_an_engine_starts_in_an_empty_working_folder(place: Place) -> None:
    """vLLM takes `tmp/x` for a folder if one is where it was started, and in / that would be any of the disk's."""
    place.add("tmp/a")

    async def run() -> None:
        async with managing(place) as engines:
            ready = await engines.start("tmp/a")
            where = Path(os.readlink(f"/proc/{ready.pid}/cwd"))
            assert where.is_relative_to(place.folder) and not list(where.iterdir())

    asyncio.run(run())


def test_starts_at_the_same_time_are_one_start(place: Place) -> None:
    place.add("a", behaviour={"start_s": 0.2})

    async def run() -> None:
        async with managing(place) as engines:
            answers = await asyncio.gather(*(engines.start("a") for _ in range(20)), engines.start("a", make_room=True))
            assert len({one.pid for one in answers}) == 1 == len(place.starts("a"))

    asyncio.run(run())


def test_a_manager_that_ends_stops_its_engines(place: Place) -> None:
    place.add("a")
    place.add("b", behaviour={"has_child": True})

    async def run() -> None:
        async with managing(place) as engines:
            await asyncio.gather(engines.start("a"), engines.start("b"))
            assert len(of_folder(place.folder)) >= 2
        assert not of_folder(place.folder)

    asyncio.run(run())


def test_engines_that_are_kept_are_adopted_by_the_next_manager(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place) as engines:
            pid = (await engines.start("a")).pid
            await engines.close(keep=True)
        async with managing(place) as engines:
            adopted = await engines.start("a")
            assert (adopted.pid, adopted.state, adopted.is_managed) == (pid, State.READY, True)
            assert len(place.starts("a")) == 1

    asyncio.run(run())


def test_a_kill_during_start_fails_with_a_reason_and_backs_off(place: Place) -> None:
    place.add("a", behaviour={"start_s": 30})

    async def run() -> None:
        async with managing(place) as engines:
            starting = asyncio.create_task(engines.ensure_ready("a"))
            await eventually(lambda: place.starts("a"))
            os.kill(place.starts("a")[0], signal.SIGKILL)
            with pytest.raises(StartFailed, match="ended while it was starting, killed by SIGKILL"):
                await starting
            failed = engines.snapshot("a")
            assert failed.state is State.FAILED and failed.retry_at is not None and failed.retry_at > time.time()
            with pytest.raises(StartFailed, match="the next try is in") as raised:
                await engines.ensure_ready("a")
            assert raised.value.retry_after_s is not None and len(place.starts("a")) == 1
            place.behave("a")
            assert (await engines.start("a")).state is State.READY  # a user need not wait
            assert engines.snapshot("a").error == ""

    asyncio.run(run())


def test_a_failed_start_reports_the_end_of_the_log(place: Place) -> None:
    place.add("a", behaviour={"dies_at_start": True, "says": "loading\nshard 3 of 4"})

    async def run() -> None:
        async with managing(place) as engines:
            with pytest.raises(StartFailed, match="exit code 1: the weights are broken") as raised:
                await engines.ensure_ready("a")
            assert raised.value.log_lines == ("loading", "shard 3 of 4", "error: the weights are broken")
            assert engines.snapshot("a").log_lines == raised.value.log_lines
            assert (await engines.stop("a")).state is State.STOPPED

    asyncio.run(run())


def test_a_program_that_is_not_there_is_a_failed_start(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place, backend=OwnProcesses(program=("/nonexistent/overspill",))) as engines:
            with pytest.raises(StartFailed, match="could not be started"):
                await engines.ensure_ready("a")
            assert engines.snapshot("a").state is State.FAILED

    asyncio.run(run())


def test_an_engine_that_dies_while_serving_has_failed(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place) as engines:
            pid = (await engines.start("a")).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: engines.snapshot("a").state is State.FAILED)
            assert "while it was serving" in engines.snapshot("a").error
            assert engines.snapshot("a").holds == Memory(), "plans counted it as memory that could be freed"

    asyncio.run(run())


def test_an_engine_terminated_from_outside_is_stopped_not_failed(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place) as engines:
            pid = (await engines.start("a")).pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
            await eventually(lambda: engines.snapshot("a").state is State.STOPPED)
            assert engines.snapshot("a").error == "" and engines.snapshot("a").holds == Memory()

    asyncio.run(run())


@pytest.mark.parametrize("behaviour", ["ignores_sigterm", "dies_at_sigterm"])
def test_stop_ends_a_stubborn_engine_and_its_children(place: Place, behaviour: str) -> None:
    place.add("a", behaviour={behaviour: True, "has_child": True})

    async def run() -> None:
        async with managing(place) as engines:
            pid = (await engines.start("a")).pid
            assert pid is not None
            family = EngineProcess(identify(pid) or pytest.fail("gone"))
            assert len(family.living()) == 2  # the child too, in a session of its own
            stopping = asyncio.create_task(engines.stop("a"))
            await eventually(lambda: engines.snapshot("a").state is State.STOPPING)
            assert (await stopping).state is State.STOPPED
            assert family.living() == []

    asyncio.run(run())


def test_an_engine_is_killed_even_after_an_error_while_stopping(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one error, such as too many open files, SIGKILL never came, and the engine was stopping for ever."""
    place.add("a", behaviour={"ignores_sigterm": True})
    gone, is_first = EngineProcess.gone, iter([True])

    async def failing(process: EngineProcess, within: float) -> bool:
        if next(is_first, False):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await gone(process, within)

    async def run() -> None:
        async with managing(place) as engines:
            pid = (await engines.start("a")).pid
            assert pid is not None
            monkeypatch.setattr(EngineProcess, "gone", failing)
            try:
                async with asyncio.timeout(30):
                    assert (await engines.stop("a")).state is State.STOPPED
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    asyncio.run(run())


def test_a_dead_engine_is_not_ready_until_its_end_is_known(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the registry was slow to say how the engine had ended, requests were sent to it, and failed."""
    place.add("a")
    asked, may_answer = threading.Event(), threading.Event()

    def slow(*args: Any) -> tuple[bool, str] | None:
        asked.set()
        may_answer.wait(10)
        return how_it_ended(*args)

    monkeypatch.setattr("overspill.manager.engine.how_it_ended", slow)

    async def run() -> None:
        async with managing(place) as engines:
            pid = (await engines.start("a")).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await eventually(asked.is_set)
            assert engines.snapshot("a").state is State.STOPPING
            may_answer.set()
            await eventually(lambda: engines.snapshot("a").state is State.FAILED)

    asyncio.run(run())


def zombie_with_threads(folder: Path) -> tuple[Path, Path]:
    """A program whose first thread ends, as of one whose other threads are still in a driver; the file ends them."""
    program, may_end = folder / "zombie.py", folder / "may_end"
    program.write_text(
        "import ctypes, os, platform, threading, time\n"
        "def linger():\n"
        "    deadline = time.monotonic() + 10\n"
        f"    while time.monotonic() < deadline and not os.path.exists({str(may_end)!r}):\n"
        "        time.sleep(0.05)\n"
        "    os._exit(3)\n"
        "threading.Thread(target=linger).start()\n"
        "exit_thread = 60 if platform.machine() == 'x86_64' else 93\n"
        "ctypes.CDLL(None).syscall(exit_thread, 0)\n"
    )
    return program, may_end


def test_a_zombie_with_running_threads_is_stopping(place: Place) -> None:
    """Waiting for its exit code stopped the whole event loop."""
    place.add("a")
    program, may_end = zombie_with_threads(place.folder)

    async def run() -> None:
        async with managing(place, backend=OwnProcesses(program=(sys.executable, "-S", str(program)))) as engines:
            starting = asyncio.create_task(engines.start("a"))
            await eventually(lambda: engines.snapshot("a").state is State.STOPPING)
            await asyncio.sleep(0.5)
            assert engines.snapshot("a").state is State.STOPPING
            may_end.touch()
            with pytest.raises(StartFailed, match="exit code 3"):
                await starting

    asyncio.run(run())


def test_a_zombie_lives_as_long_as_its_threads(tmp_path: Path) -> None:
    """An engine that an earlier manager started has no exit code here; its memory is not free before."""
    program, may_end = zombie_with_threads(tmp_path)
    child = subprocess.Popen([sys.executable, "-S", str(program)], start_new_session=True)
    process = EngineProcess(identify(child.pid) or pytest.fail("gone"))
    while process.root.is_alive:
        time.sleep(0.01)
    assert process.living() == [child.pid]
    may_end.touch()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.living(), "a zombie without threads"
    assert child.wait() == 3


def test_a_killed_engine_is_stopping_until_its_children_are_gone(place: Place) -> None:
    """A new engine beside the remains of the old one would not find its memory."""
    place.add("a", behaviour={"has_child": True})

    async def run() -> None:
        async with managing(place) as engines:
            pid = (await engines.start("a")).pid
            assert pid is not None
            family = EngineProcess(identify(pid) or pytest.fail("gone"))
            family.living()
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: engines.snapshot("a").state is State.STOPPING)
            assert family.living()
            await eventually(lambda: engines.snapshot("a").state is State.FAILED)
            assert not family.living()

    asyncio.run(run())


def test_a_restart_is_a_new_process_with_the_settings_of_now(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place) as engines:
            first = await engines.start("a")
            with place.registry() as registry:
                edit_model(registry, "a", {"max_num_seqs": 3, "ttl": 99})
            await eventually(lambda: engines.snapshot("a").needs_restart == ("max_num_seqs",))
            second = await engines.restart("a")
            assert second.pid != first.pid and second.needs_restart == () and second.state is State.READY

    asyncio.run(run())


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_port_that_is_taken_meanwhile_is_replaced_by_another(
    place: Place, monkeypatch: pytest.MonkeyPatch, ends_first: bool
) -> None:
    class Late(subprocess.Popen[bytes]):
        """The first engine has ended before the manager looks."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not place.starts("a"):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    if ends_first:
        monkeypatch.setattr("overspill.manager.backend.subprocess.Popen", Late)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place.add("a", behaviour={"prefers_taken_port": taken.getsockname()[1]})

        async def run() -> None:
            async with managing(place) as engines:
                assert (await engines.start("a")).state is State.READY
                assert len(place.starts("a")) == 2

        asyncio.run(run())


def test_another_server_on_the_port_is_not_taken_for_the_engine(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.add("a", behaviour={"start_s": 1.0})

    async def run() -> None:
        answered = asyncio.Event()

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            writer.close()
            answered.set()

        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port, is_first = server.sockets[0].getsockname()[1], iter([True])
        monkeypatch.setattr(
            "overspill.manager.backend.free_port", lambda: port if next(is_first, False) else free_port()
        )
        async with managing(place) as engines, server:
            starting = asyncio.create_task(engines.start("a"))
            await answered.wait()
            assert engines.snapshot("a").state is State.STARTING
            ready = await starting
            assert ready.url != f"http://127.0.0.1:{port}" and len(place.starts("a")) == 2

    asyncio.run(run())


def test_a_hung_engine_is_ended_and_has_failed(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place, timing=QUICK_TO_END) as engines:
            pid = (await engines.start("a")).pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await eventually(lambda: engines.snapshot("a").state is State.FAILED)
            assert "had not answered for 2 s" in engines.snapshot("a").error and identify(pid) is None

    asyncio.run(run())


def deaf(place: Place, *, from_start: bool = False) -> OwnProcesses:
    """Engines that answer no more after the first answers, and end well when they are asked to, as
    `overspill serve` does."""
    program = place.folder / "deaf.py"
    program.write_text(
        "import asyncio, os, signal, sys\n"
        f"num_answers = {0 if from_start else 4}\n"
        "async def handle(reader, writer):\n"
        "    global num_answers\n"
        "    await reader.readuntil(b'\\r\\n\\r\\n')\n"
        "    num_answers -= 1\n"
        "    if num_answers >= 0:\n"
        "        writer.write(b'HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\nconnection: close\\r\\n\\r\\n')\n"
        "        writer.close()\n"
        "async def main():\n"
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: os._exit(0))\n"
        "    with open(sys.argv[1], 'a') as file:\n"
        "        file.write(f'{sys.argv[2]} {os.getpid()}\\n')\n"
        "    await asyncio.start_server(handle, '127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1]))\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    return OwnProcesses(program=(sys.executable, "-S", str(program), str(place.behaviours.with_suffix(".starts"))))


def test_a_hung_engine_that_exits_cleanly_has_failed(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The engine was shown as stopped from outside, without an error."""
    place.add("a")

    async def run() -> None:
        async with managing(place, timing=QUICK_TO_END, backend=deaf(place)) as engines:
            await engines.start("a")
            await eventually(lambda: engines.snapshot("a").state not in (State.READY, State.STOPPING))
            failed = engines.snapshot("a")
            assert failed.state is State.FAILED and failed.retry_at is not None
            assert "while it was serving after it had not answered for 2 s, and was ended" in failed.error
        assert "a is being terminated: it had not answered for 2 s" in caplog.text

    asyncio.run(run())


def test_a_hung_start_that_exits_cleanly_fails_without_a_retry(place: Place) -> None:
    place.add("a")

    # Until then its process has begun, on a busy machine too.
    async def run() -> None:
        timing = dataclasses.replace(IMPATIENT, start_s=4.0, health_s=0.2)
        async with managing(place, timing=timing, backend=deaf(place, from_start=True)) as engines:
            with pytest.raises(StartFailed, match="while it was starting after it had not answered for 4 s"):
                await engines.ensure_ready("a")
            assert engines.snapshot("a").state is State.FAILED and len(place.starts("a")) == 1

    asyncio.run(run())


def test_kill_after_long_service_is_not_a_failed_start(
    place: Place,
) -> None:
    """Its service time was forgotten while its children were terminated, and the backoff doubled with each kill."""
    place.add("a", behaviour={"has_child": True})

    async def run() -> None:
        timing = dataclasses.replace(IMPATIENT, look_ready_s=0.02, back_off_s=0.001, most_back_off_s=0.001)
        async with managing(place, timing=timing) as engines:
            pid = (await engines.start("a")).pid
            assert pid is not None
            engine = await engines.ensure_ready("a")
            await eventually(lambda: engine._served_s > timing.back_off_s)
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: engine.failure is not None)
            assert engine.failure is not None and engine.failure.count == 0

    asyncio.run(run())


def test_the_stop_reason_is_left_for_the_engine_logged_and_shown(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="overspill.manager")
    place.add("a", ram=2 * GiB)
    place.add("b", ram=2 * GiB)
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "overspill.manager.engine.leave_reason", lambda pid, process, reason: told.append((pid, reason))
    )

    async def run() -> None:
        async with managing(place) as engines:
            pid = (await engines.start("a")).pid
            assert pid is not None
            await engines.ensure_ready("b")
            why = "it was stopped to make room for b"
            assert engines.snapshot("a").stop_reason == why and told == [(pid, why)]
            assert f"a is being stopped: {why}" in caplog.text

    asyncio.run(run())


def test_the_run_of_a_killed_engine_records_the_stop_reason(place: Place) -> None:
    place.add("a", behaviour={"ignores_sigterm": True})

    async def run() -> None:
        async with managing(place) as engines:
            pid = (await engines.start("a")).pid
            with place.registry() as registry:
                start_run(registry, "a", ["overspill"], pid=pid)
                await engines.stop("a", reason="it was stopped by key laptop")
                (ended,) = list_runs(registry, "a")
            assert (ended.end, ended.detail) == (RunEnd.KILLED, "it was stopped by key laptop")
            assert not list((place.folder / "state").rglob("*.stop"))

    asyncio.run(run())


def test_an_engine_is_evicted_for_one_that_does_not_fit_beside(place: Place) -> None:
    for name, size in (("a", GiB), ("b", GiB), ("c", 2 * GiB)):
        place.add(name, ram=size)

    async def run() -> None:
        async with managing(place) as engines:
            await engines.ensure_ready("a")
            await engines.ensure_ready("b")
            assert engines.snapshot("a").state is engines.snapshot("b").state is State.READY
            with pytest.raises(NoRoom, match=r"c needs 2 GiB of RAM.*Stop a and b first"):
                await engines.start("c")
            await engines.ensure_ready("c")
            assert engines.snapshot("a").state is engines.snapshot("b").state is State.STOPPED
            await engines.start("b", make_room=True)
            assert [one.state for one in engines.snapshots()] == [State.STOPPED, State.READY, State.STOPPED]

    asyncio.run(run())


def test_a_model_that_fits_nowhere_is_refused_and_evicts_nothing(place: Place) -> None:
    place.add("a")
    place.add("huge", ram=3 * GiB)

    async def run() -> None:
        async with managing(place) as engines:
            await engines.ensure_ready("a")
            with pytest.raises(NoRoom, match="huge needs 3 GiB of RAM; 1 GiB of RAM is free"):
                await engines.ensure_ready("huge")
            assert engines.snapshot("a").state is State.READY

    asyncio.run(run())


def test_an_engine_drains_its_requests_before_eviction(place: Place) -> None:
    for name in ("a", "b"):
        place.add(name, ram=2 * GiB)

    async def run() -> None:
        async with managing(place) as engines:
            async with engines.using("a"):
                loading = asyncio.create_task(engines.ensure_ready("b"))
                await eventually(lambda: engines.snapshot("a").is_draining)
                late = asyncio.create_task(engines.ensure_ready("a"))
                await asyncio.sleep(0.3)
                assert engines.snapshot("a").state is State.READY and not loading.done() and not late.done()
            await loading
            await late  # and then the other way round
            assert engines.snapshot("a").state is State.READY

    asyncio.run(run())


def test_drain_is_cancelled_when_the_waiting_request_gives_up(place: Place) -> None:
    for name in ("a", "b"):
        place.add(name, ram=2 * GiB)

    async def run() -> None:
        async with managing(place) as engines:
            async with engines.using("a"):
                loading = asyncio.create_task(engines.ensure_ready("b"))
                await eventually(lambda: engines.snapshot("a").is_draining)
                loading.cancel()
                await eventually(lambda: not engines.snapshot("a").is_draining)
            assert (await engines.ensure_ready("a")).state is State.READY and len(place.starts("a")) == 1

    asyncio.run(run())


def test_an_engine_being_stopped_takes_no_new_requests(place: Place) -> None:
    """It took them again, only to cut them off, once the request that it had drained for went away."""
    for name in ("a", "b"):
        place.add(name, ram=2 * GiB)

    async def run() -> None:
        async with managing(place) as engines:
            async with engines.using("a"):
                loading = asyncio.create_task(engines.ensure_ready("b"))
                await eventually(lambda: engines.snapshot("a").is_draining)
                stopping = asyncio.create_task(engines.stop("a", drains=True))
                await eventually(lambda: engines.snapshot("a").is_leaving)
                loading.cancel()
                await eventually(lambda: not engines._swaps._draining)
                with pytest.raises(Stopped, match="only finishes its current requests"):
                    async with engines.using("a"):
                        pass
            assert (await stopping).state is State.STOPPED

    asyncio.run(run())


def test_drain_is_cancelled_when_the_model_finds_room_elsewhere(place: Place) -> None:
    """The draining engine was stopped and its requests cut, for a model that was already starting."""
    for name in ("a", "b", "c"):
        place.add(name, behaviour={"start_s": 1.0 if name == "c" else 0.0})

    async def run() -> None:
        timing = dataclasses.replace(IMPATIENT, drain_s=60.0, least_service_s=0.0)
        async with managing(place, timing=timing) as engines:
            await engines.ensure_ready("a")
            await engines.ensure_ready("b")
            async with engines.using("a"), engines.using("b"):
                loading = asyncio.create_task(engines.ensure_ready("c"))
                await eventually(lambda: any(engines.snapshot(name).is_draining for name in ("a", "b")))
                (leaves,) = [name for name in ("a", "b") if engines.snapshot(name).is_draining]
                await engines.stop("b" if leaves == "a" else "a")
                await eventually(lambda: engines.snapshot("c").state is State.STARTING)
                for victim, (for_name, _) in engines._swaps._draining.items():
                    engines._swaps._draining[victim] = (for_name, time.monotonic())  # its time to end is over
                await loading
                stays = engines.snapshot(leaves)
                assert stays.state is State.READY and not stays.is_draining and len(place.starts(leaves)) == 1

    asyncio.run(run())


def test_a_queue_emptied_while_choosing_a_model_is_not_an_error() -> None:
    async def run() -> None:
        queue = Queue(10)
        queue.join("a")
        late = queue.join("b")

        class Leaving(Swaps):
            async def _serve(self, name: str) -> bool:
                served.append(name)
                queue.refuse(name, Stopped("it is not served"))
                queue.leave(late)  # its client goes away
                return True

        served: list[str] = []
        states: Any = {
            name: SimpleNamespace(state=State.STOPPED, is_draining=name == "b", is_managed=False) for name in ("a", "b")
        }
        swaps = Leaving(
            queue=queue, timing=IMPATIENT, engines=states, find_model=lambda name: None, reckon=reckon,
            free=Memory, budget=None,
        )  # fmt: skip
        await swaps.turn()
        assert served == ["a"]

    asyncio.run(run())


def test_a_ready_model_does_not_wait_for_those_before_it() -> None:
    """Its requests waited behind a model that waited for memory."""

    class Full(Swaps):
        async def _serve(self, name: str) -> bool:
            return False

    async def run() -> None:
        queue = Queue(10)
        blocked, one = queue.join("blocked"), queue.join("ready")
        engines: Any = {
            name: SimpleNamespace(state=state, is_draining=False, is_managed=False)
            for name, state in (("blocked", State.STOPPED), ("ready", State.READY))
        }
        swaps = Full(
            queue=queue, timing=IMPATIENT, engines=engines, find_model=lambda name: None, reckon=reckon,
            free=Memory, budget=None,
        )  # fmt: skip
        await swaps.turn()
        assert one.ready.done() and not blocked.ready.done()

    asyncio.run(run())


def test_requests_that_do_not_end_are_ended_after_a_while(place: Place) -> None:
    for name in ("a", "b"):
        place.add(name, ram=2 * GiB)

    async def run() -> None:
        timing = dataclasses.replace(IMPATIENT, drain_s=0.3)
        async with managing(place, timing=timing) as engines, engines.using("a"):
            await engines.ensure_ready("b")
            assert engines.snapshot("a").state is State.STOPPED

    asyncio.run(run())


def test_ttl_unloads_an_idle_model_and_keeps_a_used_one(place: Place) -> None:
    place.add("a", ttl=1)
    place.add("b", ttl=1)

    async def run() -> None:
        async with managing(place) as engines:
            async with engines.using("a"):
                await engines.ensure_ready("b")
                await eventually(lambda: engines.snapshot("b").state is State.STOPPED)
                assert engines.snapshot("a").state is State.READY
            await eventually(lambda: engines.snapshot("a").state is State.STOPPED)

    asyncio.run(run())


def test_the_queue_has_a_limit_a_deadline_and_can_be_left(place: Place) -> None:
    place.add("a", behaviour={"start_s": 30})

    async def run() -> None:
        async with managing(place, most_waiting=2) as engines:
            with pytest.raises(StillLoading, match=r"not ready after 0\.2 s"):
                await engines.ensure_ready("a", within=0.2)
            waiting = [asyncio.create_task(engines.ensure_ready("a")) for _ in range(2)]
            await eventually(lambda: engines.snapshot("a").traffic.waiting == 2)
            with pytest.raises(QueueFull, match="2 requests already wait"):
                await engines.ensure_ready("a")
            waiting[0].cancel()
            await eventually(lambda: engines.snapshot("a").traffic.waiting == 1)
            await engines.stop("a")
            with pytest.raises(Stopped):
                await waiting[1]

    asyncio.run(run())


def test_an_unknown_model_suggests_the_nearest_name(place: Place) -> None:
    place.add("qwen")

    async def run() -> None:
        async with managing(place) as engines:
            with pytest.raises(UnknownModel, match="did you mean qwen"):
                await engines.ensure_ready("qwem")
            with pytest.raises(UnknownModel, match=r"known here: qwen$"):  # and not "did you mean qwen?"
                await engines.ensure_ready("nope")
            place.add("qwem")  # found a moment later, without a restart
            await asyncio.sleep(0.3)
            assert (await engines.ensure_ready("qwem")).state is State.READY

    asyncio.run(run())


def test_listeners_get_changes_and_a_slow_one_gets_the_latest(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place) as engines:
            states, listening = [], engines.events()
            assert [one.state for one in await anext(listening)] == [State.STOPPED]
            starting = asyncio.create_task(engines.start("a"))
            async for changed in listening:
                states += [one.state for one in changed]
                if states[-1] is State.READY:
                    break
            assert states[0] is State.STARTING
            await starting
            slow = engines.events()
            await anext(slow)
            waiting = asyncio.ensure_future(anext(slow))
            await asyncio.sleep(0)
            await engines.stop("a")
            await waiting
            await engines.start("a")
            assert [one.state for one in await anext(slow)] == [State.READY]
            await slow.aclose()
            await listening.aclose()
            assert not engines.changes.has_listeners

    asyncio.run(run())


def test_two_managers_of_the_same_engines_are_refused(place: Place) -> None:
    async def run() -> None:
        async with managing(place):
            with pytest.raises(AlreadyManaged, match=f"process {os.getpid()}"):
                async with managing(place):
                    pass

    asyncio.run(run())


def test_a_manager_that_was_killed_finds_its_engines_again(place: Place) -> None:
    place.add("a", behaviour={"has_child": True})
    place.add("slow", behaviour={"start_s": 12.0})

    def manager() -> "subprocess.Popen[str]":
        started = subprocess.Popen(
            [sys.executable, "-m", "tests.manager_process", str(place.folder), "0"], cwd=ROOT, text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        return started

    import httpx

    with manager() as first:
        assert first.stdout is not None
        url = first.stdout.readline().split()[0]
        asked = {"model": "a", "prompt": "x", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=60).status_code == 200
        while not place.starts("slow"):
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json={**asked, "model": "slow"}, timeout=0.5)
        first.kill()
    assert len(place.starts("a")) == 1 == len(place.starts("slow"))
    assert identify(place.starts("a")[0]) and identify(place.starts("slow")[0])  # they outlive it

    async def run() -> None:
        async with managing(place) as engines:
            assert engines.snapshot("slow").state is State.STARTING
            adopted = await asyncio.gather(engines.start("a"), engines.start("slow"))
            assert [one.pid for one in adopted] == [*place.starts("a"), *place.starts("slow")]
            assert all(one.state is State.READY and one.is_managed for one in adopted)
            os.kill(place.starts("slow")[0], signal.SIGKILL)
            await eventually(lambda: engines.snapshot("slow").state is State.FAILED)
        assert not of_folder(place.folder)

    asyncio.run(run())
