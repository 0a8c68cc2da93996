"""What this machine has: one call for a planner."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overspill.figures import Known, derived
from overspill.hardware.gpu import Gpu, visible_gpus
from overspill.hardware.machine import Machine, read_machine
from overspill.hardware.nvml import read_gpus
from overspill.kv.errors import OverspillError


@dataclass(frozen=True, slots=True)
class Hardware:
    machine: Machine
    gpus: tuple[Gpu, ...]  # those CUDA_VISIBLE_DEVICES leaves, in its order
    problems: tuple[str, ...] = ()  # why a GPU, or all, is missing

    def first_gpu(self) -> Gpu:
        """The GPU an engine would take."""
        if self.gpus:
            return self.gpus[0]
        why = "; ".join(self.problems) or "none was found"
        raise OverspillError(f"no GPU to plan for: {why}. State one with --gpu, for example --gpu 24GiB")


def detect(
    *,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    nvml: Any | None = None,
) -> Hardware:
    """This machine and its GPUs; quick, and without touching the GPUs. The speed of a link follows from PCIe."""
    machine = read_machine(root)
    report = read_gpus(nvml)
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    gpus, problems = visible_gpus(report.gpus, setting), report.problems
    if report.gpus and not gpus:
        problems = (*problems, f"CUDA_VISIBLE_DEVICES={setting!r} hides every GPU")
    machine = without_gpu_memory(machine, report.gpus)
    return Hardware(machine, gpus, problems)


def without_gpu_memory(machine: Machine, gpus: tuple[Gpu, ...]) -> Machine:
    """On a GH200 the GPU's memory is a NUMA node, and the kernel counts it as RAM; a planner must not."""
    of_gpus = {gpu.memory_numa_node for gpu in gpus if gpu.memory_numa_node is not None}
    taken = [node for node in machine.numa_nodes if node.index in of_gpus and not node.cpus]
    if not taken:
        return machine
    total, available = machine.ram_total_bytes, machine.ram_available_bytes

    def less(figure: Known[int], num_bytes: int) -> Known[int]:
        note = "; ".join(filter(None, (figure.note, "without the GPU's memory, which is a NUMA node")))
        return derived(max(0, figure.value - num_bytes), figure, note=note)

    return replace(
        machine,
        ram_total_bytes=less(total, sum(node.total_bytes for node in taken)),
        ram_available_bytes=less(available, sum(node.free_bytes for node in taken)),
        numa_nodes=tuple(node for node in machine.numa_nodes if node not in taken),
    )
