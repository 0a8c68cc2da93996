"""Spill in the engine core: the spilled blocks of each step, and how often spilled requests run."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.jobs import StepJobs
from overspill.kv.loads import Standstill
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.sizes import MiB, format_size
from overspill.kv.speeds import Speeds
from overspill.kv.spill.balance import Balance
from overspill.kv.spill.capacity import far_groups, lent_units, spill_geometry, states_per_request
from overspill.kv.spill.placement import Placement
from overspill.kv.spill.steps import Ids, Span, SpillStep, Stretch, far_stretch, group_step, written_blocks
from overspill.kv.vllm_api import KVCacheConfig, Request, Scheduler, SchedulerOutput

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# Assumed until measured: a PCIe 4.0 link, and an 8B model on a small card.
_LINK_BYTES_PER_S = 25e9
_PLAIN_STEP_S = 0.03
_MOST_STEPS_APART = 256
# Least KV of a layer to leave to the CPU: handing over query and result takes the GPU as long as this much KV.
_LEAST_FAR_BYTES = MiB
# Relative deviation at which a request's share changes; not sooner, because every share rounds differently.
_SHARE_OFF = 0.05


@dataclass(slots=True)
class Spilled:
    """A request with KV in RAM, as of its last step."""

    num_blocks: int = 0
    most_blocks: int = 0
    steps: int = 0
    is_announced: bool = False
    # Range of its block table that the CPU attends to, by group, and the share for which it was chosen.
    far: dict[int, tuple[int, int, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spacing:
    requests: frozenset[str] | set[str] = frozenset()
    steps_apart: int = 1
    seconds_apart: float = 0.0


class SpillScheduler:
    """Adds spilled blocks to each step; costs grow with the step's allocations and the tables of spilled requests."""

    def __init__(
        self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, speeds: Speeds
    ) -> None:
        self.geometry = spill_geometry(options, vllm_config, kv_cache_config)
        self.speeds = speeds
        self.stats = OverspillStats()
        self._standstill, self._num_passes = Standstill(self.stats), 0
        self.share = options.spill_share
        self._world_size = vllm_config.parallel_config.world_size
        self._at_risk = drafts_at_risk(vllm_config)
        self._decode_tokens = 1 + int(vllm_config.num_speculative_tokens)
        self.far_groups = far_groups(kv_cache_config) if options.spill_compute == "auto" else frozenset()
        self._spilled: dict[str, Spilled] = {}
        self._in_step: set[str] = set()  # spilled requests in the latest planned step
        self._num_queries = 1  # of a spilled request in that step, at most
        self.balance = Balance(speeds)
        self.placement = Placement(
            self.geometry,
            kv_cache_config,
            self.is_spilled,
            self.stats,
            states_per_request(vllm_config, kv_cache_config.kv_cache_groups),
            lent_units(options, vllm_config, self.geometry),
        )
        self._shown: tuple[int, int] | None = None

    @property
    def block_bytes(self) -> int:
        return self.geometry.num_regions * self.geometry.page_bytes

    @property
    def link_bytes_per_s(self) -> float:
        return self.speeds.stream_bytes_per_s or _LINK_BYTES_PER_S

    def is_spilled(self, request_id: str) -> bool:
        """Whether a running request has blocks in RAM."""
        return request_id in self._spilled

    # Steps.

    def before_pass(self, scheduler: Scheduler) -> None:
        self._num_passes += 1
        self._standstill.end(scheduler, self._num_passes)
        if preempted := self.placement.before_pass(scheduler):
            self.stats.count("window_preemptions", len(preempted))
            logger.info(
                "Overspill: %d request(s) start again: others waited for window memory that they held",
                len(preempted),
            )  # fmt: skip

    def plan_step(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        """Add the step's block copies, spilled blocks and moved units to its jobs."""
        jobs.block_copies = self._block_copies(output)
        jobs.spill = self._streamed(output)
        if (loan := self.placement.loan) is not None:
            jobs.units = loan.take_change()
            if output.new_block_ids_to_zero:
                # The list may name blocks that a request gave back in this very pass, and whose memory has moved since.
                output.new_block_ids_to_zero = [n for n in output.new_block_ids_to_zero if loan.has_memory(n)] or None

    def _streamed(self, output: SchedulerOutput) -> SpillStep | None:
        """The spilled blocks of this step, each streamed once however many requests read it."""
        self._note_new_blocks(output)
        # Most steps have no spilled request, and must cost nothing.
        scheduled = output.num_scheduled_tokens
        self._in_step = {name for name in self._spilled if name in scheduled} if self._spilled else set()
        if not self._in_step:
            self.stats.count("plain_steps", int(bool(output.num_scheduled_tokens)))
            return None
        step = SpillStep()
        computed = computed_tokens(output)
        tables = {request_id: self._table(output, request_id) for request_id in self._in_step}
        is_decode = max(scheduled.values()) <= self._decode_tokens
        self._num_queries = max(scheduled[request_id] for request_id in self._in_step)
        for group, block_size in enumerate(self.placement.block_sizes):
            spans = {
                request_id: self._span(table[group], computed[request_id], scheduled[request_id])
                for request_id, table in tables.items()
            }
            if is_decode and group in self.far_groups:
                self._split(step, group, spans, block_size)
            found = group_step(spans.values(), block_size=block_size, num_resident=self.geometry.num_resident)
            if found is not None:
                step.groups[group] = found
        for request_id, table in tables.items():
            self._describe(request_id, table, computed[request_id], output.num_scheduled_tokens[request_id])
        if not step.groups:
            return None
        self.stats.count("spilled_steps")
        return replace(step, num_bytes=self._spilled_bytes())

    def _split(self, step: SpillStep, group: int, spans: dict[str, Span], block_size: int) -> None:
        """Leave a part of each request's spilled blocks to the CPU."""
        wanted = self.far_share()
        written = np.concatenate([written_blocks(span, block_size) for span in spans.values()])
        for request_id, span in spans.items():
            ids, num_full = np.asarray(span.block_ids), span.certain // block_size
            # A request may hit a block in the very step in which another one fills it, and RAM does not have it yet.
            if len(spans) > 1 and len(hits := np.flatnonzero(np.isin(ids[:num_full], written))):
                num_full = int(hits[0])
            places, far = self._spilled[request_id].far, self.geometry.num_resident
            first, end, share = places.get(group, (0, 0, 0.0))
            # A request that was preempted in the meantime has other blocks.
            is_stale = end > num_full or not np.all(ids[first:end] >= far)
            if first == end or is_stale or abs(share - wanted) > _SHARE_OFF * share:
                first, end = far_stretch(ids, num_full, far, wanted)
                places[group] = first, end, wanted
            if (end - first) * self.geometry.page_bytes < _LEAST_FAR_BYTES:
                continue
            stretch = Stretch(first, ids[first:end] - far)
            step.far.setdefault(group, {})[request_id] = stretch
            spans[request_id] = replace(span, far=stretch)

    def far_share(self) -> float:
        """The CPU's share of the step's spilled KV; zero until the CPU's speed is measured."""
        return self.balance.share(self._spilled_bytes(), self.link_bytes_per_s, self._num_queries)

    def _spilled_bytes(self) -> int:
        return self.block_bytes * sum(self._spilled[name].num_blocks for name in self._in_step)

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
        """The request's current block table. Blocks of a resumed or windowed request change places, so appending new
        blocks to an older table would be wrong."""
        assert output.kv_connector_block_state is not None
        table = output.kv_connector_block_state.get_block_ids(request_id)
        assert table is not None, request_id
        return [np.array(block_ids, np.int64) for block_ids in table]

    def _span(self, block_ids: Ids, computed: int, num_tokens: int) -> Span:
        return Span(block_ids, max(0, computed - self._at_risk), computed, computed + num_tokens)

    def _block_copies(self, output: SchedulerOutput) -> list[tuple[int, int]]:
        """Take over all of the step's block copies if any touches a spilled block, since one copy may depend on
        another. vLLM makes them for hits that end inside a block; at a spilled block's GPU address it would copy
        whatever the window holds."""
        copies = [(copy.src_block_id, copy.dst_block_id) for copy in output.kv_cache_block_copies or ()]
        if not any(max(pair) >= self.geometry.num_resident for pair in copies):
            return []
        output.kv_cache_block_copies = None
        return copies

    def _describe(self, request_id: str, table: list[Ids], computed: int, num_tokens: int) -> None:
        spilled = self._spilled[request_id]
        spilled.num_blocks = sum(int(np.count_nonzero(ids >= self.geometry.num_resident)) for ids in table)
        spilled.most_blocks = max(spilled.most_blocks, spilled.num_blocks)
        spilled.steps += 1
        if spilled.is_announced or not spilled.num_blocks:
            return
        spilled.is_announced = True
        num_bytes, link = spilled.num_blocks * self.block_bytes, self.link_bytes_per_s
        logger.info(
            "Overspill: request %s does not fit on the GPU: of its %d tokens, %s of KV is in RAM. At %.0f GB/s (%s) "
            "expect at most %.1f tokens/s, fewer as it grows",
            request_id, computed + num_tokens, format_size(num_bytes * self._world_size), link / 1e9,
            "measured" if self.speeds.stream_bytes_per_s else "assumed", link / num_bytes,
        )  # fmt: skip

    # Sharing steps.

    def spacing(self, running: Iterable[str]) -> Spacing:
        """Requests of the last step that slow others down, and how far apart their steps should be."""
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
        # Time of all heavy requests, whether they run in the same steps or in different ones.
        spilled_s = sum(streaming_s[name] for name in heavy)
        apart = steps_apart(
            spilled_step_s=spilled_s, plain_step_s=plain_step_s + light_s, share=self.share, most=_MOST_STEPS_APART
        )
        # The steps between may be long prefills, so there is a deadline too. It starts when a step is planned, and so
        # includes that step's own time.
        return Spacing(slow, apart, spilled_s / self.share)

    def _streaming_s(self, spilled: Spilled) -> float:
        """Seconds that a request's KV in RAM adds to a step. Derived from whole steps once some are measured, because
        link and CPU slow each other down."""
        num_bytes, speeds = spilled.num_blocks * self.block_bytes, self.speeds
        if speeds.spilled_bytes_per_s:
            return max(0.0, num_bytes / speeds.spilled_bytes_per_s - speeds.plain_step_s)
        return num_bytes / (self.link_bytes_per_s + speeds.far_bytes_per_s)

    # Ends of requests.

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget a finished request; return a summary for its response if it spilled."""
        self._in_step.discard(request.request_id)
        spilled = self._spilled.pop(request.request_id, None)
        if spilled is None or not spilled.most_blocks:
            return None
        num_bytes = spilled.most_blocks * self.block_bytes * self._world_size
        return {"overspill": {"spilled_bytes": num_bytes, "spilled_steps": spilled.steps}}

    def take_stats(self) -> OverspillStats | None:
        in_use = self.placement.num_used_resident, self.placement.num_used_spilled
        if in_use != self._shown:
            self._shown = in_use
            self.stats.gauge("resident_blocks_used", in_use[0])
            self.stats.gauge("spilled_blocks_used", in_use[1])
        return self.stats.take()


def computed_tokens(output: SchedulerOutput) -> dict[str, int]:
    """Number of computed tokens of each request at the start of the step."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed


def drafts_at_risk(vllm_config: VllmConfig) -> int:
    """Tokens that the scheduler counts as computed although a step in flight may still reject them.

    With asynchronous scheduling a step is planned before the previous step reports which drafts it accepted.
    """
    if not vllm_config.scheduler_config.async_scheduling:
        return 0
    return int(vllm_config.num_speculative_tokens) * int(vllm_config.max_concurrent_batches)


def heavy_requests(streaming_s: Mapping[str, float], *, plain_step_s: float, others_run: bool) -> set[str]:
    """Requests that make the steps of lighter ones at least three times as long; `others_run` if some stream nothing.

    A short request that found no GPU block streams a little, and a long one slows it down like any other.
    """
    step_s = plain_step_s
    lightest_first = sorted(streaming_s, key=lambda name: streaming_s[name])
    for position, name in enumerate(lightest_first):
        if (others_run or position) and streaming_s[name] > 2 * step_s:
            return set(lightest_first[position:])
        step_s += streaming_s[name]
    return set()


def steps_apart(*, spilled_step_s: float, plain_step_s: float, share: float, most: int) -> int:
    """Distance between a spilled request's steps while others run, so that it takes at most `share` of the time.

    One step in a round of k is spilled: the k - 1 plain steps take at least (1 - share) of the round's time.
    """
    if share >= 1 or spilled_step_s <= plain_step_s:
        return 1
    plain_steps = spilled_step_s * (1 - share) / share / plain_step_s
    return min(most, 1 + math.ceil(plain_steps - 1e-9))
