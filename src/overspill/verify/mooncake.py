"""A real Mooncake master with a store of its own, on loopback."""

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overspill.address import free_port
from overspill.kv.errors import OverspillError

_PROGRAMS = Path(sys.executable).parent


def missing() -> str:
    """Why Mooncake cannot run here, or an empty string."""
    if importlib.util.find_spec("mooncake") is None:
        return "the package of overspill[mooncake] is not installed"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "the system's libibverbs1 is not installed"
    return ""


class Mooncake:
    """The master process, and the client process that provides the store's memory."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder, self._num_bytes = folder, num_bytes
        self.port, self._metrics_port, self._store_port = free_port(), free_port(), free_port()
        self.address = f"mooncake://127.0.0.1:{self.port}"
        self.start_master()
        self.start_store()

    def start_master(self) -> None:
        self.master = self._start(
            "mooncake_master", f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
        )  # fmt: skip
        _wait_for(self.port)

    def start_store(self) -> None:
        self.store = self._start(
            "mooncake_client", "--host=127.0.0.1", f"--port={self._store_port}", "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address=127.0.0.1:{self.port}", f"--global_segment_size={self._num_bytes}",
        )  # fmt: skip
        _wait_for(self._store_port)

    def _start(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{program}.log").open("ab") as log:
            environment = {**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
            return subprocess.Popen(
                [str(_PROGRAMS / program), *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def close(self) -> None:
        """Kill both processes, even if SIGSTOP has suspended them."""
        for process in (self.store, self.master):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def _wait_for(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise OverspillError(f"Mooncake does not listen on port {port}")


@contextmanager
def mooncake(folder: Path, num_bytes: int) -> Iterator[Mooncake]:
    running = Mooncake(folder, num_bytes)
    try:
        yield running
    finally:
        running.close()
