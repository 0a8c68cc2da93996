"""Copiers of blocks between the KV buffer and the pool in RAM: one for the CPU platform, one for CUDA streams."""

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from overspill.kv.buffer import Region
from overspill.kv.cuda import Addresses, BatchCopy
from overspill.kv.host_memory import HostMemory
from overspill.kv.sizes import MiB

Ids = npt.NDArray[np.int64]

_BATCH = 512
_MARK_BYTES = 128 * MiB  # between a load's progress events: a few milliseconds of copying


class Transfer:
    """A batch of block copies in one direction, completed by the copier's threads and polled by the model's thread."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.seconds = 0.0
        self.error: BaseException | None = None
        self._queued = threading.Event()
        self._done = threading.Event()

    @property
    def queued(self) -> bool:
        """Whether `fence` can already order later compute behind the copies."""
        return self._queued.is_set()

    def done(self) -> bool:
        """Whether all copies have completed or failed."""
        return self._done.is_set()

    def remaining_bytes(self) -> int:
        """Upper bound on the bytes still to be copied."""
        return 0 if self.done() else self.num_bytes

    def fence(self) -> None:
        """Make compute queued from now on wait for the copies."""

    def settle(self, error: BaseException | None = None) -> None:
        self.error = error
        self._done.set()
        self._queued.set()


class Copier(ABC):
    """Copies between slots of the pool and blocks of the KV buffer."""

    @abstractmethod
    def load(self, slots: Ids, blocks: Ids) -> Transfer:
        """Start copying slots into blocks, after all steps that may have touched the blocks."""

    @abstractmethod
    def store(self, blocks: Ids, slots: Ids) -> Transfer:
        """Start copying blocks into slots, after the compute queued so far."""

    @abstractmethod
    def end_step(self) -> None:
        """Note that all compute of a step is queued."""

    @abstractmethod
    def close(self) -> None:
        """Wait for copies in flight, then stop."""


class PlainCopier(Copier):
    """Plain copies for the CPU platform, in the order of the calls.

    A store blocks the caller, which keeps the engine deterministic; loads run while other requests compute. Tests clear
    `gate` to keep copies in flight.
    """

    gate = threading.Event()
    gate.set()

    def __init__(self, buffer: torch.Tensor, regions: Sequence[Region], num_blocks: int, memory: HostMemory) -> None:
        raw = buffer.view(torch.uint8).numpy()
        self._pairs: list[tuple[npt.NDArray[np.uint8], slice]] = []
        offset = 0
        for region in regions:
            end = region.offset + num_blocks * region.block_bytes
            blocks = raw[region.offset : end].reshape(num_blocks, region.block_bytes)
            self._pairs.append((blocks, slice(offset, offset + region.block_bytes)))
            offset += region.block_bytes
        self._memory = memory
        self._thread = ThreadPoolExecutor(1, "overspill-copy")

    def load(self, slots: Ids, blocks: Ids) -> Transfer:
        def run() -> None:
            for region, part in self._pairs:
                region[blocks] = self._memory.slots[slots, part]

        return self._start(len(slots), run)[0]

    def store(self, blocks: Ids, slots: Ids) -> Transfer:
        def run() -> None:
            for region, part in self._pairs:
                self._memory.slots[slots, part] = region[blocks]

        transfer, future = self._start(len(slots), run)
        if self.gate.is_set():
            future.result()
        return transfer

    def _start(self, num_slots: int, run: Callable[[], None]) -> tuple[Transfer, Future[None]]:
        transfer = Transfer(num_slots * self._memory.slot_bytes)
        return transfer, self._thread.submit(self._timed, transfer, run)

    def _timed(self, transfer: Transfer, run: Callable[[], None]) -> None:
        self.gate.wait()
        began = time.perf_counter()
        try:
            run()
        except Exception as error:
            transfer.settle(error)
            return
        transfer.seconds = time.perf_counter() - began
        transfer.settle()

    def end_step(self) -> None:
        """No-op: compute is synchronous."""

    def close(self) -> None:
        self._thread.shutdown()


def merge_runs(dst: Addresses, src: Addresses, size: int, pieces: Ids) -> tuple[Addresses, Addresses, Addresses]:
    """Merge adjacent copies of `size` bytes each; merged copies stay within a registered piece and `_MARK_BYTES`."""
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
    """Slices of copies to submit together. The driver starts a batch only once all of it is submitted, so the first
    bytes should not wait for the last; progress events are recorded between batches."""
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        mark = (int(ends[begin - 1]) if begin else 0) + _MARK_BYTES
        end = min(int(np.searchsorted(ends, mark)) + 1, begin + _BATCH, len(sizes))
        yield slice(begin, end)
        begin = end


class _CudaTransfer(Transfer):
    """A transfer that is done once the event behind its last copy has completed."""

    def __init__(self, num_bytes: int, after: torch.cuda.Event) -> None:
        super().__init__(num_bytes)
        self.after = after
        # Appended by the lane's thread, popped by the model's thread.
        self._marks: deque[tuple[int, torch.cuda.Event]] = deque()
        self._queued_bytes = self._marked_bytes = self._arrived_bytes = 0
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True)

    def begin(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self.after)
        self._first.record(stream)

    def mark(self, stream: torch.cuda.Stream, num_bytes: int) -> None:
        """Record a progress event after every `_MARK_BYTES` queued."""
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
    """A low-priority stream for one direction, and a thread that queues copies on it.

    Queueing a copy takes the driver some microseconds, so the model's thread only hands the work over.
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
                # Copies queued earlier must not land in blocks reallocated meanwhile. A dead context copies nothing.
                with contextlib.suppress(RuntimeError):
                    self.stream.synchronize()
                transfer.settle(error)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        self.stream.synchronize()


