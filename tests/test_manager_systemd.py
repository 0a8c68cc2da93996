"""Engines as units, with a stand-in for systemctl that really starts and ends processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from overspill.manager.engines.launch import OwnProcesses
from overspill.manager.engines.process import identify
from overspill.manager.engines.states import State
from overspill.manager.engines.systemd import Units, backend_here
from overspill.service.installation import install, units_of
from overspill.service.units import Mode, Service
from tests.manager_process import ROOT, Place, eventually, managing, of_folder

SYSTEMCTL = f"""#!{sys.executable}
import json, os, platform, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from overspill.processes import identity
from overspill.serve.address import free_port
from overspill.serve.report import Phase
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
    write_status(Status(
        pid=started.pid, process=identity(started.pid), host=platform.node(), model="a", source="x", served_name="a",
        url=f"http://127.0.0.1:{{port}}", phase=Phase.LOADING, started_at="2026-01-01T00:00:00+00:00"), folder_of())
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
    service = Service(mode=Mode.USER, name="a", command=("/usr/bin/true",), memory_max_bytes=1 << 30)
    install(units_of(Mode.USER, folder), service)
    own = place.options().backend
    assert isinstance(own, OwnProcesses)
    return Units(systemctl=(str(program), "--user"), folder=folder, otherwise=own)


def test_a_model_with_a_unit_is_started_watched_and_stopped_by_systemd(place: Place, units: Units) -> None:
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


def test_an_engine_that_was_started_by_hand_is_found_used_and_left_alone(place: Place, units: Units) -> None:
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
