"""CPUs near a GPU."""

from pathlib import Path


def numa_cpus(node: int | None, sys: Path = Path("/sys")) -> frozenset[int]:
    """CPUs of a NUMA node; none where the machine has no such node."""
    if node is None or node < 0:
        return frozenset()
    try:
        return parse_cpulist((sys / f"devices/system/node/node{node}/cpulist").read_text())
    except OSError:
        return frozenset()


def parse_cpulist(text: str) -> frozenset[int]:
    """CPUs of a list in the kernel's form: "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
