"""Slots of RAM for KV: mapped at once, populated and pinned piece by piece in the background; and their checksums."""

import ctypes
import errno
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash
from vllm.logger import init_logger

from overspill.kv.errors import OverspillError
from overspill.kv.options import Options, Verify
from overspill.kv.ram import numa_cpus
from overspill.kv.sizes import MiB, format_size

if TYPE_CHECKING:
    from overspill.kv.cuda import PinnedRanges

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

PROT_NONE, _PROT_READ_WRITE = 0x0, 0x3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_HUGEPAGE, _MADV_DONTFORK, _MADV_POPULATE_WRITE = 14, 10, 23
_HUGE_PAGE = 2 * MiB

# Registering holds the driver's lock, so it must take much less time per piece than a step; pieces must still be large
# enough that a terabyte does not take millions of calls.
PIECE_BYTES = 256 * MiB
# Faulting in pages blocks the process's other mappings while it starts up, so only a little is faulted at a time.
_FILL_BYTES = 8 * MiB
_FILL_THREADS = 4
_PAGE = 4096
# With `verify: sample`, one slot in this many carries a checksum.
SAMPLE_EVERY = 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_memory(
    length: int,
    flags: int,
    option: str,
    *,
    address: int | None = None,
    descriptor: int = -1,
    protection: int = _PROT_READ_WRITE,
) -> int:
    """Map memory and return its address. Errors name `option` as the setting to lower if the kernel refuses."""
    mapped = _libc.mmap(address, length, protection, flags, descriptor, 0)
    if mapped is None or mapped == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise OverspillError(f"cannot map {format_size(length)} for {option}: {reason}; lower {option}")
    return int(mapped)


def unmap_memory(address: int, length: int) -> None:
    _libc.munmap(address, length)


class Mapping:
    """Anonymous memory mapped by Overspill itself: no /dev/shm, no rounding up to a power of two."""

    def __init__(self, num_bytes: int, option: str = "host_bytes") -> None:
        self.num_bytes = num_bytes
        # Huge pages make filling and registering faster, and need an aligned start.
        self._length = num_bytes + _HUGE_PAGE
        raw = map_memory(self._length, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, option)
        self._raw = raw
        self.address = -(-raw // _HUGE_PAGE) * _HUGE_PAGE
        _libc.madvise(self.address, num_bytes, _MADV_HUGEPAGE)
        # A forked child must neither copy nor keep the pool.
        _libc.madvise(self.address, num_bytes, _MADV_DONTFORK)

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory as an array, which must not outlive the mapping."""
        buffer = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        return np.frombuffer(memoryview(buffer), dtype=np.uint8)

    def populate(self, start: int, length: int) -> None:
        """Fault in pages now, on the NUMA node of the calling thread.

        No-op before Linux 5.14, where pages are allocated when registered or first written: touching them here could
        overwrite KV stored meanwhile.
        """
        if _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            logger.warning_once("Overspill: RAM for the pool could not be allocated in advance: %s", os.strerror(code))

    def close(self) -> None:
        if self._raw:
            unmap_memory(self._raw, self._length)
            self._raw = 0


class HostMemory:
    """`num_slots` slots of `slot_bytes` each, pinned in order from first to last."""

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
        # A copy must not cross from one registered piece into the next, so a piece holds whole slots and whole pages.
        self.slot_stride = slot_stride(slot_bytes)
        self.slots_per_piece = max(1, PIECE_BYTES // self.slot_stride)
        self.num_bytes = num_slots * self.slot_stride
        self._mapping = Mapping(self.num_bytes, option)
        self.address = self._mapping.address
        self._pages = self._mapping.bytes().reshape(num_slots, self.slot_stride)
        self.slots = self._pages[:, :slot_bytes]
        self.pinned_bytes = 0
        self.pinning_refused = ""
        self._numa_node = numa_node
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pinning: PinnedRanges | None = None
        self._registered: list[int] = []

    def pages(self, slot: int) -> memoryview:
        """The slot's memory in whole pages, as direct I/O requires."""
        return self._pages[slot].data

    def prepare(self, pinning: "PinnedRanges | None") -> None:
        """Populate the pool and, with `pinning`, register it, in the background."""
        self._pinning = pinning
        self._thread = threading.Thread(target=self._prepare, name="overspill-pool", daemon=True)
        self._thread.start()

    @property
    def pinned_slots(self) -> int:
        """Number of slots pinned so far; these are the first ones."""
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
        """Unpin and unmap all memory; no transfer may be in flight."""
        self._stop.set()
        self.wait_until_prepared()
        if self._pinning is not None:
            for start in self._registered:
                self._pinning.unregister(self.address + start)
        self._registered.clear()
        self.pinned_bytes = 0
        self.slots = self._pages = np.empty((0, self.slot_bytes), np.uint8)
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

    def _pin(self, pinning: "PinnedRanges", start: int) -> bool:
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
    """Number of slots in each rank's part of the pool; the scheduler and all workers compute the same number."""
    return options.host_bytes_per_rank(world_size) // slot_stride(slot_bytes)


def _run_on(cpus: frozenset[int]) -> None:
    """Bind this thread to CPUs: the kernel allocates a page on the node of the CPU that touches it first."""
    allowed = cpus & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)


