"""The link between RAM and a GPU, measured: copies of pinned memory in a process of their own, kept between runs.

A CUDA context takes some hundred MiB of the GPU and stays as long as its process; a planner or a manager of engines
should not hold one. So a child imports torch, copies, prints its rates as JSON and ends. They are kept in a small JSON
file for each machine that they hold for.
"""

import hashlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from overspill.figures import measured
from overspill.files import replace_file
from overspill.hardware.gpu import Gpu, Link
from overspill.hardware.machine import Machine
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import MiB

logger = logging.getLogger(__name__)

_FORMAT = 1
_RATES = ("h2d_bytes_per_second", "d2h_bytes_per_second")
# A figure beyond this is not a link but a damaged file: a GH200's NVLink-C2C does 450 GB/s.
_FASTEST = 10**13
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


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A measured link holds as long as none of these change."""

    gpu_uuid: str
    driver_version: str
    pcie_generation: int | None
    pcie_width: int | None
    kernel: str


def fingerprint_of(gpu: Gpu, kernel: str) -> Fingerprint:
    return Fingerprint(
        gpu_uuid=gpu.uuid,
        driver_version=gpu.driver_version,
        pcie_generation=gpu.pcie_generation.value if gpu.pcie_generation else None,
        pcie_width=gpu.pcie_width.value if gpu.pcie_width else None,
        kernel=kernel,
    )


def _path(folder: Path, fingerprint: Fingerprint) -> Path:
    text = json.dumps(asdict(fingerprint), sort_keys=True)
    return folder / "links" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def load_link(folder: Path, fingerprint: Fingerprint) -> Link | None:
    """The link measured for that fingerprint; None if there is none, or the file is damaged."""
    path = _path(folder, fingerprint)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("Overspill: the measured link in %s cannot be read (%s); it will be measured again", path, error)
        return None
    try:
        return _parse(text, fingerprint)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("Overspill: the measured link in %s is damaged (%s); it will be measured again", path, error)
        return None


def _parse(text: str, fingerprint: Fingerprint) -> Link:
    entry = json.loads(text)
    if entry["format"] != _FORMAT or entry["fingerprint"] != asdict(fingerprint):
        raise ValueError("it belongs to something else")
    rates = [entry[name] for name in _RATES]
    if not all(type(rate) is int and 0 < rate < _FASTEST for rate in rates):
        raise ValueError(f"rates of {rates}")
    note = f"measured on {date.fromisoformat(entry['measured_on'])}"
    h2d, d2h = (measured(rate, note) for rate in rates)
    return Link(h2d, d2h)


def store_link(folder: Path, fingerprint: Fingerprint, link: Link) -> None:
    """Keep a measured link; failing to is no error. Of two writers the last wins, and readers see either, whole."""
    path = _path(folder, fingerprint)
    rates = {name: getattr(link, name).value for name in _RATES}
    entry = {"format": _FORMAT, "fingerprint": asdict(fingerprint), "measured_on": date.today().isoformat(), **rates}
    text = json.dumps(entry, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        logger.warning(
            "Overspill: the measured link could not be kept in %s (%s); it is measured again next time", path, error
        )


def find_link(gpu: Gpu, machine: Machine, *, measure: bool) -> Link:
    """The link as it was measured, now or earlier; else as it stands with the GPU, from PCIe or a data sheet."""
    fingerprint = fingerprint_of(gpu, machine.kernel)
    folder = machine.cache_folder
    known = None if folder is None else load_link(folder, fingerprint)
    if known is not None or not measure:
        return known or gpu.link
    near = gpu.numa_node.value if gpu.numa_node else None
    cpus = next((node.cpus for node in machine.numa_nodes if node.index == near), frozenset[int]())
    try:
        link = measure_link(gpu, cpus)
    except LinkNotMeasured as error:
        logger.warning("Overspill: %s; its speed is taken from PCIe", error)
        return gpu.link
    # Beside another program's copies the link looks slower than it is: good for now, not to be kept.
    if folder is not None and not gpu.processes:
        store_link(folder, fingerprint, link)
    return link
