"""The machine, read from /proc and /sys as they look on different ones, and from the real ones here."""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from overspill.figures import Origin
from overspill.folders import cache_folder
from overspill.hardware.machine import Machine, NumaNode, find_container, read_machine, read_numa_nodes
from overspill.kv.errors import OverspillError
from overspill.kv.numa import parse_cpulist
from overspill.kv.ram import available_ram
from overspill.kv.sizes import GiB


class Tree:
    """A root folder of our own."""

    def __init__(self, root: Path, *, total_gib: int = 64, available_gib: int = 50) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal: {total_gib << 20} kB\nMemAvailable: {available_gib << 20} kB\nHugePages_Total: 0\n"
            f"SwapTotal: {8 << 20} kB\nSwapFree: {7 << 20} kB",
        )
        self.write("proc/sys/kernel/osrelease", "6.8.0-45-generic")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def node(self, index: int, total_gib: int, cpulist: str) -> None:
        folder = f"sys/devices/system/node/node{index}"
        lines = [("MemTotal", total_gib << 20), ("MemFree", (total_gib - 1) << 20)]
        self.write(f"{folder}/meminfo", "\n".join(f"Node {index} {name}:  {value} kB" for name, value in lines))
        self.write(f"{folder}/cpulist", cpulist)

    def read(self, environ: Mapping[str, str] | None = None) -> Machine:
        return read_machine(self.root, environ or {})


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.ram_total_bytes.origin is Origin.MEASURED
    assert 2**28 < machine.ram_available_bytes.value <= machine.ram_total_bytes.value
    assert machine.ram_available_bytes.value == pytest.approx(available_ram().available_bytes, rel=0.2)
    assert 1 <= len(machine.cpu_affinity) <= machine.cpu_count
    assert machine.kernel == os.uname().release
    assert machine.cache_free_bytes is not None and machine.cache_free_bytes.value > 0
    assert machine.is_wsl is False or "microsoft" in machine.kernel.lower()
    for node in machine.numa_nodes:
        assert 0 <= node.free_bytes <= node.total_bytes


def test_ram_and_swap_are_read_in_bytes(tree: Tree) -> None:
    machine = tree.read()
    assert machine.ram_total_bytes.value == 64 * GiB
    assert machine.ram_available_bytes.value == 50 * GiB
    assert machine.ram_available_bytes.note == "the machine's available memory"
    assert (machine.swap_total_bytes.value, machine.swap_free_bytes.value) == (8 * GiB, 7 * GiB)


def test_a_cgroup_limit_bounds_what_is_available_and_is_named(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/app")
    tree.write("sys/fs/cgroup/app/memory.max", 16 * GiB)
    tree.write("sys/fs/cgroup/app/memory.current", 6 * GiB)
    machine = tree.read()
    assert machine.ram_total_bytes.value == 64 * GiB
    assert machine.ram_available_bytes.value == 10 * GiB
    assert machine.ram_available_bytes.note.endswith("sys/fs/cgroup/app/memory.max")
    assert machine.ram_limit_bytes.value == 16 * GiB
    assert machine.ram_limit_bytes.note.endswith("sys/fs/cgroup/app/memory.max")
    tree.write("sys/fs/cgroup/app/memory.max", 128 * GiB)
    assert tree.read().ram_limit_bytes.value == 64 * GiB


def test_numa_nodes_are_read_in_order_with_their_cpus(tree: Tree) -> None:
    tree.node(10, 32, "")
    tree.node(1, 32, "8-15,24")
    tree.node(0, 32, "0-7")
    (tree.root / "sys/devices/system/node/node2").mkdir()  # as in sandboxes: a folder without files
    assert read_numa_nodes(tree.root) == tree.read().numa_nodes
    assert tree.read().numa_nodes == (
        NumaNode(0, 32 * GiB, 31 * GiB, frozenset(range(8))),
        NumaNode(1, 32 * GiB, 31 * GiB, frozenset([*range(8, 16), 24])),
        NumaNode(10, 32 * GiB, 31 * GiB, frozenset()),
    )


def test_a_kernel_without_numa_has_no_nodes(tree: Tree) -> None:
    assert tree.read().numa_nodes == ()


@pytest.mark.parametrize(("text", "cpus"), [("", []), ("3\n", [3]), ("0-2,5", [0, 1, 2, 5])])
def test_lists_of_cpus_are_those_of_the_kernel(text: str, cpus: list[int]) -> None:
    assert parse_cpulist(text) == frozenset(cpus)


def test_shared_memory_is_measured_where_there_is_any(tree: Tree) -> None:
    assert tree.read().shm_total_bytes is tree.read().shm_free_bytes is None
    (tree.root / "dev/shm").mkdir(parents=True)
    machine = tree.read()
    assert machine.shm_total_bytes is not None and machine.shm_free_bytes is not None
    assert 0 < machine.shm_free_bytes.value <= machine.shm_total_bytes.value


def test_the_memlock_limit_is_read_but_does_not_stop_pinning() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))"
    show = (
        "from overspill.hardware import detect; m = detect().machine; print(m.memlock_bytes, m.memlock_stops_pinning)"
    )
    said = subprocess.run(
        [sys.executable, "-c", f"{limited}\n{show}"], capture_output=True, text=True, check=True
    ).stdout
    assert "Known(value=65536," in said
    assert "Known(value=False," in said and "does not count pinned memory against it" in said


