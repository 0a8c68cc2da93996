"""The engine core's side of spill: what a step streams, and who may run how often."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.jobs import StepJobs
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.sizes import format_size
from overspill.kv.speeds import Speeds
from overspill.kv.spill.layers import spill_geometry, states_per_request
from overspill.kv.spill.placement import Placement
from overspill.kv.spill.policy import heavy_requests, steps_apart
from overspill.kv.spill.steps import Ids, Span, SpillStep, group_step
from overspill.kv.vllm_api import KVCacheConfig, Request, SchedulerOutput

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# Until it is measured.
_PLAIN_STEP_S = 0.03
_MOST_STEPS_APART = 256


@dataclass(slots=True)
class Spilled:
    """A request with KV in RAM, as of its last step."""

    num_blocks: int = 0
    most_blocks: int = 0
    resident_blocks: int = 0
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
        self.geometry = spill_geometry(options, vllm_config, kv_cache_config)
        self.stats = OverspillStats()
        self.share = options.spill_share
        self._world_size = vllm_config.parallel_config.world_size
        self._at_risk = drafts_at_risk(vllm_config)
        self._spilled: dict[str, Spilled] = {}
        self._in_step: set[str] = set()  # spilled requests of the step planned last
        self.placement = Placement(
            self.geometry,
            kv_cache_config,
            speeds,
            self.is_spilled,
            states_per_request(vllm_config, kv_cache_config.kv_cache_groups),
        )
        self._shown: tuple[int, int] | None = None

    def is_spilled(self, request_id: str) -> bool:
        """Whether a request that runs was given blocks in RAM."""
        return request_id in self._spilled

    # Steps.

    def plan_step(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        """Add the step's moves and its spilled blocks to its jobs."""
        jobs.moves = self.placement.moves.take()
        self.stats.count("moved_blocks", len(jobs.moves))
        self.placement.queue.found(len(jobs.moves))
        jobs.moves += self._block_copies(output)
        jobs.spill = self._streamed(output)
        self.placement.saw_step(sum(spilled.resident_blocks for spilled in self._spilled.values()))

    def _streamed(self, output: SchedulerOutput) -> SpillStep | None:
        """The spilled blocks of this step, each streamed once however many requests read it."""
        self._note_new_blocks(output)
        # Most steps of most servers have none, and then this must cost nothing.
        scheduled = output.num_scheduled_tokens
        self._in_step = {name for name in self._spilled if name in scheduled} if self._spilled else set()
        if not self._in_step:
            self.stats.count("plain_steps", int(bool(output.num_scheduled_tokens)))
            return None
        step = SpillStep()
        computed = computed_tokens(output)
        tables = {request_id: self._table(output, request_id) for request_id in self._in_step}
        for group, block_size in enumerate(self.placement.block_sizes):
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

    def _note_new_blocks(self, output: SchedulerOutput) -> None:
        """Mark requests that were given a spilled block."""
        for new in output.scheduled_new_reqs:
            self._mark(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                self._mark(request_id, block_ids)

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

    def _block_copies(self, output: SchedulerOutput) -> list[tuple[int, int]]:
        """Take over the step's copies of blocks, which vLLM makes for hits that end inside one, if any is spilled: at
        its GPU address vLLM would copy whatever the window holds. All of them, since one may continue another."""
        copies = [(copy.src_block_id, copy.dst_block_id) for copy in output.kv_cache_block_copies or ()]
        if not any(max(pair) >= self.geometry.num_resident for pair in copies):
            return []
        output.kv_cache_block_copies = None
        return copies

    def _describe(self, request_id: str, table: list[Ids], computed: int, num_tokens: int) -> None:
        spilled = self._spilled[request_id]
        spilled.num_blocks = sum(int(np.count_nonzero(ids >= self.geometry.num_resident)) for ids in table)
        # A window's skipped places hold the null block.
        spilled.resident_blocks = sum(int(np.count_nonzero(ids)) for ids in table) - spilled.num_blocks
        spilled.most_blocks = max(spilled.most_blocks, spilled.num_blocks)
        spilled.steps += 1
        if spilled.is_announced or not spilled.num_blocks:
            return
        spilled.is_announced = True
        num_bytes, link = spilled.num_blocks * self.placement.block_bytes, self.placement.link_bytes_per_s
        logger.info(
            "Overspill: request %s does not fit on the GPU: of its %d tokens, %s of KV is in RAM. At %.0f GB/s (%s) "
            "expect at most %.1f tokens/s, fewer as it grows",
            request_id, computed + num_tokens, format_size(num_bytes * self._world_size), link / 1e9,
            "measured" if self.placement.speeds.stream_bytes_per_s else "assumed", link / num_bytes,
        )  # fmt: skip

    # Sharing steps.

    def spacing(self, running: Iterable[str]) -> Spacing:
        """How the requests of the last step that slow the others down should keep their distance."""
        if not self._in_step:
            return Spacing()
        plain_step_s = self.placement.speeds.plain_step_s or _PLAIN_STEP_S
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
        # The steps between may be long ones, prefills, of which fewer make up for it. The time counts from when a step
        # is planned, so what it takes itself is part of it.
        return Spacing(slow, apart, spilled_s / self.share)

    def _streaming_s(self, spilled: Spilled) -> float:
        return spilled.num_blocks * self.placement.block_bytes / self.placement.link_bytes_per_s

    # Ends.

    def finished(self, request: Request) -> dict[str, Any] | None:
        """What to tell the user about a request that was spilled."""
        self.placement.finished(request)
        self._in_step.discard(request.request_id)
        spilled = self._spilled.pop(request.request_id, None)
        if spilled is None or not spilled.most_blocks:
            return None
        num_bytes = spilled.most_blocks * self.placement.block_bytes * self._world_size
        return {"overspill": {"spilled_bytes": num_bytes, "spilled_steps": spilled.steps}}

    def take_stats(self) -> OverspillStats | None:
        in_use = (
            self.placement.num_used_resident,
            self.geometry.num_spilled - self.placement.queue.num_free_spilled,
        )
        if in_use != self._shown:
            self._shown = in_use
            self.stats.gauge("resident_blocks_used", in_use[0])
            self.stats.gauge("spilled_blocks_used", in_use[1])
        return self.stats.take()


def computed_tokens(output: SchedulerOutput) -> dict[str, int]:
    """How many tokens of each request are computed, as the step begins."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed


def drafts_at_risk(vllm_config: VllmConfig) -> int:
    """Tokens that the scheduler counts as computed and that a step in flight may still reject.

    With asynchronous scheduling a step is planned before the one in front of it has told which drafts it took.
    """
    if not vllm_config.scheduler_config.async_scheduling:
        return 0
    return int(vllm_config.num_speculative_tokens) * int(vllm_config.max_concurrent_batches)
