"""One sample of the machine and of watched processes, at the cost of some dozens of short reads."""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from overspill.kv.ram import available_ram
from overspill.manager.watching.gpu_sampler import GpuSampler
from overspill.manager.watching.procfs import CLOCK_TICKS, OpenFile, children_of_all, kilobytes, parse_stat, tree
from overspill.manager.watching.samples import CpuSample, DiskSample, GpuSample, ProcessSample, RamSample, Sample

# Looking through all of /proc for children costs more than everything else.
_TREES_EVERY_S = 5.0
_SECTOR_BYTES = 512  # in /proc/diskstats, whatever the disk's own is


class Sampler:
    """Not for several threads at once. Reading takes a millisecond, and 40 more on GPUs whose driver has no counters
    of PCIe, so an event loop calls it in a thread."""

    def __init__(self, disks: Mapping[str, Path], gpus: GpuSampler | None = None) -> None:
        self._disks = dict(disks)
        self._gpus = gpus or GpuSampler()
        self._stat, self._meminfo = OpenFile("/proc/stat"), OpenFile("/proc/meminfo")
        self._cpu_before = _cpu_ticks(self._stat.read())
        self._disk_reads: dict[str, tuple[float, int, int]] = {}
        self._watched: dict[str, _Tree] = {}
        self._trees_at = 0.0
        self._cpu_use = 0.0

    def read(self, watched: Mapping[str, int]) -> Sample:
        """`watched` is the first process of each engine, by the engine's name."""
        self._follow(watched)
        gpus = self._gpus.read()
        return Sample(
            at=time.time(),
            ram=self._ram(),
            cpu=self._cpu(),
            gpus=gpus,
            disks=self._read_disks(),
            processes={name: one.read(gpus) for name, one in self._watched.items()},
            gpu_problem=self._gpus.problem,
        )

    def close(self) -> None:
        self._gpus.close()
        for one in self._watched.values():
            one.close()
        self._watched = {}
        self._stat.close()
        self._meminfo.close()

    def _follow(self, watched: Mapping[str, int]) -> None:
        for name in [name for name, one in self._watched.items() if watched.get(name) != one.root]:
            self._watched.pop(name).close()
        new = {name: _Tree(pid) for name, pid in watched.items() if name not in self._watched}
        self._watched.update(new)
        now = time.monotonic()
        if self._watched and (new or now - self._trees_at >= _TREES_EVERY_S):
            self._trees_at = now
            children = children_of_all()
            for one in self._watched.values():
                one.update(tree(one.root, children))

    def _ram(self) -> RamSample:
        names = (b"MemTotal", b"SwapTotal", b"SwapFree")
        sizes = kilobytes(self._meminfo.read(), names)
        ram = available_ram()
        return RamSample(
            total_bytes=sizes[b"MemTotal"],
            available_bytes=min(ram.available_bytes, sizes[b"MemTotal"]),
            bound=ram.source,
            swap_used_bytes=sizes.get(b"SwapTotal", 0) - sizes.get(b"SwapFree", 0),
        )

    def _cpu(self) -> CpuSample:
        before, after = self._cpu_before, _cpu_ticks(self._stat.read())
        total = after[0] - before[0]
        if total > 0:
            self._cpu_before = after
            self._cpu_use = min(1.0, max(0.0, 1 - (after[1] - before[1]) / total))
        return CpuSample(use=self._cpu_use, num_cpus=os.cpu_count() or 1)

    def _read_disks(self) -> dict[str, DiskSample]:
        counters = _disk_counters() if self._disks else {}
        samples = {}
        for name, folder in self._disks.items():
            try:
                there = _existing(folder)
                stat, device = os.statvfs(there), os.stat(there).st_dev
            except OSError:  # a network folder that is away, or one that may not be read
                continue
            read, written = self._disk_rates(name, counters.get((os.major(device), os.minor(device))))
            samples[name] = DiskSample(
                folder=str(folder),
                total_bytes=stat.f_frsize * stat.f_blocks,
                free_bytes=stat.f_frsize * stat.f_bavail,
                read_bytes_per_s=read,
                write_bytes_per_s=written,
            )
        return samples

    def _disk_rates(self, name: str, counted: tuple[int, int] | None) -> tuple[int | None, int | None]:
        if counted is None:
            return None, None
        now = time.monotonic()
        before = self._disk_reads.get(name)
        self._disk_reads[name] = (now, *counted)
        if before is None or now <= before[0]:
            return None, None
        read, written = (max(0, int((new - old) / (now - before[0]))) for old, new in zip(before[1:], counted))
        return read, written


