"""What is measured every second, and its flat form for charts."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """None is what the driver does not tell."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    """What CUDA, and so vLLM, counts."""
    used_bytes: int
    use: float | None
    """Share of the last moments in which a kernel ran, 0 to 1."""
    temperature_c: int | None
    power_w: float | None
    to_gpu_bytes_per_s: int | None
    """Over PCIe."""
    from_gpu_bytes_per_s: int | None
    processes: Mapping[int, int | None]
    """Bytes by process."""


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


def chart_values(sample: Sample) -> dict[str, float]:
    """One number for each line of a chart; what is not known is missing."""
    values: dict[str, float | None] = {
        "cpu.use": sample.cpu.use,
        "ram.used_bytes": sample.ram.total_bytes - sample.ram.available_bytes,
        "ram.available_bytes": sample.ram.available_bytes,
        "ram.total_bytes": sample.ram.total_bytes,
        "ram.swap_used_bytes": sample.ram.swap_used_bytes,
    }
    for gpu in sample.gpus:
        for name in ("used_bytes", "total_bytes", "use", "temperature_c", "power_w"):
            values[f"gpu{gpu.index}.{name}"] = getattr(gpu, name)
        for name in ("to_gpu_bytes_per_s", "from_gpu_bytes_per_s"):
            values[f"gpu{gpu.index}.{name}"] = getattr(gpu, name)
    for label, disk in sample.disks.items():
        for name in ("free_bytes", "read_bytes_per_s", "write_bytes_per_s"):
            values[f"disk.{label}.{name}"] = getattr(disk, name)
    for label, process in sample.processes.items():
        for name in ("ram_bytes", "locked_bytes", "cpu_cores", "gpu_bytes"):
            values[f"process.{label}.{name}"] = getattr(process, name)
    return {name: value for name, value in values.items() if value is not None}
