"""The machine around the GPUs: RAM and what limits it, NUMA, CPUs, disk, kernel, containers."""

import os
import platform
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from overspill.figures import Known, assumed, derived, measured
from overspill.folders import cache_folder
from overspill.kv.errors import OverspillError
from overspill.kv.numa import parse_cpulist
from overspill.kv.ram import available_ram, cgroup_limit

_CGROUP_HINTS = {
    "kubepods": "kubernetes", "docker": "docker", "libpod": "podman", "containerd": "containerd", "lxc": "lxc",
}  # fmt: skip


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
    swap_total_bytes: Known[int]
    swap_free_bytes: Known[int]
    memlock_bytes: Known[int] | None  # the soft RLIMIT_MEMLOCK; None is unlimited
    memlock_stops_pinning: Known[bool]
    numa_nodes: tuple[NumaNode, ...]
    cpu_count: int
    cpu_affinity: frozenset[int]  # those this process may run on
    shm_total_bytes: Known[int] | None  # None without a /dev/shm
    shm_free_bytes: Known[int] | None
    cache_folder: Path | None
    cache_free_bytes: Known[int] | None
    architecture: str
    kernel: str
    container: str | None  # which kind; None outside of any
    is_wsl: bool

    @property
    def ram_limit_bytes(self) -> Known[int]:
        """That this process could ever have; the note names a cgroup that allows less than there is."""
        limit = self.cgroup_limit_bytes
        return self.ram_total_bytes if limit is None or limit.value >= self.ram_total_bytes.value else limit


def read_machine(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    try:
        memory = _read_meminfo(root)
        ram = available_ram(root / "proc", root / "sys")
        limit = cgroup_limit(root / "proc", root / "sys")
    except FileNotFoundError as error:
        raise OverspillError(
            f"{error.filename} is missing: Overspill runs on Linux, and this is {platform.system()}"
        ) from error
    kernel = _read_kernel(root)
    is_wsl = "microsoft" in kernel.lower()  # microsoft/WSL#4071
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = _filesystem(root / "dev/shm")
    folder = cache_folder(environ)
    disk = None if folder is None else _filesystem(_existing(folder))
    return Machine(
        ram_total_bytes=measured(memory["MemTotal"]),
        cgroup_limit_bytes=None if limit is None else measured(limit[0], f"the cgroup limit {limit[1]}"),
        ram_available_bytes=measured(ram.available_bytes, ram.source),
        swap_total_bytes=measured(memory.get("SwapTotal", 0)),
        swap_free_bytes=measured(memory.get("SwapFree", 0)),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else measured(soft),
        memlock_stops_pinning=_memlock_stops_pinning(is_wsl=is_wsl),
        numa_nodes=read_numa_nodes(root),
        cpu_count=os.cpu_count() or 1,
        cpu_affinity=frozenset(os.sched_getaffinity(0)),
        shm_total_bytes=None if shm is None else measured(shm.total),
        shm_free_bytes=None if shm is None else measured(shm.free),
        cache_folder=folder,
        cache_free_bytes=None if disk is None else measured(disk.free),
        architecture=platform.machine(),
        kernel=kernel,
        container=find_container(root, environ),
        is_wsl=is_wsl,
    )


def _read_meminfo(root: Path) -> dict[str, int]:
    lines = (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in lines if rest.endswith("kB")}


def _read_kernel(root: Path) -> str:
    try:
        return (root / "proc/sys/kernel/osrelease").read_text().strip()
    except OSError:
        return platform.release()


def _memlock_stops_pinning(*, is_wsl: bool) -> Known[bool]:
    """Whether RLIMIT_MEMLOCK keeps CUDA from pinning host memory.

    It does not: NVIDIA's kernel module pins user pages itself and neither reads that limit nor counts pages against it
    (NVIDIA/open-gpu-kernel-modules 595.45.04, kernel-open/nvidia/os-mlock.c). WSL has another kernel module.
    """
    if is_wsl:
        return assumed(
            False, "WSL limits pinned memory by itself; vLLM pins there with VLLM_WSL2_ENABLE_PIN_MEMORY=1 only"
        )
    return derived(False, note="NVIDIA's driver does not count pinned memory against it")


def _filesystem(path: Path) -> "shutil._ntuple_diskusage | None":
    try:
        return shutil.disk_usage(path)
    except OSError:
        return None


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there: its filesystem is the one it would be made on."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def find_container(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> str | None:
    """The kind of container this runs in, by the marks that each kind leaves."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    if named := environ.get("container") or _first_line(root / "run/systemd/container"):
        return named
    cgroups = _first_line(root / "proc/1/cgroup", whole=True)
    return next((kind for hint, kind in _CGROUP_HINTS.items() if hint in cgroups), None)


def _first_line(path: Path, *, whole: bool = False) -> str:
    try:
        text = path.read_text()
    except OSError:
        return ""
    return text if whole else text.partition("\n")[0].strip()
