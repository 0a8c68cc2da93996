"""Moving blocks between the KV buffer and the pool: what a copier is, and the one for the CPU platform."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from overspill.kv.host_memory import HostMemory
from overspill.kv.layout import Region

Ids = npt.NDArray[np.int64]


class Transfer:
    """A batch of block copies in one direction. Written by the copier's threads, polled by the model's."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.seconds = 0.0
        self.error: BaseException | None = None
        self._queued = threading.Event()
        self._done = threading.Event()

    @property
    def queued(self) -> bool:
        """Whether later compute can be ordered behind the copies with `fence`."""
        return self._queued.is_set()

    def wait_queued(self, timeout: float) -> bool:
        return self._queued.wait(timeout)

    def done(self) -> bool:
        """Whether the bytes are where they belong, or never will be."""
        return self._done.is_set()

    def remaining_bytes(self) -> int:
        """How many are still on the way, at most."""
        return 0 if self.done() else self.num_bytes

    def fence(self) -> None:
        """Let the compute that is queued from now on wait for the copies."""

    def settle(self, error: BaseException | None = None) -> None:
        self.error = error
        self._done.set()
        self._queued.set()


class Copier(ABC):
    """Copies between slots of the pool and blocks of the KV buffer."""

    @abstractmethod
    def load(self, slots: Ids, blocks: Ids) -> Transfer:
        """Start copying slots into blocks, after the steps that may have touched them."""

    @abstractmethod
    def store(self, blocks: Ids, slots: Ids) -> Transfer:
        """Start copying blocks into slots, after the compute queued so far."""

    @abstractmethod
    def end_step(self) -> None:
        """All compute of a step is queued."""

    @abstractmethod
    def reused_early(self) -> None:
        """Blocks that the step about to run reads may be loaded into in the next one already."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the copies under way, then stop."""


class PlainCopier(Copier):
    """Plain copies for the CPU platform, in the order in which they were asked for.

    Stores are waited for, which keeps the engine deterministic; loads run on while other requests do. Tests close
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
        transfer = Transfer(len(slots) * self._memory.slot_bytes)

        def run() -> None:
            for region, part in self._pairs:
                region[blocks] = self._memory.slots[slots, part]

        self._thread.submit(self._timed, transfer, run)
        return transfer

    def store(self, blocks: Ids, slots: Ids) -> Transfer:
        transfer = Transfer(len(slots) * self._memory.slot_bytes)

        def run() -> None:
            for region, part in self._pairs:
                self._memory.slots[slots, part] = region[blocks]

        future = self._thread.submit(self._timed, transfer, run)
        if self.gate.is_set():
            future.result()
        return transfer

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
        """A step's compute is over when it returns."""

    def reused_early(self) -> None:
        """It has read them when it returns."""

    def close(self) -> None:
        self._thread.shutdown()
