"""CUDA driver calls: batched copies, stream flags, registered host memory, virtual memory. Independent of KV."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size
from overspill.kv.speeds import Mark

with contextlib.suppress(ImportError):  # absent on the CPU platform, which calls nothing in this module
    from cuda.bindings import driver

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

Addresses = npt.NDArray[np.uint64]

_CUDA_VERSION = 12080  # first version with cuMemcpyBatchAsync in the form that has a fail index
_SUCCESS, _ALREADY_REGISTERED = 0, 712
_WHILE_CAPTURING = (900, 901)  # stream capture unsupported, or invalidated
_CAPTURE_MODE_RELAXED = 2
_CAPTURE_WAIT_S = 60.0
# CU_STREAM_MEM_OP_WAIT_VALUE_32 and WRITE_VALUE_32, CU_STREAM_WAIT_VALUE_EQ, and the most operations per call.
_WAIT_VALUE, _WRITE_VALUE, _WAIT_EQUAL, _MOST_FLAG_OPERATIONS = 1, 2, 1, 256


# Held while a step is queued whose copies wait for its graph. Nothing is registered meanwhile: the driver waits
# for an idle GPU to unregister memory, and lets nobody replay a graph until then.
queueing = threading.Lock()


class _MemLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _MemcpyAttributes(ctypes.Structure):
    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", _MemLocation),
        ("dst_location", _MemLocation),
        ("flags", ctypes.c_uint),
    )


def _driver_function(name: str, *argument_types: Any) -> Callable[..., int]:
    """A driver call that releases the GIL; a wrapper that takes Python lists would hold the GIL for long."""
    error, pointer, _ = driver.cuGetProcAddress(name.encode(), _CUDA_VERSION, 0)
    if error != driver.CUresult.CUDA_SUCCESS or not pointer:
        raise OverspillError(f"the CUDA driver has no {name} ({error}); a driver for CUDA 12.8 or newer is needed")
    return ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(int(pointer))


def _error_name(code: int) -> str:
    return driver.CUresult(code).name


class BatchCopy:
    """cuMemcpyBatchAsync over arrays of addresses."""

    def __init__(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._call = _driver_function(
            "cuMemcpyBatchAsync", pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        )
        # In stream order: a copy must not read its source before earlier work on the stream has finished.
        self._attributes = _MemcpyAttributes(src_access_order=1)
        self._attribute_index = ctypes.c_size_t(0)

    def __call__(self, dst: Addresses, src: Addresses, sizes: Addresses, stream: int) -> None:
        failed_at = ctypes.c_size_t(0)
        code = self._call(
            dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(dst),
            ctypes.addressof(self._attributes), ctypes.addressof(self._attribute_index), 1,
            ctypes.addressof(failed_at), stream,
        )  # fmt: skip
        if code != _SUCCESS:
            raise RuntimeError(f"cuMemcpyBatchAsync: {_error_name(code)} at copy {failed_at.value} of {len(dst)}")


class FlagOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams; wait and write operations have the same fields."""

    _fields_ = (
        ("operation", ctypes.c_int), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint), ("alias", ctypes.c_uint64), ("rest", ctypes.c_uint64),
    )  # fmt: skip


class StreamFlags:
    """Flags (0 or 1) that streams set and wait for; both operations can be captured in a graph."""

    def __init__(self, values: torch.Tensor) -> None:
        """`values` is an int32 tensor, on the GPU or in pinned memory, with one flag per row."""
        self._values = values
        self._address, self._stride = values.data_ptr(), values.stride(0) * values.itemsize

    def raised(self, index: int) -> list[FlagOperation]:
        return [FlagOperation(_WRITE_VALUE, self.address(index), 1)]

    def lowered(self, index: int) -> list[FlagOperation]:
        return [FlagOperation(_WRITE_VALUE, self.address(index), 0)]

    def taken(self, index: int) -> list[FlagOperation]:
        """Operations that wait until the flag is raised, then lower it."""
        return [FlagOperation(_WAIT_VALUE, self.address(index), 1, _WAIT_EQUAL), *self.lowered(index)]

    def address(self, index: int) -> int:
        return self._address + self._stride * index


class FlagQueue:
    """Queues flag operations in batches, because each call becomes a node of a captured graph."""

    def __init__(self) -> None:
        arguments = ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
        self._call = _driver_function("cuStreamBatchMemOp", *arguments)

    def __call__(self, operations: Sequence[FlagOperation], stream: torch.cuda.Stream) -> None:
        for first in range(0, len(operations), _MOST_FLAG_OPERATIONS):
            part = operations[first : first + _MOST_FLAG_OPERATIONS]
            code = self._call(stream.cuda_stream, len(part), (FlagOperation * len(part))(*part), 0)
            if code != _SUCCESS:
                raise RuntimeError(f"cuStreamBatchMemOp: {_error_name(code)}")