@dataclass(slots=True)
class Verdict:
    """Result of checking a load's slots; the check runs in parallel with the copies."""

    parts: list[Future[list[int]]] = field(default_factory=list)
    num_checked: int = 0

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def error(self) -> BaseException | None:
        """The exception if the check itself failed; waits for the check."""
        return next((error for part in self.parts if (error := part.exception()) is not None), None)

    def corrupt_slots(self) -> list[int]:
        """Slots whose content does not match their checksum; waits for the check."""
        return [slot for part in self.parts if part.exception() is None for slot in part.result()]


class Checksums:
    """Checksums by host slot, computed in threads: xxhash releases the GIL while hashing."""

    def __init__(self, memory: HostMemory, verify: Verify, threads: int | None = None) -> None:
        self._memory = memory
        self._verify = verify
        self._digests = np.zeros(memory.num_slots, np.uint64)
        self._recording: dict[int, Future[None]] = {}
        self._threads = threads or max(2, min(8, (os.cpu_count() or 2) // 2))
        self._pool = ThreadPoolExecutor(self._threads, "overspill-checksum") if verify != "off" else None

    def covers(self, slot: int) -> bool:
        """Whether the slot has a checksum; the answer is the same at store and at load."""
        return self._verify == "all" or (self._verify == "sample" and slot % SAMPLE_EVERY == 0)

    def record(self, slots: Sequence[int]) -> None:
        """Compute checksums of stored slots in the background; checks of these slots wait until that is done."""
        if self._pool is None:
            return
        for part in self._split(slots):
            future = self._pool.submit(self._record, part)
            self._recording.update(dict.fromkeys(part, future))

    def check(self, slots: Sequence[int]) -> Verdict:
        """Start checking slots that are about to be loaded."""
        verdict = Verdict()
        if self._pool is None:
            return verdict
        for part in self._split(slots):
            # Futures of the same pool, submitted earlier: a later task waiting for them cannot deadlock.
            verdict.parts.append(self._pool.submit(self._check, part, self._pending(part)))
            verdict.num_checked += len(part)
        return verdict

    def _pending(self, slots: Sequence[int]) -> set[Future[None]]:
        """Checksums of these slots that are still being computed, for which every check must wait."""
        pending = set()
        for slot in slots:
            future = self._recording.get(slot)
            if future is not None and future.done():
                del self._recording[slot]
            elif future is not None:
                pending.add(future)
        return pending

    def note(self, slot: int, digest: int) -> None:
        """Set the checksum of a slot that was filled with content of known digest."""
        self._recording.pop(slot, None)
        self._digests[slot] = digest

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _split(self, slots: Sequence[int]) -> list[list[int]]:
        covered = [slot for slot in slots if self.covers(slot)]
        return [covered[i :: self._threads] for i in range(min(self._threads, len(covered)))]

    def digest(self, slot: int) -> int:
        return xxhash.xxh3_64_intdigest(self._memory.slots[slot])

    def _record(self, slots: list[int]) -> None:
        for slot in slots:
            self._digests[slot] = self.digest(slot)

    def _check(self, slots: list[int], recording: set[Future[None]]) -> list[int]:
        for future in recording:
            future.result()
        return [slot for slot in slots if int(self._digests[slot]) != self.digest(slot)]
