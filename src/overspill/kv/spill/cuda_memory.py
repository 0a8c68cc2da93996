"""The GPU's KV buffer for spill: two window halves lie under the spilled ranges of all regions."""

from contextlib import ExitStack

import torch

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.layers import granularity
from overspill.kv.spill.vmm import AddressRange, PhysicalMemory, mapping_granularity


class CudaAliasedMemory:
    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        index = device.index
        found = mapping_granularity(index)
        if granularity() % found:
            raise OverspillError(
                f"this GPU maps memory in pieces of {format_size(found)}, and spill was planned for "
                f"{format_size(granularity())}. Remove spill_bytes"
            )
        self._device = device
        self._stack = ExitStack()
        try:
            self._range = AddressRange(index, geometry.buffer_bytes)
            self._stack.callback(self._range.close)
            halves = [self._create(geometry.half_bytes) for _ in range(geometry.num_halves)]
            for region in range(geometry.num_regions):
                self._range.map(region * geometry.region_bytes, self._create(geometry.resident_bytes))
                self._range.map(geometry.spilled_offset(region), halves[geometry.half_of(region)])
        except BaseException:
            self._stack.close()
            raise

    def _create(self, num_bytes: int) -> PhysicalMemory:
        memory = PhysicalMemory(self._device.index, num_bytes)
        # Released at once, it would still live as long as it is mapped; but a window half is mapped again and again.
        self._stack.callback(memory.release)
        return memory

    def tensor(self) -> torch.Tensor:
        """The buffer, zeroed: memory of another process or run could hold numbers that are none."""
        return self._range.tensor().zero_()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._stack.close()
