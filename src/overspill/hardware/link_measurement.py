"""Timing the link: copies of pinned memory, in a process of their own.

A CUDA context takes some hundred MiB of the GPU and stays as long as its process; whoever plans, or manages engines,
should not hold one. So a child imports torch, copies, prints its rates as JSON and ends.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from overspill.figures import measured
from overspill.hardware.gpu import Gpu
from overspill.hardware.link import Link
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import MiB

_PROBE_BYTES = 16 * MiB
_MOST_BYTES = 256 * MiB
_COPY_S = 0.02  # one copy; long against the cost of starting it
_WAKE_S = 0.1  # an idle link runs at a lower generation, and takes some copies to come back
_REPEATS = 9
_TIMEOUT_S = 120.0  # importing torch from a cold disk takes most of it


class LinkNotMeasured(OverspillError):
    """The link could not be timed: no torch for CUDA, no free GPU memory, or pinning refused."""


def measure_link(gpu: Gpu, cpus: Iterable[int] = (), timeout_s: float = _TIMEOUT_S) -> Link:
    """Bytes per second each way. `cpus` are those of the GPU's NUMA node: pages come from the node of who asks."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(sorted(cpus))]
    # By its uuid, because numbers mean different GPUs to CUDA and to NVML.
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
    try:
        child = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkNotMeasured(f"the link of GPU {gpu.index} could not be measured: {error}") from error
    if child.returncode != 0:
        why = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        raise LinkNotMeasured(f"the link of GPU {gpu.index} could not be measured: {why[-1]}")
    try:
        rates = json.loads(child.stdout.splitlines()[-1])
        h2d, d2h = (measured(int(rates[name]), f"median of {_REPEATS} copies") for name in ("h2d", "d2h"))
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise LinkNotMeasured(
            f"the link of GPU {gpu.index} could not be measured: no rates in {child.stdout!r}"
        ) from error
    return Link(h2d, d2h)


def copy_bytes(probe_s: float) -> int:
    """How much to copy at a time, given what copying the probe took: whole MiB, quick on a slow link too."""
    wanted = int(_PROBE_BYTES * _COPY_S / max(probe_s, 1e-9)) // MiB * MiB
    return min(max(wanted, _PROBE_BYTES), _MOST_BYTES)


def _copy_rates() -> dict[str, float]:
    """Median bytes per second of copies to the first visible GPU and back."""
    import torch

    host: Any = torch.empty(_MOST_BYTES, dtype=torch.uint8, pin_memory=True)
    device: Any = torch.empty(_MOST_BYTES, dtype=torch.uint8, device="cuda")

    def seconds(copy: Callable[[], object]) -> float:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        copy()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def rate(target: Any, source: Any) -> float:
        wake_until = time.monotonic() + _WAKE_S
        while True:
            probe_s = seconds(lambda: target[:_PROBE_BYTES].copy_(source[:_PROBE_BYTES], non_blocking=True))
            if time.monotonic() > wake_until:
                break
        size = copy_bytes(probe_s)
        taken = [seconds(lambda: target[:size].copy_(source[:size], non_blocking=True)) for _ in range(_REPEATS)]
        return size / statistics.median(taken)

    return {"h2d": rate(device, host), "d2h": rate(host, device)}


def main() -> None:
    """The child's part."""
    cpus = set(json.loads(sys.argv[1])) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        rates = _copy_rates()
    except (ImportError, RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        sys.exit((str(error).strip() or repr(error)).splitlines()[0])
    print(json.dumps(rates))
