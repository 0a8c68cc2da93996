"""The whole manager over stand-ins for engines, as a process of its own: to be attacked, starved and killed.

python -m tests.managed_process FOLDER PORT [PATIENCE_S]
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvloop

from overspill.address import free_port
from overspill.manager.web.server import run
from overspill.manager.web.setup import Setup
from overspill.registry import Registry, open_registry
from tests.manager_process import ROOT, Place, of_folder

WAIT_S = 120


class QuickPlace(Place):
    """Whose registry waits a second for others, and not fifteen."""

    patience_s = 1.0

    def registry(self) -> Registry:
        return open_registry(f"sqlite:///{self.folder}/registry.db?timeout={self.patience_s}")


class ManagedProcess:
    def __init__(self, place: Place, port: int | None = None, patience_s: float = QuickPlace.patience_s) -> None:
        self.place, self.port = place, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.out = place.folder / "manager.out"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OVERSPILL_")}
        environment = {**kept, "XDG_STATE_HOME": str(place.folder / "state"), "HF_HUB_CACHE": str(place.folder / "hub")}
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.managed_process", str(place.folder), str(self.port), str(patience_s)],
                cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True, env=environment,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers=headers, trust_env=False)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def say(self, data: bytes) -> bytes:
        """What comes back, until the manager closes the connection."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_all(connection)

    def wait_until_it_answers(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.out.read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/healthz", trust_env=False, timeout=60).status_code == 200
            return False

        until(answers)

    def num_tasks(self) -> int:
        """Of its event loop."""
        before = self._counted()
        os.kill(self.pid, signal.SIGUSR1)
        until(lambda: len(self._counted()) > len(before))
        return int(self._counted()[-1].split()[1])

    def num_files(self) -> int:
        """That it has open: files and connections."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def bytes_read(self) -> int:
        fields = dict(line.split(": ") for line in Path(f"/proc/{self.pid}/io").read_text().splitlines())
        return int(fields["rchar"])

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def _counted(self) -> list[str]:
        return [line for line in self.out.read_text().splitlines() if line.startswith("tasks ")]


def read_all(connection: socket.socket) -> bytes:
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def managed_process(
    place: Place, port: int | None = None, *, patience_s: float = QuickPlace.patience_s
) -> "contextlib.AbstractContextManager[ManagedProcess]":
    """Starts it at once, and waits for it when it is entered."""
    return _managed(ManagedProcess(place, port, patience_s))


@contextlib.contextmanager
def _managed(running: ManagedProcess) -> Iterator[ManagedProcess]:
    folder = running.place.folder
    try:
        running.wait_until_it_answers()
        yield running
        assert running.end() == 0, running.out.read_text()
        assert "Traceback" not in running.out.read_text(), running.out.read_text()
        assert not of_folder(folder)
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        for pid in of_folder(folder):
            os.kill(pid, signal.SIGKILL)


def audit(client: httpx.Client) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = client.get("/api/audit").json()
    return told


async def _main(folder: Path, port: int, patience_s: float = QuickPlace.patience_s) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: print("tasks", len(asyncio.all_tasks(loop)), flush=True))
    place = QuickPlace(folder)
    place.patience_s = patience_s
    setup = Setup(folder=folder / "manager", port=port, models_folders=(folder / "models",))
    with place.registry() as registry:
        await run(setup, registry, lambda text: print(text, flush=True), place.options())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:])))
