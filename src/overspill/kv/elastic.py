"""Elastic KV in the engine core: gives memory to as many blocks as the GPU's ledger grants this engine.

vLLM is set up with the most blocks that the GPU could back; blocks without memory are held out of its free queue. To
shrink, empty blocks are taken out at once. Cached blocks are copied to RAM first, and loaded from there when a request
needs them again. Requests that hold blocks are preempted only after a delay.
"""

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.buffer import Units, block_regions, granularity
from overspill.kv.errors import OverspillError
from overspill.kv.held_out import HeldOut
from overspill.kv.ledger import Ledger
from overspill.kv.loads import Standstill
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.sizes import format_size
from overspill.kv.spill.capacity import spill_geometry, states_per_request
from overspill.kv.stores import Stores
from overspill.kv.vllm_api import (
    BlockPool,
    KVCacheConfig,
    KVCacheManager,
    add_engine_method,
    before_loop,
    blocks_behind_windows,
    blocks_waiting,
    bytes_of_block,
    bytes_of_longest,
    call_workers,
    connectors_of,
    is_frozen,
    on_wakeup,
    preempt,
    wake_up,
    watch_outputs,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# How long requests keep their blocks when their engine has to shrink.
_PATIENCE_S = 2.0
# How much longer cached blocks wait for their copies: a slow link is not a reason to lose them.
_COPYING_S = 10.0
# Offers are repeated, since stores may be dropped when RAM has no free slots.
_SECONDS_BETWEEN_OFFERS = 0.5
# Retry interval after the GPU lacked the memory that was granted.
_SECONDS_BETWEEN_TRIES = 1.0
_SECONDS_BETWEEN_LOOKS, _SECONDS_BETWEEN_REPORTS = 0.02, 0.2


class Shape(NamedTuple):
    """Units of a KV cache, the number that have memory at the start, and the least number."""

    units: Units
    first: int
    floor: int


def elastic_shape(options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Shape | None:
    """Shape of the elastic KV cache, or None without a ledger; the scheduler and workers compute the same one."""
    if not options.ledger:
        return None
    groups = kv_cache_config.kv_cache_groups
    # Room for the longest request and vLLM's null block.
    least = 1 + -(-bytes_of_longest(vllm_config, groups) // bytes_of_block(vllm_config, groups))
    if options.spill_bytes:
        geometry = spill_geometry(options, vllm_config, kv_cache_config)
        units = Units.of(geometry.num_resident, geometry.page_bytes, geometry.num_regions)
        # One request's recurrent states, which cannot spill, and the null block.
        states = 1 + states_per_request(vllm_config, groups)
        least = max(units.blocks_per_unit, states, least - geometry.num_spilled)
    else:
        regions = block_regions(kv_cache_config)
        sizes = {region.block_bytes for region in regions}
        if len(sizes) > 1 or any(region.offset % granularity() for region in regions):
            raise OverspillError(
                "elastic KV needs layers whose KV begins where memory can be mapped, and those of this model do not: "
                "remove ledger"
            )
        units = Units.of(kv_cache_config.num_blocks, regions[0].block_bytes, len(regions))
    floor = least_units(units, least)
    wanted = options.ledger_bytes // units.unit_bytes if options.ledger_bytes else units.count
    return Shape(units, min(units.count, max(floor, wanted)), floor)


def least_units(units: Units, num_blocks: int) -> int:
    """Units that hold so many blocks whichever ones stay beside unit 0; the last unit may be shorter than others."""
    if num_blocks <= units.blocks_per_unit:
        return 1
    last = len(units.blocks(units.count - 1))
    return min(units.count, 1 + -(-(num_blocks - last) // units.blocks_per_unit))


@dataclass(slots=True)
class Leaving:
    """A unit that is about to lose its memory."""

    deadline: float
    offered_at: float = 0.0
    out_after: int | None = None
    """Number of steps planned when all its blocks were out and unread; steps in flight may still write to it."""
    vacated: set[int] = field(default_factory=set)
    """Blocks of the unit whose holders were preempted, until they are free."""
    readers: set[str] = field(default_factory=set)
    """Requests whose sliding windows have moved past one of its blocks, but may still read it."""


class Elastic:
    def __init__(self, shape: Shape, options: Options, block_tokens: int) -> None:
        self.units, first, self._floor = shape
        self._block_tokens = block_tokens
        self.mapped = set(range(first))
        self.stats = OverspillStats()
        self._standstill = Standstill(self.stats)
        self._ledger = Ledger(Path(options.ledger))
        self._row = self._ledger.take(
            os.getpid(), held=self._bytes(self.mapped), floor=self._bytes(range(self._floor)),
            most=self.units.num_bytes, weight=options.ledger_weight,
        )  # fmt: skip
        self._leaving: dict[int, Leaving] = {}
        self._pool: BlockPool | None = None
        self._behind_windows: dict[str, set[int]] = {}
        self._out: HeldOut | None = None
        self._stores: Stores | None = None
        self._planned = self._done = 0
        self.is_attached = False  # to the engine core's steps
        self.is_parked = False  # as of the last `adjust`
        self._tried_at = -_SECONDS_BETWEEN_TRIES
        self._reported_at, self._seen = 0.0, (0, 0)

    def _bytes(self, units: Iterable[int]) -> int:
        """Bytes of these units; the last unit may be smaller than the others."""
        return sum(len(self.units.blocks(unit)) for unit in units) * self.units.block_bytes

    def bind(self, manager: KVCacheManager, stores: Stores | None) -> None:
        """Hold out blocks that have no memory yet."""
        pool: BlockPool = manager.block_pool
        self._pool, self._stores, self._out = pool, stores, HeldOut(pool)
        self._behind_windows = blocks_behind_windows(manager)
        self._out.take(
            pool.blocks[block] for unit in range(self.units.count) if unit not in self.mapped
            for block in self.units.blocks(unit)
        )  # fmt: skip

    # Steps.

    def planned(self) -> None:
        self._planned += 1

    def done(self) -> None:
        self._done += 1
        if self._leaving:
            self._vacate()

    def attach(self, num_in_flight: int) -> None:
        """Count finished steps from now on; `num_in_flight` planned steps have not finished yet."""
        self.is_attached, self._done = True, self._planned - num_in_flight

    # Called by the engine's loop, between steps.

    @property
    def granted_units(self) -> int:
        granted = self._ledger.read(self._row).granted
        if not granted:  # no manager has written yet
            return len(self.mapped) - len(self._leaving)
        if granted >= self.units.num_bytes:
            return self.units.count
        return max(self._floor, granted // self.units.unit_bytes)

    def adjust(self, core: Any) -> None:
        """Move towards the granted size without waiting for anything."""
        self.is_parked = is_frozen(core)
        if self.is_parked:
            self._ledger.write(self._row, held=0, used=0, wanted=0)
            return
        self._give_back(core)
        missing = self.granted_units - (len(self.mapped) - len(self._leaving))
        if missing > 0:
            missing -= self._keep_after_all(missing)
        if missing > 0 and not self._leaving:
            self._grow(core, missing)
        elif missing < 0:
            self._ask_to_leave(-missing)
        if self._leaving:
            self._empty(core)
        self._standstill.end(core.scheduler, self._planned)
        self._report(core)

    def is_settled(self) -> bool:
        return not self._leaving and self.granted_units == len(self.mapped)

    def _grow(self, core: Any, num_units: int) -> None:
        now = time.monotonic()
        if now - self._tried_at < _SECONDS_BETWEEN_TRIES:
            return
        added = [unit for unit in range(self.units.count) if unit not in self.mapped][:num_units]
        # Written before memory is taken, so that the ledger's sum is never below the memory in use.
        self._ledger.write(self._row, held=self._bytes(self.mapped.union(added)))
        try:
            call_workers(core, "overspill_keep_units", self.mapped.union(added))
        except Exception as error:
            self._tried_at = now
            self._ledger.write(self._row, held=self._bytes(self.mapped))
            self.stats.count("grow_failures")
            logger.warning(
                "Overspill: %s of GPU memory was granted but could not be allocated: %s",
                format_size(self._bytes(added)), error,
            )  # fmt: skip
            return
        self.mapped.update(added)
        assert self._out is not None
        self._out.give(block for unit in added for block in self.units.blocks(unit))
        self.stats.count("grown_bytes", self._bytes(added))

    def _keep_after_all(self, num_units: int) -> int:
        """Keep up to `num_units` of the leaving units; returns how many are kept."""
        assert self._out is not None
        kept = list(self._leaving)[:num_units]
        for unit in kept:
            del self._leaving[unit]
            self._out.give(self.units.blocks(unit))
        return len(kept)

    def _ask_to_leave(self, num_units: int) -> None:
        """Mark units to give up: fewest blocks in use first, then from the end; unit 0 holds vLLM's null block."""
        assert self._pool is not None
        blocks = self._pool.blocks

        def cost(unit: int) -> tuple[int, int, int]:
            return sum(blocks[block].ref_cnt > 0 for block in self.units.blocks(unit)), len(self._readers(unit)), -unit

        candidates = sorted(self.mapped - self._leaving.keys() - {0}, key=cost)
        deadline = time.monotonic() + _PATIENCE_S
        for unit in candidates[:num_units]:
            self._leaving[unit] = Leaving(deadline)

    def _empty(self, core: Any) -> None:
        """Take out the leaving units' free blocks, offer blocks without a copy to RAM, preempt late holders."""
        assert self._pool is not None and self._out is not None
        now, held, late_readers, lost = time.monotonic(), set[int](), set[str](), 0
        for unit, leaving in self._leaving.items():
            is_late, is_given_up = now > leaving.deadline, now > leaving.deadline + _COPYING_S
            may_offer = now - leaving.offered_at > _SECONDS_BETWEEN_OFFERS
            offered, in_use = [], set[int]()
            for block in (
                self._pool.blocks[number] for number in self.units.blocks(unit) if number not in self._out.ids
            ):
                lacks_copy = self._stores is not None and self._stores.lacks_copy(block)
                if lacks_copy and not is_given_up:
                    offered.append(block)  # blocks in use, too: their holders load the copies after preemption
                elif not block.ref_cnt:
                    lost += lacks_copy
                    self._out.take([block])
                if block.ref_cnt:
                    in_use.add(block.block_id)
            if is_late:
                leaving.vacated |= in_use
                held |= in_use
            if offered and may_offer and self._stores is not None:
                leaving.offered_at = now
                self._stores.offer(offered, "")
            had_readers = bool(leaving.readers)
            leaving.readers = self._readers(unit)
            is_out = self._out.ids.issuperset(self.units.blocks(unit))
            if is_out and (leaving.out_after is None or had_readers):
                leaving.out_after = self._planned
            late_readers.update(leaving.readers if is_late else ())
        self._count_lost(lost)
        if held or late_readers:
            self.stats.count("shrink_preemptions", len(preempt(core.scheduler, late_readers, held)))
            self._vacate()

    def _vacate(self) -> None:
        """Keep requests from hitting blocks of preempted holders again, and take such blocks out once they are free."""
        assert self._pool is not None and self._out is not None
        lost = 0
        for leaving in self._leaving.values():
            blocks = [self._pool.blocks[number] for number in leaving.vacated]
            lost += self._stores is not None and sum(map(self._stores.lacks_copy, blocks))
            self._out.forget(blocks)
            free = [block for block in blocks if not block.ref_cnt]
            self._out.take(block for block in free if block.block_id not in self._out.ids)
            leaving.vacated.difference_update(block.block_id for block in free)
        self._count_lost(lost)

    def _count_lost(self, lost: int) -> None:
        if lost:
            self.stats.count("shrink_lost_blocks", lost)
            logger.warning("Overspill: %d cached block(s) were evicted without a copy: RAM took none of them", lost)

    def _readers(self, unit: int) -> set[str]:
        blocks = self.units.blocks(unit)
        return {name for name, behind in self._behind_windows.items() if not behind.isdisjoint(blocks)}

    def _give_back(self, core: Any) -> None:
        """Unmap leaving units that no step in flight can use any more."""
        ready = {
            unit for unit, one in self._leaving.items()
            if one.out_after is not None and one.out_after <= self._done and not one.readers
        }  # fmt: skip
        if not ready:
            return
        call_workers(core, "overspill_keep_units", self.mapped - ready)
        self.mapped -= ready
        for unit in ready:
            del self._leaving[unit]
        self._ledger.write(self._row, held=self._bytes(self.mapped))
        self.stats.count("shrunk_bytes", self._bytes(ready))

    def _report(self, core: Any) -> None:
        assert self._pool is not None and self._out is not None
        queue = self._pool.free_block_queue
        free = getattr(queue, "num_free_resident", queue.num_free_blocks)  # with spill, only the GPU's tier
        used = self.units.num_blocks - len(self._out.ids) - 1 - free
        waiting = blocks_waiting(core, self._block_tokens, most=self.units.num_blocks)
        wanted = min(self.units.count, -(-(used + waiting) // self.units.blocks_per_unit) + 1)
        self._ledger.write(
            self._row, held=self._bytes(self.mapped), used=used * self.units.block_bytes,
            wanted=self._bytes(range(wanted)),
        )  # fmt: skip
        self._reported_at, self._seen = time.monotonic(), (self._planned, used)
        self.stats.gauge("kv_held_bytes", self._bytes(self.mapped))

    # Called by the ledger thread.

    def is_due(self) -> bool:
        """Whether the engine's loop should adjust: the grant is not met, or a report of newly planned steps is due."""
        if not self.is_settled():
            return True
        return self._seen[0] != self._planned and time.monotonic() - self._reported_at > _SECONDS_BETWEEN_REPORTS

    def take_stats(self) -> OverspillStats | None:
        return self.stats.take()

    def close(self) -> None:
        self._ledger.leave(self._row)


def add_elastic() -> None:
    """Make engine cores adjust their KV memory in their loop, whenever they are woken up."""
    before_loop(_watch)
    on_wakeup(adjust)
    add_engine_method("overspill_adjust", adjust)


def adjust(core: Any) -> None:
    for connector in connectors_of(core, "elastic"):
        if (elastic := connector.elastic) is not None:
            _attach(core, elastic)
            elastic.adjust(core)


def _attach(core: Any, elastic: Elastic) -> None:
    if not elastic.is_attached:
        elastic.attach(num_in_flight=watch_outputs(core, elastic.done))


def _watch(core: Any) -> None:
    """Wake the engine's loop when memory needs adjusting, since an idle loop only waits for requests."""
    (elastic,) = (one.elastic for one in connectors_of(core, "elastic"))
    if elastic is None:
        return
    _attach(core, elastic)

    def look() -> None:
        while True:
            is_parked = is_frozen(core)
            is_due = is_parked != elastic.is_parked or (not is_parked and elastic.is_due())
            if is_due and not wake_up(core):
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    threading.Thread(target=look, name="overspill-ledger", daemon=True).start()