def test_an_unlimited_memlock_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert read_machine().memlock_bytes is None


def test_wsl_is_recognised_and_what_it_means_for_pinning_is_said(tree: Tree) -> None:
    tree.write("proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2")
    machine = tree.read()
    assert machine.is_wsl
    assert machine.memlock_stops_pinning.origin is Origin.ASSUMED
    assert "VLLM_WSL2_ENABLE_PIN_MEMORY=1" in machine.memlock_stops_pinning.note


@pytest.mark.parametrize(
    ("path", "text", "environ", "kind"),
    [
        (".dockerenv", "", {}, "docker"),
        ("run/.containerenv", 'engine="podman-5.0"', {}, "podman"),
        ("run/systemd/container", "systemd-nspawn", {}, "systemd-nspawn"),
        ("proc/1/cgroup", "0::/kubepods/besteffort/pod1/c1", {}, "kubernetes"),
        ("proc/1/cgroup", "4:memory:/docker/abc", {}, "docker"),
        ("proc/1/cgroup", "0::/lxc.payload.web", {}, "lxc"),
        ("proc/1/cgroup", "0::/init.scope", {}, None),
        ("unrelated", "", {"container": "flatpak"}, "flatpak"),
        (".dockerenv", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ("unrelated", "", {}, None),
    ],
)
def test_containers_are_recognised_by_their_marks(
    tmp_path: Path, path: str, text: str, environ: dict[str, str], kind: str | None
) -> None:
    Tree(tmp_path).write(path, text)
    assert find_container(tmp_path, environ) == kind


def test_free_disk_is_that_of_the_future_cache_folder(tree: Tree, tmp_path: Path) -> None:
    machine = tree.read({"XDG_CACHE_HOME": str(tmp_path / "not/there/yet")})
    assert machine.cache_folder == tmp_path / "not/there/yet/overspill"
    assert machine.cache_free_bytes is not None
    stat = os.statvfs(tmp_path)
    assert machine.cache_free_bytes.value == pytest.approx(stat.f_frsize * stat.f_bavail, rel=0.1)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/overspill"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/overspill"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/overspill"),
    ],
)
def test_the_cache_folder_follows_xdg(environ: dict[str, str], folder: str) -> None:
    assert cache_folder(environ) == Path(folder)


def test_a_user_without_a_home_has_no_cache_folder(monkeypatch: pytest.MonkeyPatch, tree: Tree) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    machine = tree.read()
    assert machine.cache_folder is machine.cache_free_bytes is None


def test_another_system_than_linux_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OverspillError, match=r"proc/meminfo is missing: Overspill runs on Linux, and this is"):
        read_machine(tmp_path, {})
