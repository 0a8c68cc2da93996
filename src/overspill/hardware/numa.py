"""NUMA nodes: their memory, their CPUs."""

from dataclasses import dataclass
from pathlib import Path

from overspill.kv.numa import parse_cpulist


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
