"""How fast a CPU attends to KV in RAM; assumed from its cores, as the link's speed is from PCIe, or stated."""

from overspill.figures import Known, assumed
from overspill.kv.attention.library import AttentionUnavailable, default_threads, load

# The slowest core that was measured, a Neoverse N1, attends to 3.7 GB/s; those of a Xeon with AVX-512 BF16 to 8 to 10.
# Two channels of memory also serve the link, and leave about this much beside it. Servers have more: eight channels
# reached 100 GB/s with 14 threads (benchmarks/attention_kernel.py).
_THREAD_BYTES_PER_S, _MEMORY_BYTES_PER_S = 3 * 10**9, 20 * 10**9
# A machine that is only stated: eight cores, two of which are left to the engine.
_STATED_THREADS = 6


def cpu_attention(threads: int | None = None) -> Known[int]:
    """Of this machine, in bytes of KV per second; 0 where the kernel cannot run, and the note says why."""
    try:
        load()
    except AttentionUnavailable as error:
        return assumed(0, str(error))
    return assumed_attention(threads or default_threads())


def assumed_attention(threads: int = _STATED_THREADS) -> Known[int]:
    rate = min(threads * _THREAD_BYTES_PER_S, _MEMORY_BYTES_PER_S)
    return assumed(rate, f"{threads} thread{'s' if threads > 1 else ''} and two channels of memory")
