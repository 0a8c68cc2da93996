"""A manager as users run it: a process of its own, with a home of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from overspill.address import free_port
from tests.manager_process import of_folder

START_S = 180
# As tests/test_serve.py: weights of 2.75 MiB and 8 MiB of KV do not fit, so about half of it spills.
SETTINGS: dict[str, Any] = {
    "max_model_len": 4096, "gpu_memory": "8MiB", "ram": "12GiB", "offload_ram": "64MiB", "dtype": "float32",
    "max_num_seqs": 4, "enforce_eager": True,
}  # fmt: skip


class Managed:
    def __init__(self, folder: Path, *flags: str, port: int | None = None, **variables: str) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder, self.out = folder, folder / "manager.out"
        self.models = folder / "models"
        self.models.mkdir(exist_ok=True)
        left_out = ("OVERSPILL_", "VLLM_ENABLE_V1_MULTIPROCESSING")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        self.environment = {
            **clean, "XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200",
            "HF_HUB_CACHE": str(folder / "hub"), "VLLM_LOGGING_LEVEL": "INFO",
            **variables,
        }  # fmt: skip
        self.command = [
            sys.executable, "-m", "overspill", "manager", "--port", str(self.port), "--models-folder",
            str(self.models), *flags,
        ]  # fmt: skip
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        with self.out.open("ab") as out:
            return subprocess.Popen(
                self.command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
                env=self.environment,
            )  # fmt: skip

    def kill_and_start_again(self) -> None:
        """As after a crash: nothing of it could say goodbye."""
        self.process.kill()
        self.process.wait(timeout=10)
        self.process = self._started()
        self.wait_until_it_answers()

    def others(self) -> list[int]:
        """Processes beside it that were started with something of its folder: its engines."""
        return [pid for pid in of_folder(self.folder) if pid != self.process.pid]

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=300, headers=headers, trust_env=False)

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.out.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/healthz", trust_env=False, timeout=60).status_code == 200:
                    return
            time.sleep(0.1)

    def overspill(self, *words: str, text: str = "", timeout: float = 120) -> "subprocess.CompletedProcess[str]":
        """A command of the same user."""
        return subprocess.run(
            [sys.executable, "-m", "overspill", *words], env=self.environment, capture_output=True, text=True,
            input=text, timeout=timeout, check=False,
        )  # fmt: skip

    def end(self) -> int:
        """As a user ends it; what it started has ended then too."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)

    def clean_up(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.end()
        for pid in of_folder(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def managed(folder: Path, *flags: str, **variables: str) -> Iterator[Managed]:
    running = Managed(folder, *flags, **variables)
    try:
        running.wait_until_it_answers()
        yield running
    finally:
        running.clean_up()
