"""Memory taken from the kernel directly."""

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import MiB, format_size

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

_PROT_READ_WRITE = 0x3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_HUGEPAGE, _MADV_DONTFORK, _MADV_POPULATE_WRITE = 14, 10, 23
_HUGE_PAGE = 2 * MiB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_memory(length: int, flags: int, option: str, *, address: int | None = None, descriptor: int = -1) -> int:
    """The address; `option` is what the user would lower if there is not so much."""
    mapped = _libc.mmap(address, length, _PROT_READ_WRITE, flags, descriptor, 0)
    if mapped is None or mapped == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise OverspillError(f"cannot map {format_size(length)} for {option}: {reason}; lower {option}")
    return int(mapped)


def unmap_memory(address: int, length: int) -> None:
    _libc.munmap(address, length)


class Mapping:
    """Anonymous memory of our own: no /dev/shm, no rounding up to a power of two."""

    def __init__(self, num_bytes: int, option: str = "host_bytes") -> None:
        self.num_bytes = num_bytes
        # Huge pages make filling and registering faster, and need an aligned start.
        self._length = num_bytes + _HUGE_PAGE
        raw = map_memory(self._length, MAP_PRIVATE | MAP_ANONYMOUS | _MAP_NORESERVE, option)
        self._raw = raw
        self.address = -(-raw // _HUGE_PAGE) * _HUGE_PAGE
        _libc.madvise(self.address, num_bytes, _MADV_HUGEPAGE)
        # A forked child must not copy, or keep, the pool.
        _libc.madvise(self.address, num_bytes, _MADV_DONTFORK)

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory as an array; it must not outlive the mapping."""
        buffer = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        return np.frombuffer(memoryview(buffer), dtype=np.uint8)

    def populate(self, start: int, length: int) -> None:
        """Take the pages now, in the calling thread, on its NUMA node.

        Before Linux 5.14 this does nothing, and pages come when they are registered or first written: touching them
        here would overwrite what was stored meanwhile.
        """
        if _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            logger.warning_once("Overspill: RAM for the pool could not be taken in advance: %s", os.strerror(code))

    def close(self) -> None:
        if self._raw:
            unmap_memory(self._raw, self._length)
            self._raw = 0
