"""Elastic KV, in the engine core: blocks with memory under them, as many as the GPU's ledger grants this engine.

vLLM knows the most blocks that the GPU could give. Those without memory are held out of its free queue. To shrink,
empty blocks are taken out at once; cached ones are copied to RAM first, and their requests' KV is loaded from there
when it is needed again. Holders are preempted only after a while.
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

# Requests keep their blocks for so long when their engine has to shrink.
_PATIENCE_S = 2.0
# And cached blocks wait so much longer for their copies: a slow link is no reason to lose them.
_COPYING_S = 10.0
# Offered stores may be dropped, for want of slots in RAM.
_SECONDS_BETWEEN_OFFERS = 0.5
# After the GPU had no memory for what was granted.
_SECONDS_BETWEEN_TRIES = 1.0
_SECONDS_BETWEEN_LOOKS, _SECONDS_BETWEEN_REPORTS = 0.02, 0.2


class Shape(NamedTuple):
    """Units of a KV cache, and how many of them have memory at first and at least."""

    units: Units
    first: int
    floor: int


def elastic_shape(options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Shape | None:
    """The same in the scheduler and in workers; None without a ledger."""
    if not options.ledger:
        return None
    groups = kv_cache_config.kv_cache_groups
    # The longest request, and vLLM's null block.
    least = 1 + -(-bytes_of_longest(vllm_config, groups) // bytes_of_block(vllm_config, groups))
    if options.spill_bytes:
        geometry = spill_geometry(options, vllm_config, kv_cache_config)
        units = Units.of(geometry.num_resident, geometry.page_bytes, geometry.num_regions)
        # And one request's recurrent states, which cannot spill.
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
    floor = min(units.count, -(-least // units.blocks_per_unit))
    wanted = options.ledger_bytes // units.unit_bytes if options.ledger_bytes else units.count
    return Shape(units, min(units.count, max(floor, wanted)), floor)


@dataclass(slots=True)
class Leaving:
    """A unit that is about to lose its memory."""

    deadline: float
    offered_at: float = 0.0
    out_after: int | None = None
    """The step planned last when its last block was taken out: one in flight may still write to it."""
    vacated: set[int] = field(default_factory=set)
    """Of its blocks, those whose holders were preempted."""
    readers: set[str] = field(default_factory=set)
    """Requests whose sliding windows have left one of its blocks, and that may still read it."""


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
        self.is_parked = False  # as the ledger has it
        self._tried_at = -_SECONDS_BETWEEN_TRIES
        self._reported_at, self._seen = 0.0, (0, 0)

    def _bytes(self, units: Iterable[int]) -> int:
        """The last unit may be smaller than the others."""
        return sum(len(self.units.blocks(unit)) for unit in units) * self.units.block_bytes

    def bind(self, manager: KVCacheManager, stores: Stores | None) -> None:
        """Hide blocks that have no memory yet."""
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
        """Steps are counted from now on."""
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
        """Get nearer to what is granted, without waiting for anything."""
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
        # Told before it is taken: the sum of the ledger is never below the truth.
        self._ledger.write(self._row, held=self._bytes(self.mapped.union(added)))
        try:
            call_workers(core, "overspill_keep_units", self.mapped.union(added))
        except Exception as error:
            self._tried_at = now
            self._ledger.write(self._row, held=self._bytes(self.mapped))
            self.stats.count("grow_failures")
            logger.warning(
                "Overspill: %s of GPU memory was granted and could not be had: %s",
                format_size(self._bytes(added)), error,
            )  # fmt: skip
            return
        self.mapped.update(added)
        assert self._out is not None
        self._out.give(block for unit in added for block in self.units.blocks(unit))
        self.stats.count("grown_bytes", self._bytes(added))

    def _keep_after_all(self, num_units: int) -> int:
        """Take back as many of the leaving units; returns how many."""
        assert self._out is not None
        kept = list(self._leaving)[:num_units]
        for unit in kept:
            del self._leaving[unit]
            self._out.give(self.units.blocks(unit))
        return len(kept)

    def _ask_to_leave(self, num_units: int) -> None:
        """Units with the fewest blocks in use, the last ones first; the first one has vLLM's null block."""
        assert self._pool is not None
        blocks = self._pool.blocks

        def cost(unit: int) -> tuple[int, int, int]:
            return sum(blocks[block].ref_cnt > 0 for block in self.units.blocks(unit)), len(self._readers(unit)), -unit

        candidates = sorted(self.mapped - self._leaving.keys() - {0}, key=cost)
        deadline = time.monotonic() + _PATIENCE_S
        for unit in candidates[:num_units]:
            self._leaving[unit] = Leaving(deadline)

    def _empty(self, core: Any) -> None:
        """Take out what is free of the leaving units, and have copied what RAM lacks."""
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
                    offered.append(block)  # those in use, too: their holders load it when they come back
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
        """Let no request have a block again whose holders were preempted, and take it out as soon as it is free."""
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
            logger.warning("Overspill: %d cached block(s) were given up without a copy: RAM took none of them", lost)

    def _readers(self, unit: int) -> set[str]:
        blocks = self.units.blocks(unit)
        return {name for name, behind in self._behind_windows.items() if not behind.isdisjoint(blocks)}

    def _give_back(self, core: Any) -> None:
        """Unmap units that no step in flight knows any more."""
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
        free = getattr(queue, "num_free_resident", queue.num_free_blocks)  # with spill, of the GPU's tier
        used = self.units.num_blocks - len(self._out.ids) - 1 - free
        waiting = blocks_waiting(core, self._block_tokens, most=self.units.num_blocks)
        wanted = min(self.units.count, -(-(used + waiting) // self.units.blocks_per_unit) + 1)
        self._ledger.write(
            self._row, held=self._bytes(self.mapped), used=used * self.units.block_bytes,
            wanted=self._bytes(range(wanted)),
        )  # fmt: skip
        self._reported_at, self._seen = time.monotonic(), (self._planned, used)
        self.stats.gauge("kv_held_bytes", self._bytes(self.mapped))

    # Called by a thread of its own.

    def is_due(self) -> bool:
        """Whether the engine's loop should look: the grant changed, it is not met yet, or steps ran since."""
        if not self.is_settled():
            return True
        return self._seen[0] != self._planned and time.monotonic() - self._reported_at > _SECONDS_BETWEEN_REPORTS

    def take_stats(self) -> OverspillStats | None:
        return self.stats.take()

    def close(self) -> None:
        self._ledger.leave(self._row)


def add_elastic() -> None:
    """Let engine cores adjust their memory: in their loop, whenever they are woken up."""
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
    """Wake the loop up when there is something to adjust: an idle one waits for requests."""
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
