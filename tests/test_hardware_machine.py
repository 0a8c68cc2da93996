"""The machine, read from /proc and /sys as they look on different ones, and from the real ones here."""

from pathlib import Path

import pytest

from overspill.figures import Origin
from overspill.files import state_folder
from overspill.hardware.machine import Machine, NumaNode, read_machine, read_numa_nodes
from overspill.kv.errors import OverspillError
from overspill.kv.ram import available_ram, parse_cpulist
from overspill.kv.sizes import GiB


class Tree:
    """A root folder of our own."""

    def __init__(self, root: Path, *, total_gib: int = 64, available_gib: int = 50) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal: {total_gib << 20} kB\nMemAvailable: {available_gib << 20} kB\nHugePages_Total: 0\n",
        )

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def node(self, index: int, total_gib: int, cpulist: str) -> None:
        folder = f"sys/devices/system/node/node{index}"
        lines = [("MemTotal", total_gib << 20), ("MemFree", (total_gib - 1) << 20)]
        self.write(f"{folder}/meminfo", "\n".join(f"Node {index} {name}:  {value} kB" for name, value in lines))
        self.write(f"{folder}/cpulist", cpulist)

    def read(self) -> Machine:
        return read_machine(self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.ram_total_bytes.origin is Origin.MEASURED
    assert 2**28 < machine.ram_available_bytes.value <= machine.ram_total_bytes.value
    assert machine.ram_available_bytes.value == pytest.approx(available_ram().available_bytes, rel=0.2)
    for node in machine.numa_nodes:
        assert 0 <= node.free_bytes <= node.total_bytes


def test_ram_is_read_in_bytes(tree: Tree) -> None:
    machine = tree.read()
    assert machine.ram_total_bytes.value == 64 * GiB
    assert machine.ram_available_bytes.value == 50 * GiB
    assert machine.ram_available_bytes.note == "the machine's available memory"


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


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_STATE_HOME": "/c", "HOME": "/h"}, "/c/overspill"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/overspill"),
        ({"XDG_STATE_HOME": "", "HOME": "/h"}, "/h/.local/state/overspill"),
    ],
)
def test_the_state_folder_follows_xdg(environ: dict[str, str], folder: str) -> None:
    assert state_folder(environ) == Path(folder)


def test_a_user_without_a_home_has_no_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert state_folder({}) is None


def test_another_system_than_linux_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OverspillError, match=r"proc/meminfo is missing: Overspill runs on Linux, and this is"):
        read_machine(tmp_path)
