"""One GPU, as a planner sees it."""

from dataclasses import dataclass

from overspill.figures import Known
from overspill.hardware.link import Link


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    name: str  # "" where it may not be known, as for another container's process
    used_bytes: int | None  # None where the driver does not count, as under WSL


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """None stands for what neither the driver nor the table of cards knows."""

    index: int  # NVML's, in the order of PCI addresses
    uuid: str  # "" for a card that is only stated
    name: str
    total_bytes: Known[int]  # what CUDA, and so vLLM, counts as the GPU's memory
    free_bytes: Known[int]
    memory_bytes_per_second: Known[int] | None
    bf16_flops: Known[int] | None  # dense, with float32 accumulation, as vLLM computes; fp16 where there is no bf16
    compute_capability: tuple[int, int] | None
    pcie_generation: Known[int] | None
    pcie_width: Known[int] | None
    numa_node: Known[int] | None  # the node whose RAM is nearest
    link: Link
    processes: tuple[GpuProcess, ...] = ()
    driver_version: str = ""
    memory_numa_node: int | None = None  # set where the GPU's own memory is a NUMA node, as on a GH200
    notes: tuple[str, ...] = ()  # what is unusual about it, a sentence each

    @property
    def is_stated(self) -> bool:
        return not self.uuid
