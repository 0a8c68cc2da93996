"""The CPU platform's KV buffer for spill: spilled ranges of all regions are the same pages, as on a GPU."""

import ctypes
import mmap
import os

import torch

from overspill.kv.mapping import MAP_ANONYMOUS, MAP_FIXED, MAP_PRIVATE, MAP_SHARED, map_memory, unmap_memory
from overspill.kv.spill.geometry import Geometry

GRANULARITY = mmap.PAGESIZE


class AliasedMemory:
    """A buffer of `geometry`; two window halves lie under all its spilled ranges."""

    def __init__(self, geometry: Geometry) -> None:
        self._length = geometry.buffer_bytes
        self._address = map_memory(self._length, MAP_PRIVATE | MAP_ANONYMOUS, "spill_bytes")
        halves = [os.memfd_create(f"overspill-window-{half}") for half in range(geometry.num_halves)]
        try:
            for half in halves:
                os.ftruncate(half, geometry.half_bytes)
            for region in range(geometry.num_regions):
                start = self._address + geometry.spilled_offset(region)
                map_memory(
                    geometry.half_bytes, MAP_SHARED | MAP_FIXED, "spill_bytes",
                    address=start, descriptor=halves[geometry.half_of(region)],
                )  # fmt: skip
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
            unmap_memory(self._address, self._length)
            self._address = 0
