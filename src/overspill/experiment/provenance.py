"""Where and with what something was measured: card, driver, versions, the code's revision."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.bench.record import git_revision
from overspill.hardware import detect
from overspill.registry import installed_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    gpu: str | None
    driver: str | None
    versions: dict[str, str]
    git_revision: str | None
    """Of Overspill's code, where it is installed from a checkout."""
    machine: dict[str, Any]


def find_provenance() -> Provenance:
    hardware = detect()
    gpu = hardware.gpus[0] if hardware.gpus else None
    return Provenance(
        gpu=gpu.name if gpu is not None else None,
        driver=gpu.driver_version or None if gpu is not None else None,
        versions=installed_versions(),
        git_revision=git_revision(),
        machine={
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "ram_bytes": hardware.machine.ram_total_bytes.value,
        },
    )


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
