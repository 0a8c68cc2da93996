"""Each worker's disk I/O between slots and places: preallocated segment files, direct I/O on a few threads, and an xxh3
digest of every block."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from overspill.kv.host_memory import Checksums, HostMemory, Verdict
from overspill.kv.jobs import DiskReadJob, DiskWriteJob, StepReport
from overspill.kv.metrics import OverspillStats
from overspill.kv.sizes import GiB, MiB, format_size

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

SEGMENT_BYTES = GiB
# Reads can fill the queue of an NVMe drive; writes leave most of it to reads, for which requests wait.
_READ_THREADS = 8
_WRITE_THREADS = 2
# Size of one system call: large enough to be efficient, small enough that several threads share a hit.
_CALL_BYTES = 8 * MiB
_CALL_BLOCKS = 256


def places_per_segment(stride: int) -> int:
    """Blocks in a segment file, independent of `disk_bytes`: a place stays where it is when the bound changes."""
    return max(1, SEGMENT_BYTES // stride)


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def segment_path(folder: Path, rank: int, segment: int) -> Path:
    return rank_folder(folder, rank) / f"segment-{segment:06d}"


class NoRoom(OSError):
    """The disk is full: it has no room from place `place` on."""

    def __init__(self, place: int) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.place = place


class Segments:
    """One rank's segment files in a folder, with direct I/O where the filesystem supports it."""

    def __init__(self, folder: Path, rank: int, memory: HostMemory, num_places: int) -> None:
        self._folder, self._rank, self._memory, self._num_places = folder, rank, memory, num_places
        self._per_segment = places_per_segment(memory.slot_stride)
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()
        self._direct = getattr(os, "O_DIRECT", 0)

    def calls(self, pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Sort (place, slot) pairs by place and split them into system calls: adjacent places within one segment."""
        stride, call = self._memory.slot_stride, list[tuple[int, int]]()
        most = max(1, min(_CALL_BLOCKS, _CALL_BYTES // stride))
        for pair in sorted(pairs):
            if call and (pair[0] != call[-1][0] + 1 or pair[0] % self._per_segment == 0 or len(call) == most):
                yield call
                call = []
            call.append(pair)
        if call:
            yield call

    def read(self, call: Sequence[tuple[int, int]]) -> None:
        self._move(call, writes=False)

    def write(self, call: Sequence[tuple[int, int]]) -> None:
        self._move(call, writes=True)

    def _move(self, call: Sequence[tuple[int, int]], *, writes: bool) -> None:
        segment, first = divmod(call[0][0], self._per_segment)
        file = self._file(segment, first + len(call), create=writes)
        buffers = [self._memory.pages(slot) for _, slot in call]
        at, total = first * self._memory.slot_stride, len(call) * self._memory.slot_stride
        moved = os.pwritev(file, buffers, at) if writes else os.preadv(file, buffers, at)
        if moved != total:
            # A signal or a limit cut the call short; such a block is written again later, or recomputed.
            raise OSError(errno.EIO, f"{moved} of {total} bytes at {at} of segment {segment}")

    def _file(self, segment: int, end: int, *, create: bool) -> int:
        with self._lock:
            file = self._files.get(segment)
            if file is None:
                file = self._files[segment] = self._open(segment, create=create)
            if create:
                self._allocate(segment, file, end)
            return file

    def _open(self, segment: int, *, create: bool) -> int:
        path = segment_path(self._folder, self._rank, segment)
        if create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            return os.open(path, flags | self._direct, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            logger.warning_once(
                "Overspill: the filesystem of %s has no direct I/O; KV on disk also takes page cache", self._folder
            )
            self._direct = 0
            return os.open(path, flags, 0o600)

    def _allocate(self, segment: int, file: int, end: int) -> None:
        """Reserve the whole segment now, so that a disk filling up later cannot cut it short. Raises NoRoom unless the
        segment's first `end` places exist."""
        first = segment * self._per_segment
        length = min(self._per_segment, self._num_places - first) * self._memory.slot_stride
        present = os.fstat(file).st_size
        if present >= length:
            return
        try:
            os.posix_fallocate(file, present, length - present)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            if not present:
                os.close(self._files.pop(segment))
                segment_path(self._folder, self._rank, segment).unlink(missing_ok=True)
            num_present = present // self._memory.slot_stride
            # A raised `disk_bytes` lengthens the last segment; without room for that, its old places remain usable.
            if end > num_present:
                raise NoRoom(first + num_present) from error

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


@dataclass(slots=True)
class _Part:
    """Outcome of one system call: a write's digests (None for unwritten blocks), or the positions a read failed for."""

    positions: list[int]
    digests: list[int | None] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    error: OSError | None = None
    began: float = 0.0
    ended: float = 0.0


@dataclass(slots=True)
class _Job:
    job: DiskReadJob | DiskWriteJob
    parts: list[Future[_Part]]

    def done(self) -> bool:
        return all(part.done() for part in self.parts)


class DiskWorker:
    """Disk reads and writes of one rank, each on a thread pool of their own."""

    def __init__(self, memory: HostMemory, checksums: Checksums, rank: int, num_places: int) -> None:
        self._memory, self._checksums, self._rank, self._num_places = memory, checksums, rank, num_places
        self._segments: Segments | None = None
        self._folder = ""
        self._readers = ThreadPoolExecutor(_READ_THREADS, "overspill-disk-read")
        self._writers = ThreadPoolExecutor(_WRITE_THREADS, "overspill-disk-write")
        self._jobs: list[_Job] = []
        self._has_failed = False

    @property
    def is_reading(self) -> bool:
        """Whether a read is in flight."""
        return any(isinstance(job.job, DiskReadJob) and not job.done() for job in self._jobs)

    @property
    def has_done(self) -> bool:
        """Whether a completed job has not been reported yet."""
        return any(job.done() for job in self._jobs)

    @property
    def is_writing(self) -> bool:
        return any(isinstance(job.job, DiskWriteJob) and not job.done() for job in self._jobs)

    def read(self, job: DiskReadJob) -> None:
        self._jobs.append(_Job(job, self._start(job, self._readers, self._read, job.digests[self._rank])))

    def write(self, job: DiskWriteJob) -> None:
        # Check the slots: damage in RAM must not reach the disk, where it would get a digest that matches.
        self._jobs.append(_Job(job, self._start(job, self._writers, self._write, self._checksums.check(job.slots))))

    def write_now(self, job: DiskWriteJob, report: StepReport) -> None:
        """Write synchronously, and add the outcome to the report."""
        self.write(job)
        self._finish(self._jobs.pop(), report, OverspillStats())

    def _start(
        self, job: DiskReadJob | DiskWriteJob, threads: ThreadPoolExecutor, move: Callable[..., _Part], more: Any
    ) -> list[Future[_Part]]:
        segments, number = self._segments_of(job.folder), {slot: i for i, slot in enumerate(job.slots)}
        return [
            threads.submit(move, segments, call, [number[slot] for _, slot in call], more)
            for call in segments.calls(list(zip(job.places, job.slots, strict=True)))
        ]

    def _segments_of(self, folder: str) -> Segments:
        if self._segments is None or folder != self._folder:
            if self._segments is not None:
                self._segments.close()
            self._segments = Segments(Path(folder), self._rank, self._memory, self._num_places)
            self._folder = folder
        return self._segments

    def _read(
        self, segments: Segments, call: list[tuple[int, int]], positions: list[int], digests: Sequence[int]
    ) -> _Part:
        part = _Part(positions, began=time.perf_counter())
        try:
            segments.read(call)
        except OSError as error:
            part.bad, part.error = positions, error
        else:
            for position, (_, slot) in zip(positions, call, strict=True):
                digest = self._checksums.digest(slot)
                if digest != digests[position]:
                    part.bad.append(position)
                else:
                    self._checksums.note(slot, digest)
        part.ended = time.perf_counter()
        return part

    def _write(self, segments: Segments, call: list[tuple[int, int]], positions: list[int], verdict: Verdict) -> _Part:
        part = _Part(positions)
        corrupt = {slot for _, slot in call} if verdict.error() is not None else set(verdict.corrupt_slots())
        digests = [None if slot in corrupt else self._checksums.digest(slot) for _, slot in call]
        try:
            segments.write(call)
            part.digests = digests
        except OSError as error:
            part.digests, part.error = [None] * len(call), error
        return part

    def poll(self, report: StepReport, stats: OverspillStats) -> None:
        """Add completed jobs to the report."""
        done = [job for job in self._jobs if job.done()]
        if done:
            self._jobs = [job for job in self._jobs if job not in done]
            for job in done:
                self._finish(job, report, stats)

    def _finish(self, job: _Job, report: StepReport, stats: OverspillStats) -> None:
        parts = [part.result() for part in job.parts]
        num_bytes = len(job.job.slots) * self._memory.slot_stride
        if isinstance(job.job, DiskReadJob):
            bad = sorted(position for part in parts for position in part.bad)
            report.disk_read.setdefault(job.job.job_id, {})[self._rank] = bad
            seconds = max(part.ended for part in parts) - min(part.began for part in parts)
            stats.count("disk_read_bytes", num_bytes)
            stats.count("disk_read_seconds", seconds)
            if not bad:
                report.disk_speed.add(num_bytes, seconds)
        else:
            digests: list[int | None] = [None] * len(job.job.slots)
            for part in parts:
                for position, digest in zip(part.positions, part.digests, strict=True):
                    digests[position] = digest
            report.disk_written.setdefault(job.job.job_id, {})[self._rank] = digests
            stats.count("disk_write_bytes", num_bytes)
        for part in parts:
            if part.error is not None:
                self._failed(part.error, report)

    def _failed(self, error: OSError, report: StepReport) -> None:
        if isinstance(error, NoRoom):
            known = report.disk_full_at
            report.disk_full_at = error.place if known is None else min(known, error.place)
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "Overspill: %s on the disk at %s: %s. KV that cannot be read is recomputed, and KV that cannot be "
                "written is lost at the next stop. Later errors are counted only.",
                format_size(self._memory.slot_stride), self._folder, error,
            )  # fmt: skip

    def close(self) -> None:
        """Wait for I/O in flight, which uses the pool's memory, and close the files."""
        for threads in (self._readers, self._writers):
            threads.shutdown(cancel_futures=True)
        if self._segments is not None:
            self._segments.close()
            self._segments = None
