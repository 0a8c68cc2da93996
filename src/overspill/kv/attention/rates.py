"""Speed at which this machine attends to KV in RAM: `python -m overspill.kv.attention.rates THREADS`."""

import contextlib
import mmap
import statistics
import sys
import time
from typing import Any

import torch

from overspill.kv.attention.library import TYPE_BYTES, TYPES
from overspill.kv.attention.pool import Job, Layout, Pool, Segments
from overspill.kv.sizes import MiB

_PIECE = 4 * MiB


def whole_job(
    memory: torch.Tensor, *, kv_heads: int = 8, group: int = 4, head_size: int = 128, block_size: int = 16,
    kv_type: str = "bfloat16", query_type: str = "bfloat16", queries: int = 1,
) -> tuple[Job, Any]:  # fmt: skip
    """Job that attends to all of `memory`, and the tensors to keep while it runs."""
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
    return job, (query, output, lse)


def kv_memory(num_bytes: int, kv_type: str) -> torch.Tensor:
    """Memory filled with random numbers of `kv_type`, in huge pages where the system has them, like the arena."""
    memory = mmap.mmap(-1, max(num_bytes // _PIECE, 1) * _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    filled = torch.frombuffer(memory, dtype=torch.uint8)
    numbers = torch.randn(_PIECE // TYPE_BYTES[TYPES.index(kv_type)]).to(getattr(torch, kv_type))
    filled.view(-1, _PIECE).copy_(numbers.view(torch.uint8))
    return filled


def main(threads: int, repeats: int = 3) -> None:
    """Print the bytes of KV attended to per second, for a plan (overspill.hardware.cpu)."""
    memory, seconds = kv_memory(256 * MiB, "bfloat16"), []
    job, _kept = whole_job(memory)
    with Pool(threads) as pool:
        pool.attend(job)
        for _ in range(repeats):
            began = time.perf_counter()
            pool.attend(job)
            seconds.append(time.perf_counter() - began)
    print(int(memory.numel() / statistics.median(seconds)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