class _Tree:
    """A process and those below it, with their files open."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._files: dict[int, tuple[OpenFile, OpenFile]] = {}
        self._ticks: dict[int, int] = {}
        self._read_at: float | None = None

    def update(self, pids: list[int]) -> None:
        for pid in self._files.keys() - set(pids):
            self._forget(pid)
        for pid in pids:
            if pid not in self._files:
                with suppress(OSError), ExitStack() as stack:
                    stat = stack.enter_context(closing(OpenFile(f"/proc/{pid}/stat")))
                    self._files[pid] = stat, OpenFile(f"/proc/{pid}/status")
                    stack.pop_all()

    def read(self, gpus: tuple[GpuSample, ...]) -> ProcessSample:
        ram = locked = ticks = 0
        now = time.monotonic()
        for pid, (stat, status) in list(self._files.items()):
            try:
                process = parse_stat(stat.read())
                if not process.is_alive:
                    raise ProcessLookupError(pid)
                # Not smaps_rollup, which tells shares of pages: for hundreds of GiB it walks page tables for seconds,
                # and holds the lock that the engine's own memory calls wait for.
                sizes = kilobytes(status.read(), (b"RssAnon", b"RssShmem", b"VmLck", b"VmPin"))
            except (OSError, ValueError, IndexError):
                self._forget(pid)
                continue
            ram += sizes.get(b"RssAnon", 0) + sizes.get(b"RssShmem", 0)
            locked += sizes.get(b"VmLck", 0) + sizes.get(b"VmPin", 0)
            ticks += max(0, process.cpu_ticks - self._ticks.get(pid, process.cpu_ticks))
            self._ticks[pid] = process.cpu_ticks
        seconds = 0.0 if self._read_at is None else now - self._read_at
        self._read_at = now
        return ProcessSample(
            num_processes=len(self._files),
            ram_bytes=ram,
            locked_bytes=locked,
            cpu_cores=ticks / CLOCK_TICKS / seconds if seconds > 0 else 0.0,
            gpu_bytes=self._gpu_bytes(gpus),
        )

    def close(self) -> None:
        for pid in list(self._files):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        for file in self._files.pop(pid):
            file.close()
        self._ticks.pop(pid, None)

    def _gpu_bytes(self, gpus: tuple[GpuSample, ...]) -> int | None:
        if not gpus:
            return None
        sizes = [size for gpu in gpus for pid, size in gpu.processes.items() if pid in self._files]
        return sum(size for size in sizes if size is not None) if all(size is not None for size in sizes) else None


def _cpu_ticks(stat: bytes) -> tuple[int, int]:
    """All, and idle: user nice system idle iowait irq softirq steal; guests are in user already."""
    fields = [int(field) for field in stat[: stat.index(b"\n")].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def _disk_counters() -> dict[tuple[int, int], tuple[int, int]]:
    """Bytes read and written, by device."""
    found = {}
    try:
        with open("/proc/diskstats", "rb") as file:
            for line in file:
                fields = line.split()
                counted = int(fields[5]) * _SECTOR_BYTES, int(fields[9]) * _SECTOR_BYTES
                found[int(fields[0]), int(fields[1])] = counted
    except (OSError, IndexError, ValueError):
        return {}
    return found


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there: its filesystem is the one it would be made on."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))
