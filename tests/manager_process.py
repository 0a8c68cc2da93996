"""A manager over stand-ins for engines, in this process or as one of its own that can be killed.

python -m tests.manager_process FOLDER PORT
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from overspill.kv.sizes import GiB
from overspill.manager.backend import OwnProcesses
from overspill.manager.fleet import Engines, Options
from overspill.manager.gateway import Gateway
from overspill.manager.needs import Memory, Need
from overspill.manager.states import Timing
from overspill.manager.web.server import BoundedProtocol
from overspill.processes import processes
from overspill.registry import Model, Registry, add_model, open_registry
from tests.guarded_app import open_to_all

ROOT = Path(__file__).parents[1]
IMPATIENT = Timing(
    look_starting_s=0.05, look_ready_s=0.2, look_models_s=0.2, stop_patience_s=1.0, back_off_s=30.0,
    least_service_s=0.2, drain_s=10.0, settle_s=0.0, load_s=60.0, silent_s=60.0, health_s=10.0,
)  # fmt: skip
# An engine that does not answer has failed soon; one that is well may seem so where the machine is busy.
QUICK_TO_END = replace(IMPATIENT, silent_s=2.0, health_s=1.0)


class Place:
    """A folder with a registry, behaviours of engines, and what the manager keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.behaviours = folder / "behaviours.json"

    def registry(self) -> Registry:
        return open_registry(f"sqlite:///{self.folder}/registry.db")

    def add(self, name: str, *, ram: int = GiB, behaviour: dict[str, Any] | None = None, **settings: object) -> None:
        source = self.folder / "model"
        source.mkdir(exist_ok=True)
        (source / "config.json").write_text("{}")
        with self.registry() as registry:
            add_model(registry, name, {"source": str(source), "ram": ram, **settings})
        self.behave(name, **(behaviour or {}))

    def behave(self, name: str, **behaviour: Any) -> None:
        told = json.loads(self.behaviours.read_text()) if self.behaviours.exists() else {}
        self.behaviours.write_text(json.dumps({**told, name: behaviour}))

    def starts(self, name: str) -> list[int]:
        """Process numbers of every start of it."""
        path = self.behaviours.with_suffix(".starts")
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == name]

    def options(self, **more: Any) -> Options:
        program = (sys.executable, "-S", str(ROOT / "tests/fake_server.py"), str(self.behaviours))
        backend = OwnProcesses(program=program)
        options: dict[str, Any] = {
            "folder": self.folder / "manager", "backend": backend, "memory": Memory(ram_bytes=2 * GiB),
            "timing": IMPATIENT, "reckon": reckon, **more,
        }  # fmt: skip
        return Options(**options)


def place_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """For a fixture; afterwards no process of it is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    yield Place(folder)
    left = of_folder(folder)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def of_folder(folder: Path) -> list[int]:
    """Processes that were started with something of this folder."""
    found = []
    for one in processes():
        with contextlib.suppress(OSError):
            if one.state not in "ZX" and str(folder).encode() in Path(f"/proc/{one.pid}/cmdline").read_bytes():
                found.append(one.pid)
    return found


async def eventually(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not is_so():
            await asyncio.sleep(0.02)


def reckon(model: Model, evictable: Memory) -> Need:
    """As its settings say, without looking at files."""
    need = Memory(ram_bytes=model.settings.ram or 0)
    return Need(least=need, takes=need)


@contextlib.asynccontextmanager
async def managing(place: Place, **options: Any) -> AsyncIterator[Engines]:
    with place.registry() as registry:
        async with Engines(registry, place.options(**options)) as engines:
            yield engines


@contextlib.asynccontextmanager
async def gateway(engines: Engines, port: int = 0, **settings: Any) -> AsyncIterator[str]:
    """Its address."""
    listening = socket.create_server(("127.0.0.1", port), backlog=512)
    app = open_to_all(Gateway(engines), **settings)
    config = uvicorn.Config(app, http=BoundedProtocol, log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve([listening]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task


async def _main(folder: Path, port: int) -> None:
    async with managing(Place(folder)) as engines, gateway(engines, port) as url:
        print(url, os.getpid(), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
