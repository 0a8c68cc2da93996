"""The machine around the GPUs: RAM and what limits it, and NUMA nodes."""

import platform
from dataclasses import dataclass
from pathlib import Path

from overspill.figures import Known, measured
from overspill.kv.errors import OverspillError
from overspill.kv.numa import parse_cpulist
from overspill.kv.ram import available_ram, cgroup_limit


@dataclass(frozen=True, slots=True)
class NumaNode:
    index: int
    total_bytes: int
    free_bytes: int
    cpus: frozenset[int]  # none where the node is memory only: CXL, or the memory of a GPU such as a GH200's


def read_numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """In order of their numbers; none where the kernel was built without NUMA."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = [node for folder in folders if (node := _read_node(folder)) is not None]
    return tuple(sorted(nodes, key=lambda node: node.index))


def _read_node(folder: Path) -> NumaNode | None:
    try:
        meminfo, cpulist = (folder / "meminfo").read_text(), (folder / "cpulist").read_text()
    except OSError:  # sandboxes show the folder and not the files
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
    cgroup_limit_bytes: Known[int] | None  # the lowest on this process, which the note names; None without one
    ram_available_bytes: Known[int]  # without swapping or reaching a cgroup's limit; the note names what bounds it
    numa_nodes: tuple[NumaNode, ...]

    @property
    def ram_limit_bytes(self) -> Known[int]:
        """That this process could ever have; the note names a cgroup that allows less than there is."""
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
