"""The engine core's side of spill: which tier blocks come from, what a step streams, and who may run how often."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from overspill.kv.jobs import StepJobs
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.sizes import format_size
from overspill.kv.speeds import Speeds
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.layers import spill_geometry
from overspill.kv.spill.moves import Moves
from overspill.kv.spill.policy import TierCosts, heavy_requests, move_to_gpu, steps_apart, take_spilled
from overspill.kv.spill.steps import Ids, Span, SpillStep, group_step
from overspill.kv.spill.tiers import Choice, TieredQueue

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# Until they are measured: a PCIe 4.0 link, and an 8B model on a small card.
_LINK_BYTES_PER_S = 25e9
_PREFILL_TOKENS_PER_S = 5000.0
_PLAIN_STEP_S = 0.03
# An 8B model's decode step on an H200: 5.0 ms with FULL graphs, 11.4 ms with piecewise ones.
_STEP_OVERHEAD_S = 0.006
# How many tokens a request is expected to give, until some have ended.
_OUTPUT_TOKENS = 256.0
_MOST_STEPS_APART = 256


@dataclass(slots=True)
class Spilled:
    """A request with KV in RAM, as of its last step."""

    num_blocks: int = 0
    most_blocks: int = 0
    steps: int = 0
    is_announced: bool = False


@dataclass(frozen=True, slots=True)
class Spacing:
    requests: frozenset[str] | set[str] = frozenset()
    steps_apart: int = 1
    seconds_apart: float = 0.0


class SpillScheduler:
    """Gives each step its spilled blocks. A step costs what it allocates, and the tables of spilled requests."""

    def __init__(
        self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, speeds: Speeds
    ) -> None:
        self.geometry: Geometry = spill_geometry(options, vllm_config, kv_cache_config)
        self.stats = OverspillStats()
        self.speeds = speeds
        self._world_size = vllm_config.parallel_config.world_size
        self._block_bytes = self.geometry.num_regions * self.geometry.page_bytes
        self._block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._windows = [
            getattr(group.kv_cache_spec, "sliding_window", None) for group in kv_cache_config.kv_cache_groups
        ]
        self.share = options.spill_share
        self._at_risk = drafts_at_risk(vllm_config)
        self._spilled: dict[str, Spilled] = {}
        self._in_step: set[str] = set()  # spilled requests of the step planned last
        self._output_tokens = _OUTPUT_TOKENS
        self.moves = Moves(self._block_sizes[0], self.geometry.num_resident)
        self._queue: TieredQueue | None = None
        # Who is being given blocks, how many tokens it found cached, and how many it computes in the step.
        self._asking: tuple[Request, int, int] | None = None
        # Whether offload could load more of a request than so many tokens: a move would keep it from that.
        self.finds_more: Callable[[Request, int], bool] = lambda request, num_tokens: False
        self._shown: tuple[int, int] | None = None

    @property
    def queue(self) -> TieredQueue:
        assert self._queue is not None, "the block pool is not bound yet"
        return self._queue

    def bind(self, manager: KVCacheManager) -> None:
        """Hand out resident blocks first, and know for whom."""
        pool: BlockPool = manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        self._queue = TieredQueue(free, self.geometry.num_resident, self._choose_tiers)
        pool.free_block_queue = self._queue
        self.moves.bind(pool)
        allocate_slots, get_computed_blocks = manager.allocate_slots, manager.get_computed_blocks

        def tiered_allocate_slots(request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            num_hit_tokens = kwargs.get("num_new_computed_tokens", 0)
            self._asking = request, num_hit_tokens, num_new_tokens
            self.queue.num_taken = 0
            blocks = allocate_slots(request, num_new_tokens, *args, **kwargs)
            if blocks is not None and num_hit_tokens:
                self.queue.found(num_hit_tokens // min(self._block_sizes))
            return blocks

        def tiered_get_computed_blocks(request: Request) -> tuple[KVCacheBlocks, int, int]:
            blocks, num_tokens, boundary = get_computed_blocks(request)
            if self._should_move(request, blocks, num_tokens):
                num_tokens = self.moves.propose(request.request_id, blocks.blocks[0])
                kept = blocks.blocks[0][: num_tokens // self._block_sizes[0]]
                blocks = manager.create_kv_cache_blocks((list(kept),))
            return blocks, num_tokens, boundary

        manager.allocate_slots = tiered_allocate_slots
        manager.get_computed_blocks = tiered_get_computed_blocks

    def _choose_tiers(self) -> Choice:
        """For the request that is being given blocks."""
        if self._asking is None:
            return Choice()
        request, num_hit_tokens, num_new_tokens = self._asking
        # Some of them it has been given already: blocks are taken group by group, and loaded ones before new ones.
        need = max(1, self._blocks_to_come(request, num_hit_tokens, num_new_tokens) - self.queue.num_taken)
        moves = self.moves.offered_tokens(request.request_id) > 0
        return Choice(
            take_spilled=not moves and take_spilled(self._costs(request, need)),
            num_spilled_first=max(0, need - self.queue.num_free_resident),
        )

    def _should_move(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> bool:
        if len(self._block_sizes) > 1 or not num_tokens or not self.moves.may_propose(request.request_id):
            return False  # groups would have to move together
        sources = self.moves.sources(blocks.blocks[0])
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
        """Blocks for the tokens that are known and not computed yet. A window's are given back as it moves on, but
        not before the step."""
        tokens = max(0, request.num_tokens - request.num_computed_tokens - num_hit_tokens)
        return sum(
            1 + (tokens if window is None else min(tokens, window + num_new_tokens)) // block_size
            for block_size, window in zip(self._block_sizes, self._windows, strict=True)
        )

    def _costs(self, request: Request, num_blocks: int) -> TierCosts:
        remaining = request.max_tokens - request.num_output_tokens
        return TierCosts(
            block_bytes=self._block_bytes,
            block_size=min(self._block_sizes),
            num_blocks=num_blocks,
            step_overhead_s=0.0 if request.request_id in self._spilled else _STEP_OVERHEAD_S,
            link_bytes_per_s=self.link_bytes_per_s,
            prefill_tokens_per_s=self.speeds.prefill_tokens_per_s or _PREFILL_TOKENS_PER_S,
            expected_steps=min(remaining, self._output_tokens),
            reuse_probability=self.queue.reuse_probability,
        )

    @property
    def link_bytes_per_s(self) -> float:
        return self.speeds.stream_bytes_per_s or _LINK_BYTES_PER_S

    # Steps.

    def plan_step(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        """Add the step's moves and its spilled blocks to its jobs."""
        jobs.moves = self.moves.take()
        self.stats.count("moved_blocks", len(jobs.moves))
        self.queue.found(len(jobs.moves))
        jobs.spill = self._streamed(output)

    def _streamed(self, output: SchedulerOutput) -> SpillStep | None:
        """The spilled blocks of this step, each streamed once however many requests read it."""
        self._refuse_block_copies(output)
        computed = self._note_new_blocks(output)
        self._in_step = {request_id for request_id in output.num_scheduled_tokens if request_id in self._spilled}
        if not self._in_step:
            self.stats.count("plain_steps", int(bool(output.num_scheduled_tokens)))
            return None
        step = SpillStep()
        tables = {request_id: self._table(output, request_id) for request_id in self._in_step}
        for group, block_size in enumerate(self._block_sizes):
            spans = [
                self._span(table[group], computed[request_id], output.num_scheduled_tokens[request_id])
                for request_id, table in tables.items()
            ]
            found = group_step(spans, block_size=block_size, num_resident=self.geometry.num_resident)
            if found is not None:
                step.groups[group] = found
        for request_id, table in tables.items():
            self._describe(request_id, table, computed[request_id], output.num_scheduled_tokens[request_id])
        if not step.groups:
            return None
        self.stats.count("spilled_steps")
        return step

    def _note_new_blocks(self, output: SchedulerOutput) -> dict[str, int]:
        """Mark requests that were given a spilled block; how many tokens of each are computed."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._mark(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, tokens, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            computed[request_id] = tokens
            if block_ids is not None:
                self._mark(request_id, block_ids)
        return computed

    def _mark(self, request_id: str, block_ids: Iterable[list[int]]) -> None:
        if request_id not in self._spilled and any(ids and max(ids) >= self.geometry.num_resident for ids in block_ids):
            self._spilled[request_id] = Spilled()

    def _table(self, output: SchedulerOutput, request_id: str) -> list[Ids]:
        """As it is now: blocks of a resumed or windowed request change places, so what was appended will not do."""
        assert output.kv_connector_block_state is not None
        table = output.kv_connector_block_state.get_block_ids(request_id)
        assert table is not None, request_id
        return [np.array(block_ids, np.int64) for block_ids in table]

    def _span(self, block_ids: Ids, computed: int, num_tokens: int) -> Span:
        return Span(block_ids, max(0, computed - self._at_risk), computed, computed + num_tokens)

    def _refuse_block_copies(self, output: SchedulerOutput) -> None:
        """vLLM copies blocks on the GPU before any hook runs. Only state models do; they are refused at the start."""
        for copy in output.kv_cache_block_copies or ():
            if max(copy.src_block_id, copy.dst_block_id) >= self.geometry.num_resident:
                raise RuntimeError("vLLM copies a spilled KV block; Overspill cannot spill this model")

    def _describe(self, request_id: str, table: list[Ids], computed: int, num_tokens: int) -> None:
        spilled = self._spilled[request_id]
        spilled.num_blocks = sum(int(np.count_nonzero(ids >= self.geometry.num_resident)) for ids in table)
        spilled.most_blocks = max(spilled.most_blocks, spilled.num_blocks)
        spilled.steps += 1
        if spilled.is_announced or not spilled.num_blocks:
            return
        spilled.is_announced = True
        num_bytes = spilled.num_blocks * self._block_bytes
        logger.info(
            "Overspill: request %s does not fit on the GPU: of its %d tokens, %s of KV is in RAM. At %.0f GB/s (%s) "
            "expect at most %.1f tokens/s, fewer as it grows",
            request_id, computed + num_tokens, format_size(num_bytes * self._world_size), self.link_bytes_per_s / 1e9,
            "measured" if self.speeds.stream_bytes_per_s else "assumed", self.link_bytes_per_s / num_bytes,
        )  # fmt: skip

    # Sharing steps.

    def spacing(self, running: Iterable[str]) -> Spacing:
        """How the requests of the last step that slow the others down should keep their distance."""
        if not self._in_step:
            return Spacing()
        plain_step_s = self.speeds.plain_step_s or _PLAIN_STEP_S
        running = set(running)
        streaming_s = {name: self._streaming_s(self._spilled[name]) for name in running & self._spilled.keys()}
        heavy = heavy_requests(streaming_s, plain_step_s=plain_step_s, others_run=len(streaming_s) < len(running))
        slow = heavy & self._in_step
        if not slow:
            return Spacing()
        light_s = sum(seconds for name, seconds in streaming_s.items() if name in self._in_step - heavy)
        # Of all of them, whether they run in the same steps or in different ones.
        spilled_s = sum(streaming_s[name] for name in heavy)
        apart = steps_apart(
            spilled_step_s=spilled_s, plain_step_s=plain_step_s + light_s, share=self.share, most=_MOST_STEPS_APART
        )
        # The steps between may be long ones, prefills, of which fewer make up for it.
        return Spacing(slow, apart, spilled_s * (1 - self.share) / self.share)

    def _streaming_s(self, spilled: Spilled) -> float:
        return spilled.num_blocks * self._block_bytes / self.link_bytes_per_s

    # Ends.

    def finished(self, request: Request) -> dict[str, Any] | None:
        """What to tell the user about a request that was spilled."""
        self.moves.finished(request.request_id)
        self._output_tokens += (request.num_output_tokens - self._output_tokens) / 16
        self._in_step.discard(request.request_id)
        spilled = self._spilled.pop(request.request_id, None)
        if spilled is None or not spilled.most_blocks:
            return None
        num_bytes = spilled.most_blocks * self._block_bytes * self._world_size
        return {"overspill": {"spilled_bytes": num_bytes, "spilled_steps": spilled.steps}}

    def take_stats(self) -> OverspillStats | None:
        in_use = (
            self.geometry.num_resident - 1 - self.queue.num_free_resident,
            self.geometry.num_spilled - self.queue.num_free_spilled,
        )
        if in_use != self._shown:
            self._shown = in_use
            self.stats.gauge("resident_blocks_used", in_use[0])
            self.stats.gauge("spilled_blocks_used", in_use[1])
        return self.stats.take()


def drafts_at_risk(vllm_config: VllmConfig) -> int:
    """Tokens that the scheduler counts as computed and that a step in flight may still reject.

    With asynchronous scheduling a step is planned before the one in front of it has told which drafts it took.
    """
    if not vllm_config.scheduler_config.async_scheduling:
        return 0
    return int(vllm_config.num_speculative_tokens) * int(vllm_config.max_concurrent_batches)
