"""Engines as units, with a stand-in for systemctl that really starts and ends processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from overspill.manager.backend import OwnProcesses, Unit, Units, backend_here, identify, unit_in
from overspill.manager.fleet import Options
from overspill.manager.states import State
from overspill.service.installation import install, units_of
from overspill.service.units import Mode, ModelService, unit_name
from tests.managed_here import managed_here
from tests.manager_process import ROOT, Place, eventually, managing, of_folder

SYSTEMCTL = f"""#!{sys.executable}
import json, os, platform, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from overspill.processes import identity
from overspill.address import free_port
from overspill.serve.engine_report import Phase
from overspill.serve.status import Status, folder_of, write_status
folder = Path(__file__).parent
asked = [word for word in sys.argv[1:] if not word.startswith("-")]
with (folder / "asked").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
verb, unit = asked[0], asked[-1]
main_pid = folder / f"{{unit}}.pid"
if verb == "start":
    port = free_port()
    command = [sys.executable, "-S", {str(ROOT / "tests/fake_server.py")!r}, str(folder / "behaviours.json"), "a"]
    with open(os.devnull, "wb") as nothing:
        started = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], start_new_session=True,
                                   stdout=nothing, stderr=nothing, stdin=subprocess.DEVNULL)
    main_pid.write_text(str(started.pid))
    named = (folder / "named").read_text() if (folder / "named").exists() else "a"
    write_status(Status(
        pid=started.pid, process=identity(started.pid), host=platform.node(), model=named, source=named,
        served_name="a", url=f"http://127.0.0.1:{{port}}", phase=Phase.LOADING,
        started_at="2026-01-01T00:00:00+00:00"), folder_of())
elif verb == "show":
    print(main_pid.read_text() if main_pid.exists() else 0)
elif verb == "stop":
    os.kill(int(main_pid.read_text()), signal.SIGTERM)
else:
    sys.exit(f"Unknown command verb {{verb}}.")
