"""CUDA's driver calls, and the copier that uses them: batched asynchronous copies on low-priority streams."""

import contextlib
import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from overspill.kv.copies import Copier, Ids, Transfer
from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import HostMemory, slot_stride
from overspill.kv.layout import Region
from overspill.kv.mapping import Mapping
from overspill.kv.sizes import MiB
from overspill.kv.timing import Mark

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

Addresses = npt.NDArray[np.uint64]

_CUDA_VERSION = 12080  # the first that has cuMemcpyBatchAsync, in the form with a fail index
_SUCCESS, _ALREADY_REGISTERED = 0, 712
_WHILE_CAPTURING = (900, 901)  # stream capture unsupported, or invalidated
_CAPTURE_MODE_RELAXED = 2
_CAPTURE_WAIT_S = 60.0
_BATCH = 512
_MARK_BYTES = 128 * MiB  # how far apart a load's progress is seen: a few milliseconds
_BOUNCE_BYTES = 64 * MiB
_BOUNCE_THREADS = 4


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
    """A driver call that releases the interpreter lock, which a wrapper taking Python lists would hold for long."""
    from cuda.bindings import driver

    error, pointer, _ = driver.cuGetProcAddress(name.encode(), _CUDA_VERSION, 0)
    if error != driver.CUresult.CUDA_SUCCESS or not pointer:
        raise OverspillError(f"the CUDA driver has no {name} ({error}); a driver for CUDA 12.8 or newer is needed")
    return ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(int(pointer))


def _error_name(code: int) -> str:
    from cuda.bindings import driver

    return driver.CUresult(code).name


