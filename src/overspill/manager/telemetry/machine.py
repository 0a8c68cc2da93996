"""One sample of the machine and of watched processes, at the cost of some dozens of short reads."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from overspill.kv.ram import available_ram
from overspill.manager.telemetry.gpus import GpuSample, GpuSampler
from overspill.processes import memory_of

# Looking through all of /proc for children costs more than everything else.
_TREES_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RamSample:
    total_bytes: int
    available_bytes: int
    """Without swapping, or reaching a cgroup's limit."""
    bound: str
    """What sets it."""
    swap_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSample:
    use: float
    """Of all cores together, 0 to 1."""
    num_cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSample:
    folder: str
    total_bytes: int
    free_bytes: int
    read_bytes_per_s: int | None
    """Of its device; None where the kernel does not count, as for some network folders."""
    write_bytes_per_s: int | None
    device: int = 0
    """Of its filesystem: two folders may be on one disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """A process and all below it: an engine, or the manager itself."""

    num_processes: int
    ram_bytes: int
    """Anonymous and shared memory. Files that are mapped are left out: the kernel takes them back when it needs to."""
    locked_bytes: int
    """As the kernel counts. What CUDA pins is not in it, as the driver does that: see overspill_pool_pinned_bytes."""
    cpu_cores: float
    """How many cores were busy with it."""
    gpu_bytes: int | None
    """On all GPUs; None where the driver does not count by process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at: float
    """Seconds since 1970."""
    ram: RamSample
    cpu: CpuSample
    gpus: tuple[GpuSample, ...] = ()
    disks: Mapping[str, DiskSample] = field(default_factory=dict)
    processes: Mapping[str, ProcessSample] = field(default_factory=dict)
    gpu_problem: str = ""
    """Why there are none, or not all."""


_CHARTED = {
    "gpu": (
        "used_bytes", "total_bytes", "use", "temperature_c", "power_w", "to_gpu_bytes_per_s", "from_gpu_bytes_per_s",
    ),
    "disk.": ("free_bytes", "read_bytes_per_s", "write_bytes_per_s"),
    "process.": ("ram_bytes", "locked_bytes", "cpu_cores", "gpu_bytes"),
}  # fmt: skip


def chart_values(sample: Sample) -> dict[str, float]:
    """One number for each line of a chart; unknown ones are missing."""
    ram = sample.ram
    values: dict[str, float | None] = {
        "cpu.use": sample.cpu.use,
        "ram.used_bytes": ram.total_bytes - ram.available_bytes,
        "ram.available_bytes": ram.available_bytes,
        "ram.total_bytes": ram.total_bytes,
        "ram.swap_used_bytes": ram.swap_used_bytes,
    }
    groups: dict[str, Mapping[str, object]] = {
        "gpu": {str(gpu.index): gpu for gpu in sample.gpus}, "disk.": _by_device(sample.disks),
        "process.": sample.processes,
    }  # fmt: skip
    for group, members in groups.items():
        for label, member in members.items():
            values |= {f"{group}{label}.{name}": getattr(member, name) for name in _CHARTED[group]}
    return {name: value for name, value in values.items() if value is not None}


def _by_device(disks: Mapping[str, DiskSample]) -> dict[str, DiskSample]:
    """Each disk once, with the names of all folders on it."""
    names: dict[int, list[str]] = {}
    for name, disk in disks.items():
        names.setdefault(disk.device, []).append(name)
    return {" and ".join(shared): disks[shared[0]] for shared in names.values()}


