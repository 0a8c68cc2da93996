"""CUDA's copies between arena and window: one stream each way, ordered by events."""

import time

import numpy as np
import numpy.typing as npt
import torch

from overspill.kv.cuda import BatchCopy, CudaMark
from overspill.kv.host_memory import HostMemory
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import Runs
from overspill.kv.spill.streams import Streams
from overspill.kv.timing import Mark

_POLL_S = 0.0005


class CudaStreams(Streams):
    """All calls are made by the model's thread: an event must be recorded before anything can wait for it."""

    def __init__(self, geometry: Geometry, buffer: torch.Tensor, arena: HostMemory) -> None:
        super().__init__(geometry.page_bytes)
        self._device = buffer.device
        self._in = torch.cuda.Stream(buffer.device)
        self._out = torch.cuda.Stream(buffer.device)
        self._copy = BatchCopy()
        regions = range(geometry.num_regions)
        self._windows = [buffer.data_ptr() + geometry.spilled_offset(region) for region in regions]
        self._regions = [buffer.data_ptr() + region * geometry.region_bytes for region in regions]
        self._num_resident = geometry.num_resident
        self._arena = [arena.address + region * arena.slot_stride for region in regions]

    def _fill(self, region: int, runs: Runs) -> None:
        self._queue(self._windows[region], self._arena[region], runs, self._in)

    def _save(self, region: int, runs: Runs) -> None:
        self._queue(self._arena[region], self._windows[region], runs, self._out)

    def _queue(self, target: int, source: int, runs: Runs, stream: torch.cuda.Stream) -> None:
        """A run is one copy: the window and a region's part of the arena have the same order."""
        page = np.uint64(self.page_bytes)
        starts, ends = (np.array(column, np.uint64) for column in zip(*runs, strict=True))
        offsets = starts * page
        self._copy(np.uint64(target) + offsets, np.uint64(source) + offsets, (ends - starts) * page, stream.cuda_stream)

    def move(self, pairs: list[tuple[int, int]]) -> None:
        blocks = np.array(pairs, np.uint64)
        for region in range(len(self._arena)):
            addresses = self._content(region, blocks)
            sizes = np.full(len(blocks), self.page_bytes, np.uint64)
            self._copy(
                np.ascontiguousarray(addresses[:, 1]), np.ascontiguousarray(addresses[:, 0]), sizes,
                self._in.cuda_stream,
            )  # fmt: skip

    def _content(self, region: int, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Where blocks' content lies: on the GPU, or in RAM."""
        page = np.uint64(self.page_bytes)
        resident = np.uint64(self._regions[region]) + blocks * page
        spilled = np.uint64(self._arena[region]) + (blocks - np.uint64(self._num_resident)) * page
        return np.where(blocks < self._num_resident, resident, spilled)

    def filled(self) -> torch.cuda.Event:
        return self._in.record_event()

    def saved(self) -> torch.cuda.Event:
        return self._out.record_event()

    def computed(self) -> torch.cuda.Event:
        return torch.cuda.current_stream().record_event()

    def fill_after(self, point: torch.cuda.Event) -> None:
        self._in.wait_event(point)

    def save_after(self, point: torch.cuda.Event) -> None:
        self._out.wait_event(point)

    def compute_after(self, point: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(point)

    def mark(self) -> Mark:
        return CudaMark(self._in)

    def wait(self, point: torch.cuda.Event) -> None:
        torch.cuda.set_device(self._device)  # a thread begins on the first GPU, and would make a context there
        while not point.query():
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._in.synchronize()
        self._out.synchronize()
