"""The pool's memory: mapped at once, filled with pages and registered for DMA piece by piece in the background."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from vllm.logger import init_logger

from overspill.kv.mapping import Mapping
from overspill.kv.numa import numa_cpus
from overspill.kv.options import Options
from overspill.kv.sizes import MiB, format_size

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# Registering holds the driver's lock, so a piece must be short against a step; small enough to be quick, large
# enough that a terabyte is not millions of calls.
PIECE_BYTES = 256 * MiB
# Taking pages keeps the process from mapping memory meanwhile, and it is starting up: a little at a time.
_FILL_BYTES = 8 * MiB
_FILL_THREADS = 4
_PAGE = 4096


class Pinning(Protocol):
    """Registering memory for DMA."""

    def register(self, address: int, length: int) -> str | None:
        """None, or why it was refused."""

    def unregister(self, address: int) -> None: ...


class HostMemory:
    """`num_slots` slots of `slot_bytes` each; slots become DMA-able from the first to the last."""

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        numa_node: int | None = None,
        name: str = "pool",
        option: str = "host_bytes",
    ) -> None:
        self._name, self._option = name, option
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        # One copy must not cross from one registered piece into the next, so a piece is whole slots and whole pages.
        self.slot_stride = slot_stride(slot_bytes)
        self.slots_per_piece = max(1, PIECE_BYTES // self.slot_stride)
        self.num_bytes = num_slots * self.slot_stride
        self._mapping = Mapping(self.num_bytes, option)
        self.address = self._mapping.address
        self.slots = self._mapping.bytes().reshape(num_slots, self.slot_stride)[:, :slot_bytes]
        self.pinned_bytes = 0
        self.pinning_refused = ""
        self._numa_node = numa_node
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pinning: Pinning | None = None
        self._registered: list[int] = []

    def prepare(self, pinning: Pinning | None) -> None:
        """Fill and, with `pinning`, register the pool in the background."""
        self._pinning = pinning
        self._thread = threading.Thread(target=self._prepare, name="overspill-pool", daemon=True)
        self._thread.start()

    @property
    def pinned_slots(self) -> int:
        """Slots below this one can be copied from and to directly."""
        return self.pinned_bytes // self.slot_stride

    @property
    def _piece_bytes(self) -> int:
        return self.slots_per_piece * self.slot_stride

    @property
    def is_prepared(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait_until_prepared(self, timeout: float | None = None) -> bool:
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def close(self) -> None:
        """Give everything back; no transfer may be under way."""
        self._stop.set()
        self.wait_until_prepared()
        if self._pinning is not None:
            for start in self._registered:
                self._pinning.unregister(self.address + start)
        self._registered.clear()
        self.pinned_bytes = 0
        self.slots = np.empty((0, self.slot_bytes), np.uint8)
        self._mapping.close()

    def _prepare(self) -> None:
        try:
            self._fill_and_pin()
        except Exception as error:
            self._refused(repr(error))

    def _fill_and_pin(self) -> None:
        began = time.monotonic()
        pinning = self._pinning
        starts = range(0, self.num_bytes, self._piece_bytes)
        cpus = numa_cpus(self._numa_node)
        workers = max(1, min(_FILL_THREADS, len(cpus) or (os.cpu_count() or 1)))
        with ThreadPoolExecutor(workers, "overspill-fill", initializer=_run_on, initargs=(cpus,)) as pool:
            filled = [pool.submit(self._fill, start) for start in starts]
            for start, piece in zip(starts, filled, strict=True):
                piece.result()
                if self._stop.is_set():
                    return
                if pinning is not None and not self._pin(pinning, start):
                    pinning = None
        logger.info(
            "Overspill: %s of %s ready after %.1f s, %s of it pinned",
            self._name, format_size(self.num_bytes), time.monotonic() - began, format_size(self.pinned_bytes),
        )  # fmt: skip

    def _fill(self, start: int) -> None:
        end = min(start + self._piece_bytes, self.num_bytes)
        for at in range(start, end, _FILL_BYTES):
            if self._stop.is_set():
                return
            self._mapping.populate(at, min(_FILL_BYTES, end - at))

    def _pin(self, pinning: Pinning, start: int) -> bool:
        length = min(self._piece_bytes, self.num_bytes - start)
        refused = pinning.register(self.address + start, length)
        if refused is not None:
            self._refused(refused)
            return False
        self._registered.append(start)
        self.pinned_bytes = start + length
        return True

    def _refused(self, why: str) -> None:
        self.pinning_refused = why
        logger.warning(
            "Overspill: registering the %s for DMA was refused after %s of %s (%s). The rest is copied as pageable "
            "memory, slower; raise the memlock limit (ulimit -l) or lower %s.",
            self._name, format_size(self.pinned_bytes), format_size(self.num_bytes), why, self._option,
        )  # fmt: skip


def slot_stride(slot_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-slot_bytes // _PAGE) * _PAGE


def num_host_slots(options: Options, world_size: int, slot_bytes: int) -> int:
    """Slots in each rank's part of the pool; scheduler and workers must agree on it."""
    return options.host_bytes_per_rank(world_size) // slot_stride(slot_bytes)


def _run_on(cpus: frozenset[int]) -> None:
    """Pages are taken from the node of the CPU that touches them first."""
    allowed = cpus & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
