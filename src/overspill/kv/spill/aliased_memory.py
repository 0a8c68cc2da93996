"""The CPU platform's KV buffer for spill: spilled ranges of all regions are the same pages, as on a GPU."""

import ctypes
import mmap
import os

import torch

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size
from overspill.kv.spill.geometry import Geometry

_PROT_READ_WRITE, _MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x3, 0x01, 0x02, 0x10, 0x20
_MAP_FAILED = ctypes.c_void_p(-1).value

GRANULARITY = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class AliasedMemory:
    """A buffer of `geometry`; two window halves lie under all its spilled ranges."""

    def __init__(self, geometry: Geometry) -> None:
        self._length = geometry.buffer_bytes
        self._address = _map(None, self._length, _MAP_PRIVATE | _MAP_ANONYMOUS, -1)
        halves = [os.memfd_create(f"overspill-window-{half}") for half in range(geometry.num_halves)]
        try:
            for half in halves:
                os.ftruncate(half, geometry.half_bytes)
            for region in range(geometry.num_regions):
                start = self._address + geometry.spilled_offset(region)
                _map(start, geometry.half_bytes, _MAP_SHARED | _MAP_FIXED, halves[geometry.half_of(region)])
        except BaseException:
            self.close()
            raise
        finally:
            for half in halves:
                os.close(half)  # the mappings keep the memory

    def tensor(self) -> torch.Tensor:
        """The buffer; it must not be used after `close`."""
        memory = (ctypes.c_int8 * self._length).from_address(self._address)
        return torch.frombuffer(memory, dtype=torch.int8)

    def close(self) -> None:
        if self._address:
            _libc.munmap(self._address, self._length)
            self._address = 0


def _map(address: int | None, length: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, length, _PROT_READ_WRITE, flags, descriptor, 0)
    if mapped is None or mapped == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise OverspillError(f"cannot map {format_size(length)} for the KV buffer: {reason}; lower spill_bytes")
    return int(mapped)