class BatchCopy:
    """cuMemcpyBatchAsync over arrays of addresses."""

    def __init__(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._call = _driver_function(
            "cuMemcpyBatchAsync", pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        )
        # In stream order: a copy must not read its source before what precedes it on the stream.
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


class PinnedRanges:
    """Registering host memory for DMA, from any thread."""

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
        """vLLM captures graphs while the pool is being registered; by default a capture in one thread forbids such
        calls to all others."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._exchange_capture_mode(ctypes.addressof(mode))
        try:
            return self._register(address, length, 0)
        finally:
            self._exchange_capture_mode(ctypes.addressof(mode))

    def unregister(self, address: int) -> None:
        torch.cuda.set_device(self._device)
        code = self._unregister(address)
        if code != _SUCCESS:
            logger.warning("Overspill: cuMemHostUnregister: %s", _error_name(code))


def merge_runs(dst: Addresses, src: Addresses, size: int, pieces: Ids) -> tuple[Addresses, Addresses, Addresses]:
    """Neighbouring copies of `size` bytes each become one, within a registered piece and up to a mark."""
    if len(dst) < 2:
        return dst, src, np.full(len(dst), size, np.uint64)
    step = np.uint64(size)
    apart = (dst[1:] - dst[:-1] != step) | (src[1:] - src[:-1] != step) | (pieces[1:] != pieces[:-1])
    most = max(1, _MARK_BYTES // size)
    apart[most - 1 :: most] = True
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    lengths = np.diff(np.append(starts, len(dst))).astype(np.uint64)
    return dst[starts], src[starts], lengths * step


def batches(sizes: Addresses) -> Iterator[slice]:
    """Copies to hand to the driver together. It starts a batch when it has taken all of it, so the first bytes should
    not wait for the last; and progress is seen between batches."""
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        mark = (int(ends[begin - 1]) if begin else 0) + _MARK_BYTES
        end = min(int(np.searchsorted(ends, mark)) + 1, begin + _BATCH, len(sizes))
        yield slice(begin, end)
        begin = end


class CudaMark(Mark):
    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """On the compute stream, if none is given."""
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def seconds_until(self, later: Mark) -> float | None:
        assert isinstance(later, CudaMark)
        return self.event.elapsed_time(later.event) / 1e3 if later.event.query() else None


class _CudaTransfer(Transfer):
    """Done when the event behind the last copy is reached."""

    def __init__(self, num_bytes: int, after: torch.cuda.Event) -> None:
        super().__init__(num_bytes)
        self.after = after
        # Appended by the lane's thread, taken by the model's.
        self._marks: deque[tuple[int, torch.cuda.Event]] = deque()
        self._queued_bytes = self._marked_bytes = self._arrived_bytes = 0
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True)

    def begin(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self.after)
        self._first.record(stream)

    def mark(self, stream: torch.cuda.Stream, num_bytes: int) -> None:
        """So many bytes more are queued."""
        self._queued_bytes += num_bytes
        if self._queued_bytes - self._marked_bytes >= _MARK_BYTES:
            self._marked_bytes = self._queued_bytes
            event = torch.cuda.Event()
            event.record(stream)
            self._marks.append((self._marked_bytes, event))

    def end(self, stream: torch.cuda.Stream) -> None:
        self._last.record(stream)
        self._queued.set()

    def done(self) -> bool:
        if self._done.is_set():
            return True
        if not self._queued.is_set() or not self._last.query():
            return False
        self.seconds = self._first.elapsed_time(self._last) / 1e3
        self._done.set()
        return True

    def remaining_bytes(self) -> int:
        if self.done():
            return 0
        while self._marks and self._marks[0][1].query():
            self._arrived_bytes, _ = self._marks.popleft()
        return self.num_bytes - self._arrived_bytes

    def fence(self) -> None:
        if not self._done.is_set():
            torch.cuda.current_stream().wait_event(self._last)


class _Lane:
    """One direction: a low-priority stream and a thread that queues copies on it.

    Queueing a copy costs the driver some microseconds, so the model's thread only hands the work over.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        lowest, _ = torch.cuda.Stream.priority_range()
        self.stream = torch.cuda.Stream(device, priority=lowest)
        self._device = device
        self._work: queue.SimpleQueue[tuple[_CudaTransfer, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, transfer: _CudaTransfer, copy: Callable[[], None]) -> None:
        self._work.put((transfer, copy))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            transfer, copy = item
            try:
                torch.cuda.set_device(self._device)
                transfer.begin(self.stream)
                copy()
                transfer.end(self.stream)
            except Exception as error:
                # What was queued before must not land in blocks that are handed on. A dead context copies nothing.
                with contextlib.suppress(RuntimeError):
                    self.stream.synchronize()
                transfer.settle(error)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        self.stream.synchronize()


class CudaCopier(Copier):
    """Loads and stores on streams of their own; neither ever makes the model's thread wait.

    A store waits for all compute queued before it. A load need not: its blocks were free when it was planned, and
    vLLM frees a block only once the steps that touch it are processed. With `steps_in_flight` steps at a time, that
    was so for all but the latest of them, and a long prefill under way does not hold the load up.

    Where vLLM zeroes new blocks that does not hold: a block may be allocated, given back and allocated again within one
    pass, and the zeroes for its first owner are queued all the same. A load waits for all compute there, too.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        regions: Sequence[Region],
        memory: HostMemory,
        pinned: PinnedRanges | None,
        steps_in_flight: int = 1,
        *,
        zeroes_new_blocks: bool = False,
    ) -> None:
        self._memory = memory
        self._zeroes_new_blocks = zeroes_new_blocks
        self._base = buffer.data_ptr()
        self._regions = regions
        offsets = np.cumsum([0, *(region.block_bytes for region in regions)])[:-1]
        self._slot_offsets = [int(offset) for offset in offsets]
        self._batch = BatchCopy()
        self._loads = _Lane(buffer.device, "overspill-load")
        self._stores = _Lane(buffer.device, "overspill-store")
        self._bounces = [_Bounce(memory.slot_bytes, pinned) for _ in range(2)]
        self._ends: deque[torch.cuda.Event] = deque(maxlen=steps_in_flight)

    def end_step(self) -> None:
        self._ends.append(_compute_so_far())

    def reused_early(self) -> None:
        # Until the ring is full again, a load waits for all compute queued before it.
        self._ends.clear()

    def load(self, slots: Ids, blocks: Ids) -> Transfer:
        may_overtake = len(self._ends) == self._ends.maxlen and not self._zeroes_new_blocks
        after = self._ends[0] if may_overtake else _compute_so_far()
        return self._submit(self._loads, slots, blocks, after, to_gpu=True)

    def store(self, blocks: Ids, slots: Ids) -> Transfer:
        return self._submit(self._stores, slots, blocks, _compute_so_far(), to_gpu=False)

    def _submit(self, lane: _Lane, slots: Ids, blocks: Ids, after: torch.cuda.Event, *, to_gpu: bool) -> Transfer:
        transfer = _CudaTransfer(len(slots) * self._memory.slot_bytes, after)
        lane.submit(transfer, lambda: self._copy(lane, transfer, slots, blocks, to_gpu=to_gpu))
        return transfer

    def _copy(self, lane: _Lane, transfer: _CudaTransfer, slots: Ids, blocks: Ids, *, to_gpu: bool) -> None:
        pinned = slots < self._memory.pinned_slots
        if pinned.any():
            some = slots[pinned]
            places = _Places(self._memory.address, self._memory.slot_stride, some, some // self._memory.slots_per_piece)
            self._queue(lane, transfer, places, blocks[pinned], to_gpu=to_gpu)
        if not pinned.all():
            self._copy_through_bounce(lane, transfer, slots[~pinned], blocks[~pinned], to_gpu=to_gpu)

    def _queue(self, lane: _Lane, transfer: _CudaTransfer, places: "_Places", blocks: Ids, *, to_gpu: bool) -> None:
        parts = []
        for region, slot_offset in zip(self._regions, self._slot_offsets, strict=True):
            gpu = np.uint64(self._base + region.offset) + blocks.astype(np.uint64) * np.uint64(region.block_bytes)
            ram = np.uint64(places.address + slot_offset) + places.slots.astype(np.uint64) * np.uint64(places.stride)
            dst, src = (gpu, ram) if to_gpu else (ram, gpu)
            parts.append(merge_runs(dst, src, region.block_bytes, places.pieces))
        dst, src, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        for part in batches(sizes):
            self._batch(dst[part], src[part], sizes[part], lane.stream.cuda_stream)
            if to_gpu:
                transfer.mark(lane.stream, int(sizes[part].sum()))

    def _copy_through_bounce(
        self, lane: _Lane, transfer: _CudaTransfer, slots: Ids, blocks: Ids, *, to_gpu: bool
    ) -> None:
        """In the lane's thread, which waits; the model's thread does not."""
        bounce = self._bounces[0 if to_gpu else 1]
        for start in range(0, len(slots), bounce.num_slots):
            some, targets = slots[start : start + bounce.num_slots], blocks[start : start + bounce.num_slots]
            addresses = [self._memory.address + int(slot) * self._memory.slot_stride for slot in some]
            if to_gpu:
                bounce.fill(addresses)
            self._queue(lane, transfer, bounce.places(len(some)), targets, to_gpu=to_gpu)
            lane.stream.synchronize()
            if not to_gpu:
                bounce.empty(addresses)

    def close(self) -> None:
        for lane in (self._loads, self._stores):
            lane.close()
        for bounce in self._bounces:
            bounce.close()


def _compute_so_far() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class _Places:
    """Slots in some host memory."""

    address: int
    stride: int
    slots: Ids
    pieces: Ids  # the registered piece that each lies in


class _Bounce:
    """A few slots of memory that is registered for DMA at once, where that is allowed.

    Unregistered it works too: the driver then stages the copy itself.
    """

    def __init__(self, slot_bytes: int, pinned: PinnedRanges | None) -> None:
        self._slot_bytes = slot_bytes
        self._stride = slot_stride(slot_bytes)
        self.num_slots = max(1, _BOUNCE_BYTES // self._stride)
        self._mapping = Mapping(self.num_slots * self._stride)
        self._mapping.populate(0, self._mapping.num_bytes)
        self._threads = ThreadPoolExecutor(_BOUNCE_THREADS, "overspill-bounce")
        self._pinned = pinned
        if pinned is not None and pinned.register(self._mapping.address, self._mapping.num_bytes) is not None:
            self._pinned = None

    def places(self, count: int) -> _Places:
        slots = np.arange(count)
        return _Places(self._mapping.address, self._stride, slots, np.zeros(count, np.int64))

    def fill(self, sources: Sequence[int]) -> None:
        self._move([(self._mapping.address + i * self._stride, source) for i, source in enumerate(sources)])

    def empty(self, targets: Sequence[int]) -> None:
        self._move([(target, self._mapping.address + i * self._stride) for i, target in enumerate(targets)])

    def _move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """memmove releases the interpreter lock; one core alone does not keep up with the link."""
        for done in [self._threads.submit(ctypes.memmove, dst, src, self._slot_bytes) for dst, src in pairs]:
            done.result()

    def close(self) -> None:
        self._threads.shutdown()
        if self._pinned is not None:
            self._pinned.unregister(self._mapping.address)
        self._mapping.close()


def gpu_numa_node(device: torch.device) -> int | None:
    """The NUMA node next to the GPU, where the machine says which."""
    properties = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        with open(f"/sys/bus/pci/devices/{address}/numa_node") as file:
            node = int(file.read())
    except (OSError, AttributeError, ValueError):
        return None
    return node if node >= 0 else None