class PinnedRanges:
    """Registers (pins) host memory for DMA, from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._register = _driver_function("cuMemHostRegister", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = _driver_function("cuMemHostUnregister", ctypes.c_void_p)
        self._exchange_capture_mode = _driver_function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p)

    def register(self, address: int, length: int) -> str | None:
        torch.cuda.set_device(self._device)
        deadline = time.monotonic() + _CAPTURE_WAIT_S
        while (code := self._register_relaxed(address, length)) in _WHILE_CAPTURING and time.monotonic() < deadline:
            time.sleep(0.1)
        return None if code in (_SUCCESS, _ALREADY_REGISTERED) else _error_name(code)

    def _register_relaxed(self, address: int, length: int) -> int:
        """Register in relaxed capture mode: vLLM captures graphs at the same time, and by default a capture in one
        thread forbids such calls in all other threads."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._exchange_capture_mode(ctypes.addressof(mode))
        try:
            with queueing:
                return self._register(address, length, 0)
        finally:
            self._exchange_capture_mode(ctypes.addressof(mode))

    def unregister(self, address: int) -> None:
        torch.cuda.set_device(self._device)
        with queueing:
            code = self._unregister(address)
        if code != _SUCCESS:
            logger.warning("Overspill: cuMemHostUnregister: %s", _error_name(code))


class CudaMark(Mark):
    """A CUDA event with timing."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """Record the event on `stream`, by default the compute stream."""
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def seconds_until(self, later: Mark) -> float | None:
        assert isinstance(later, CudaMark)
        return self.event.elapsed_time(later.event) / 1e3 if later.event.query() else None


def gpu_numa_node(device: torch.device) -> int | None:
    """NUMA node of the GPU; None if the machine does not report one."""
    properties = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        with open(f"/sys/bus/pci/devices/{address}/numa_node") as file:
            node = int(file.read())
    except (OSError, AttributeError, ValueError):
        return None
    return node if node >= 0 else None


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver and return the results; raises if the call failed."""
    code, *results = function(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {code.name}")
    return results[0] if len(results) == 1 else results


def _memory_of(device: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties


def mapping_granularity(device: int) -> int:
    """Granularity of mappings on a device; raises if the device lacks virtual memory management."""
    torch.cuda.init()
    supported = _call(
        driver.cuDeviceGetAttribute,
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        driver.CUdevice(device),
    )
    if not supported:
        raise OverspillError(
            "this GPU or its driver has no virtual memory management, which spill, park and elastic KV need ("
            "vGPUs often lack it). Remove spill_bytes, park and ledger; offload (host_bytes) works"
        )
    flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call(driver.cuMemGetAllocationGranularity, _memory_of(device), flags))


class PhysicalMemory:
    """GPU memory without an address of its own, which can be mapped at several addresses at once."""

    def __init__(self, device: int, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        try:
            self.handle = _call(driver.cuMemCreate, num_bytes, _memory_of(device), 0)
        except RuntimeError as error:
            raise OverspillError(
                f"{format_size(num_bytes)} of GPU memory for KV could not be allocated ({error}): lower "
                "--gpu-memory-utilization or resident_bytes, or free the GPU"
            ) from error

    def release(self) -> None:
        """Drop the handle; the driver frees the memory once its last mapping is gone."""
        _call(driver.cuMemRelease, self.handle)


class AddressRange:
    """Reserved addresses, partly backed by physical memory; mappings may change while the range is in use."""

    def __init__(self, device: int, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        self.address = int(_call(driver.cuMemAddressReserve, num_bytes, 0, driver.CUdeviceptr(0), 0))
        self._mapped: dict[int, int] = {}  # offset -> length

    def map(self, offset: int, memory: PhysicalMemory) -> None:
        """Map all of `memory` at `offset`, readable and writable."""
        place = driver.CUdeviceptr(self.address + offset)
        _call(driver.cuMemMap, place, memory.num_bytes, 0, memory.handle, 0)
        self._mapped[offset] = memory.num_bytes
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            _call(driver.cuMemSetAccess, place, memory.num_bytes, [access], 1)
        except BaseException:
            self.unmap(offset)
            raise

    def unmap(self, offset: int) -> None:
        """Unmap the memory at `offset`; no kernel or copy may still be using it."""
        _call(driver.cuMemUnmap, driver.CUdeviceptr(self.address + offset), self._mapped.pop(offset))

    def tensor(self, num_bytes: int | None = None) -> torch.Tensor:
        """The range, or its first `num_bytes`, without a copy."""
        array = _CudaArray(self.address, self.num_bytes if num_bytes is None else num_bytes)
        return torch.as_tensor(array, device=torch.device("cuda", self.device))

    def close(self) -> None:
        """Free the addresses; tensors over them become invalid. All compute must have completed."""
        for offset in list(self._mapped):
            self.unmap(offset)
        if self.address:
            _call(driver.cuMemAddressFree, driver.CUdeviceptr(self.address), self.num_bytes)
            self.address = 0


class _CudaArray:
    """The array interface through which torch accepts foreign GPU memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
