"""How much RAM may be taken, from /proc and /sys as they look on different machines."""

from pathlib import Path

import pytest

from overspill.kv.errors import OverspillError
from overspill.kv.ram import Ram, available_ram, num_oom_kills, require_ram

GIB = 2**30


class Machine:
    """A /proc and a /sys of our own."""

    def __init__(self, root: Path, available: int, cgroup: str | None) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.write(self.proc / "meminfo", f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n")
        if cgroup is not None:
            self.write(self.proc / "self/cgroup", cgroup)

    def write(self, path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def limit_v2(self, path: str, limit: int | str, usage: int, inactive_file: int = 0) -> None:
        folder = self.sys / "fs/cgroup" / path
        self.write(folder / "memory.max", limit)
        self.write(folder / "memory.current", usage)
        self.write(folder / "memory.stat", f"anon 1\ninactive_file {inactive_file}\nactive_file 5")

    def ram(self) -> Ram:
        return available_ram(self.proc, self.sys)


def test_without_cgroups_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    ram = Machine(tmp_path, 10 * GIB, None).ram()
    assert ram == Ram(10 * GIB, "the machine's available memory")


def test_a_cgroup_v2_limit_below_it_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 10 * GIB, "0::/app")
    machine.limit_v2("app", 4 * GIB, 1 * GIB)
    assert machine.ram().available_bytes == 3 * GIB
    assert "app/memory.max" in machine.ram().source


def test_a_limit_of_max_is_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 10 * GIB, "0::/app")
    machine.limit_v2("app", "max", 1 * GIB)
    assert machine.ram().available_bytes == 10 * GIB


def test_the_tightest_of_nested_limits_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 10 * GIB, "0::/slice/app")
    machine.limit_v2("slice/app", 8 * GIB, 1 * GIB)
    machine.limit_v2("slice", 6 * GIB, 5 * GIB)
    assert machine.ram().available_bytes == 1 * GIB
    assert machine.ram().source.endswith("slice/memory.max")


def test_a_mount_limit_counts_when_the_path_is_the_hosts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 10 * GIB, "0::/kubepods/pod7/c1")
    machine.limit_v2("", 4 * GIB, 1 * GIB)
    assert machine.ram().available_bytes == 3 * GIB


def test_page_cache_is_counted_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 10 * GIB, "0::/app")
    machine.limit_v2("app", 4 * GIB, 3 * GIB, inactive_file=2 * GIB)
    assert machine.ram().available_bytes == 3 * GIB


def test_a_cgroup_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 10 * GIB, "0::/app")
    machine.limit_v2("app", 1 * GIB, 2 * GIB)
    assert machine.ram().available_bytes == 0


def test_a_cgroup_v1_limit_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 10 * GIB, "5:cpu:/x\n4:hugetlb,memory:/docker/c1")
    folder = machine.sys / "fs/cgroup/memory/docker/c1"
    machine.write(folder / "memory.limit_in_bytes", 4 * GIB)
    machine.write(folder / "memory.usage_in_bytes", 2 * GIB)
    machine.write(folder / "memory.stat", f"inactive_file {GIB // 2}")
    assert machine.ram().available_bytes == 2.5 * GIB


def test_a_kernel_without_memavailable_is_named(tmp_path: Path) -> None:
    machine = Machine(tmp_path, GIB, None)
    machine.write(machine.proc / "meminfo", "MemTotal: 5 kB")
    with pytest.raises(OverspillError, match=r"no MemAvailable line; Linux 3\.14"):
        machine.ram()


def test_oom_kills_are_counted_by_cgroup_or_else_by_machine(tmp_path: Path) -> None:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True)
    (proc / "vmstat").write_text("nr_free_pages 1\n")
    (proc / "self/cgroup").write_text("4:memory:/job\n0::/\n")
    assert num_oom_kills(proc, sys) is None
    (proc / "vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    assert num_oom_kills(proc, sys) == 7
    for folder, name, text in (
        (sys / "fs/cgroup/memory/job", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        (sys / "fs/cgroup/user/engine", "memory.events", "low 0\noom 1\noom_kill 1\noom_group_kill 0\n"),
    ):
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
    assert num_oom_kills(proc, sys) == 2
    (proc / "self/cgroup").write_text("0::/user/engine\n")
    assert num_oom_kills(proc, sys) == 1


def test_this_machine_has_some_ram() -> None:
    assert available_ram().available_bytes > 2**26


def test_a_pool_that_leaves_the_reserve_is_accepted() -> None:
    require_ram({"host_bytes": 6 * GIB}, 4 * GIB, Ram(10 * GIB, "test"))


def test_a_pool_over_the_reserve_is_refused_with_the_largest_fit() -> None:
    with pytest.raises(OverspillError) as refused:
        require_ram({"host_bytes": 6 * GIB + 1, "spill_bytes": 0}, 4 * GIB, Ram(10 * GIB, "the cgroup limit X"))
    message = str(refused.value)
    for part in ("needs 6 GiB", "10 GiB is available", "the cgroup limit X", "4 GiB stays in reserve",
                 '"host_bytes": "6144MiB"', "lower reserve_bytes"):  # fmt: skip
        assert part in message
    require_ram({"host_bytes": 6144 * 2**20}, 4 * GIB, Ram(10 * GIB, "what was advised fits"))


def test_where_nothing_fits_no_size_is_advised() -> None:
    with pytest.raises(OverspillError, match="Nothing fits: free some RAM"):
        require_ram({"host_bytes": 1}, 4 * GIB, Ram(3 * GIB, "test"))
