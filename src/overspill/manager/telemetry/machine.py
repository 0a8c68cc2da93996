"""Samples of the machine, its GPUs and watched processes, at the cost of some dozens of short reads."""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from overspill.hardware.nvml import Device, NotUsable, read_gpus
from overspill.kv.ram import available_ram
from overspill.processes import memory_of

# Scanning all of /proc for children costs more than everything else.
_TREES_EVERY_S = 5.0
_TRY_AGAIN_S = 60.0
# NVML_PCIE_UTIL_RX_BYTES and TX, in KB/s: to the GPU, and from it. Its byte counters (NVML_FI_DEV_PCIE_COUNT_*) take no
# time to read, but wrap at 4 GiB on an H200: every 70 ms while its link is busy.
_UTILIZATIONS = (1, 0)
_TEMPERATURE_OF_GPU = 0
_LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class RamSample:
    total_bytes: int
    available_bytes: int
    """RAM available without swapping or reaching a cgroup's limit."""
    bound: str
    """Source of the bound on available RAM."""
    swap_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSample:
    use: float
    """Busy share of all cores together, 0 to 1."""
    num_cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """Figures of one GPU; None where the driver has none."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    """Total as CUDA, and so vLLM, counts it."""
    used_bytes: int
    use: float | None
    """Share of the last moments in which a kernel ran, 0 to 1."""
    temperature_c: int | None
    power_w: float | None
    to_gpu_bytes_per_s: int | None
    """Rate over PCIe."""
    from_gpu_bytes_per_s: int | None
    processes: Mapping[int, int | None]
    """Bytes by pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSample:
    folder: str
    total_bytes: int
    free_bytes: int
    read_bytes_per_s: int | None
    """Rate of the disk; None where the kernel does not count, as for some network folders."""
    write_bytes_per_s: int | None
    device: int = 0
    """Device number of the filesystem: two folders may be on one disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """A process and all its descendants: an engine, a job, or the manager itself."""

    num_processes: int
    ram_bytes: int
    """Anonymous and shared memory, without mapped files, which the kernel reclaims when it needs to."""
    locked_bytes: int
    """Locked memory as the kernel counts it, without what CUDA's driver pins: see overspill_pool_pinned_bytes."""
    cpu_cores: float
    """Number of cores that were busy with it."""
    gpus: tuple[int | None, ...] = ()
    """Memory on each of the sample's GPUs; None where the driver does not count by process."""

    @property
    def gpu_bytes(self) -> int | None:
        """Memory on all GPUs."""
        known = [size for size in self.gpus if size is not None]
        return sum(known) if known and len(known) == len(self.gpus) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at: float
    """Time of the sample, in seconds since 1970."""
    ram: RamSample
    cpu: CpuSample
    gpus: tuple[GpuSample, ...] = ()
    disks: Mapping[str, DiskSample] = field(default_factory=dict)
    processes: Mapping[str, ProcessSample] = field(default_factory=dict)
    gpu_problem: str = ""
    """Why GPUs are missing, all or some of them."""


_CHARTED = {
    "gpu": (
        "used_bytes", "total_bytes", "use", "temperature_c", "power_w", "to_gpu_bytes_per_s", "from_gpu_bytes_per_s",
    ),
    "disk.": ("free_bytes", "read_bytes_per_s", "write_bytes_per_s"),
    "process.": ("ram_bytes", "locked_bytes", "cpu_cores", "gpu_bytes"),
}  # fmt: skip


def chart_values(sample: Sample) -> dict[str, float]:
    """One number per line of a chart; unknown values are left out."""
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


# GPUs, through NVML, which stays open; a machine without a GPU is fine, and a driver that loads later is found.


@dataclass(slots=True)
class _Gpu:
    index: int
    device: Device
    uuid: str
    name: str


