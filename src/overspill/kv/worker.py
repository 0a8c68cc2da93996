"""Offload in a worker: the pool's memory, copies in flight, and their reports."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.buffer import block_regions
from overspill.kv.copies import Copier, CudaCopier, PlainCopier, Transfer
from overspill.kv.cuda import PinnedRanges, gpu_numa_node
from overspill.kv.disk.segments import DiskWorker
from overspill.kv.disk.tier import num_disk_places
from overspill.kv.host_memory import Checksums, HostMemory, Verdict, num_host_slots, slot_stride
from overspill.kv.jobs import DiskWriteJob, LoadJob, StepJobs, StepReport, StoreJob
from overspill.kv.metrics import OverspillStats
from overspill.kv.options import Options
from overspill.kv.remote.worker import RemoteWorker
from overspill.kv.sizes import format_size
from overspill.kv.spill.worker import SpillWorker
from overspill.kv.vllm_api import KVCacheConfig, KVConnectorTransferResults

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# A load is announced this long before its copies should complete, because vLLM takes a step or two to schedule its
# request. Compute queued after that waits for the copies, so this bounds the delay of other requests.
_ANNOUNCE_AHEAD_S = 0.01
# While nothing computes, announcing the oldest load earlier delays nobody: its request's step is prepared and queued
# during the copies. Requests that arrive meanwhile wait no longer than this.
_IDLE_AHEAD_S = 0.1
# How long an idle step may wait for a load to be announced; it has nothing else to do.
_IDLE_WAIT_S = 0.05
_POLL_S = 0.0005
# Likewise for writes to disk or store: no request waits for them, so this only yields the core to other threads.
_DISK_WAIT_S = 0.002


@dataclass(slots=True, eq=False)
class _Load:
    job: LoadJob
    transfer: Transfer
    verdict: Verdict  # the request waits for the check and the copies
    announced: bool = False


class OffloadWorker:
    """Offload on one rank. A step that computes waits only for copies of loads that were announced ahead."""

    def __init__(self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        parallel = vllm_config.parallel_config
        self._options = options
        self._config = kv_cache_config
        self._regions = block_regions(kv_cache_config)
        self._slot_bytes = sum(region.block_bytes for region in self._regions)
        self._num_slots = num_host_slots(options, parallel.world_size, self._slot_bytes)
        self._steps_in_flight = vllm_config.max_concurrent_batches
        self.idle_wait_s = _IDLE_WAIT_S
        self.load_bytes_per_s = 0.0  # of the last load
        self._rank, self._world_size = parallel.rank, parallel.world_size
        self.memory: HostMemory | None = None
        self.checksums: Checksums | None = None
        self.disk: DiskWorker | None = None
        self.remote: RemoteWorker | None = None
        self.buffer: torch.Tensor | None = None  # vLLM's KV cache as bytes
        self._copier: Copier | None = None
        self._loads: list[_Load] = []
        self._steps_since_announcement = self._steps_in_flight
        self._stores: list[tuple[StoreJob, Transfer]] = []
        self._void: list[LoadJob] = []
        self._report = StepReport()
        self.stats = OverspillStats()
        self._shown_pool: tuple[int, bool] | None = None

    @property
    def pool_bytes(self) -> int:
        return self._num_slots * slot_stride(self._slot_bytes)

    def register(self, buffer: torch.Tensor, spill: SpillWorker | None = None) -> None:
        """Map the pool and create the copier. `buffer` is vLLM's KV cache as bytes."""
        regions, slot_bytes, num_slots = self._regions, self._slot_bytes, self._num_slots
        self.buffer = buffer
        if buffer.is_cuda:
            self._use_cuda(buffer, num_slots, slot_bytes, regions)
        else:
            self.memory = HostMemory(num_slots, slot_bytes)
            self.memory.prepare(None)
            self._copier = PlainCopier(buffer, regions, self._config.num_blocks, self.memory)
        assert self.memory is not None and self._copier is not None
        if spill is not None:
            self._copier = spill.copier(self._copier, self.memory)
        self.checksums = Checksums(self.memory, self._options.verify)
        if self._options.disk_bytes:
            num_places = num_disk_places(self._options, self._world_size, slot_stride(slot_bytes))
            self.disk = DiskWorker(self.memory, self.checksums, self._rank, num_places)
        if self._options.remote:
            self.remote = RemoteWorker(self._options.remote, self.memory, self.checksums, self._rank, self._world_size)
        logger.info(
            "Overspill: %s of RAM for KV, %d blocks of %s in %d piece(s) each",
            format_size(num_slots * slot_bytes), num_slots, format_size(slot_bytes), len(regions),
        )  # fmt: skip

    def _use_cuda(self, buffer: torch.Tensor, num_slots: int, slot_bytes: int, regions: Sequence[Any]) -> None:
        pinned = PinnedRanges(buffer.device) if self._options.pin else None
        self.memory = HostMemory(num_slots, slot_bytes, numa_node=gpu_numa_node(buffer.device))
        self._copier = CudaCopier(
            buffer, regions, self.memory, self._steps_in_flight,
            zeroes_new_blocks=self._config.needs_kv_cache_zeroing,
        )  # fmt: skip
        self.memory.prepare(pinned)

    # Every step.

    def begin_step(self, jobs: StepJobs) -> None:
        """Start loads, and jobs of the tiers below RAM, before the forward, which does not touch the loads' blocks."""
        assert self._copier is not None and self.checksums is not None
        for job in jobs.loads:
            if job.void:
                self._void.append(job)
                continue
            verdict = self.checksums.check(job.slots)
            self._loads.append(_Load(job, self._copier.load(_ids(job.slots), _ids(job.block_ids)), verdict))
        if self.disk is not None:
            for read in jobs.disk_reads:
                self.disk.read(read)
            for write in jobs.disk_writes:
                self.disk.write(write)
        if self.remote is not None:
            for call in jobs.remote:
                self.remote.start(call)

    def write_now(self, job: DiskWriteJob) -> StepReport:
        """Write slots to disk outside a step, and wait for completion."""
        assert self.disk is not None
        report = StepReport()
        self.disk.write_now(job, report)
        return report

    def end_step(self, jobs: StepJobs) -> None:
        """Start stores after the forward, of blocks that it or an earlier one has filled."""
        assert self._copier is not None
        self._copier.end_step()
        for job in jobs.stores:
            self._stores.append((job, self._copier.store(_ids(job.block_ids), _ids(job.slots))))

    def results(self, jobs: StepJobs | None) -> KVConnectorTransferResults:
        """Requests whose load has completed or failed, or will complete in time."""
        results = KVConnectorTransferResults()
        for job in self._void:
            self._failed_load(job, results, "was void")
            self._report.loaded[job.job_id] = 1
        self._void.clear()
        # With several steps in flight, vLLM runs one or two more idle steps before it processes an announcement.
        is_idle = (
            jobs is not None and not jobs.num_tokens and self._steps_since_announcement >= self._steps_in_flight - 1
        )
        if is_idle:
            self._wait_for_a_load()
        ready = self._ready(is_idle=is_idle)
        self._loads = [load for load in self._loads if not self._advance(load, results, ready=load in ready)]
        self._steps_since_announcement = 0 if results.finished_recving else self._steps_since_announcement + 1
        self._poll_stores()
        for tier in (self.disk, self.remote):
            if tier is not None:
                if jobs is not None and not jobs.num_tokens:
                    self._wait_for(tier)
                tier.poll(self._report, self.stats)
        return results

    def _wait_for(self, tier: DiskWorker | RemoteWorker) -> None:
        """Make an idle step wait for reads, because requests wait for them, and briefly for writes."""
        seconds = self.idle_wait_s if tier.is_reading else _DISK_WAIT_S
        self._wait_while(lambda: not tier.has_done and (tier.is_reading or tier.is_writing), seconds)

    def _wait_for_a_load(self) -> None:
        """Wait in a step without a forward: this delays nothing, and spinning would take cores from copying threads."""
        self._wait_while(lambda: any(not load.announced for load in self._loads), self.idle_wait_s)

    def _wait_while(self, waits: Callable[[], bool], seconds: float) -> None:
        """Sleep while `waits()` holds, until a load can be announced or the time is up."""
        deadline = time.monotonic() + seconds
        while waits() and time.monotonic() < deadline:
            if any(not load.announced for load in self._ready(is_idle=True)):
                return
            time.sleep(_POLL_S)

    def _ready(self, *, is_idle: bool) -> list[_Load]:
        """Loads that are checked and have completed or soon will, in the order of their copies, oldest first."""
        ready, remaining_bytes = [], 0
        ahead_bytes = _ANNOUNCE_AHEAD_S * self.load_bytes_per_s
        for load in self._loads:
            remaining_bytes += load.transfer.remaining_bytes()
            if not load.verdict.done() or not (load.transfer.queued or load.transfer.done()):
                continue
            if is_idle and not load.announced and remaining_bytes <= _IDLE_AHEAD_S * self.load_bytes_per_s:
                is_idle, ahead_bytes = False, ahead_bytes + remaining_bytes
            if load.transfer.done() or remaining_bytes <= ahead_bytes:
                ready.append(load)
        return ready

    def _advance(self, load: _Load, results: KVConnectorTransferResults, *, ready: bool) -> bool:
        """Announce the load's request when it may run; True once the copies have completed."""
        job, transfer = load.job, load.transfer
        over = transfer.done()
        if not load.announced:
            if not ready:
                return False
            corrupt, error = load.verdict.corrupt_slots(), transfer.error or load.verdict.error()
            if not over and (corrupt or error is not None):
                return False  # its blocks are still being written
            self.stats.count("verified_blocks", load.verdict.num_checked)
            load.announced = True
            if corrupt:
                self._report.corrupt_slots.update(corrupt)
                self.stats.count("corrupt_blocks", len(corrupt))
                self._failed_load(job, results, f"found {len(corrupt)} corrupt block(s)")
            elif error is not None:
                self._report.failed.add(job.job_id)
                self._failed_load(job, results, f"failed: {error}")
            else:
                # Fence all compute queued from now on: vLLM copies recurrent states before it binds a step's metadata.
                transfer.fence()
                results.finished_recving.add(job.request_id)
        if over:
            self._report.loaded[job.job_id] = 1
            if transfer.error is None:
                if transfer.seconds:
                    self.load_bytes_per_s = transfer.num_bytes / transfer.seconds
                self._report.load_speed.add(transfer.num_bytes, transfer.seconds)
                self.stats.count("load_bytes", transfer.num_bytes)
                self.stats.count("load_seconds", transfer.seconds)
        return over

    def _failed_load(self, job: LoadJob, results: KVConnectorTransferResults, what: str) -> None:
        logger.warning("Overspill: the load of request %s %s; it is recomputed", job.request_id, what)
        results.finished_recving.add(job.request_id)
        results.failed_recving.add(job.request_id)

    def _poll_stores(self) -> None:
        assert self.checksums is not None
        in_flight: list[tuple[StoreJob, Transfer]] = []
        for job, transfer in self._stores:
            if not transfer.done():
                in_flight.append((job, transfer))
                continue
            self._report.stored[job.job_id] = 1
            if transfer.error is not None:
                logger.warning("Overspill: storing %d block(s) failed: %s", len(job.slots), transfer.error)
                self._report.failed.add(job.job_id)
                self.stats.count("store_failures")
            else:
                self.checksums.record(job.slots)
                self.stats.count("store_bytes", transfer.num_bytes)
                self.stats.count("store_seconds", transfer.seconds)
        self._stores = in_flight

    def report(self, report: StepReport) -> None:
        """Add everything since the last call to the report."""
        report.aggregate(self._report)
        self._report = StepReport()

    def take_stats(self) -> OverspillStats | None:
        memory = self.memory
        if memory is not None:
            shown = (memory.pinned_bytes, bool(memory.pinning_refused))
            if shown != self._shown_pool:
                self._shown_pool = shown
                self.stats.gauge("pool_bytes", memory.num_bytes, self._rank)
                self.stats.gauge("pool_pinned_bytes", memory.pinned_bytes, self._rank)
                self.stats.gauge("pinning_refused", int(shown[1]), self._rank)
        return self.stats.take()

    def shutdown(self) -> None:
        """Finish copies, then free memory, even if some of this fails."""
        with ExitStack() as stack:
            # Remote calls that still run may write into the pool, which then stays until the process ends.
            if self.memory is not None and (self.remote is None or self.remote.close()):
                stack.callback(self.memory.close)
            if self.checksums is not None:
                stack.callback(self.checksums.close)
            if self._copier is not None:
                stack.callback(self._copier.close)
            if self.disk is not None:
                stack.callback(self.disk.close)
            self.disk = self.remote = None
            self.memory = self.checksums = self._copier = self.buffer = None


def _ids(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)
