"""Placement of blocks: vLLM's free queue in two tiers, and the choice of tiers for a request."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import NamedTuple

from vllm.logger import init_logger

from overspill.kv.metrics import OverspillStats
from overspill.kv.spill.capacity import is_state
from overspill.kv.spill.geometry import Geometry, LentUnits
from overspill.kv.spill.loan import Loan
from overspill.kv.vllm_api import (
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    Request,
    Scheduler,
    around_allocation,
    blocks_behind_windows,
    first_free,
    limit_groups,
    preempt,
    requests_holding_blocks,
)

logger = init_logger(f"vllm.{__name__}")

# A request that does not fit on the GPU leaves up to one in this many GPU blocks cached: for hits and shorter requests.
_CACHED_PART = 4
# Tokens of its answer for which a starting request gets room at once. A longer answer divides memory anew: the request
# is preempted, and finds most of its KV cached.
_GROWTH_TOKENS = 2048


class Choice(NamedTuple):
    """Tiers for the current allocation."""

    # Spilled blocks to take before all others.
    num_spilled_first: int = 0
    # GPU blocks to leave free while there are free spilled ones: for recurrent states, which cannot spill.
    num_kept_resident: int = 0
    # GPU blocks to leave cached while there are empty spilled ones.
    num_kept_cached: int = 0


class TieredQueue:
    """Stands in for `FreeKVCacheBlockQueue` in vLLM's block pool.

    A request that fits on the GPU gets GPU blocks only: empty ones first, then the least recently used cached ones. So
    short requests stay out of RAM.

    A request that does not fit, or is spilled already, takes all empty GPU blocks and evicts cached ones, but leaves
    the most recently used quarter of the GPU cached while there are empty spilled blocks. So a long request does not
    evict the prefixes in use, and shorter requests find GPU blocks beside it. Its first blocks are spilled and its last
    ones on the GPU: it streams the same amount either way, but if other requests evict its GPU blocks later, it loses
    its tail rather than its head, without which none of it could be hit.
    """

    def __init__(
        self, blocks: Sequence[KVCacheBlock], num_resident: int, choose: Callable[[], Choice] = Choice
    ) -> None:
        """`blocks` are the free blocks, in eviction order."""
        self._num_resident = num_resident
        self._resident = FreeKVCacheBlockQueue([b for b in blocks if b.block_id < num_resident])
        self._spilled = FreeKVCacheBlockQueue([b for b in blocks if b.block_id >= num_resident])
        self._choose = choose
        self._is_resident_only = False  # the caller cannot use spilled blocks
        self.num_taken = 0  # blocks of both tiers, in the current allocation

    # Called by vLLM's BlockPool.

    @property
    def num_free_blocks(self) -> int:
        return self._resident.num_free_blocks + self._spilled.num_free_blocks

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if self._is_resident_only:
            return self._resident.popleft_n(n)
        assert n <= self.num_free_blocks
        choice = self._choose()
        taken: list[KVCacheBlock] = []
        for _ in range(n):
            if self._next_is_resident(choice, is_first=len(taken) < choice.num_spilled_first):
                taken.append(self._resident.popleft())
            else:
                taken.append(self._spilled.popleft())
        self.num_taken += n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        self._tier(block).remove(block)

    def append(self, block: KVCacheBlock) -> None:
        self._tier(block).append(block)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        for queue, part in self._split(blocks):
            queue.append_n(part)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        for queue, part in self._split(blocks):
            queue.prepend_n(part)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return self._resident.get_all_free_blocks() + self._spilled.get_all_free_blocks()

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        if cursor is None or cursor.block_id < self._num_resident:
            yield from self._resident.iter_blocks_after(cursor)
            cursor = None
        yield from self._spilled.iter_blocks_after(cursor)

    # Called by spill.

    @contextmanager
    def resident_only(self) -> Iterator[None]:
        """Allocate only GPU blocks inside this context, whatever `choose` says."""
        self._is_resident_only = True
        try:
            yield
        finally:
            self._is_resident_only = False

    @property
    def tiers(self) -> tuple[FreeKVCacheBlockQueue, FreeKVCacheBlockQueue]:
        """The free queues of both tiers."""
        return self._resident, self._spilled

    @property
    def num_free_resident(self) -> int:
        return self._resident.num_free_blocks

    @property
    def num_free_spilled(self) -> int:
        return self._spilled.num_free_blocks

    @contextmanager
    def empty_ones_first(self) -> Iterator[None]:
        """Queue GPU blocks that are prepended inside this context behind those that are empty already."""
        empty = self._resident.popleft_n(self.num_empty_resident(self._resident.num_free_blocks))
        yield
        self._resident.prepend_n(empty)

    def num_empty_resident(self, most: int) -> int:
        """Number of empty GPU blocks, up to `most`; vLLM puts empty blocks at the head of its queue."""
        return sum(1 for _ in takewhile(_is_empty, islice(self._resident.iter_blocks_after(None), most)))

    def _next_is_resident(self, choice: Choice, *, is_first: bool) -> bool:
        resident, spilled = first_free(self._resident), first_free(self._spilled)
        if resident is None or spilled is None:
            return spilled is None
        if is_first or self._resident.num_free_blocks <= choice.num_kept_resident:
            return False
        if _is_empty(resident) or not _is_empty(spilled):
            return True
        return self._resident.num_free_blocks > choice.num_kept_cached

    def _tier(self, block: KVCacheBlock) -> FreeKVCacheBlockQueue:
        return self._resident if block.block_id < self._num_resident else self._spilled

    def _split(self, blocks: list[KVCacheBlock]) -> Iterator[tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]]:
        yield self._resident, [b for b in blocks if b.block_id < self._num_resident]
        yield self._spilled, [b for b in blocks if b.block_id >= self._num_resident]


def _is_empty(block: KVCacheBlock) -> bool:
    return block.block_hash is None


class Placement:
    """Hook between vLLM's cache manager and its block pool that knows for which request blocks are allocated."""

    def __init__(
        self,
        geometry: Geometry,
        kv_cache_config: KVCacheConfig,
        is_spilled: Callable[[str], bool],
        stats: OverspillStats,
        states_per_request: int = 0,
        units: LentUnits | None = None,
    ) -> None:
        self.geometry = geometry
        self._stats = stats
        self._units = units
        self.loan: Loan | None = None
        self.is_alone = True
        """Whether the scheduler has at most one request."""
        self._is_idle = True  # whether nothing ran when the pass began
        self.is_spilled = is_spilled
        groups = kv_cache_config.kv_cache_groups
        self.block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self._windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
        self._state_groups = [i for i, group in enumerate(groups) if is_state(group.kv_cache_spec)]
        self._states_per_request = states_per_request
        # Blocks that the current allocation needs for states.
        self._states_wanted = 0
        self._is_allocating = False
        self._num_holders: Callable[[int], int] = lambda _: 0  # requests that hold blocks of a group
        self._behind_windows: dict[str, set[int]] = {}
        self._queue: TieredQueue | None = None
        # Current allocation: its request, tokens that hit the cache, and tokens to compute in the step.
        self._current: tuple[Request, int, int] | None = None

    @property
    def queue(self) -> TieredQueue:
        assert self._queue is not None, "the block pool is not bound yet"
        return self._queue

    @property
    def num_used_resident(self) -> int:
        """GPU blocks in use, not counting vLLM's null block."""
        return self.num_resident - 1 - self.queue.num_free_resident

    @property
    def num_used_spilled(self) -> int:
        num_spilled = self.geometry.num_spilled if self.loan is None else self.loan.num_spilled
        return num_spilled - self.queue.num_free_spilled

    @property
    def num_resident(self) -> int:
        """GPU blocks that have memory."""
        return self.geometry.num_resident if self.loan is None else self.loan.num_resident

    def bind(self, manager: KVCacheManager) -> None:
        """Replace the pool's free queue, and hook into allocations."""
        pool: BlockPool = manager.block_pool
        self._pool = pool
        free = pool.free_block_queue.get_all_free_blocks()
        self._queue = TieredQueue(free, self.geometry.num_resident, self._choose_tiers)
        pool.free_block_queue = self._queue
        if self._units is not None:
            self.loan = Loan(self._units, pool, self._queue)
            self._behind_windows = blocks_behind_windows(manager)
        self._num_holders = lambda group: requests_holding_blocks(manager, group)
        around_allocation(manager, self._allocate)
        if self._state_groups:
            limit_groups(manager, self._state_groups, self.queue.resident_only, self._states_fit)

    def _allocate(
        self,
        request: Request,
        num_new_tokens: int,
        num_hit_tokens: int,
        hits: KVCacheBlocks | None,
        allocate: Callable[[], KVCacheBlocks | None],
    ) -> KVCacheBlocks | None:
        self._current = request, num_hit_tokens, num_new_tokens
        if self.loan is not None:
            self._make_room(self.loan, hits)
        self.queue.num_taken = 0
        self._is_allocating = True
        try:
            return allocate()
        finally:
            self._is_allocating = False

    def _make_room(self, loan: Loan, hits: KVCacheBlocks | None) -> None:
        """Move memory between GPU blocks and window if the request does not fit the present division. A request that
        has blocks already only needs room for its next ones, in either tier."""
        assert self._current is not None
        request, num_hit_tokens, num_new_tokens = self._current
        found = [block for group in hits.blocks for block in group] if hits is not None else []
        need = self._blocks_to_come(request, num_hit_tokens, num_new_tokens) + self._kept_for_states
        free_resident, free_spilled = self.queue.num_free_resident, self.queue.num_free_spilled
        is_first = request.num_computed_tokens == 0
        if need + len(found) <= free_resident or (not is_first and need <= free_resident + free_spilled):
            return
        growth = min(request.max_tokens, _GROWTH_TOKENS) if is_first else 0
        spare = sum(
            -(-growth // size) for group, size in enumerate(self.block_sizes) if group not in self._state_groups
        )
        kept = {block.block_id for block in found}.union(*self._behind_windows.values())
        loan.make_room(need, spare, found, kept, may_lower=is_first and self.is_alone, is_idle=self._is_idle)

    def before_pass(self, scheduler: Scheduler) -> list[str]:
        """Preempt requests whose blocks have kept another request waiting too long for the window's memory; return
        their ids."""
        if self.loan is None:
            return []
        self.is_alone, self._is_idle = len(scheduler.requests) < 2, not scheduler.running
        if not self.loan.is_overdue and not self.loan.is_taking_back:
            return []
        lent = self.loan.lent
        readers = {name for name, behind in self._behind_windows.items() if not behind.isdisjoint(lent)}
        preempted = preempt(scheduler, readers, lent)
        self.loan.take_back(set[int]().union(*self._behind_windows.values()))
        return preempted

    def _states_fit(self, num_states: int, hits: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Whether GPU blocks suffice for an allocation's states; vLLM itself compares with free blocks of both tiers.
        Hits leave the free queue first; `num_states` includes hits of states."""
        self._states_wanted = num_states
        resident_hits = {
            block.block_id
            for group, blocks in enumerate(hits)
            if group not in self._state_groups
            for block in blocks
            if block.ref_cnt == 0 and not block.is_null and block.block_id < self.geometry.num_resident
        }
        if not self._is_allocating or num_states + len(resident_hits) <= self.queue.num_free_resident:
            return True
        if resident_hits and not self._num_holders(self._state_groups[0]):
            # No other request will free GPU blocks, so these hits would keep this one waiting for ever.
            self._pool.evict_blocks(resident_hits)
            self._stats.count("hits_given_up_blocks", len(resident_hits))
            logger.info(
                "Overspill: %d cached GPU block(s) are recomputed: recurrent states needed their memory",
                len(resident_hits),
            )
        return False

    @property
    def _kept_for_states(self) -> int:
        """GPU blocks that attention leaves free for recurrent states.

        At least enough for one request: otherwise a request whose KV fills the GPU would find no room for its states,
        be preempted, and fill the GPU again. Enough for the next request too, but at most half of the GPU.
        """
        if not self._state_groups:
            return 0
        several = min(self._states_per_request * (self._num_holders(self._state_groups[0]) + 1), self.num_resident // 2)
        return max(self._states_per_request, self._states_wanted, several)

    def _choose_tiers(self) -> Choice:
        """Tiers for the blocks that the current allocation takes next."""
        if self._current is None:
            return Choice(num_kept_resident=self._kept_for_states)
        request, num_hit_tokens, num_new_tokens = self._current
        # Without the blocks already taken: vLLM takes them group by group, and blocks to load before new ones.
        need = max(1, self._blocks_to_come(request, num_hit_tokens, num_new_tokens) - self.queue.num_taken)
        free = max(0, self.queue.num_free_resident - self._kept_for_states)
        if need <= free and not self.is_spilled(request.request_id):
            return Choice(num_kept_resident=self._kept_for_states)
        kept = self.num_resident // _CACHED_PART
        resident = min(free, max(free - kept, self.queue.num_empty_resident(need)))
        return Choice(max(0, need - resident), self._kept_for_states, kept)

    def _blocks_to_come(self, request: Request, num_hit_tokens: int, num_new_tokens: int) -> int:
        """Attention blocks for the request's known tokens that are not computed yet. Blocks behind a sliding window are
        freed as the window moves on, but not before the step."""
        tokens = max(0, request.num_tokens - request.num_computed_tokens - num_hit_tokens)
        return sum(
            1 + (tokens if window is None else min(tokens, window + num_new_tokens)) // block_size
            for group, (block_size, window) in enumerate(zip(self.block_sizes, self._windows, strict=True))
            if group not in self._state_groups
        )
