"""The scheduler's side of the store between machines: lookups and loads for waiting requests, and puts.

A scheduler pass never touches the network. A request whose prefix is not in RAM waits while workers look up which
blocks the store has, and then while they read these into RAM; in all for at most DEADLINE_S without progress.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.disk.folder import default_folder
from overspill.kv.disk.key import AdapterDigests, Digests, content_key, identity_of, model_facts
from overspill.kv.errors import OverspillError
from overspill.kv.host_cache import BelowRam, HostCache, Stored
from overspill.kv.jobs import RemoteJob, RemoteResult, StepJobs, StepReport
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.provenance import EventOf
from overspill.kv.speeds import Speeds, load_beats_recompute
from overspill.kv.vllm_api import (
    BlockHashWithGroupId,
    KVCacheBlock,
    KVCacheConfig,
    Request,
    make_block_hash_with_group_id,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# With the steps around it, a hanging store delays a request by 0.2 s.
DEADLINE_S = 0.18
# Nobody waits for puts.
_PUT_DEADLINE_S = 5.0
_PUT_BLOCKS = 32
_PUTS_IN_FLIGHT = 2
# Consecutive failures after which the store is paused, and seconds of the pause.
_FAILURES = 3
_PAUSE_S = 5.0
# Every n-th request uses the store although recomputing seems faster, to measure it again.
_PROBE_AFTER = 32


class Breaker:
    """A circuit breaker: pauses a failing store, then lets one request try it."""

    def __init__(self, stats: OverspillStats) -> None:
        self._stats = stats
        self._failures = 0
        self._failed_kind = ""  # kind of the last call that failed
        self._until = 0.0
        self._is_trying = False

    @property
    def is_closed(self) -> bool:
        return self._failures < _FAILURES

    def may_try(self) -> bool:
        """Whether this request should probe whether the store is back. True once per pause."""
        if self.is_closed or self._is_trying or time.monotonic() < self._until:
            return False
        self._is_trying = True
        return True

    def may_try_put(self) -> bool:
        """Whether a put should probe after failed puts: if the store is empty, no load can show that it is back."""
        return self._failed_kind == "store" and self.may_try()

    def succeeded(self, kind: str) -> None:
        if kind not in ("load", self._failed_kind):
            # An answer of the master says nothing about a hanging store.
            if kind == "find" and not self.is_closed:
                self._is_trying = False
                if self._failed_kind != "store":
                    self._until = time.monotonic() + _PAUSE_S
            return
        if not self.is_closed:
            logger.info("Overspill: the store answers again, and is used")
        self._failures, self._failed_kind, self._is_trying = 0, "", False

    def failed(self, kind: str) -> None:
        self._stats.count("remote_failures")
        was_closed = self.is_closed
        self._failures, self._failed_kind, self._is_trying = self._failures + 1, kind, False
        if not self.is_closed:
            self._until = time.monotonic() + _PAUSE_S
        if was_closed and not self.is_closed:
            self._stats.count("remote_pauses")
            logger.warning(
                "Overspill: the store failed %d times in a row, and is paused; every %.0f s one request checks "
                "whether it is back. KV is recomputed meanwhile.",
                self._failures, _PAUSE_S,
            )  # fmt: skip


@dataclass(slots=True)
class _Ask:
    """A request's only pass through the store: a find, then a load."""

    job_id: int = 0  # the call the request waits for, or 0
    patience_s: float = 0.0  # seconds that the find left of the deadline
    found: set[bytes] | None = None


@dataclass(slots=True)
class _Call:
    job: RemoteJob
    ask: _Ask | None = None
    blocks: list[KVCacheBlock] = field(default_factory=list)
    items: list[Stored] = field(default_factory=list)
    num_tokens: int = 0
    results: dict[int, RemoteResult] = field(default_factory=dict)  # by rank
    is_late: bool = False
    abandoned: bool = False


