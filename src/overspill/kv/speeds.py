"""Measured speeds: how steps are timed, whether a load beats recomputing, and how much to store at once."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from overspill.kv.jobs import Sample, StepJobs, StepReport

# A load costs an extra engine step and a round of bookkeeping besides its bytes. An assumption, on the low side.
LOAD_OVERHEAD_S = 1e-3
# Stores may keep the link busy for this long; further ones wait, so that a burst never delays a load for longer.
STORE_BACKLOG_S = 0.25
# Steps of fewer tokens tell little about prefill, steps of more tell little about decoding.
PREFILL_TOKENS = 256
# Weight of a new measurement in the running mean.
_WEIGHT = 0.3

# A mark costs a few microseconds, which a step of a few milliseconds should not pay every time.
_STEPS_BETWEEN_MARKS = 8


@dataclass(slots=True)
class Speeds:
    """Running means; zero means not measured yet."""

    load_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    remote_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    stream_bytes_per_s: float = 0.0  # of spilled KV, layer by layer
    plain_step_s: float = 0.0  # a small step that streams nothing
    far_bytes_per_s: float = 0.0  # of KV that the CPU attends to
    spilled_bytes_per_s: float = 0.0  # of steps with KV in RAM, however it is read

    def record(self, report: StepReport) -> None:
        for rate, sample in _RATES.items():
            setattr(self, rate, _mean(getattr(self, rate), getattr(report, sample)))
        steps_per_s = _mean(1 / self.plain_step_s if self.plain_step_s else 0.0, report.plain_steps)
        self.plain_step_s = 1 / steps_per_s if steps_per_s else 0.0


# Each rate, and the sample in a report that measures it.
_RATES = {
    "load_bytes_per_s": "load_speed",
    "disk_bytes_per_s": "disk_speed",
    "remote_bytes_per_s": "remote_speed",
    "prefill_tokens_per_s": "prefill_speed",
    "stream_bytes_per_s": "stream_speed",
    "far_bytes_per_s": "far_speed",
    "spilled_bytes_per_s": "spilled_steps",
}


def _mean(mean: float, sample: Sample) -> float:
    if sample.amount <= 0 or sample.seconds <= 0:
        return mean
    rate = sample.amount / sample.seconds
    return rate if mean == 0 else mean + _WEIGHT * (rate - mean)


def load_beats_recompute(
    speeds: Speeds, *, num_tokens: int, num_bytes: int, queued_bytes: int, disk_bytes: int = 0, remote_bytes: int = 0
) -> bool:
    """Whether loading is faster than recomputing, even if `disk_bytes` and `remote_bytes` must first be read from disk
    and store. Speeds not measured yet never prevent a load."""
    if speeds.prefill_tokens_per_s == 0:
        return True
    load_s = 0.0
    if speeds.load_bytes_per_s:
        load_s = LOAD_OVERHEAD_S + (queued_bytes + num_bytes) / speeds.load_bytes_per_s
    if disk_bytes and speeds.disk_bytes_per_s:
        load_s += LOAD_OVERHEAD_S + disk_bytes / speeds.disk_bytes_per_s
    if remote_bytes and speeds.remote_bytes_per_s:
        load_s += LOAD_OVERHEAD_S + remote_bytes / speeds.remote_bytes_per_s
    return load_s < num_tokens / speeds.prefill_tokens_per_s


def may_probe(speeds: Speeds, *, num_tokens: int, queued_bytes: int) -> bool:
    """Whether only the link's speed ruled a load out, and no load in flight will measure it again."""
    return queued_bytes == 0 and num_tokens / speeds.prefill_tokens_per_s > LOAD_OVERHEAD_S


def store_budget(speeds: Speeds, *, block_bytes: int, blocks_in_flight: int, gpu_blocks: int) -> int:
    """Number of blocks that may be stored now.

    Blocks in flight are pinned on the GPU, so they never exceed a quarter of its blocks, nor what the link carries in
    STORE_BACKLOG_S, assuming D2H is as fast as H2D was measured.
    """
    limit = max(1, gpu_blocks // 4)
    if speeds.load_bytes_per_s:
        limit = min(limit, max(16, int(speeds.load_bytes_per_s * STORE_BACKLOG_S / block_bytes)))
    return max(0, limit - blocks_in_flight)


class Mark(ABC):
    """A timing event on a stream."""

    @abstractmethod
    def seconds_until(self, later: "Mark") -> float | None:
        """Seconds from this mark to a later one; None until the later one has completed."""


class WallMark(Mark):
    """Wall-clock time, for synchronous compute."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_until(self, later: Mark) -> float | None:
        assert isinstance(later, WallMark)
        return later._time - self._time


class StepTimer:
    """Times all steps with many tokens, for the prefill speed, and small steps: all with KV in RAM, and some of the
    others."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._start: Mark | None = None
        self._steps = 0
        self._waiting: list[tuple[StepJobs, Mark, Mark]] = []

    def begin_step(self, jobs: StepJobs) -> None:
        self._start = None
        if jobs.num_tokens >= PREFILL_TOKENS or jobs.spill is not None:
            self._start = self._mark()
        elif jobs.num_tokens:
            self._steps += 1
            if self._steps % _STEPS_BETWEEN_MARKS == 0:
                self._start = self._mark()

    def end_step(self, jobs: StepJobs) -> None:
        if self._start is not None:
            self._waiting.append((jobs, self._start, self._mark()))
            self._start = None

    def report(self, report: StepReport) -> None:
        """Add completed measurements to the report."""
        waiting: list[tuple[StepJobs, Mark, Mark]] = []
        for jobs, start, end in self._waiting:
            seconds = start.seconds_until(end)
            if seconds is None:
                waiting.append((jobs, start, end))
            elif jobs.num_tokens >= PREFILL_TOKENS:
                report.prefill_speed.add(jobs.num_tokens, seconds)
            elif jobs.spill is None:
                report.plain_steps.add(1, seconds)
            else:
                report.spilled_steps.add(jobs.spill.num_bytes, seconds)
        self._waiting = waiting
