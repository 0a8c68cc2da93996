"""Seen from outside: vLLM's own server with Overspill, its /health, its /metrics, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill.address import free_port
from tests.engine import random_prompt
from tests.plugin import with_plugin

START_SECONDS = 240


# As a plugin of vLLM's, in every process: 100 MiB of RAM, of which the pool's 64 MiB are gone as soon as it is mapped.
SMALL_MACHINE = """
import os
from pathlib import Path
from overspill.kv import ram
from overspill.kv.host_memory import HostMemory

FOLDER = Path(__file__).parent

def available_ram():
    is_taken = (FOLDER / "taken").exists()
    with open(FOLDER / "checks", "a") as checks:
        print(os.getpid(), "after" if is_taken else "before", file=checks)
    return ram.Ram(36 << 20 if is_taken else 100 << 20, "a small machine")

def register():
    prepare = HostMemory.prepare
    def prepare_and_tell(self, pinning):
        (FOLDER / "taken").touch()
        prepare(self, pinning)
    HostMemory.prepare, ram.available_ram = prepare_and_tell, available_ram
"""


class Server:
    def __init__(self, model: Path, log: Path) -> None:
        self.port = free_port()
        transfer = {
            "kv_connector": "OverspillConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_bytes": "64MiB", "load": "always", "reserve_bytes": 0},
        }
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                    "--served-model-name", "tiny", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32",
                    "--block-size", "32", "--num-gpu-blocks-override", "25", "--max-model-len", "700",
                    "--host", "127.0.0.1", "--port", str(self.port),
                    "--kv-transfer-config", json.dumps(transfer),
                ],
                stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
                # A server has its engine in a process of its own.
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **with_plugin(log.parent, SMALL_MACHINE)},
            )  # fmt: skip

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def wait_for_health(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def complete(self, prompt: list[int]) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        asked = {**body, "detokenize": False, "return_token_ids": True}
        return json.loads(self.get("/v1/completions", asked))

    def metric(self, name: str) -> float:
        found = re.findall(rf"^overspill_{name}(?:_total)?{{[^}}]*}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"no series overspill_{name}"
        return sum(map(float, found))

    def members(self) -> list[int]:
        """Living processes of the server's group."""
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[2]) == self.process.pid and fields[0] not in "ZX":
                    alive.append(int(entry.name))
        return alive

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(llama, tmp_path_factory.mktemp("server") / "log")
    try:
        running.wait_for_health()
        yield running
    finally:
        if running.members():
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(timeout=60)


def test_a_returning_prompt_hits_ram_and_the_metrics_show_it(server: Server) -> None:
    prompts = [random_prompt(seed, 400) for seed in range(4)]
    first = [server.complete(p)["choices"][0]["token_ids"] for p in prompts]
    again = [server.complete(p)["choices"][0]["token_ids"] for p in prompts]
    assert again == first and len({tuple(tokens) for tokens in first}) == 4
    assert server.metric("hit_tokens") >= 3 * 384
    assert server.metric("load_bytes") > 0 and server.metric("store_bytes") > 0
    assert server.metric("pool_bytes") == 64 << 20
    assert 0 < server.metric("pool_used_bytes") <= 64 << 20


def test_ram_is_checked_before_the_pool_takes_it_and_not_again(server: Server) -> None:
    """vLLM completes its configuration again in the engine core, after loading: a check there refused an engine for
    its own pool's RAM, if the pool was filled by then, and its server waited for it for ever."""
    checks = [line.split() for line in (server.log.parent / "checks").read_text().splitlines()]
    assert [when for _, when in checks] == ["before", "before"]
    assert checks[0][0] == str(server.process.pid) != checks[1][0]


def test_vllm_counts_the_hits_as_the_hosts(server: Server) -> None:
    text = server.get("/metrics")
    host = re.findall(r'^vllm:prompt_tokens_cached_by_source_total{[^}]*source="host"[^}]*} (\S+)$', text, re.MULTILINE)
    assert host and sum(map(float, host)) == server.metric("hit_tokens")
    sources = re.findall(r"^vllm:prompt_tokens_by_source_total{[^}]*} (\S+)$", text, re.MULTILINE)
    assert sources and all(float(value) >= 0 for value in sources)


def test_the_server_ends_and_leaves_no_process(server: Server) -> None:
    server.stop()
    deadline = time.monotonic() + 120
    while server.members() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not server.members()
