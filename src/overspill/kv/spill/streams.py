"""Streams of copies between arena and window, ordered against compute: the interface, and both platforms."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from overspill.kv.cuda import BatchCopy, CudaMark
from overspill.kv.host_memory import HostMemory
from overspill.kv.speeds import Mark, WallMark
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import Runs, count

# A CUDA event, or its stand-in, on one of three streams: compute, H2D (fills) and D2H (saves).
Event = Any

_POLL_S = 0.0005
# Enough for a step or two, each with three tables per group.
_MOST_TABLES = 64


class Streams:
    """One H2D and one D2H stream beside the compute stream, each in the order of the calls.

    Only `wait` and `close` block: `…_after` makes later work of one stream wait for an event of another.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.bytes_in = 0
        self.bytes_out = 0

    def fill(self, region: int, runs: Runs) -> None:
        """Copy from the arena to the window (H2D)."""
        if runs:
            self.bytes_in += count(runs) * self.page_bytes
            self._fill(region, runs)

    def save(self, region: int, runs: Runs) -> None:
        """Copy from the window to the arena (D2H)."""
        if runs:
            self.bytes_out += count(runs) * self.page_bytes
            self._save(region, runs)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, target) blocks of all regions on the H2D stream; either may be spilled."""
        raise NotImplementedError

    def _fill(self, region: int, runs: Runs) -> None:
        raise NotImplementedError

    def _save(self, region: int, runs: Runs) -> None:
        raise NotImplementedError

    # Defaults for synchronous copies, with which every order holds.

    def fill_event(self) -> Event:
        """Event at the end of the H2D stream."""

    def save_event(self) -> Event:
        """Event at the end of the D2H stream."""

    def compute_event(self) -> Event:
        """Event at the end of the compute stream."""

    def fill_after(self, event: Event) -> None: ...

    def save_after(self, event: Event) -> None: ...

    def compute_after(self, event: Event) -> None: ...

    def mark(self) -> Mark:
        """Timing event at the end of the H2D stream."""
        return WallMark()

    def wait(self, event: Event) -> None:
        """Block the calling thread, which is not the model's, until the event has completed."""

    def close(self) -> None:
        """Wait for copies in flight."""


class HostStreams(Streams):
    """Synchronous copies for the CPU platform."""

    def __init__(self, geometry: Geometry, buffer: torch.Tensor, arena: HostMemory) -> None:
        super().__init__(geometry.page_bytes)
        shape = geometry.num_spilled, geometry.page_bytes
        regions = range(geometry.num_regions)
        starts = [geometry.spilled_offset(region) for region in regions]
        self._windows = [buffer[start : start + geometry.half_bytes].view(shape) for start in starts]
        self._num_resident = geometry.num_resident
        self._resident = [
            buffer[start : start + geometry.resident_bytes].view(-1, geometry.page_bytes)
            for start in range(0, geometry.buffer_bytes, geometry.region_bytes)
        ]
        self._arena = [torch.from_numpy(arena.slots[region]).view(shape) for region in regions]

    def _fill(self, region: int, runs: Runs) -> None:
        for start, end in runs:
            self._windows[region][start:end] = self._arena[region][start:end]

    def _save(self, region: int, runs: Runs) -> None:
        for start, end in runs:
            self._arena[region][start:end] = self._windows[region][start:end]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for region in range(len(self._arena)):
                self._content(region, target).copy_(self._content(region, source))

    def _content(self, region: int, block: int) -> torch.Tensor:
        spilled = block - self._num_resident
        return self._resident[region][block] if spilled < 0 else self._arena[region][spilled]


class CudaStreams(Streams):
    """CUDA streams, ordered by events. Only the model's thread queues work, since an event must be recorded before a
    stream waits for it."""

    def __init__(self, geometry: Geometry, buffer: torch.Tensor, arena: HostMemory) -> None:
        super().__init__(geometry.page_bytes)
        self.device = buffer.device
        # A priority of its own: streams of equal priority may share a hardware queue, in which a wait for a graph's
        # flag would keep that graph from starting.
        self.inbound = torch.cuda.Stream(buffer.device, priority=-1)
        self._out = torch.cuda.Stream(buffer.device)
        self._copy = BatchCopy()
        self._tables: dict[int, tuple[Runs, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]] = {}
        regions = range(geometry.num_regions)
        self._windows = [buffer.data_ptr() + geometry.spilled_offset(region) for region in regions]
        self._regions = [buffer.data_ptr() + region * geometry.region_bytes for region in regions]
        self._num_resident = geometry.num_resident
        self._arena = [arena.address + region * arena.slot_stride for region in regions]

    def _fill(self, region: int, runs: Runs) -> None:
        self._queue(self._windows[region], self._arena[region], runs, self.inbound)

    def _save(self, region: int, runs: Runs) -> None:
        self._queue(self._arena[region], self._windows[region], runs, self._out)

    def save_behind_fills(self, region: int, runs: Runs) -> None:
        """Copy from the window to the arena on the inbound stream, in order with fills."""
        self.bytes_out += count(runs) * self.page_bytes
        self._queue(self._arena[region], self._windows[region], runs, self.inbound)

    def _queue(self, target: int, source: int, runs: Runs, stream: torch.cuda.Stream) -> None:
        """Queue one copy per run: blocks have the same order in the window and in a region's part of the arena."""
        offsets, sizes = self._table(runs)
        self._copy(np.uint64(target) + offsets, np.uint64(source) + offsets, sizes, stream.cuda_stream)

    def _table(self, runs: Runs) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Offsets and sizes of a step's runs, cached because all of its layers share them."""
        known = self._tables.get(id(runs))
        if known is None or known[0] is not runs:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            starts, ends = np.array(runs, np.uint64).T * np.uint64(self.page_bytes)
            known = self._tables[id(runs)] = runs, np.ascontiguousarray(starts), ends - starts
        return known[1], known[2]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        blocks = np.array(pairs, np.uint64)
        for region in range(len(self._arena)):
            addresses = self._content(region, blocks)
            sizes = np.full(len(blocks), self.page_bytes, np.uint64)
            self._copy(
                np.ascontiguousarray(addresses[:, 1]), np.ascontiguousarray(addresses[:, 0]), sizes,
                self.inbound.cuda_stream,
            )  # fmt: skip

    def _content(self, region: int, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Addresses of the blocks' content, on the GPU or in RAM."""
        page = np.uint64(self.page_bytes)
        resident = np.uint64(self._regions[region]) + blocks * page
        spilled = np.uint64(self._arena[region]) + (blocks - np.uint64(self._num_resident)) * page
        return np.where(blocks < self._num_resident, resident, spilled)

    def fill_event(self) -> torch.cuda.Event:
        return self.inbound.record_event()

    def save_event(self) -> torch.cuda.Event:
        return self._out.record_event()

    def compute_event(self) -> torch.cuda.Event:
        return torch.cuda.current_stream().record_event()

    def fill_after(self, event: torch.cuda.Event) -> None:
        self.inbound.wait_event(event)

    def save_after(self, event: torch.cuda.Event) -> None:
        self._out.wait_event(event)

    def compute_after(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(event)

    def mark(self) -> Mark:
        return CudaMark(self.inbound)

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.set_device(self.device)  # a new thread is on the first GPU, and would create a context there
        while not event.query():
            time.sleep(_POLL_S)

    def close(self) -> None:
        self.inbound.synchronize()
        self._out.synchronize()
