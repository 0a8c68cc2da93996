"""Measured speeds, and what rests on them: is a load worth it, how much to store at once, how long a step will take."""

from dataclasses import dataclass

from overspill.kv.jobs import Pace, StepReport

# A load costs an extra engine step and a round of bookkeeping besides its bytes. Assumed, on the small side.
LOAD_OVERHEAD_S = 1e-3
# Stores may keep the link busy for this long; what is beyond waits, so that a burst never delays a load for longer.
STORE_BACKLOG_S = 0.25
# Steps of fewer tokens say little about prefill; steps of more, little about decoding.
PREFILL_TOKENS = 256
# Tokens are many when computing them takes as long as so many small steps. One step more is then a small part of it.
_MANY_STEPS = 8
# So many requests without a load before one is loaded all the same, at first and at most.
_SECOND_LOOK, _LAST_LOOK = 4, 256
# Weight of a new measurement in the running mean.
_WEIGHT = 0.3
# What is left of the greatest measurement with each one that follows.
_FADING = 0.99


@dataclass(slots=True)
class Speeds:
    """Running means; zero means not measured yet."""

    load_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    fastest_prefill_tokens_per_s: float = 0.0  # of late
    stream_bytes_per_s: float = 0.0  # of spilled KV, layer by layer
    plain_step_s: float = 0.0  # a small step that streams nothing

    def saw(self, report: StepReport) -> None:
        self.saw_load(report.load_speed.amount, report.load_speed.seconds)
        self.saw_prefill(report.prefill_speed.amount, report.prefill_speed.seconds)
        self.saw_stream(report.stream_speed.amount, report.stream_speed.seconds)
        self.saw_plain_steps(report.plain_steps.amount, report.plain_steps.seconds)

    def saw_load(self, num_bytes: int, seconds: float) -> None:
        self.load_bytes_per_s = _mean(self.load_bytes_per_s, num_bytes, seconds)

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, num_tokens, seconds)
        if num_tokens > 0 and seconds > 0:
            faded = self.fastest_prefill_tokens_per_s * _FADING
            self.fastest_prefill_tokens_per_s = max(faded, num_tokens / seconds)

    def saw_stream(self, num_bytes: int, seconds: float) -> None:
        self.stream_bytes_per_s = _mean(self.stream_bytes_per_s, num_bytes, seconds)

    def saw_plain_steps(self, count: int, seconds: float) -> None:
        rate = _mean(1 / self.plain_step_s if self.plain_step_s else 0.0, count, seconds)
        self.plain_step_s = 1 / rate if rate else 0.0


def _mean(mean: float, amount: int, seconds: float) -> float:
    if amount <= 0 or seconds <= 0:
        return mean
    rate = amount / seconds
    return rate if mean == 0 else mean + _WEIGHT * (rate - mean)


def load_beats_recompute(speeds: Speeds, *, num_tokens: int, num_bytes: int, queued_bytes: int) -> bool:
    """Whether loading is faster than computing the tokens again. What was not measured yet does not stop a load."""
    if speeds.load_bytes_per_s == 0 or speeds.prefill_tokens_per_s == 0:
        return True
    load_s = LOAD_OVERHEAD_S + (queued_bytes + num_bytes) / speeds.load_bytes_per_s
    return load_s < num_tokens / speeds.prefill_tokens_per_s


def is_doubtful(speeds: Speeds, *, num_tokens: int, queued_bytes: int) -> bool:
    """Whether the link's speed alone made a load not worth it, and none is under way that would measure it again."""
    return queued_bytes == 0 and num_tokens / speeds.prefill_tokens_per_s > LOAD_OVERHEAD_S


class SecondLooks:
    """Which loads are made although they seem slow.

    Nothing measures the link while nothing is loaded, so one unlucky measurement (the first one, of few bytes, or made
    while the pool was not pinned yet) would end all loads for good. If the link is slow indeed, looks get rare.
    """

    def __init__(self) -> None:
        self._patience = _SECOND_LOOK
        self._num_skipped = 0
        self._looker = ""

    def wants(self, request_id: str) -> bool:
        """Whether this request is to measure the link again; it may be asked until it has room."""
        if self._num_skipped < self._patience:
            return False
        self._looker = request_id
        return True

    def load_was_skipped(self) -> None:
        """A request was admitted without a load that it could have had."""
        self._num_skipped += 1

    def load_begins(self, request_id: str) -> None:
        is_look = request_id == self._looker
        self._patience = min(2 * self._patience, _LAST_LOOK) if is_look else _SECOND_LOOK
        self._num_skipped = 0
        self._looker = ""


def pace(speeds: Speeds, num_tokens: int) -> Pace:
    """A step's time at least: by its tokens alone, and as fast as any of late. The mean would not do: a step of many
    tokens may decode many requests, which takes much longer than as many tokens of one."""
    step_s = speeds.plain_step_s
    if num_tokens >= PREFILL_TOKENS and speeds.fastest_prefill_tokens_per_s:
        step_s = num_tokens / speeds.fastest_prefill_tokens_per_s
    many = _MANY_STEPS * speeds.plain_step_s * speeds.fastest_prefill_tokens_per_s
    return Pace(step_s, speeds.load_bytes_per_s, many)


def store_budget(speeds: Speeds, *, block_bytes: int, blocks_in_flight: int, gpu_blocks: int) -> int:
    """Blocks that may be stored now.

    A block in flight is pinned on the GPU, so never more than a quarter of the GPU's blocks; and no more than the
    link carries in STORE_BACKLOG_S, taking it to be as fast towards RAM as it was from it.
    """
    limit = max(1, gpu_blocks // 4)
    if speeds.load_bytes_per_s:
        limit = min(limit, max(16, int(speeds.load_bytes_per_s * STORE_BACKLOG_S / block_bytes)))
    return max(0, limit - blocks_in_flight)