class RemoteTier:
    """Schedules calls to the store. A late call keeps its slots until it ends, for it may still write into them."""

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
        self._stride = stride
        self._groups = kv_cache_config.prefix_cacheable_group_ids
        self._prefix = ""  # prefix of all keys; empty until the weights' digest is known
        self._detached = ""
        self._adapters, self._event_of = adapters, event_of
        self.breaker = Breaker(stats)
        self._asks: dict[str, _Ask] = {}
        self._calls: dict[int, _Call] = {}
        self._planned: list[RemoteJob] = []
        self._queue: deque[Stored] = deque()  # blocks to put; not pinned, so they may be evicted first
        self._num_lost = 0  # slots that a lost transfer may still write into
        self._num_skipped = 0
        # Outside the disk tier's folders, each of which belongs to one server.
        folder = default_folder(vllm_config.model_config.model)
        self.digests = folder.parent.with_name("digests") / folder.name
        self._stop = threading.Event()
        self._opening = threading.Thread(
            target=self._open, args=(vllm_config, kv_cache_config), name="overspill-remote-key", daemon=True
        )
        self._opening.start()

    def _open(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        try:
            self.digests.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = model_facts(vllm_config, kv_cache_config, Digests(self.digests / "digests.json", self._stop))
        except (OSError, OverspillError, ValueError) as error:
            self.detach(f"the key of this model's KV cannot be computed: {error}")
            return
        self._prefix = f"overspill/{identity_of(facts).hex()[:32]}"

    def wait_until_open(self, timeout: float | None = None) -> bool:
        self._opening.join(timeout)
        return bool(self._prefix)

    # Reading.

    def wants(self, request: Request, num_local_tokens: int, max_tokens: int) -> bool:
        ask, adapter = self._asks.get(request.request_id), self._adapters.of(request)
        if not self._prefix or self._detached or adapter is None:
            return False
        if ask is None:
            return self._find(request, adapter, num_local_tokens, max_tokens)
        call = self._calls.get(ask.job_id)
        if call is not None and not call.is_late:
            return True
        found, ask.found = ask.found, None
        return bool(found) and self._load(request, ask, found or set(), adapter, num_local_tokens, max_tokens)

    def _find(self, request: Request, adapter: bytes, num_local_tokens: int, max_tokens: int) -> bool:
        # Decided once per request: every pass looks again at a request that waits for the GPU.
        ask = self._asks[request.request_id] = _Ask()
        keys = self._missing(request, num_local_tokens, max_tokens)
        if not keys or not self._is_worth_it(max_tokens - num_local_tokens, len(keys)):
            return False
        if not self.breaker.is_closed and not self.breaker.may_try():
            return False
        call = self._start("find", [content_key(key, adapter) for key in keys], [], DEADLINE_S)
        call.ask, ask.job_id = ask, call.job.job_id
        return True

    def _missing(self, request: Request, num_local_tokens: int, max_tokens: int) -> list[BlockHashWithGroupId]:
        keys = []
        for group in self._groups:
            size = self._host.group_block_sizes[group]
            for i in range(num_local_tokens // size, max_tokens // size):
                key = self._key(request, group, i)
                if key is not None and self._host.find(key) is None:
                    keys.append(key)
        return keys

    def _key(self, request: Request, group: int, index: int) -> BlockHashWithGroupId | None:
        at = (index + 1) * (self._host.group_block_sizes[group] // self._host.hash_block_size) - 1
        if not 0 <= at < len(request.block_hashes):
            return None
        return make_block_hash_with_group_id(request.block_hashes[at], group)

    def _is_worth_it(self, num_tokens: int, num_blocks: int) -> bool:
        num_bytes = num_blocks * self._stride
        if self._always or load_beats_recompute(
            self._speeds, num_tokens=num_tokens, num_bytes=num_bytes, queued_bytes=0, remote_bytes=num_bytes
        ):
            self._num_skipped = 0
            return True
        self._num_skipped += 1
        return self._num_skipped % _PROBE_AFTER == 0

    def _load(
        self, request: Request, ask: _Ask, found: set[bytes], adapter: bytes, num_local_tokens: int, max_tokens: int
    ) -> bool:
        def find(key: BlockHashWithGroupId) -> BelowRam | None:
            content = content_key(key, adapter)
            return BelowRam(key, content) if content in found else None

        held = self._num_lost + sum(len(call.blocks) for call in self._calls.values() if call.job.kind == "load")
        most = self._host.num_slots // 2 - held
        hit = self._host.lookup_below(request.block_hashes, num_local_tokens, max_tokens, find, most)
        if hit is None:
            return False
        items = []
        for group, blocks in enumerate(hit.blocks):
            size = self._host.group_block_sizes[group]
            for i, block in enumerate(blocks):
                if isinstance(block, BelowRam):
                    # A null block beyond the GPU's part lies before a sliding window.
                    is_first = i == 0 or (blocks[i - 1].is_null and i * size > num_local_tokens)
                    parent = None if is_first else self._key(request, group, i - 1)
                    event = self._event_of(request, i, size, group)
                    items.append(Stored(block, block.key, (i + 1) * size, parent, adapter, event))
        slots = self._host.allocate_beside(hit, len(items))
        if not slots:
            return False
        in_ram = self._host.lookup(request.block_hashes, num_local_tokens, max_tokens)
        keys = [content_key(item.key, adapter) for item in items]
        call = self._start("load", keys, slots, ask.patience_s)
        call.items = [Stored(slot, *item[1:]) for item, slot in zip(items, slots, strict=True)]
        call.num_tokens = hit.num_tokens - (in_ram.num_tokens if in_ram is not None else 0)
        call.ask, ask.job_id = ask, call.job.job_id
        return True

    def _start(
        self, kind: Literal["find", "load", "store"], keys: list[bytes], blocks: list[KVCacheBlock], patience_s: float
    ) -> _Call:
        slots = [block.block_id - 1 for block in blocks]
        job = RemoteJob(next(self._job_ids), kind, self._prefix, keys, slots, patience_s)
        call = self._calls[job.job_id] = _Call(job, blocks=blocks)
        self._planned.append(job)
        return call

    # Writing.

    def stored(self, items: Sequence[Stored]) -> None:
        """Queue blocks that were copied from the GPU into RAM, even before they are used again: another replica's first
        use counts here, and the store bounds itself. Blocks that do not fit are dropped, tails before heads."""
        wanted = [item for item in items if item.adapter is not None]
        if not wanted or not self._prefix or self._detached:
            return
        if not self.breaker.is_closed:
            if self.breaker.may_try_put():
                self._put(wanted[:_PUT_BLOCKS])
            return
        room = max(1, self._host.num_slots // 8) - len(self._queue)
        self._queue.extend(wanted[:room])
        self._stats.count("remote_dropped_blocks", len(wanted[room:]))

    def plan(self, jobs: StepJobs) -> None:
        num_puts = sum(call.job.kind == "store" for call in self._calls.values())
        while self._queue and num_puts < _PUTS_IN_FLIGHT:
            some = [self._queue.popleft() for _ in range(min(_PUT_BLOCKS, len(self._queue)))]
            # Skip blocks that were evicted meanwhile.
            here = [item for item in some if self._host.pool.items[item.block.block_id] is item]
            if here:
                self._put(here)
                num_puts += 1
        jobs.remote, self._planned = self._planned, []

    def _put(self, items: Sequence[Stored]) -> None:
        blocks = [item.block for item in items]
        self._host.pin(blocks)
        keys = [content_key(item.key, item.adapter or b"") for item in items]
        self._start("store", keys, blocks, _PUT_DEADLINE_S)

    # Completion, resets and shutdown.

    def complete(self, report: StepReport) -> None:
        for job_id in report.remote_late:
            call = self._calls.get(job_id)
            if call is not None and not call.is_late:
                call.is_late = True
                self._stats.count("remote_timeouts")
                self.breaker.failed(call.job.kind)
        for job_id, results in report.remote.items():
            call = self._calls[job_id]
            call.results.update(results)
            if len(call.results) == self._world_size:
                del self._calls[job_id]
                self._ended(call)

    def _ended(self, call: _Call) -> None:
        results = call.results.values()
        bad = {position for result in results for position in result.bad}
        if any(result.failed for result in results):
            if not call.is_late:
                self.breaker.failed(call.job.kind)
        elif not call.is_late:
            self.breaker.succeeded(call.job.kind)
        if call.job.kind == "find":
            if call.ask is not None and not call.is_late:
                call.ask.found = {key for position, key in enumerate(call.job.keys) if position not in bad}
                call.ask.patience_s = max(0.0, DEADLINE_S - max(result.seconds for result in results))
        elif call.job.kind == "store":
            self._host.release(call.blocks)
        elif any(result.lost for result in results):
            self._num_lost += len(call.blocks)
            logger.warning(
                "Overspill: %d block(s) of RAM are not used any more until the next start: a transfer from the store "
                "hung, and may still write into them",
                len(call.blocks),
            )  # fmt: skip
        else:
            self._loaded(call, bad)

    def _loaded(self, call: _Call, bad: set[int]) -> None:
        good = []
        for position, item in enumerate(call.items):
            if position in bad or call.abandoned or self._host.find(item.key) is not None:
                self._host.release([item.block])
            else:
                good.append(item)
        self._host.insert(good)
        if bad:
            self._stats.count("remote_bad_blocks", len(bad))
            logger.warning(
                "Overspill: %d of %d block(s) did not come back intact from the store; they are recomputed",
                len(bad), len(call.items),
            )  # fmt: skip
        if good and not call.is_late:
            self._stats.count("remote_hit_tokens", call.num_tokens * len(good) // len(call.items))

    def finished(self, request_id: str) -> None:
        self._asks.pop(request_id, None)

    def is_busy(self) -> bool:
        """Whether more steps are needed. Late calls count: they hold slots, and only steps report their end."""
        return bool(self._planned or self._queue or self._calls)

    def reset(self) -> None:
        """Discard loads in flight and queued puts: RAM was cleared, and its blocks are of no use to other engines."""
        for call in self._calls.values():
            call.abandoned = True
        self._queue.clear()

    def detach(self, reason: str) -> None:
        if not self._detached:
            self._detached = reason
            self._queue.clear()
            logger.warning("Overspill: the store is not used any more until the next start: %s", reason)

    def clear(self) -> None:
        """Detach; blocks in the store stay, for other engines use them too."""
        self.detach("the KV cache was reset")

    def take_stats(self) -> None: ...

    def close(self) -> None:
        self._stop.set()
        self._opening.join()
        self._detached = self._detached or "closed"
