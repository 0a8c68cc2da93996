"""CUDA's virtual memory: address ranges, physical memory, and which lies where. Nothing here knows of KV."""

from typing import Any

import torch

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size


def _call(function: Any, *arguments: Any) -> Any:
    """A driver call's result, or its error as an exception."""
    from cuda.bindings import driver

    code, *results = function(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {code.name}")
    return results[0] if len(results) == 1 else results


def _memory_of(device: int) -> Any:
    from cuda.bindings import driver

    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties


def mapping_granularity(device: int) -> int:
    """Sizes and offsets of mappings are multiples of this. Refuses a device without virtual memory."""
    from cuda.bindings import driver

    torch.cuda.init()
    supported = _call(
        driver.cuDeviceGetAttribute,
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        driver.CUdevice(device),
    )
    if not supported:
        raise OverspillError(
            "this GPU or its driver has no virtual memory management, which spill maps its KV cache with (vGPUs often "
            "lack it). Remove spill_bytes; offload (host_bytes) works"
        )
    flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call(driver.cuMemGetAllocationGranularity, _memory_of(device), flags))


class PhysicalMemory:
    """GPU memory without an address. It can be mapped in several places at once."""

    def __init__(self, device: int, num_bytes: int) -> None:
        from cuda.bindings import driver

        self.device, self.num_bytes = device, num_bytes
        try:
            self.handle = _call(driver.cuMemCreate, num_bytes, _memory_of(device), 0)
        except RuntimeError as error:
            raise OverspillError(
                f"{format_size(num_bytes)} of GPU memory for KV could not be had ({error}): lower "
                "--gpu-memory-utilization or resident_bytes, or free the GPU"
            ) from error

    def release(self) -> None:
        """The memory goes back when it is mapped nowhere any more."""
        from cuda.bindings import driver

        _call(driver.cuMemRelease, self.handle)


class AddressRange:
    """Reserved addresses; parts of it are backed by physical memory, and that may change while it is in use."""

    def __init__(self, device: int, num_bytes: int) -> None:
        from cuda.bindings import driver

        self.device, self.num_bytes = device, num_bytes
        self.address = int(_call(driver.cuMemAddressReserve, num_bytes, 0, driver.CUdeviceptr(0), 0))
        self._mapped: dict[int, int] = {}  # offset -> length

    def map(self, offset: int, memory: PhysicalMemory) -> None:
        """Put all of `memory` at `offset`, readable and writable."""
        from cuda.bindings import driver

        place = driver.CUdeviceptr(self.address + offset)
        _call(driver.cuMemMap, place, memory.num_bytes, 0, memory.handle, 0)
        self._mapped[offset] = memory.num_bytes
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(driver.cuMemSetAccess, place, memory.num_bytes, [access], 1)

    def unmap(self, offset: int) -> None:
        """Nothing may be using it."""
        from cuda.bindings import driver

        _call(driver.cuMemUnmap, driver.CUdeviceptr(self.address + offset), self._mapped.pop(offset))

    def tensor(self) -> torch.Tensor:
        """The whole range as bytes, without a copy."""
        return torch.as_tensor(_CudaArray(self.address, self.num_bytes), device=torch.device("cuda", self.device))

    def close(self) -> None:
        """Give the addresses back; tensors over them are void. All compute must be over."""
        from cuda.bindings import driver

        for offset in list(self._mapped):
            self.unmap(offset)
        if self.address:
            _call(driver.cuMemAddressFree, driver.CUdeviceptr(self.address), self.num_bytes)
            self.address = 0


class _CudaArray:
    """What torch asks of foreign GPU memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