class CudaCopier(Copier):
    """Copier with separate CUDA streams for loads and stores; neither makes the model's thread wait.

    A store waits for all compute queued before it. A load need not: its blocks were free when it was planned, and vLLM
    frees a block only after processing the steps that touch it. So a load waits only for the step `steps_in_flight`
    steps ago, and a long prefill under way does not delay it.

    The exception is a model whose new blocks vLLM zeroes: a block may be allocated, freed and allocated again within
    one pass, and the zeroes for its first owner are queued nevertheless. There, loads wait for all compute, too.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        regions: Sequence[Region],
        memory: HostMemory,
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
        self._ends: deque[torch.cuda.Event] = deque(maxlen=steps_in_flight)

    def end_step(self) -> None:
        self._ends.append(_compute_so_far())

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
            self._queue(lane, transfer, slots[pinned], blocks[pinned], to_gpu=to_gpu)
        if not pinned.all():
            # CUDA does not order copies of pageable memory by events. So this thread waits: first for earlier compute,
            # then for the copies, before the transfer counts as queued.
            lane.stream.synchronize()
            self._queue(lane, transfer, slots[~pinned], blocks[~pinned], to_gpu=to_gpu)
            lane.stream.synchronize()

    def _queue(self, lane: _Lane, transfer: _CudaTransfer, slots: Ids, blocks: Ids, *, to_gpu: bool) -> None:
        memory, parts = self._memory, []
        pieces = slots // memory.slots_per_piece
        for region, slot_offset in zip(self._regions, self._slot_offsets, strict=True):
            gpu = np.uint64(self._base + region.offset) + blocks.astype(np.uint64) * np.uint64(region.block_bytes)
            ram = np.uint64(memory.address + slot_offset) + slots.astype(np.uint64) * np.uint64(memory.slot_stride)
            dst, src = (gpu, ram) if to_gpu else (ram, gpu)
            parts.append(merge_runs(dst, src, region.block_bytes, pieces))
        dst, src, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        for part in batches(sizes):
            self._batch(dst[part], src[part], sizes[part], lane.stream.cuda_stream)
            if to_gpu:
                transfer.mark(lane.stream, int(sizes[part].sum()))

    def close(self) -> None:
        for lane in (self._loads, self._stores):
            lane.close()


def _compute_so_far() -> torch.cuda.Event:
    """Event behind all compute queued so far."""
    event = torch.cuda.Event()
    event.record()
    return event
