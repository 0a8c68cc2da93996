"""Copies between the arena and the window, and their order against compute: the interface, and the CPU platform's."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from overspill.kv.host_memory import HostMemory
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import Runs, count
from overspill.kv.timing import Mark, WallMark

# A place in the order of one of the three: compute, the way in, the way out.
Point = Any


class Streams(ABC):
    """One stream each way beside the compute stream; within a stream everything happens in the order it was asked.

    Nothing here waits: `…_after` orders what is asked of one stream from now on behind a point of another.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.bytes_in = 0
        self.bytes_out = 0

    def fill(self, region: int, runs: Runs) -> None:
        """Arena to window."""
        if runs:
            self.bytes_in += count(runs) * self.page_bytes
            self._fill(region, runs)

    def save(self, region: int, runs: Runs) -> None:
        """Window to arena."""
        if runs:
            self.bytes_out += count(runs) * self.page_bytes
            self._save(region, runs)

    @abstractmethod
    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Blocks of all regions, from and to, on the way in; either may be spilled."""

    @abstractmethod
    def _fill(self, region: int, runs: Runs) -> None: ...

    @abstractmethod
    def _save(self, region: int, runs: Runs) -> None: ...

    @abstractmethod
    def filled(self) -> Point:
        """The way in, so far."""

    @abstractmethod
    def saved(self) -> Point:
        """The way out, so far."""

    @abstractmethod
    def computed(self) -> Point:
        """Compute, so far."""

    @abstractmethod
    def fill_after(self, point: Point) -> None: ...

    @abstractmethod
    def save_after(self, point: Point) -> None: ...

    @abstractmethod
    def compute_after(self, point: Point) -> None: ...

    @abstractmethod
    def mark(self) -> Mark:
        """The way in, for timing."""

    @abstractmethod
    def wait(self, point: Point) -> None:
        """Keep this thread, not the model's, until the point is reached."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the copies under way."""


class HostStreams(Streams):
    """The CPU platform: a copy is over when it is asked for, so every order holds."""

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

    def move(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for region in range(len(self._arena)):
                self._content(region, target).copy_(self._content(region, source))

    def _content(self, region: int, block: int) -> torch.Tensor:
        spilled = block - self._num_resident
        return self._resident[region][block] if spilled < 0 else self._arena[region][spilled]

    def filled(self) -> Point:
        return None

    def saved(self) -> Point:
        return None

    def computed(self) -> Point:
        return None

    def fill_after(self, point: Point) -> None:
        """It is over."""

    def save_after(self, point: Point) -> None:
        """It is over."""

    def compute_after(self, point: Point) -> None:
        """It is over."""

    def mark(self) -> Mark:
        return WallMark()

    def wait(self, point: Point) -> None:
        """It is over."""

    def close(self) -> None:
        """None is under way."""
