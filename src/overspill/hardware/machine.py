"""Detection of this machine's RAM and its limits, NUMA nodes and GPUs, in one call for planners."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overspill.figures import Known, derived, measured
from overspill.hardware.gpu import Gpu, visible_gpus
from overspill.hardware.nvml import read_gpus
from overspill.kv.errors import OverspillError
from overspill.kv.ram import available_ram, cgroup_limit, parse_cpulist


@dataclass(frozen=True, slots=True)
class NumaNode:
    index: int
    total_bytes: int
    free_bytes: int
    cpus: frozenset[int]  # empty for nodes of memory only: CXL, or a GPU's memory as on a GH200


def read_numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """NUMA nodes by number; none where the kernel was built without NUMA."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = [node for folder in folders if (node := _read_node(folder)) is not None]
    return tuple(sorted(nodes, key=lambda node: node.index))


def _read_node(folder: Path) -> NumaNode | None:
    try:
        meminfo, cpulist = (folder / "meminfo").read_text(), (folder / "cpulist").read_text()
    except OSError:  # sandboxes show the folder without the files
        return None
    sizes = {}
    for line in meminfo.splitlines():
        _, _, name, value, *_ = line.replace(":", " ").split()  # "Node 0 MemTotal:       24682740 kB"
        sizes[name] = int(value) * 1024
    cpus = parse_cpulist(cpulist)
    return NumaNode(int(folder.name.removeprefix("node")), sizes["MemTotal"], sizes["MemFree"], cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    ram_total_bytes: Known[int]
    cgroup_limit_bytes: Known[int] | None  # lowest on this process, named by the note; None without one
    ram_available_bytes: Known[int]  # without swapping or reaching a cgroup's limit; the note names what bounds it
    numa_nodes: tuple[NumaNode, ...]

    @property
    def ram_limit_bytes(self) -> Known[int]:
        """Most RAM this process could ever have; the note names a cgroup that allows less than the machine has."""
        limit = self.cgroup_limit_bytes
        return self.ram_total_bytes if limit is None or limit.value >= self.ram_total_bytes.value else limit


def read_machine(root: Path = Path("/")) -> Machine:
    try:
        memory = (root / "proc/meminfo").read_text()
        ram = available_ram(root / "proc", root / "sys")
        limit = cgroup_limit(root / "proc", root / "sys")
    except FileNotFoundError as error:
        raise OverspillError(
            f"{error.filename} is missing: Overspill runs on Linux, and this is {platform.system()}"
        ) from error
    total = next(int(line.split()[1]) * 1024 for line in memory.splitlines() if line.startswith("MemTotal:"))
    return Machine(
        ram_total_bytes=measured(total),
        cgroup_limit_bytes=None if limit is None else measured(limit[0], f"the cgroup limit {limit[1]}"),
        ram_available_bytes=measured(ram.available_bytes, ram.source),
        numa_nodes=read_numa_nodes(root),
    )


@dataclass(frozen=True, slots=True)
class Hardware:
    machine: Machine
    gpus: tuple[Gpu, ...]  # those CUDA_VISIBLE_DEVICES leaves, in its order
    problems: tuple[str, ...] = ()  # why a GPU, or every one, is missing

    def first_gpu(self) -> Gpu:
        """The GPU an engine would take; an error with the reasons if there is none."""
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
    """Detect this machine and its GPUs quickly, without touching the GPUs; link speeds are derived from PCIe."""
    machine = read_machine(root)
    report = read_gpus(nvml)
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    gpus, problems = visible_gpus(report.gpus, setting), report.problems
    if report.gpus and not gpus:
        problems = (*problems, f"CUDA_VISIBLE_DEVICES={setting!r} hides every GPU")
    machine = without_gpu_memory(machine, report.gpus)
    return Hardware(machine, gpus, problems)


def without_gpu_memory(machine: Machine, gpus: tuple[Gpu, ...]) -> Machine:
    """Subtract GPU memory from RAM: on a GH200 it is a NUMA node that the kernel counts as RAM, and a plan must not."""
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