"""


@pytest.fixture
def units(place: Place) -> Units:
    program, folder = place.folder / "systemctl", place.folder / "units"
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    service = ModelService(mode=Mode.USER, name="a", command=("/usr/bin/true",), memory_max_bytes=1 << 30)
    install(units_of(Mode.USER, folder), service)
    own = place.options().backend
    assert isinstance(own, OwnProcesses)
    return Units(systemctl=(str(program), "--user"), folder=folder, otherwise=own)


def test_systemd_starts_and_stops_a_model_that_has_a_unit(place: Place, units: Units) -> None:
    place.add("a")
    place.add("b")

    async def run() -> None:
        async with managing(place, backend=units) as engines:
            ready = await engines.start("a")
            assert (ready.unit, ready.is_managed, ready.served_names) == ("overspill@a.service", True, ("a",))
            assert ready.phase == "loading the model" and ready.url is not None
            assert (await engines.start("b")).unit is None  # has no unit
            await engines.stop("a")
            assert identify(ready.pid or 0) is None
        asked = (place.folder / "asked").read_text().splitlines()
        assert asked[0] == "--user start --no-block overspill@a.service"
        assert asked[-1] == "--user stop --no-block overspill@a.service"

    asyncio.run(run())


def test_a_unit_that_dies_has_failed(place: Place, units: Units) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place, backend=units) as engines:
            ready = await engines.start("a")
            os.kill(ready.pid or 0, signal.SIGKILL)
            await eventually(lambda: engines.snapshot("a").state is State.FAILED)
            assert "while it was serving" in engines.snapshot("a").error

    asyncio.run(run())
    assert not of_folder(place.folder)


def test_the_log_hint_of_a_unit_names_the_journalctl_command(place: Place, units: Units) -> None:
    """The log was an empty file, on the page as well as after a failure."""
    place.add("a")
    hint = "systemd keeps the log of overspill@a.service; see: journalctl --user -u overspill@a.service"

    async def run() -> None:
        async with managing(place, backend=units) as engines:
            assert engines.log_hint("a") == ""
            ready = await engines.start("a")
            assert (ready.log_hint, ready.log_file) == (hint, None)
            await engines.close(keep=True)
        async with managing(place, backend=units) as engines:  # also by the next manager
            ready = await engines.start("a")
            assert ready.log_hint == hint
            os.kill(ready.pid or 0, signal.SIGKILL)
            await eventually(lambda: engines.snapshot("a").state is State.FAILED)
            failed = engines.snapshot("a")
            assert failed.log_lines == (hint,) and failed.log_hint == hint

    asyncio.run(run())


def test_the_page_and_the_api_name_the_command_too(place: Place, units: Units) -> None:
    place.add("a")

    def options(**more: object) -> Options:
        return Place.options(place, backend=units, **more)

    place.options = options  # type: ignore[method-assign]
    with managed_here(place) as here, here.client() as client:
        assert client.post("/api/engines/start/a").status_code == 200
        for query in ("", "?search=x", "?follow=true"):
            told = client.get(f"/api/logs/a{query}").text
            assert told.endswith("; see: journalctl --user -u overspill@a.service\n"), query
        for query in ("", "&search=x"):
            assert "journalctl --user -u overspill@a.service" in client.get(f"/logs?name=a{query}").text


def test_a_unit_restarted_by_systemd_is_found_by_its_served_name(place: Place, units: Units) -> None:
    """Its status names the model by its path: the card said failed, while the unit ran and held memory."""
    place.add("a")

    async def run() -> None:
        async with managing(place, backend=units) as engines:
            first = await engines.start("a")
            (place.folder / "named").write_text(str(place.folder / "model"))
            os.kill(first.pid or 0, signal.SIGKILL)
            await eventually(lambda: engines.snapshot("a").state is State.FAILED)
            units._run("start", "overspill@a.service")  # as systemd would
            await eventually(lambda: engines.snapshot("a").state is State.READY)
            again = engines.snapshot("a")
            assert again.pid != first.pid and again.error == ""
            assert (await engines.stop("a")).state is State.STOPPED
            assert identify(again.pid or 0) is None

    asyncio.run(run())


def test_a_unit_restarted_by_systemd_is_still_managed(
    place: Place, units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add("a")
    monkeypatch.setattr("overspill.manager.records.unit_of", lambda pid: Unit("overspill@a.service", True))

    async def run() -> None:
        (place.folder / "named").write_text("/elsewhere")  # the unit alone says whose it is
        async with managing(place, backend=units) as engines:
            first = await engines.start("a")
            os.kill(first.pid or 0, signal.SIGKILL)
            await eventually(lambda: engines.snapshot("a").state is State.FAILED)
            units._run("start", "overspill@a.service")
            await eventually(lambda: engines.snapshot("a").state is State.READY)
            again = engines.snapshot("a")
            assert again.is_managed and again.unit == "overspill@a.service" and "journalctl" in again.log_hint
            await eventually(lambda: list((place.folder / "manager/engines").glob("a.json")))  # for the next manager
        assert (place.folder / "asked").read_text().splitlines()[-1] == "--user stop --no-block overspill@a.service"
        assert identify(again.pid or 0) is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-overspill.slice/overspill@qwen.service\n",
            Unit("overspill@qwen.service", True),
        ),
        ("0::/system.slice/system-overspill.slice/overspill@qwen.service\n", Unit("overspill@qwen.service", False)),
        ("12:pids:/\n1:name=systemd:/system.slice/overspill@a.service\n", Unit("overspill@a.service", False)),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/overspill-manager.service\n", None),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_a_process_tells_in_which_unit_it_runs(cgroup: str, unit: Unit | None) -> None:
    assert unit_in(cgroup) == unit


def test_a_unit_is_of_the_model_that_it_is_named_for() -> None:
    assert Unit(unit_name("Qwen/Qwen3-8B"), True).is_of("Qwen/Qwen3-8B")
    assert not Unit(unit_name("a"), True).is_of("b") and not Unit(unit_name("a"), True).is_of("x" * 300)


def test_an_engine_started_by_hand_is_used_and_left_running(place: Place, units: Units) -> None:
    place.add("a", ram=2 << 30)
    place.add("b", ram=1 << 30)

    async def run() -> None:
        units._run("start", "a")  # as somebody else would
        async with managing(place) as engines:
            await eventually(lambda: engines.snapshot("a").state is State.READY)
            found = await engines.start("a")
            assert not found.is_managed and not place.starts("b") and len(place.starts("a")) == 1
            pid = found.pid or 0
        assert identify(pid) is not None  # it goes on
        async with managing(place) as engines:
            await eventually(lambda: engines.snapshot("a").state is State.READY)
            assert (await engines.stop("a")).state is State.STOPPED  # but by its name it can be stopped
        assert identify(pid) is None

    asyncio.run(run())


def test_where_no_systemd_runs_engines_are_own_processes(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    assert isinstance(backend_here(environ), OwnProcesses)
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd/private").touch()
    (tmp_path / "systemctl").write_text("#!/bin/sh\n")
    (tmp_path / "systemctl").chmod(0o755)
    assert isinstance(backend_here(environ), Units)
