"""Samples of this machine against what this machine does, histories for charts, and maps of memory."""

import contextlib
import json
import math
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overspill.kv.sizes import GiB, MiB
from overspill.manager.telemetry.machine import GpuSampler, Sampler, chart_values
from overspill.manager.telemetry.overview import Claim, Kind, gpu_claim, memory_map, ram_claim
from overspill.manager.telemetry.watcher import MAX_COLUMNS, History, Ring
from overspill.processes import family, identity, processes
from overspill.serve.engine_report import HostMemoryReport, Phase, Report
from overspill.serve.status import memory_of
from tests.test_hardware_nvml import LOST, NOT_SUPPORTED, Device, FakeNvml, NVMLError, used


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[Sampler]:
    sampler = Sampler({"state": tmp_path, "models": tmp_path / "not" / "there" / "yet"})
    yield sampler
    sampler.close()


HOLD = f"""
import sys, time
held = bytearray({64 * MiB})
print("held", flush=True)
sys.stdin.readline()
end = time.process_time() + 0.5
while time.process_time() < end: pass
print("worked", flush=True)
sys.stdin.readline()
"""
# The process that is watched is the parent of the one that holds and works, as with an engine.
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def told(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdout is not None and process.stdout.readline().strip() == what


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_sample_has_the_machines_own_figures(sampler: Sampler, tmp_path: Path) -> None:
    sample = sampler.read({"manager": os.getpid()})
    assert sample.ram.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < sample.ram.available_bytes <= sample.ram.total_bytes
    assert sample.cpu.num_cpus == os.cpu_count() and 0 <= sample.cpu.use <= 1
    assert abs(sample.at - time.time()) < 60
    free = os.statvfs(tmp_path)
    assert sample.disks["state"].total_bytes == free.f_blocks * free.f_frsize
    # A cache that was never used lies where it would be made.
    assert sample.disks["models"].total_bytes == sample.disks["state"].total_bytes


def test_a_childs_memory_and_cpu_count_for_its_watched_parent(sampler: Sampler, parent: subprocess.Popen[str]) -> None:
    told(parent, "held")
    before = sampler.read({"engine": parent.pid}).processes["engine"]
    assert before.num_processes == 2
    assert 64 * MiB <= before.ram_bytes < 192 * MiB
    say(parent)
    told(parent, "worked")
    sample = sampler.read({"engine": parent.pid})
    assert sample.processes["engine"].cpu_cores > 0
    assert sample.cpu.use > 0
    values = chart_values(sample)
    assert values["process.engine.ram_bytes"] == sample.processes["engine"].ram_bytes
    assert values["ram.used_bytes"] + values["ram.available_bytes"] == values["ram.total_bytes"]


def test_an_ended_process_counts_nothing_and_leaks_no_file(sampler: Sampler, parent: subprocess.Popen[str]) -> None:
    told(parent, "held")
    pids = family(parent.pid, processes())
    assert sampler.read({"engine": parent.pid}).processes["engine"].num_processes == len(pids) == 2
    for pid in reversed(pids):
        os.kill(pid, 9)
        while identity(pid) is not None:
            time.sleep(0.01)
    parent.wait()
    gone = sampler.read({"engine": parent.pid}).processes["engine"]
    assert (gone.num_processes, gone.ram_bytes) == (0, 0)
    assert not open_of(pids)
    assert sampler.read({}).processes == {}


def open_of(pids: Sequence[int]) -> list[str]:
    """Files of these processes that this one has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return [path for path in found if path.startswith(tuple(f"/proc/{pid}/" for pid in pids))]


def test_locked_pages_are_counted(sampler: Sampler) -> None:
    before = sampler.read({"me": os.getpid()}).processes["me"].locked_bytes
    import ctypes

    with mmap.mmap(-1, 4 * MiB) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(4 * MiB)) == 0
        assert sampler.read({"me": os.getpid()}).processes["me"].locked_bytes == before + 4 * MiB
        libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(4 * MiB))


def test_writing_a_file_shows_as_disk_use(sampler: Sampler, tmp_path: Path) -> None:
    if sampler.read({}).disks["state"].write_bytes_per_s is None:
        sampler.read({})
    if sampler.read({}).disks["state"].write_bytes_per_s is None:
        pytest.skip(f"the kernel counts no reads and writes for the filesystem of {tmp_path}")
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(8 * MiB))
        file.flush()
        os.fsync(file.fileno())
    assert (sampler.read({}).disks["state"].write_bytes_per_s or 0) > 0


def test_a_process_named_with_brackets_and_spaces_is_counted(sampler: Sampler, tmp_path: Path) -> None:
    program = tmp_path / "a) b (c"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "3600"]) as process:
        try:
            sample = sampler.read({"engine": process.pid}).processes["engine"]
            assert sample.num_processes == 1 and sample.ram_bytes > 0
        finally:
            process.kill()


class Nvml(FakeNvml):
    """With the calls that only sampling uses."""

    def nvmlDeviceGetUtilizationRates(self, device: Device) -> Any:
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetTemperature(self, device: Device, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, device: Device) -> int:
        raise NVMLError(NOT_SUPPORTED)

    def nvmlDeviceGetPcieThroughput(self, device: Device, which: int) -> int:
        return 5000 + which


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_gpu_is_sampled_with_its_link() -> None:
    card = Device(ComputeRunningProcesses=[used(10, 5 * GiB), used(11, None)])
    nvml = Nvml(card)
    gpus = GpuSampler(nvml)
    (sample,) = gpus.read()
    assert (sample.total_bytes, sample.used_bytes) == ((24564 - 357) * MiB, (24564 - 357) * MiB - 20 * GiB)
    assert (sample.use, sample.temperature_c, sample.power_w) == (0.37, 61, None)
    assert sample.processes == {10: 5 * GiB, 11: None}
    assert (sample.to_gpu_bytes_per_s, sample.from_gpu_bytes_per_s) == (5001_000, 5000_000)
    gpus.close()
    assert nvml.open == 0


def test_a_lost_gpu_is_told_and_looked_for_again_a_minute_later() -> None:
    card, clock = Device(), Clock()
    nvml = Nvml(card)
    gpus = GpuSampler(nvml, clock)
    assert len(gpus.read()) == 1
    memory, card.answers["MemoryInfo"] = card.answers["MemoryInfo"], NVMLError(LOST)
    assert gpus.read() == () and "GPU 0 cannot be read" in gpus.problem
    card.answers["MemoryInfo"] = memory
    assert gpus.read() == ()
    clock.now += 61
    assert len(gpus.read()) == 1 and gpus.problem == ""


def test_a_machine_without_a_driver_has_samples_and_a_sentence(tmp_path: Path) -> None:
    sampler = Sampler({}, GpuSampler(FakeNvml(init=NVMLError(12))))
    sample = sampler.read({"me": os.getpid()})
    assert sample.gpus == () and "no NVIDIA driver" in sample.gpu_problem
    assert sample.processes["me"].gpu_bytes is None
    sampler.close()


def test_a_watched_process_has_its_gpu_memory_from_all_gpus() -> None:
    cards = [Device(number, ComputeRunningProcesses=[used(os.getpid(), GiB), used(1, GiB)]) for number in range(2)]
    sampler = Sampler({}, GpuSampler(Nvml(*cards)))
    assert sampler.read({"me": os.getpid()}).processes["me"].gpu_bytes == 2 * GiB
    sampler.close()


def test_a_ring_keeps_the_newest_rows_in_order_and_gaps_as_null() -> None:
    ring = Ring(3)
    for at in range(5):
        ring.append(float(at), {"a": at * 1.5} if at != 3 else {"b": 7.0})
    assert ring.columns() == {"time": [2.0, 3.0, 4.0], "series": {"a": [3, None, 6], "b": [None, 7, None]}}
    assert ring.columns(["a"], after=3.0) == {"time": [4.0], "series": {"a": [6]}}


def test_expired_series_are_dropped_and_their_number_is_bounded() -> None:
    ring = Ring(4)
    ring.append(0.0, {"old": 1.0})
    for at in range(1, 8):
        ring.append(float(at), {"new": 1.0})
    assert ring.names() == ["new"]
    ring.append(8.0, {f"n{number}": 1.0 for number in range(2 * MAX_COLUMNS)})
    assert len(ring.columns()["series"]) == MAX_COLUMNS


def test_history_has_seconds_then_averages_of_minutes() -> None:
    history = History(seconds=90, minutes=3)
    for at in range(60 * 5):
        values = {"a": float(at % 60)}
        if at < 100:
            values["gone"] = 1.0
        history.add(at, values | {"bad": math.nan})
    seconds, minutes = history.by_second.columns(), history.by_minute.columns()
    assert seconds["time"] == list(range(210, 300))
    # The minute that has not ended yet is not there.
    assert minutes == {"time": [60.0, 120.0, 180.0], "series": {"a": [29.5] * 3, "gone": [1, None, None]}}
    assert "bad" not in seconds["series"]
    json.dumps(seconds, allow_nan=False)


STARTED = Report(
    phase=Phase.STARTED,
    weights_bytes=15 * GiB,
    kv_bytes=9 * GiB,
    resident_bytes=3 * GiB,
    spilled_bytes=6 * GiB,
    window_bytes=GiB,
    activation_bytes=GiB,
    graph_bytes=GiB // 2,
    non_torch_bytes=GiB // 4,
    context_bytes=GiB // 2,
    weights_in_ram_bytes=2 * GiB,
    arena=HostMemoryReport(num_bytes=6 * GiB, pinned_bytes=0, is_prepared=False, refused=""),
    pool=HostMemoryReport(num_bytes=4 * GiB, pinned_bytes=0, is_prepared=False, refused=""),
)


def memory(*reports: Report) -> dict[str, int | None]:
    """As the engine's status has it."""
    return asdict(memory_of(reports))


def sizes(parts: list[Any]) -> dict[str, float]:
    return {part.kind.name: part.num_bytes / GiB for part in parts}


def test_a_gpus_memory_is_told_by_what_it_holds() -> None:
    claim = gpu_claim("qwen", memory(STARTED), taken_bytes=21 * GiB)
    assert sizes(memory_map(24 * GiB, 22 * GiB, [claim])) == {
        "WEIGHTS": 15, "RESIDENT_KV": 3, "WINDOW": 1, "ACTIVATIONS": 1.5, "ENGINE_OTHER": 0.5, "OTHER": 1, "FREE": 2,
    }  # fmt: skip


def test_while_an_engine_loads_no_more_is_shown_than_is_in_use() -> None:
    claim = gpu_claim("qwen", memory(STARTED), taken_bytes=10 * GiB)
    assert sizes(memory_map(24 * GiB, 10 * GiB, [claim])) == {"WEIGHTS": 10, "FREE": 14}


def test_an_engines_own_figures_replace_missing_driver_counts() -> None:
    claim = gpu_claim("qwen", memory(STARTED), taken_bytes=None)
    assert sizes(memory_map(24 * GiB, 22 * GiB, [claim]))["ENGINE_OTHER"] == 0.75


def test_ram_is_told_by_what_it_holds() -> None:
    claim = ram_claim("qwen", memory(STARTED, STARTED), taken_bytes=30 * GiB)
    parts = {"WEIGHTS": 4, "SPILLED_KV": 12, "OFFLOAD_POOL": 8, "ENGINE_OTHER": 6, "OTHER": 10, "FREE": 24}
    assert sizes(memory_map(64 * GiB, 40 * GiB, [claim])) == parts
    on_cpu = ram_claim("qwen", memory(STARTED), taken_bytes=None, on_cpu=True)
    assert dict(on_cpu.parts)[Kind.RESIDENT_KV] == 3 * GiB


def test_parts_always_add_up_and_are_never_negative() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        size = lambda: rng.randrange(-5, 100)  # noqa: E731
        claims = [
            Claim(
                engine=str(number),
                parts=tuple((rng.choice(list(Kind)), size()) for _ in range(rng.randrange(5))),
                taken_bytes=rng.choice([None, size()]),
            )
            for number in range(rng.randrange(4))
        ]
        total, used_bytes = rng.randrange(100), size()
        parts = memory_map(total, used_bytes, claims)
        assert sum(part.num_bytes for part in parts) == total
        assert all(part.num_bytes > 0 for part in parts)


@pytest.mark.gpu
def test_copies_to_a_gpu_show_on_its_link_and_its_process() -> None:
    import torch

    sampler = Sampler({})
    host = torch.zeros(GiB, dtype=torch.uint8).pin_memory()
    device = torch.empty(GiB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    idle = sampler.read({"me": os.getpid()})
    for _ in range(100):
        device.copy_(host, non_blocking=True)
    time.sleep(1)  # the copies take longer
    busy = sampler.read({"me": os.getpid()})
    torch.cuda.synchronize()
    (gpu,) = busy.gpus[:1]
    assert gpu.used_bytes >= GiB and gpu.total_bytes > gpu.used_bytes
    assert (gpu.to_gpu_bytes_per_s or 0) > 10**9, (idle.gpus, busy.gpus)
    assert (gpu.to_gpu_bytes_per_s or 0) > 5 * (gpu.from_gpu_bytes_per_s or 0), "the directions are not mixed up"
    if gpu.processes:
        assert (busy.processes["me"].gpu_bytes or 0) >= GiB
    sampler.close()
