"""The GPU: the link between RAM and it, measured with plain torch copies of pinned memory, and memory in use.

Memory is counted by the driver and the kernel: spill maps GPU memory that torch's statistics do not know.

python benchmarks/gpu.py       prints the link as one JSON object, null without a GPU
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from record import GIB, Json

MEASURE_SECONDS = 90.0


def measure_link(num_bytes: int = GIB, repeats: int = 9) -> Json | None:
    """Bytes per second each way, and of both directions together."""
    import torch

    if not torch.cuda.is_available():
        return None
    host = [torch.ones(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    device = [torch.ones(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def load() -> None:
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)

    def store() -> None:
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)

    def both() -> None:
        load()
        store()

    def seconds(copy: Callable[[], None]) -> list[float]:
        taken = []
        for _ in range(repeats + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return taken[2:]  # the first copies also wake the link up

    return {
        "bytes": num_bytes,
        "repeats": repeats,
        "h2d_bytes_per_second": num_bytes / statistics.median(seconds(load)),
        "d2h_bytes_per_second": num_bytes / statistics.median(seconds(store)),
        "both_bytes_per_second": 2 * num_bytes / statistics.median(seconds(both)),
    }


def measure() -> Json:
    """Link and CUDA context, in a fork that is over before an engine starts: its own context would count."""
    context = multiprocessing.get_context("fork")
    answers, answer = context.Pipe(duplex=False)
    child = context.Process(target=_send_gpu, args=(answer, used_bytes()))
    child.start()
    answer.close()
    try:
        measured: Json = answers.recv() if answers.poll(MEASURE_SECONDS) else {"link": None, "context_bytes": 0}
    except EOFError:
        measured = {"link": None, "context_bytes": 0}
    child.join(10)
    if child.exitcode is None:
        child.kill()
    return measured


def _send_gpu(answer: Connection, used_before: int | None) -> None:
    import torch

    context_bytes = 0
    if torch.cuda.is_available() and used_before is not None:
        torch.zeros(1, device="cuda")
        # By NVML both times: it counts what the driver keeps for itself as used, and CUDA does not.
        context_bytes = max(0, (used_bytes() or 0) - used_before)
    answer.send({"link": measure_link(), "context_bytes": context_bytes})


def used_bytes() -> int | None:
    """Memory in use on the whole GPU; None without one. Taken before and after, the difference is an engine's."""
    found = _nvml()
    if found is None:
        return None
    nvml, device = found
    return int(nvml.nvmlDeviceGetMemoryInfo(device).used)


def held_bytes(pids: Collection[int]) -> int | None:
    """Of the GPU's memory by these processes; None where the driver does not tell processes apart."""
    found = _nvml()
    if found is None:
        return None
    nvml, device = found
    held = [one.usedGpuMemory for one in nvml.nvmlDeviceGetComputeRunningProcesses(device) if one.pid in pids]
    return None if not held or None in held else sum(held)


def usage(gpu_bytes_before: int | None) -> Json:
    """GPU and RAM now. Allocators keep what they once had, so after a phase this is its peak."""
    held, used = held_bytes({os.getpid()}), used_bytes()
    status = _status()
    if held is None and used is not None and gpu_bytes_before is not None:
        held = used - gpu_bytes_before
    return {
        "gpu_bytes": held,
        "rss_bytes": status.get("VmRSS"),
        "peak_rss_bytes": status.get("VmHWM"),
    }


def _nvml() -> tuple[Any, Any] | None:
    """NVML makes no CUDA context, so it may be asked before the engine starts."""
    try:
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)
    except Exception:
        return None


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, _ in fields}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(json.dumps(measure_link()))
