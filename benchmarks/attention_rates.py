"""How fast this machine attends to KV in RAM, beside plain reads of the same memory by the same threads."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from overspill.kv.attention.pool import Pool
from overspill.kv.attention.rates import kv_memory, whole_job

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rates:
    """Medians. Rates by CPU time are what the threads would reach if nobody else used their cores."""

    threads: int
    kernel: str
    attend_bytes_per_s: float
    read_bytes_per_s: float
    attend_bytes_per_cpu_s: float
    read_bytes_per_cpu_s: float


def measure_rates(
    pool: Pool, *, num_bytes: int = 1 << 30, kv_heads: int = 8, group: int = 4, head_size: int = 128,
    kv_type: str = "bfloat16", query_type: str = "bfloat16", queries: int = 1, repeats: int = 5,
    memory: torch.Tensor | None = None,
) -> Rates:  # fmt: skip
    """Reads and attention take turns, so that other work on the machine hits both.

    `memory` (whole MiB of bytes, which must be numbers of `kv_type`) saves filling it for every shape.
    """
    if memory is None:
        memory = kv_memory(num_bytes, kv_type)
    shape = {"kv_heads": kv_heads, "group": group, "head_size": head_size}
    job, _kept = whole_job(memory, kv_type=kv_type, query_type=query_type, queries=queries, **shape)
    attended = job.layout.num_blocks * job.layout.block_size * job.layout.token_bytes
    read, address = memory.numel() // _MIB * _MIB, memory.data_ptr()
    pool.attend(job)
    kernel = pool.kernel
    attends, reads = [], []
    for _ in range(repeats):
        reads.append(_timed(pool, lambda: pool.read(address, read)))
        attends.append(_timed(pool, lambda: pool.attend(job)))
    wall = [statistics.median(seconds for seconds, _ in samples) for samples in (attends, reads)]
    cpu = [statistics.median(seconds for _, seconds in samples) / pool.threads for samples in (attends, reads)]
    return Rates(pool.threads, kernel, attended / wall[0], read / wall[1], attended / cpu[0], read / cpu[1])


def _timed(pool: Pool, work: Callable[[], None]) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    cpu, began = pool.cpu_seconds, time.perf_counter()
    work()
    return time.perf_counter() - began, pool.cpu_seconds - cpu
