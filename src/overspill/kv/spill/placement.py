"""Where blocks are placed: which tier a request is given, and which cached prefix moves from RAM to the GPU."""

from collections.abc import Callable, Sequence

from overspill.kv.speeds import Speeds
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.layers import is_state
from overspill.kv.spill.moves import Moves
from overspill.kv.spill.policy import TierCosts, left_to_others, move_to_gpu, take_spilled
from overspill.kv.spill.recent import RecentMost
from overspill.kv.spill.tiers import Choice, TieredQueue
from overspill.kv.vllm_api import (
    BlockPool,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    Request,
    around_allocation,
    change_computed_blocks,
    limit_groups,
    requests_holding_blocks,
)

# Until they are measured: a PCIe 4.0 link, and an 8B model on a small card.
LINK_BYTES_PER_S = 25e9
_PREFILL_TOKENS_PER_S = 5000.0
# An 8B model's decode step on an H200: 5.0 ms with FULL graphs, 11.4 ms with piecewise ones.
_STEP_OVERHEAD_S = 0.006
# How many tokens a request is expected to give, until some have ended.
_OUTPUT_TOKENS = 256.0
# How long it is remembered what requests that fit have needed.
_REMEMBERED_S = 30.0


class Placement:
    """Stands between vLLM's cache manager and its block pool, and knows for whom blocks are taken."""

    def __init__(
        self,
        geometry: Geometry,
        kv_cache_config: KVCacheConfig,
        speeds: Speeds,
        is_spilled: Callable[[str], bool],
        states_per_request: int = 0,
    ) -> None:
        self.geometry = geometry
        self.speeds = speeds
        self.is_spilled = is_spilled
        groups = kv_cache_config.kv_cache_groups
        self.block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self._windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
        self._state_groups = [i for i, group in enumerate(groups) if is_state(group.kv_cache_spec)]
        self._states_per_request = states_per_request
        # Blocks for states that the allocation under way will take.
        self._states_wanted = 0
        self._is_allocating = False
        self._num_holders: Callable[[], int] = lambda: 0  # requests that hold states
        self.moves = Moves(self.block_sizes[0], geometry.num_resident)
        self._queue: TieredQueue | None = None
        # Who is being given blocks, how many tokens it found cached, and how many it computes in the step.
        self._asking: tuple[Request, int, int] | None = None
        self._output_tokens = _OUTPUT_TOKENS
        # GPU blocks: of requests that spill, in their last step; of all, when blocks were last asked for; and the most
        # that those which do not spill have had of late.
        self._of_spilled = 0
        self._used = 0
        self.others_recently = RecentMost(_REMEMBERED_S)
        # Whether offload could load more of a request than so many tokens: a move would keep it from that.
        self.finds_more: Callable[[Request, int], bool] = lambda request, num_tokens: False

    @property
    def queue(self) -> TieredQueue:
        assert self._queue is not None, "the block pool is not bound yet"
        return self._queue

    @property
    def num_used_resident(self) -> int:
        """Without vLLM's null block."""
        return self.geometry.num_resident - 1 - self.queue.num_free_resident

    @property
    def link_bytes_per_s(self) -> float:
        return self.speeds.stream_bytes_per_s or LINK_BYTES_PER_S

    @property
    def block_bytes(self) -> int:
        return self.geometry.num_regions * self.geometry.page_bytes

    def bind(self, manager: KVCacheManager) -> None:
        """Hand out resident blocks first, and know for whom."""
        pool: BlockPool = manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        self._queue = TieredQueue(free, self.geometry.num_resident, self._choose_tiers)
        pool.free_block_queue = self._queue
        self.moves.bind(pool)
        around_allocation(manager, self._allocate)
        change_computed_blocks(manager, self._without_moved)
        if self._state_groups:
            limit_groups(manager, self._state_groups, self.queue.resident_only, self._states_fit)
            self._num_holders = lambda: requests_holding_blocks(manager, self._state_groups[0])

    def _allocate(
        self,
        request: Request,
        num_new_tokens: int,
        num_hit_tokens: int,
        allocate: Callable[[], KVCacheBlocks | None],
    ) -> KVCacheBlocks | None:
        self._asking = request, num_hit_tokens, num_new_tokens
        self.queue.num_taken = 0
        self._used = self.num_used_resident
        self._is_allocating = True
        try:
            blocks = allocate()
        finally:
            self._is_allocating = False
        if blocks is not None and num_hit_tokens:
            self.queue.found(num_hit_tokens // min(self.block_sizes))
        return blocks

    def _without_moved(
        self, request: Request, blocks: Sequence[Sequence[KVCacheBlock]], num_tokens: int
    ) -> tuple[list[KVCacheBlock], int] | None:
        """The part of a cached prefix that stays where it is, if the rest is to move to the GPU."""
        if not self._should_move(request, blocks, num_tokens):
            return None
        num_kept = self.moves.propose(request.request_id, blocks[0])
        return list(blocks[0][: num_kept // self.block_sizes[0]]), num_kept

    def _states_fit(self, num_states: int, hits: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Whether there are GPU blocks enough for the states that an allocation takes: vLLM compares with all that are
        free, and knows of no tiers. Hits are taken out of the free queue first; those of states are counted already."""
        self._states_wanted = num_states
        resident_hits = sum(
            block.ref_cnt == 0 and not block.is_null and block.block_id < self.geometry.num_resident
            for group, blocks in enumerate(hits)
            if group not in self._state_groups
            for block in blocks
        )
        return not self._is_allocating or num_states + resident_hits <= self.queue.num_free_resident

    @property
    def _kept_for_states(self) -> int:
        """GPU blocks that attention leaves to recurrent states.

        One request's at least: the states of a request whose KV fills the GPU would have no place, it would be
        preempted, and the same would happen again. The next request's too, but never more than half of the GPU.
        """
        if not self._state_groups:
            return 0
        several = min(self._states_per_request * (self._num_holders() + 1), self.geometry.num_resident // 2)
        return max(self._states_per_request, self._states_wanted, several)

    def saw_step(self, resident_blocks_of_spilled: int) -> None:
        """How many GPU blocks the requests that spill hold in the step."""
        self._of_spilled = resident_blocks_of_spilled
        self.others_recently.saw(self.num_used_resident - resident_blocks_of_spilled)

    def finished(self, request: Request) -> None:
        self.moves.finished(request.request_id)
        self._output_tokens += (request.num_output_tokens - self._output_tokens) / 16

    def _choose_tiers(self) -> Choice:
        """For the request that is being given blocks."""
        if self._asking is None:
            return Choice(num_kept_resident=self._kept_for_states)
        request, num_hit_tokens, num_new_tokens = self._asking
        # Some of them it has been given already: blocks are taken group by group, and loaded ones before new ones.
        need = max(1, self._blocks_to_come(request, num_hit_tokens, num_new_tokens) - self.queue.num_taken)
        moves = self.moves.offered_tokens(request.request_id) > 0
        return Choice(
            take_spilled=not moves and take_spilled(self._costs(request, need)),
            num_spilled_first=max(0, need - self._resident_for(request, need)),
            num_kept_resident=self._kept_for_states,
        )

    def _resident_for(self, request: Request, need: int) -> int:
        """GPU blocks that a request may take: all, if it then needs no others."""
        free = max(0, self.queue.num_free_resident - self._kept_for_states)
        if need <= free and not self.is_spilled(request.request_id):
            return free
        left = left_to_others(
            most=self.others_recently.most, now=self._used - self._of_spilled, num_resident=self.geometry.num_resident
        )
        return max(0, free - left)

    def _should_move(self, request: Request, blocks: Sequence[Sequence[KVCacheBlock]], num_tokens: int) -> bool:
        if len(self.block_sizes) > 1 or not num_tokens or not self.moves.may_propose(request.request_id):
            return False  # groups would have to move together
        sources = self.moves.sources(blocks[0])
        if not sources or self.finds_more(request, num_tokens):
            return False
        resident = [block for block in sources if block.block_id < self.geometry.num_resident]
        costs = self._costs(request, self._blocks_to_come(request, 0, request.num_tokens))
        return move_to_gpu(
            costs,
            num_spilled_hits=len(sources) - len(resident),
            # Until it is copied, what moves within the GPU takes its place twice.
            num_free_resident=self.queue.num_free_resident - sum(block.ref_cnt == 0 for block in resident),
        )

    def _blocks_to_come(self, request: Request, num_hit_tokens: int, num_new_tokens: int) -> int:
        """Blocks for attention to the tokens that are known and not computed yet. A window's are given back as it
        moves on, but not before the step."""
        tokens = max(0, request.num_tokens - request.num_computed_tokens - num_hit_tokens)
        return sum(
            1 + (tokens if window is None else min(tokens, window + num_new_tokens)) // block_size
            for group, (block_size, window) in enumerate(zip(self.block_sizes, self._windows, strict=True))
            if group not in self._state_groups
        )

    def _costs(self, request: Request, num_blocks: int) -> TierCosts:
        remaining = request.max_tokens - request.num_output_tokens
        return TierCosts(
            block_bytes=self.block_bytes,
            block_size=min(self.block_sizes),
            num_blocks=num_blocks,
            step_overhead_s=0.0 if self.is_spilled(request.request_id) else _STEP_OVERHEAD_S,
            link_bytes_per_s=self.link_bytes_per_s,
            prefill_tokens_per_s=self.speeds.prefill_tokens_per_s or _PREFILL_TOKENS_PER_S,
            expected_steps=min(remaining, self._output_tokens),
            reuse_probability=self.queue.reuse_probability,
        )
