"""Servers as child processes: started with a log, awaited, and always terminated with everything they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from record import Json

POLL_SECONDS = 0.05


class Server:
    def __init__(self, child: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.pid, self.port, self.log = child.pid, port, log
        self.began = time.monotonic()
        self._child = child
        self.process = psutil.Process(child.pid)

    def tail(self, lines: int = 40) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-lines:]

    def request(self, path: str, body: Json | None = None, seconds: float = 5.0) -> httpx.Response:
        method = "GET" if body is None else "POST"
        return httpx.request(method, f"http://127.0.0.1:{self.port}{path}", json=body, timeout=seconds)

    def wait(self, path: str, seconds: float) -> float:
        """Seconds from the start of the process to the first answer."""
        while time.monotonic() < self.began + seconds:
            if self._child.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {self._child.returncode}")
            with contextlib.suppress(httpx.TransportError):
                if self.request(path).is_success:
                    return time.monotonic() - self.began
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"no answer on {path} in time")

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, port: int = 0, env: Mapping[str, str] | None = None, patience: float = 20.0
) -> Iterator[Server]:
    """In a group and not a session: where this command is ended by ending its session, the server goes with it.

    vLLM's engine core is a child of the server: killing only the server would leave it holding the GPU.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` clauses run
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        child = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            process_group=0, env={**os.environ, **(env or {})},
        )  # fmt: skip
    server = Server(child, port, log)
    try:
        yield server
    finally:
        family = server.family()
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        child.wait(10)