class Sampler:
    """Not for several threads at once. Reading takes a few milliseconds, and 40 more on GPUs whose driver has no
    counters of PCIe, so an event loop calls it in a thread."""

    def __init__(self, disks: Mapping[str, Path], gpus: GpuSampler | None = None) -> None:
        self._disks, self._gpus = dict(disks), gpus or GpuSampler()
        self._cpu_before, self._cpu_use = psutil.cpu_times(), 0.0
        self._disk_reads: dict[str, tuple[float, int, int]] = {}
        self._watched: dict[str, _Tree] = {}
        self._trees_at = 0.0

    def read(self, watched: Mapping[str, int]) -> Sample:
        """`watched` is the first process of each engine, by the engine's name."""
        self._follow(watched)
        gpus = self._gpus.read()
        return Sample(
            at=time.time(),
            ram=_ram(),
            cpu=self._cpu(),
            gpus=gpus,
            disks=self._read_disks(),
            processes={name: one.read(gpus) for name, one in self._watched.items()},
            gpu_problem=self._gpus.problem,
        )

    def close(self) -> None:
        self._gpus.close()

    def _follow(self, watched: Mapping[str, int]) -> None:
        known = self._watched
        self._watched = {
            name: known[name] if name in known and known[name].root == pid else _Tree(pid)
            for name, pid in watched.items()
        }
        now = time.monotonic()
        is_new = any(known.get(name) is not one for name, one in self._watched.items())
        if is_new or now - self._trees_at >= _TREES_EVERY_S:
            self._trees_at = now
            for one in self._watched.values():
                one.look()

    def _cpu(self) -> CpuSample:
        before, after = self._cpu_before, psutil.cpu_times()
        # Guests are in user already.
        total = sum(after[:8]) - sum(before[:8])
        if total > 0:
            idle = after.idle + after.iowait - before.idle - before.iowait
            self._cpu_before, self._cpu_use = after, min(1.0, max(0.0, 1 - idle / total))
        return CpuSample(use=self._cpu_use, num_cpus=os.cpu_count() or 1)

    def _read_disks(self) -> dict[str, DiskSample]:
        counters = psutil.disk_io_counters(perdisk=True, nowrap=False) or {} if self._disks else {}
        samples = {}
        for name, folder in self._disks.items():
            try:
                # The nearest folder that exists is on the filesystem where this one would be made.
                there = next(each for each in (folder, *folder.parents) if each.exists())
                usage, device = psutil.disk_usage(str(there)), there.stat().st_dev
            except OSError:  # a network folder that is away, or one that may not be read
                continue
            of_device = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
            read, written = self._disk_rates(name, counters.get(os.path.basename(of_device)))
            samples[name] = DiskSample(
                folder=str(folder),
                total_bytes=usage.total,
                free_bytes=usage.free,
                read_bytes_per_s=read,
                write_bytes_per_s=written,
                device=device,
            )
        return samples

    def _disk_rates(self, name: str, counted: "psutil._ntuples.sdiskio | None") -> tuple[int | None, int | None]:
        if counted is None:
            return None, None
        now, before = time.monotonic(), self._disk_reads.get(name)
        self._disk_reads[name] = now, counted.read_bytes, counted.write_bytes
        if before is None or now <= before[0]:
            return None, None
        read, written = (max(0, int((new - old) / (now - before[0]))) for old, new in zip(before[1:], counted[2:4]))
        return read, written


class _Tree:
    """A process and those below it."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._processes: dict[int, psutil.Process] = {}
        self._cpu_s: dict[int, float] = {}
        self._read_at: float | None = None

    def look(self) -> None:
        self._processes = {}
        with suppress(psutil.Error):
            root = psutil.Process(self.root)
            self._processes = {one.pid: one for one in (root, *root.children(recursive=True))}

    def read(self, gpus: tuple[GpuSample, ...]) -> ProcessSample:
        ram = locked = 0
        busy_s, cpu_s, now = 0.0, dict[int, float](), time.monotonic()
        for pid, process in list(self._processes.items()):
            try:
                with process.oneshot():
                    if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                        raise ProcessLookupError(pid)
                    used = process.cpu_times()
                of_ram, of_locked = memory_of(pid)
            except (OSError, psutil.Error):
                del self._processes[pid]
                continue
            ram, locked, cpu_s[pid] = ram + of_ram, locked + of_locked, used.user + used.system
            busy_s += max(0.0, cpu_s[pid] - self._cpu_s.get(pid, cpu_s[pid]))
        seconds = 0.0 if self._read_at is None else now - self._read_at
        self._cpu_s, self._read_at = cpu_s, now
        sizes = [size for gpu in gpus for pid, size in gpu.processes.items() if pid in self._processes]
        is_counted = bool(gpus) and None not in sizes
        return ProcessSample(
            num_processes=len(self._processes),
            ram_bytes=ram,
            locked_bytes=locked,
            cpu_cores=busy_s / seconds if seconds > 0 else 0.0,
            gpu_bytes=sum(size for size in sizes if size is not None) if is_counted else None,
        )


def _ram() -> RamSample:
    total, ram = psutil.virtual_memory().total, available_ram()
    return RamSample(
        total_bytes=total,
        available_bytes=min(ram.available_bytes, total),
        bound=ram.source,
        swap_used_bytes=psutil.swap_memory().used,
    )
