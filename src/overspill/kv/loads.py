"""Loads: which requests get their prefix from RAM, and the blocks pinned while it is copied."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from vllm.logger import init_logger

from overspill.kv.host_cache import Hit, HostCache
from overspill.kv.jobs import LoadJob
from overspill.kv.metrics import OverspillStats
from overspill.kv.speeds import Speeds, load_beats_recompute, may_probe
from overspill.kv.tier import Tier
from overspill.kv.vllm_api import (
    BlockHash,
    BlockPool,
    KVCacheBlock,
    KVCacheBlocks,
    Request,
    Scheduler,
    release_waiting,
    requests_at_rest,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only


@dataclass(slots=True)
class LoadInFlight:
    request_id: str
    gpu_blocks: list[KVCacheBlock]
    host_blocks: list[KVCacheBlock]
    head: BlockHash | None = None
    # vLLM's allocation does not match the hit: the request must be recomputed.
    void: bool = False
    reports: int = 0


class Loads:
    """Hits, and loads in flight. Blocks in RAM and on the GPU are pinned from admission until all workers report."""

    # Only loads measure the link, so one bad measurement (the first one, of few bytes, or made before the pool was
    # pinned) would end them for good. After this many loads skipped as too slow, one runs anyway.
    probe_after = 32

    def __init__(
        self,
        host: HostCache,
        speeds: Speeds,
        stats: OverspillStats,
        job_ids: Iterator[int],
        live: Collection[str],
        tiers: Sequence[Tier],
        *,
        always: bool,
        world_size: int,
        block_bytes: int,
        groups: Collection[int],
    ) -> None:
        """With `always`, hits are loaded even if recomputing is faster."""
        self._always, self._world_size, self._block_bytes, self._groups = always, world_size, block_bytes, groups
        self._host, self._speeds, self._stats = host, speeds, stats
        self._tiers = tiers
        self._num_skipped = 0  # since the last load
        self._job_ids = job_ids
        self._live = live  # requests admitted and not finished
        self._gpu: BlockPool | None = None
        # Kept from lookup to admission within one scheduling pass. Nothing is evicted from RAM in between, so hits
        # need no pin.
        self._hits: dict[str, Hit] = {}
        self._skipped: dict[str, int] = {}  # tokens not worth a load, also until admission
        self._unloadable: set[str] = set()  # requests to recompute whatever RAM holds
        self._failed: set[str] = set()  # those whose load failed, until they have blocks again
        self._to_requeue: set[str] = set()  # those that vLLM still believes to hold blocks
        self._planned: list[LoadInFlight] = []
        self._heads: dict[BlockHash, LoadInFlight] = {}  # by the hash of the first block to load
        self.in_flight: dict[int, LoadInFlight] = {}
        self.num_blocks = 0  # planned and in flight

    def bind(self, pool: BlockPool) -> None:
        self._gpu = pool

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load from RAM beyond the GPU's hit, and whether asynchronously; None makes vLLM retry later."""
        self._forget(request.request_id)
        if request.request_id in self._to_requeue:
            self._to_requeue.discard(request.request_id)
            return None, False
        # The last token is always computed, for its logits.
        max_tokens = request.num_tokens - 1
        if max_tokens <= num_local_tokens or request.request_id in self._unloadable:
            return 0, False
        if (
            num_local_tokens + self._host.block_size <= max_tokens
            and self._head(request, num_local_tokens) in self._heads
        ):
            # Another request is loading the same blocks, which will then be a hit on the GPU. Checked before the
            # lookup: many requests may wait for one long prefix, and vLLM calls for each of them in every pass.
            return None, False
        # Before the lookup, since a tier may evict from RAM to make room.
        if any(tier.wants(request, num_local_tokens, max_tokens) for tier in self._tiers):
            return None, False
        hit = self._host.lookup(request.block_hashes, num_local_tokens, max_tokens)
        blocks = self._blocks_of(hit) if hit is not None else []
        if hit is None or not blocks:
            return 0, False
        if not self._is_worth_it(hit.num_tokens, len(blocks)):
            self._skipped[request.request_id] = hit.num_tokens
            self._host.use(blocks)
            return 0, False
        if self._failed:
            # vLLM reserves the failed requests' blocks against other loads, and ends its pass at the first refusal.
            return None, False
        self._hits[request.request_id] = hit
        return hit.num_tokens, True

    def _head(self, request: Request, num_local_tokens: int) -> BlockHash:
        """Hash of the first block beyond the local tokens, which covers the whole prefix before the block, too."""
        return request.block_hashes[num_local_tokens // self._host.hash_block_size]

    def _forget(self, request_id: str) -> tuple[Hit | None, int]:
        return self._hits.pop(request_id, None), self._skipped.pop(request_id, 0)

    def _blocks_of(self, hit: Hit) -> list[KVCacheBlock]:
        return [
            block
            for group in self._groups
            for block in hit.blocks[group][hit.num_local_tokens // self._host.group_block_sizes[group] :]
            if not block.is_null
        ]

    def _is_worth_it(self, num_tokens: int, num_blocks: int) -> bool:
        num_bytes, queued_bytes = num_blocks * self._block_bytes, self.num_blocks * self._block_bytes
        if self._always or load_beats_recompute(
            self._speeds, num_tokens=num_tokens, num_bytes=num_bytes, queued_bytes=queued_bytes
        ):
            return True
        return self._num_skipped >= self.probe_after and may_probe(
            self._speeds, num_tokens=num_tokens, queued_bytes=queued_bytes
        )

    def admit(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load of a request that now has its GPU blocks; the load starts with the step."""
        request_id = request.request_id
        hit, num_skipped = self._forget(request_id)
        for requests in (self._failed, self._to_requeue):
            requests.discard(request_id)
        if num_external_tokens == 0:
            if num_skipped:
                self._num_skipped += 1
                self._stats.count("loads_skipped_tokens", num_skipped)
            return
        load = self._plan(request_id, blocks, num_external_tokens, hit)
        if load.void:
            logger.warning(
                "Overspill: %d tokens of request %s cannot be loaded as offered; they will be recomputed",
                num_external_tokens, request_id,
            )  # fmt: skip
            self._unloadable.add(request_id)
        else:
            self._num_skipped = 0
            self._stats.count("hit_tokens", num_external_tokens)
            assert hit is not None
            load.head = self._head(request, hit.num_local_tokens)
            self._heads[load.head] = load
        self._host.read(load.host_blocks)
        assert self._gpu is not None
        self._gpu.touch(load.gpu_blocks)
        self.num_blocks += len(load.host_blocks)
        self._planned.append(load)

    def _plan(self, request_id: str, blocks: KVCacheBlocks, num_external_tokens: int, hit: Hit | None) -> LoadInFlight:
        void = LoadInFlight(request_id, [], [], void=True)
        if hit is None or hit.num_tokens != num_external_tokens:
            return void
        load = LoadInFlight(request_id, [], [])
        end = hit.num_local_tokens + hit.num_tokens
        for group in self._groups:
            size = self._host.group_block_sizes[group]
            span = slice(hit.num_local_tokens // size, -(-end // size))
            # Null targets lie before the sliding window.
            pairs = zip_longest(blocks.blocks[group][span], hit.blocks[group][span])
            wanted = [(target, source) for target, source in pairs if target is not None and not target.is_null]
            if any(source is None or source.is_null for _, source in wanted):
                return void
            load.gpu_blocks += [target for target, _ in wanted]
            load.host_blocks += [source for _, source in wanted]
        return load

    def plan(self) -> list[LoadJob]:
        """Loads to start with this step."""
        jobs = []
        for load in self._planned:
            job_id = next(self._job_ids)
            self.in_flight[job_id] = load
            jobs.append(
                LoadJob(
                    job_id,
                    load.request_id,
                    [block.block_id - 1 for block in load.host_blocks],
                    [block.block_id for block in load.gpu_blocks],
                    void=load.void,
                )
            )
        self._planned.clear()
        return jobs

    def report(self, job_id: int, count: int, *, failed: bool) -> None:
        """Count `count` more workers as done with the load."""
        load = self.in_flight[job_id]
        load.reports += count
        if failed:
            # Any of the blocks may be unreadable; loads of later hits on them would fail for ever.
            self._host.drop(load.host_blocks)
        if load.reports == self._world_size:
            del self.in_flight[job_id]
            self._release(load)

    def recompute(self, request_ids: Collection[str]) -> None:
        """Recompute requests whose loads failed. vLLM keeps a failed load's blocks reserved for its request, so
        another load would wait for ever.

        vLLM also frees the request's blocks, yet leaves it queued before requests that hold theirs. If it does not fit
        beside them, because a window takes more blocks to compute than to load, all would wait for ever. A None from
        `match` makes vLLM requeue it behind them."""
        self._stats.count("load_failures", len(request_ids))
        failed = set(request_ids).intersection(self._live)
        self._unloadable |= failed
        self._failed |= failed
        self._to_requeue |= failed

    def drop_corrupt(self, slots: Collection[int]) -> None:
        self._host.drop(self._host.pool.blocks[slot + 1] for slot in slots)
        logger.warning(
            "Overspill: %d block(s) in RAM no longer held what was stored; dropped, and the tokens are recomputed",
            len(slots),
        )

    def _release(self, load: LoadInFlight) -> None:
        assert self._gpu is not None
        self.num_blocks -= len(load.host_blocks)
        if load.head is not None and self._heads.get(load.head) is load:
            del self._heads[load.head]
        self._host.release(load.host_blocks)
        self._gpu.free_blocks(reversed(load.gpu_blocks))

    def finished(self, request_id: str) -> None:
        self._forget(request_id)
        for requests in (self._unloadable, self._failed, self._to_requeue):
            requests.discard(request_id)

    def reset(self) -> bool:
        """Turn planned loads into recomputations. False while a load is in flight, whose request would still get the
        old content."""
        self._hits.clear()
        self._skipped.clear()
        self._heads.clear()
        for load in self._planned:
            self._release(load)
        self._planned = [LoadInFlight(load.request_id, [], [], void=True) for load in self._planned]
        return all(load.void for load in self.in_flight.values())


class Standstill:
    """Breaks deadlocks of requests with loaded KV that wait for blocks only such requests hold. vLLM reserves blocks
    for requests it lets load, but knows neither of blocks that elastic KV has taken since, nor that recurrent states
    cannot spill."""

    def __init__(self, stats: OverspillStats) -> None:
        self._stats = stats
        self._seen: tuple[int, list[str]] = (0, [])

    def end(self, scheduler: Scheduler, num_passes: int) -> None:
        """Free the last waiting request's blocks if a pass has left the same requests waiting; it loads them again.
        Called between passes, of which there were `num_passes`."""
        waiting = [request.request_id for request in requests_at_rest(scheduler)]
        passes, before = self._seen
        if waiting != before:
            self._seen = num_passes, waiting
        elif waiting and num_passes > passes:
            self._seen = num_passes, waiting[:-1]
            release_waiting(scheduler, lambda request: request.request_id == waiting[-1])
            self._stats.count("standstills")
            logger.info("Overspill: %d request(s) with loaded KV waited for blocks; one has to reload", len(waiting))
