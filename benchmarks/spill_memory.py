"""Memory as the driver and the kernel count it: spill maps GPU memory that torch's statistics do not know."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from record import Json


def gpu_used_bytes() -> int | None:
    """Memory in use on the whole GPU; None without one. Taken before and after, the difference is an engine's."""
    found = _nvml()
    if found is None:
        return None
    nvml, device = found
    return int(nvml.nvmlDeviceGetMemoryInfo(device).used)


def gpu_process_bytes() -> int | None:
    """What NVML says of this process alone. In a container it often cannot tell."""
    found = _nvml()
    if found is None:
        return None
    nvml, device = found
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    except Exception:
        return None
    return next((p.usedGpuMemory for p in processes if p.pid == os.getpid() and p.usedGpuMemory), None)


def usage(gpu_bytes_before: int | None) -> Json:
    """GPU and RAM now. Allocators keep what they once had, so after a phase this is its peak."""
    used = gpu_used_bytes()
    status = _status()
    return {
        "gpu_bytes": None if used is None or gpu_bytes_before is None else used - gpu_bytes_before,
        "gpu_process_bytes": gpu_process_bytes(),
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
