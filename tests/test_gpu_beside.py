"""An engine that starts beside a process that takes and frees GPU memory meanwhile. Run with `pytest -m gpu`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from overspill.address import free_port
from overspill.launch.vllm import installed_vllm, server_command
from tests import model_configs as models
from tests.zygote import cold

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

START_S = 80
# Holds most while an engine looks what is free, and never so much again: vLLM's own profile then always sees memory
# that was freed. It begins when the card loses more than a CUDA context: the engine's weights.
NEIGHBOUR = """
import sys, threading, time
import torch

GiB = 1 << 30
most, less, weights = int(sys.argv[1]) * GiB, int(sys.argv[2]) * GiB, 2 * GiB
held = torch.empty(most, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holding", flush=True)
stopped = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
before = torch.cuda.mem_get_info()[0]
while torch.cuda.mem_get_info()[0] > before - weights and not stopped.wait(0.01):
    pass
times = 0
while not stopped.is_set():
    del held
    torch.cuda.empty_cache()
    times += 1
    print("freed", times, flush=True)
    stopped.wait(0.1)
    held = torch.empty(less, dtype=torch.uint8, device="cuda")
    stopped.wait(0.1)
print("times", times, flush=True)
"""
MOST_GIB, LESS_GIB, ENGINE_GIB = 40, 20, 24
COMMON = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096", "--max-num-seqs", "8",
          "--max-num-batched-tokens", "2048", "--enforce-eager"]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.4 GiB of weights: more than the neighbour waits for, and less than it frees."""
    folder = tmp_path_factory.mktemp("model")
    config = {**models.llama_3_1_8b(), "num_hidden_layers": 8, "vocab_size": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def room() -> None:
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < MOST_GIB + ENGINE_GIB + 2:
        pytest.skip(f"needs {MOST_GIB + ENGINE_GIB + 2} GiB of GPU memory; {free} GiB is free")


class Neighbour:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def times(self) -> int:
        """How often it freed memory since the engine had its weights; ends it."""
        out, _ = self.process.communicate(timeout=30)
        return int(out.split("times ")[1]) if "times " in out else 0


@contextmanager
def neighbour() -> Iterator[Neighbour]:
    words = [sys.executable, "-c", NEIGHBOUR, str(MOST_GIB), str(LESS_GIB)]
    with cold():
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "holding\n"
            yield Neighbour(process)
        finally:
            process.kill()


def environment(folder: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERSPILL_")}
    homes = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("STATE", "DATA", "CONFIG")}
    return {**clean, **homes, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", "COLUMNS": "200"}


@contextmanager
def started(words: list[str], folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """In a session of its own, which is ended as a whole."""
    log = folder / "log"
    # NVML does not start again in a fork of a process that used it.
    with log.open("wb") as out, cold():
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=environment(folder),
        )  # fmt: skip
    try:
        yield process, log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def test_vllm_alone_refuses_to_start_beside_it(model: Path, tmp_path: Path) -> None:
    """What the other test must not show."""
    vllm = installed_vllm()
    assert vllm is not None
    share = f"{ENGINE_GIB * 2**30 / torch.cuda.mem_get_info()[1]:.4f}"
    words = [*server_command(str(model), vllm), *COMMON, "--gpu-memory-utilization", share, "--port", str(free_port())]
    with neighbour() as beside, started(words, tmp_path) as (process, log):
        assert process.wait(START_S) != 0
        assert "Error in memory profiling" in log.read_text()
        assert beside.times() > 0


def test_a_planned_engine_starts_beside_it_with_the_planned_kv(model: Path, tmp_path: Path) -> None:
    port = free_port()
    words = [
        sys.executable, "-m", "overspill", "serve", str(model), "--gpu-memory", f"{ENGINE_GIB}GiB", "--ram", "8GiB",
        "--offload-ram", "0", "--port", str(port), *COMMON,
    ]  # fmt: skip
    with neighbour() as beside, started(words, tmp_path) as (process, log):
        deadline = time.monotonic() + START_S
        while "/v1 serves" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        said = log.read_text()
        assert beside.times() > 0
        assert "as planned: KV cache" in said and "skipped memory profiling" in said
        asked = {"model": str(model), "prompt": list(range(40)), "max_tokens": 4, "ignore_eos": True,
                 "return_token_ids": True, "detokenize": False}  # fmt: skip
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=30)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
