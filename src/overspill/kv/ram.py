"""RAM and NUMA nodes of this machine: how much RAM this process may still take, and which CPUs are near a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import MiB, format_size


@dataclass(frozen=True)
class Ram:
    available_bytes: int
    source: str  # what sets the bound, for messages


def _meminfo_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OverspillError(f"{proc}/meminfo has no MemAvailable line; Linux 3.14 or newer is needed")


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)


def _cgroup_folders(proc: Path, sys: Path) -> list[tuple[Path, str, str]]:
    """(folder, limit file, usage file) of this process's memory cgroup and of all its parents."""
    found = []
    try:
        entries = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            base, names = sys / "fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = sys / "fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path is often the host's; the limit is then at the mount's root.
        for candidate in (folder, *folder.parents):
            if candidate == base or base in candidate.parents:
                found.append((candidate, *names))
    return found


def cgroup_limit(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> tuple[int, Path] | None:
    """Lowest memory limit among this process's cgroups and the file that sets it, or None without a limit."""
    files = [folder / limit_name for folder, limit_name, _ in _cgroup_folders(proc, sys)]
    return min(((limit, file) for file in files if (limit := _read_int(file)) is not None), default=None)


def available_ram(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Ram:
    """RAM that this process can take without swapping or reaching a cgroup's limit."""
    best = Ram(_meminfo_available(proc), "the machine's available memory")
    for folder, limit_name, usage_name in _cgroup_folders(proc, sys):
        limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
        if limit is None or usage is None:
            continue
        # Page cache counts as usage but is reclaimed under pressure.
        reclaimable = _stat(folder / "memory.stat", "inactive_file")
        room = max(0, limit - usage + reclaimable)
        if room < best.available_bytes:
            best = Ram(room, f"the cgroup limit {folder / limit_name}")
    return best


def num_oom_kills(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int | None:
    """Number of processes the kernel's OOM killer has killed, in this memory cgroup or else on the machine."""
    folders = [folder for folder, _, _ in _cgroup_folders(proc, sys)]
    counters = [folder / name for folder in folders for name in ("memory.events", "memory.oom_control")]
    for path in (*counters, proc / "vmstat"):
        try:
            counts = dict(line.split()[:2] for line in path.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if counts.get("oom_kill", "").isdigit():
            return int(counts["oom_kill"])
    return None


def require_ram(needs: Mapping[str, int], reserve_bytes: int, ram: Ram | None = None) -> None:
    """Refuse needs that would take the machine below its reserve. `needs` are bytes not allocated yet, by option.

    All needs of an engine are checked together, before the first is allocated: RAM taken by one would be missing from
    the RAM available to the others.
    """
    ram = available_ram() if ram is None else ram
    fits, need_bytes = ram.available_bytes - reserve_bytes, sum(needs.values())
    if need_bytes <= fits:
        return
    wanted = [option for option, num_bytes in needs.items() if num_bytes]
    option = " + ".join(wanted)
    fixed = needs.get("park", 0)  # a copy of the weights, which cannot be made smaller
    sizes = [name for name in wanted if name != "park"]
    largest = f'"{(fits - fixed) // MiB}MiB"'
    largest = f"{largest} for both" if len(sizes) > 1 else f'"{"".join(sizes)}": {largest}'
    advice = f"Largest that fits: {largest}" if fits - fixed >= MiB else "Nothing fits: free some RAM"
    advice += f", do without park ({format_size(fixed)} for a copy of the weights)" if fixed else ""
    raise OverspillError(
        f"{option} needs {format_size(need_bytes)} of RAM; {format_size(ram.available_bytes)} is available "
        f"({ram.source}) and {format_size(reserve_bytes)} stays in reserve. {advice}, or lower reserve_bytes."
    )


def numa_cpus(node: int | None, sys: Path = Path("/sys")) -> frozenset[int]:
    """CPUs of a NUMA node; empty if the machine does not have the node."""
    if node is None or node < 0:
        return frozenset()
    try:
        return parse_cpulist((sys / f"devices/system/node/node{node}/cpulist").read_text())
    except OSError:
        return frozenset()


def parse_cpulist(text: str) -> frozenset[int]:
    """CPUs in a list of the kernel's form, such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
