"""The scheduler's side of the disk tier: which blocks a waiting request reads into RAM, and which blocks are written.

A hit on disk is first read into free slots of the pool while its request waits; from then on it is an ordinary hit in
RAM. A failed read is therefore a miss: the request never depended on it. Blocks that leave RAM are written if they were
used again after being stored; `flush` writes everything in RAM.
"""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.disk.folder import JOURNAL, Folder, default_folder
from overspill.kv.disk.index import DiskIndex, Entry
from overspill.kv.disk.journal import Journal, Records
from overspill.kv.disk.key import AdapterDigests, Digests, content_key, identity_of, model_facts
from overspill.kv.disk.segments import places_per_segment
from overspill.kv.errors import OverspillError
from overspill.kv.host_cache import BelowRam, Hit, HostCache, Stored
from overspill.kv.jobs import DiskReadJob, DiskWriteJob, StepJobs, StepReport
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.provenance import EventOf
from overspill.kv.sizes import format_size
from overspill.kv.speeds import Speeds, load_beats_recompute
from overspill.kv.vllm_api import (
    MEDIUM_STORAGE,
    BlockHashWithGroupId,
    BlockRemoved,
    BlockStored,
    KVCacheBlock,
    KVCacheConfig,
    KVCacheEvent,
    Request,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# Blocks per write, and writes in flight.
_WRITE_BLOCKS = 64
_WRITES_IN_FLIGHT = 2
# A flush updates the journal after this many blocks, which bounds what a kill in the middle loses.
_FLUSH_BLOCKS = 256
_PROGRESS_S = 5.0
# Seconds a request waits for a read: a hanging disk must not hang the request.
_PATIENCE_S = 20.0
# Reads per request; other requests may evict the blocks again before this one is admitted.
_MOST_READS = 2
# Every n-th read that seems slower than recomputing is made anyway, to measure the disk again.
_PROBE_AFTER = 32
# A journal is rewritten once its records outnumber twice the valid ones by this many.
_SMALL_JOURNAL = 4096


def num_disk_places(options: Options, world_size: int, stride: int) -> int:
    """Places on each rank's share of the disk; the scheduler and all workers compute the same number."""
    return options.disk_bytes // world_size // stride


def _shorten(journal: Journal, index: DiskIndex) -> None:
    if journal.num_records > 2 * len(index) + _SMALL_JOURNAL:
        journal.replace(index.records())


@dataclass(slots=True)
class _Read:
    blocks: list[KVCacheBlock]
    items: list[Stored]
    places: list[int]
    num_tokens: int
    began: float
    bad: set[int] = field(default_factory=set)
    reports: int = 0
    abandoned: bool = False


@dataclass(slots=True)
class _Write:
    blocks: list[KVCacheBlock]
    items: list[Stored]
    places: list[int]
    digests: dict[int, list[int | None]] = field(default_factory=dict)  # by rank
    abandoned: bool = False


class DiskTier:
    """Schedules disk reads and writes. The index opens in the background; until then every lookup misses."""

    def __init__(
        self,
        options: Options,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        host: HostCache,
        speeds: Speeds,
        stats: OverspillStats,
        job_ids: Iterator[int],
        stride: int,
        adapters: AdapterDigests,
        event_of: EventOf,
    ) -> None:
        self._host, self._speeds, self._stats, self._job_ids = host, speeds, stats, job_ids
        self._always = options.load == "always"
        self._world_size = vllm_config.parallel_config.world_size
        self._stride, self._bound = stride, options.disk_bytes
        self._num_places = num_disk_places(options, self._world_size, stride)
        if not self._num_places:
            raise OverspillError(
                f"disk_bytes of {format_size(self._bound)} holds no block of KV, which takes "
                f"{format_size(stride * self._world_size)}: give more, or remove disk_bytes"
            )
        root = Path(options.disk_path) if options.disk_path else default_folder(vllm_config.model_config.model)
        self._folder = Folder(root)
        self._path = self.digests = root
        self._journal: Journal | None = None
        self.index: DiskIndex | None = None
        self._others_bytes = 0  # KV of other keys in the folder
        self._trimming: threading.Thread | None = None
        self._detached = ""
        self._adapters, self._event_of = adapters, event_of
        # Evicted blocks waiting to be written, which keep their slots meanwhile. The newest is written first: a prefix
        # leaves RAM tail first, and its tail is worth nothing without its head.
        self._queue: deque[tuple[KVCacheBlock, Stored]] = deque()
        self._most_queued = max(1, host.num_slots // 8)
        self._writes: dict[int, _Write] = {}
        self._reads: dict[int, _Read] = {}
        self._planned: list[DiskReadJob] = []
        self._reading: set[bytes] = set()
        self._waiting: dict[str, int] = {}  # request id -> job id of its read
        self._num_reads: dict[str, int] = {}
        self._num_skipped = 0  # consecutive reads that seemed too slow
        self._announced: set[bytes] = set()  # keys with a published BlockStored event
        self._shown = -1
        # A reset may come before the index is open; it is then carried out by the thread that opens the index.
        self._is_cleared = False
        self._clearing = threading.Lock()
        self._stop = threading.Event()
        self._opening = threading.Thread(
            target=self._open, args=(vllm_config, kv_cache_config), name="overspill-disk-index", daemon=True
        )
        self._opening.start()
        host.on_evict = self.evicted

    # Opening.

    def _open(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        began = time.monotonic()
        try:
            facts = model_facts(vllm_config, kv_cache_config, Digests(self.digests / "digests.json", self._stop))
            identity = identity_of(facts)
            path = self._folder.open(identity, facts)
            self._others_bytes = self._folder.trim(path, 0, self._bound)
            journal = Journal(path / JOURNAL, identity, self._world_size)
            records = journal.open()
            index = DiskIndex.load(records, self._num_places, self._world_size)
            _shorten(journal, index)
            self._remove_segments_beyond(path)
        except (OSError, OverspillError, ValueError) as error:
            self.detach(f"KV on disk cannot be used: {error}")
            return
        self._path, self._journal = path, journal
        with self._clearing:
            self.index = index  # last: from now on the scheduler's thread uses it
            if self._is_cleared:
                self._empty_journal(journal, index)
        logger.info(
            "Overspill: %d block(s) of KV on disk, %s of %s, found after %.1f s in %s",
            len(index), format_size(len(index) * self._stride * self._world_size), format_size(self._bound),
            time.monotonic() - began, path,
        )  # fmt: skip

    def _remove_segments_beyond(self, path: Path) -> None:
        """Delete segments beyond the bound, which may be lower than at the last start."""
        num_segments = -(-self._num_places // places_per_segment(self._stride))
        for segment in path.glob("rank-*/segment-*"):
            if int(segment.name.rpartition("-")[2]) >= num_segments:
                segment.unlink()

    def wait_until_open(self, timeout: float | None = None) -> bool:
        self._opening.join(timeout)
        return not self._opening.is_alive()

    @property
    def _ready(self) -> DiskIndex | None:
        return None if self._detached else self.index

    # Reading.

    def wants(self, request: Request, num_local_tokens: int, max_tokens: int) -> bool:
        """Whether the request should wait while blocks are read from disk. May evict from RAM to make room."""
        request_id = request.request_id
        read = self._reads.get(self._waiting.get(request_id, -1))
        if read is not None:
            return time.monotonic() - read.began < _PATIENCE_S
        self._waiting.pop(request_id, None)
        if any(time.monotonic() - read.began >= _PATIENCE_S for read in self._reads.values()):
            return False  # the disk hangs, and only the first requests wait for it
        index, adapter = self._ready, self._adapters.of(request)
        if index is None or not len(index) or adapter is None or self._num_reads.get(request_id, 0) >= _MOST_READS:
            return False

        def find(key: BlockHashWithGroupId) -> BelowRam | None:
            content = content_key(key, adapter)
            return BelowRam(key, content) if content in index else None

        most = max(1, self._host.num_slots // 2)
        found = self._host.lookup_below(request.block_hashes, num_local_tokens, max_tokens, find, most)
        blocks = found.blocks if found is not None else ()
        on_disk = [block for group in blocks for block in group if isinstance(block, BelowRam)]
        if found is None or not on_disk:
            return False
        in_ram = self._host.lookup(request.block_hashes, num_local_tokens, max_tokens)
        num_tokens = found.num_tokens - (in_ram.num_tokens if in_ram is not None else 0)
        if num_tokens <= 0:
            return False
        if any(block.content in self._reading for block in on_disk):
            return True  # wait for another request's read of them
        if not self._is_worth_it(num_tokens, len(on_disk)):
            self._num_reads[request_id] = _MOST_READS
            self._stats.count("disk_skipped_tokens", num_tokens)
            return False
        return self._read(index, request, found, on_disk, num_tokens, adapter)

    def _is_worth_it(self, num_tokens: int, num_blocks: int) -> bool:
        num_bytes = num_blocks * self._stride
        queued = sum(len(read.blocks) for read in self._reads.values()) * self._stride
        if self._always or load_beats_recompute(
            self._speeds, num_tokens=num_tokens, num_bytes=num_bytes, queued_bytes=0, disk_bytes=num_bytes + queued
        ):
            self._num_skipped = 0
            return True
        # Only reads measure the disk: without probes, one bad measurement would end them for good.
        self._num_skipped += 1
        return self._num_skipped % _PROBE_AFTER == 0

    def _read(
        self,
        index: DiskIndex,
        request: Request,
        found: Hit,
        on_disk: Sequence[BelowRam],
        num_tokens: int,
        adapter: bytes,
    ) -> bool:
        request_id = request.request_id
        blocks = self._host.allocate_beside(found, len(on_disk))
        if not blocks:
            return False
        entries = index.find([block.content for block in on_disk])
        if len(entries) < len(on_disk):
            self._host.release(blocks)
            return False
        index.use([entry.key for entry in entries])
        index.hold(entry.place for entry in entries)
        # A parent that is neither read now nor in RAM keeps its key on disk: its continuation counts as cut off.
        parents = {content_key(b.key, adapter): b.key for b in on_disk}
        parents |= {
            content_key(b.block_hash, adapter): b.block_hash for b in found.in_ram() if b.block_hash is not None
        }
        items, events = [], self._events(request, found) if self._host.events_enabled else {}
        for slot, block, entry in zip(blocks, on_disk, entries, strict=True):
            parent = parents.get(entry.parent, BlockHashWithGroupId(entry.parent)) if entry.parent else None
            items.append(Stored(slot, block.key, entry.num_tokens, parent, adapter, events.get(block.key)))
        job_id = next(self._job_ids)
        places = [entry.place for entry in entries]
        self._reads[job_id] = _Read(blocks, items, places, num_tokens, time.monotonic())
        self._reading.update(entry.key for entry in entries)
        self._waiting[request_id] = job_id
        self._num_reads[request_id] = self._num_reads.get(request_id, 0) + 1
        digests = [[entry.digests[rank] for entry in entries] for rank in range(self._world_size)]
        slots = [block.block_id - 1 for block in blocks]
        self._planned.append(DiskReadJob(job_id, str(self._path), places, slots, digests))
        return True

    def _events(self, request: Request, found: Hit) -> dict[bytes, BlockStored]:
        """Events by key for blocks read into RAM, built from the request: the journal does not hold tokens."""
        sizes = self._host.group_block_sizes
        return {
            block.key: event
            for group, blocks in enumerate(found.blocks)
            for i, block in enumerate(blocks)
            if isinstance(block, BelowRam) and (event := self._event_of(request, i, sizes[group], group)) is not None
        }

    def _read_done(self, read: _Read) -> None:
        index = self.index
        assert index is not None
        index.release(read.places)
        contents = [content_key(item.key, item.adapter or b"") for item in read.items]
        self._reading.difference_update(contents)
        good = []
        for position, item in enumerate(read.items):
            if position in read.bad:
                self._forget(contents[position])
            if position in read.bad or read.abandoned or self._host.find(item.key) is not None:
                self._host.release([item.block])
            else:
                good.append(item)
        self._host.insert(good)
        if read.bad:
            self._stats.count("disk_bad_blocks", len(read.bad))
            logger.warning(
                "Overspill: %d of %d block(s) on disk did not hold what was written; they are recomputed",
                len(read.bad), len(read.items),
            )  # fmt: skip
        if good:
            self._stats.count("disk_hit_tokens", read.num_tokens * len(good) // len(read.items))

    def _forget(self, content: bytes) -> None:
        index = self._ready
        if index is not None and (record := index.remove(content)) is not None:
            self._append(record)
            self._publish((), ())

    # Writing.

    def evicted(self, block: KVCacheBlock, item: Stored, used_again: bool) -> KVCacheBlock | None:
        """Queue an evicted block for writing if worthwhile. Returns a block that may be reused now: this one, or the
        one that has waited longest to be written; None if this one keeps its slot until it is written."""
        index = self._ready
        if index is None or not used_again or item.adapter is None or content_key(item.key, item.adapter) in index:
            return block
        self._queue.append((block, item))
        if len(self._queue) <= self._most_queued:
            return None
        self._stats.count("disk_dropped_blocks")
        return self._queue.popleft()[0]

    def plan(self, jobs: StepJobs) -> None:
        """Add reads and writes to a step's jobs."""
        jobs.disk_reads, self._planned = self._planned, []
        while self._queue and len(self._writes) < _WRITES_IN_FLIGHT:
            newest = [self._queue.pop() for _ in range(min(_WRITE_BLOCKS, len(self._queue)))]
            job = self._start_write([block for block, _ in newest], [item for _, item in newest])
            if job is not None:
                jobs.disk_writes.append(job)

    def _start_write(self, blocks: list[KVCacheBlock], items: list[Stored]) -> DiskWriteJob | None:
        index = self._ready
        places = index.take(len(blocks)) if index is not None else []
        if len(places) < len(blocks):
            self._stats.count("disk_dropped_blocks", len(blocks) - len(places))
            self._host.release(blocks[len(places) :])
            blocks, items = blocks[: len(places)], items[: len(places)]
        if not blocks:
            return None
        self._make_room()
        job_id = next(self._job_ids)
        self._writes[job_id] = _Write(blocks, items, places)
        return DiskWriteJob(job_id, str(self._path), [block.block_id - 1 for block in blocks], places)

    def _make_room(self) -> None:
        """Delete other keys' KV before the bound is exceeded, off the scheduler's thread, for it may take long."""
        assert self.index is not None
        if not self._others_bytes or (self._trimming is not None and self._trimming.is_alive()):
            return
        whole = places_per_segment(self._stride)
        num_places = min(-(-self.index.num_used // whole) * whole, self._num_places)
        own_bytes = num_places * self._stride * self._world_size
        if own_bytes + self._others_bytes > self._bound:
            self._trimming = threading.Thread(target=self._trim, args=(own_bytes,), name="overspill-disk-trim")
            self._trimming.start()

    def _trim(self, own_bytes: int) -> None:
        try:
            self._others_bytes = self._folder.trim(self._path, own_bytes, self._bound)
        except OSError as error:
            self._others_bytes = 0  # no second attempt at every write
            logger.warning("Overspill: KV of other models in %s cannot be deleted: %s", self._folder.root, error)

    def _write_done(self, write: _Write) -> None:
        index = self.index
        assert index is not None
        entries, unwritten = [], []
        for position, (item, place) in enumerate(zip(write.items, write.places, strict=True)):
            digests = [digest for rank in range(self._world_size) if (digest := write.digests[rank][position])]
            content = content_key(item.key, item.adapter or b"")
            is_written = len(digests) == self._world_size
            if not is_written:
                self._stats.count("disk_write_failures")
            if not is_written or write.abandoned or content in index or place >= index.num_places:
                unwritten.append(place)
                continue
            parent = content_key(item.parent, item.adapter or b"") if item.parent is not None else None
            entries.append(Entry(content, parent, item.num_tokens, place, tuple(digests)))
        index.give_back(unwritten)
        # Two blocks may hold the same content.
        unique = list({entry.key: entry for entry in entries}.values())
        index.give_back({entry.place for entry in entries} - {entry.place for entry in unique})
        if unique:
            self._append(index.put(unique))
            self._publish(unique, write.items)
        self._host.release(write.blocks)

    def _publish(self, written: Sequence[Entry], items: Sequence[Stored]) -> None:
        """Publish vLLM's KV events for content written to disk, and for content evicted from it."""
        assert self.index is not None
        gone, self.index.gone = self.index.gone, []
        if not self._host.events_enabled:
            return
        events: list[KVCacheEvent] = []
        for key in self._announced.intersection(gone):
            self._announced.discard(key)
            name = BlockHashWithGroupId(key)
            events.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(get_block_hash(name))],
                    medium=MEDIUM_STORAGE, group_idx=get_group_id(name), locality="LOCAL",
                )
            )  # fmt: skip
        places = {entry.key for entry in written}
        for item in items:
            # An adapter's content has a key other than its block hash, so its removal could not be announced.
            if item.event is not None and item.adapter == b"" and item.key in places:
                event = copy.copy(item.event)
                event.medium = MEDIUM_STORAGE
                events.append(event)
                self._announced.add(item.key)
        self._host.pool.kv_event_queue += events

    def _append(self, records: Records) -> None:
        assert self._journal is not None and self.index is not None
        try:
            self._journal.append(records)
            _shorten(self._journal, self.index)
        except OSError as error:
            logger.warning_once("Overspill: the journal at %s cannot be written: %s", self._path, error)
            self._stats.count("disk_write_failures", len(records))

    def complete(self, report: StepReport) -> None:
        """Process the workers' report of a step."""
        self._limit(report.disk_full_at)
        for job_id, bad in report.disk_read.items():
            read = self._reads[job_id]
            read.reports += len(bad)
            read.bad.update(position for positions in bad.values() for position in positions)
            if read.reports == self._world_size:
                del self._reads[job_id]
                self._read_done(read)
        for job_id, digests in report.disk_written.items():
            write = self._writes[job_id]
            write.digests.update(digests)
            if len(write.digests) == self._world_size:
                del self._writes[job_id]
                self._write_done(write)

    def _limit(self, full_at: int | None) -> None:
        if full_at is not None and self.index is not None and full_at < self.index.num_places:
            self.index.limit(full_at)
            logger.warning(
                "Overspill: the disk is full: %s of the %s given by disk_bytes fit. Older KV makes room for newer.",
                format_size(full_at * self._stride * self._world_size), format_size(self._bound),
            )  # fmt: skip

    def flush(self, write: Callable[[DiskWriteJob], StepReport], limit_s: float) -> int:
        """Write everything in RAM that is not on disk, most recently used first; returns the blocks written.

        `write` runs a job on all workers and returns their report. No step may run meanwhile.
        """
        deadline = time.monotonic() + limit_s
        self.wait_until_open(limit_s)
        index = self._ready
        if index is None:
            return 0
        queued = list(self._queue)
        self._queue.clear()
        cached = self._host.by_last_use()[: index.num_places]
        for block, _ in cached:
            self._host.pin([block])
        items = [pair for pair in [*reversed(queued), *cached] if self._is_unwritten(index, pair[1])]
        index.use([content_key(item.key, item.adapter or b"") for _, item in cached])
        self._host.release([block for block, item in queued if not self._is_unwritten(index, item)])
        self._host.release([block for block, item in reversed(cached) if not self._is_unwritten(index, item)])
        before, shown = len(index), time.monotonic()
        if items:
            num_bytes = len(items) * self._stride * self._world_size
            logger.info("Overspill: writing %d block(s) of KV, %s, to disk", len(items), format_size(num_bytes))
        for first in range(0, len(items), _FLUSH_BLOCKS):
            part = items[first : first + _FLUSH_BLOCKS]
            if time.monotonic() > deadline:
                left = items[first:]
                self._host.release([block for block, _ in left])
                self._stats.count("disk_dropped_blocks", len(left))
                logger.warning(
                    "Overspill: %d block(s) of KV were not written to disk within %.0f s", len(left), limit_s
                )
                break
            job = self._start_write([block for block, _ in part], [item for _, item in part])
            if job is not None:
                self.complete(write(job))
            if time.monotonic() - shown > _PROGRESS_S:
                shown = time.monotonic()
                logger.info("Overspill: %d of %d block(s) of KV are written to disk", first + len(part), len(items))
        return len(index) - before

    def _is_unwritten(self, index: DiskIndex, item: Stored) -> bool:
        return item.adapter is not None and content_key(item.key, item.adapter) not in index

    # Request end, resets and shutdown.

    def finished(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._num_reads.pop(request_id, None)

    def is_busy(self) -> bool:
        return bool(self._reads or self._writes or self._queue or self._planned)

    def reset(self) -> None:
        """Discard reads and writes in flight after RAM was cleared."""
        for read in self._reads.values():
            read.abandoned = True
        for write in self._writes.values():
            write.abandoned = True
        queued, self._queue = self._queue, deque()
        self._host.release([block for block, _ in queued])

    def detach(self, reason: str) -> None:
        """Stop reading and writing: KV computed from now on may not match the key. KV on disk stays for the next
        start."""
        if not self._detached:
            self._detached = reason
            logger.warning("Overspill: the disk is not used any more until the next start: %s", reason)

    def clear(self) -> None:
        """Forget everything on disk, and detach."""
        self.detach("the KV cache was reset")
        with self._clearing:
            self._is_cleared = True
            if self._journal is not None and self.index is not None:
                self._empty_journal(self._journal, self.index)

    def _empty_journal(self, journal: Journal, index: DiskIndex) -> None:
        try:
            journal.replace(index.records()[:0])
        except OSError as error:
            logger.warning("Overspill: KV on disk in %s cannot be deleted: %s", self._path, error)

    def take_stats(self) -> None:
        used = len(self.index) * self._stride * self._world_size if self.index is not None else 0
        if used != self._shown:
            self._shown = used
            self._stats.gauge("disk_used_bytes", used)

    def close(self) -> None:
        self._stop.set()
        self._opening.join()
        self._detached = self._detached or "closed"
        if self._trimming is not None:
            self._trimming.join()
        if self._journal is not None:
            self._journal.close()
        self._folder.close()
