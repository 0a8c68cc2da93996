"""Speed of the CPU's attention to KV in RAM: measured once per machine, else assumed from its cores, or stated."""

import json
import logging
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from overspill.figures import Known, assumed, measured
from overspill.files import replace_file, state_folder
from overspill.kv.attention.library import AttentionUnavailable, default_threads, load

logger = logging.getLogger(__name__)

# The slowest core measured, a Neoverse N1, attends to 3.7 GB/s; cores of a Xeon with AVX-512 BF16 to 8 to 10 GB/s.
# Two memory channels also serve the link, which leaves about this much. Servers have more: eight channels reached
# 100 GB/s with 14 threads (benchmarks/attention_kernel.py).
_THREAD_BYTES_PER_S, _MEMORY_BYTES_PER_S = 3 * 10**9, 20 * 10**9
# Threads of a machine that is only stated: eight cores, two of them left to the engine.
_STATED_THREADS = 6
# While the link copied at 55 GB/s, the same 14 threads kept 63 to 74 of their 99 GB/s (benchmarks/spill.py).
BESIDE_LINK = 0.7
_PATIENCE_S = 60.0


def cpu_attention(threads: int | None = None) -> Known[int]:
    """Bytes of KV per second this machine's CPU attends to; 0 where the kernel cannot run, with the reason as note."""
    try:
        load()
    except AttentionUnavailable as error:
        return assumed(0, str(error))
    threads = threads or default_threads()
    with suppress(OSError, ValueError, KeyError, TypeError):
        if (path := _path()) is not None:
            rate = int(json.loads(path.read_text(encoding="utf-8"))[_key(threads)])
            return measured(
                int(rate * BESIDE_LINK), f"{_threads(threads)}, less the memory bandwidth that the link takes"
            )
    return assumed_attention(threads)


def assumed_attention(threads: int = _STATED_THREADS) -> Known[int]:
    rate = min(threads * _THREAD_BYTES_PER_S, _MEMORY_BYTES_PER_S)
    return assumed(rate, f"{_threads(threads)} and two channels of memory")


def measure_attention(threads: int | None = None) -> bool:
    """Measure the rate, which takes seconds, and save it for this user's plans on this machine; True if that was done.
    Skipped while other programs compute: what they leave is not what the CPU can do."""
    threads, path = threads or default_threads(), _path()
    cores = len(os.sched_getaffinity(0))
    if path is None or os.getloadavg()[0] > max(1, cores - threads):
        return False
    try:
        rate = _measured_rate(threads)
        kept = {}
        with suppress(OSError, ValueError):
            kept = dict(json.loads(path.read_text(encoding="utf-8")))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps({**kept, _key(threads): rate}) + "\n")
    except (OSError, ValueError, subprocess.TimeoutExpired, AttentionUnavailable) as error:
        logger.warning("Overspill: how fast this CPU attends to KV is assumed; measuring it failed: %s", error)
        return False
    return True


def _measured_rate(threads: int) -> int:
    """Measure in a separate process: torch takes hundreds of MiB, and a manager that plans is long-lived."""
    command = [sys.executable, "-m", "overspill.kv.attention.rates", str(threads)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_PATIENCE_S)
    if done.returncode:
        raise AttentionUnavailable((done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1])
    return int(done.stdout)


def computes_bf16() -> bool:
    """Whether vLLM's CPU build can use bf16: on ARM its kernels hit an illegal instruction on cores without it."""
    if platform.machine() != "aarch64":
        return True
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return True


def _path() -> Path | None:
    folder = state_folder()
    return None if folder is None else folder / "cpu-attention.json"


def _key(threads: int) -> str:
    """Key of a saved rate, with the host name: a home directory may be shared between machines."""
    return f"{platform.node()}, {threads}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"