class GpuSampler:
    """Reads all GPUs; not for several threads at once."""

    def __init__(self, nvml: Any | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._gpus: list[_Gpu] | None = None
        self._opened_at = -_TRY_AGAIN_S
        self.problem = ""

    def read(self) -> tuple[GpuSample, ...]:
        if self._gpus is None and not self._open():
            return ()
        samples = []
        for gpu in self._gpus or ():
            try:
                samples.append(self._read(gpu))
            except NotUsable as error:
                self.problem = f"GPU {gpu.index} {error}"
            except self._nvml.NVMLError as error:  # type: ignore[union-attr]
                self.problem = f"GPU {gpu.index} cannot be read: {error}"
                if getattr(error, "value", None) in _LOST:
                    self.close()  # to be opened again later
                    break
        return tuple(samples)

    def close(self) -> None:
        if self._gpus is not None:
            with contextlib.suppress(self._nvml.NVMLError):  # type: ignore[union-attr]
                self._nvml.nvmlShutdown()  # type: ignore[union-attr]
        self._gpus = None

    def _open(self) -> bool:
        if self._clock() - self._opened_at < _TRY_AGAIN_S:
            return False
        self._opened_at = self._clock()
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
        except Exception:  # read_gpus puts the reason in words
            self.problem = " ".join(read_gpus(self._nvml).problems)
            return False
        self._gpus, self.problem = [], ""
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                device = Device(self._nvml, self._nvml.nvmlDeviceGetHandleByIndex(index))
                self._gpus.append(_Gpu(index, device, device.uuid(), device.name()))
            except self._nvml.NVMLError as error:
                self.problem = f"GPU {index} cannot be read: {error}"
        return True

    def _read(self, gpu: _Gpu) -> GpuSample:
        ask, memory = gpu.device.ask, gpu.device.memory()
        total = memory.total.value
        utilization, milliwatts = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPowerUsage")
        to_gpu, from_gpu = self._link(gpu)
        lists = [ask(f"nvmlDeviceGet{kind}RunningProcesses") for kind in ("Compute", "Graphics")]
        return GpuSample(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            total_bytes=total,
            used_bytes=min(total, max(0, total - memory.free.value)),
            use=None if utilization is None else utilization.gpu / 100,
            temperature_c=ask("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU),
            power_w=None if milliwatts is None else milliwatts / 1000,
            to_gpu_bytes_per_s=to_gpu,
            from_gpu_bytes_per_s=from_gpu,
            # A program that draws and computes is in both lists, with the same memory.
            processes={each.pid: each.usedGpuMemory for some in lists for each in some or ()},
        )

    def _link(self, gpu: _Gpu) -> tuple[int | None, int | None]:
        """PCIe bytes per second to the GPU and from it, each measured for 20 ms."""
        rates = [gpu.device.ask("nvmlDeviceGetPcieThroughput", which) for which in _UTILIZATIONS]
        return rates[0] and rates[0] * 1000, rates[1] and rates[1] * 1000


# The machine


class Sampler:
    """Reads the whole machine; not for several threads at once. A read takes a few milliseconds, and 40 more for
    each GPU's link, so an event loop calls it in a thread."""

    def __init__(self, disks: Mapping[str, Path], gpus: GpuSampler | None = None) -> None:
        self._disks, self._gpus = dict(disks), gpus or GpuSampler()
        self._cpu_before, self._cpu_use = psutil.cpu_times(), 0.0
        self._disk_reads: dict[str, tuple[float, int, int]] = {}
        self._watched: dict[str, _Tree] = {}
        self._trees_at = 0.0

    def read(self, watched: Mapping[str, int]) -> Sample:
        """Take a sample; `watched` is the root pid of each engine or job, by name."""
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
        # Guest time is already part of user time.
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
                # The nearest existing folder is on the filesystem where this one would be created.
                there = next(each for each in (folder, *folder.parents) if each.exists())
                usage, device = psutil.disk_usage(str(there)), there.stat().st_dev
            except OSError:  # a network folder that is offline, or a folder that may not be read
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
    """A process and its descendants."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._processes: dict[int, psutil.Process] = {}

    def look(self) -> None:
        known, self._processes = self._processes, {}
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.root)
            for one in (root, *root.children(recursive=True)):
                # A known process keeps the CPU times of its last look.
                self._processes[one.pid] = known[one.pid] if known.get(one.pid) == one else one

    def read(self, gpus: tuple[GpuSample, ...]) -> ProcessSample:
        ram, locked, cores = 0, 0, 0.0
        for pid, process in list(self._processes.items()):
            try:
                with process.oneshot():
                    if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                        raise ProcessLookupError(pid)
                    busy = process.cpu_percent() / 100
                of_ram, of_locked = memory_of(pid)
            except (OSError, psutil.Error):
                del self._processes[pid]
                continue
            ram, locked, cores = ram + of_ram, locked + of_locked, cores + busy
        sizes = [[size for pid, size in gpu.processes.items() if pid in self._processes] for gpu in gpus]
        return ProcessSample(
            num_processes=len(self._processes),
            ram_bytes=ram,
            locked_bytes=locked,
            cpu_cores=cores,
            gpus=tuple(None if None in each else sum(size or 0 for size in each) for each in sizes),
        )


def _ram() -> RamSample:
    total, ram = psutil.virtual_memory().total, available_ram()
    return RamSample(
        total_bytes=total,
        available_bytes=min(ram.available_bytes, total),
        bound=ram.source,
        swap_used_bytes=psutil.swap_memory().used,
    )
