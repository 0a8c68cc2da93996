"""How fast this machine attends to KV in RAM, beside plain reads of the same memory by the same threads."""

import contextlib
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from overspill.kv.attention.library import TYPE_BYTES, TYPES
from overspill.kv.attention.pool import Job, Layout, Pool, Segments

_MIB = 1 << 20
_PIECE = 4 * _MIB


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
    block_size: int = 16, kv_type: str = "bfloat16", query_type: str = "bfloat16", queries: int = 1, repeats: int = 5,
    memory: torch.Tensor | None = None,
) -> Rates:  # fmt: skip
    """Reads and attention take turns, so that other work on the machine hits both.

    `memory` (whole MiB of bytes, which must be numbers of `kv_type`) saves filling it for every shape.
    """
    if memory is None:
        memory = kv_memory(num_bytes, kv_type)
    content = 2 * kv_heads * head_size * TYPE_BYTES[TYPES.index(kv_type)]
    layout = Layout.packed(
        num_blocks=memory.numel() // (block_size * content), block_size=block_size, kv_heads=kv_heads, group=group,
        head_size=head_size, kv_type=kv_type, query_type=query_type,
    )  # fmt: skip
    heads = kv_heads * group
    query = torch.randn(queries, heads, head_size).to(getattr(torch, query_type))
    output, lse = torch.empty(queries, heads, head_size), torch.empty(heads, queries)
    job = Job(
        layout=layout, segments=Segments([(range(layout.num_blocks), range(queries))]), kv=memory.data_ptr(),
        query=query.data_ptr(), output=output.data_ptr(), lse=lse.data_ptr(), num_queries=queries,
        scale=head_size**-0.5,
    )  # fmt: skip
    attended, read = layout.num_blocks * block_size * content, memory.numel() // _MIB * _MIB
    address = memory.data_ptr()
    pool.attend(job)
    kernel = pool.kernel
    attends, reads = [], []
    for _ in range(repeats):
        reads.append(_timed(pool, lambda: pool.read(address, read)))
        attends.append(_timed(pool, lambda: pool.attend(job)))
    wall = [statistics.median(seconds for seconds, _ in samples) for samples in (attends, reads)]
    cpu = [statistics.median(seconds for _, seconds in samples) / pool.threads for samples in (attends, reads)]
    return Rates(pool.threads, kernel, attended / wall[0], read / wall[1], attended / cpu[0], read / cpu[1])


def kv_memory(num_bytes: int, kv_type: str) -> torch.Tensor:
    """Bytes that are random numbers of the type, in huge pages where the system has them, as the arena is."""
    memory = mmap.mmap(-1, max(num_bytes // _PIECE, 1) * _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    filled = torch.frombuffer(memory, dtype=torch.uint8)
    numbers = torch.randn(_PIECE // TYPE_BYTES[TYPES.index(kv_type)]).to(getattr(torch, kv_type))
    filled.view(-1, _PIECE).copy_(numbers.view(torch.uint8))
    return filled


def _timed(pool: Pool, work: Callable[[], None]) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    cpu, began = pool.cpu_seconds, time.perf_counter()
    work()
    return time.perf_counter() - began, pool.cpu_seconds - cpu


if __name__ == "__main__":
    # For a plan (overspill.hardware.cpu): bytes of KV in a second, by so many threads.
    with Pool(int(sys.argv[1])) as measured:
        print(int(measure_rates(measured, num_bytes=256 * _MIB, repeats=3).attend_bytes_per_s))
