"""vLLM's real scheduler and Overspill's both sides, on a GPU and a link that are made of times.

A step takes as long as its tokens, or as a small one; copies take turns on the link; the clock is nobody's. Steps are
queued as vLLM's engine core does, two at a time with asynchronous scheduling.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from overspill.kv.copies import Copier, Transfer
from overspill.kv.host_memory import Verdict
from tests.simulated_copies import BLOCK_BYTES, Setup
from tests.simulated_engine import Engine, _report

SMALL_STEP_S = 0.006
PREFILL_TOKENS_PER_S = 250.0
LOAD_BYTES_PER_S = 10 * BLOCK_BYTES / 0.016
_LAUNCH_S = 0.002
_IDLE_STEP_S = 0.0005


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class VirtualTransfer(Transfer):
    def __init__(self, gpu: "VirtualGpu", num_bytes: int, begin: float) -> None:
        super().__init__(num_bytes)
        self._gpu, self._begin, self.end = gpu, begin, begin + num_bytes / LOAD_BYTES_PER_S
        self.seconds = self.end - begin
        self._queued.set()

    def done(self) -> bool:
        return self._gpu.clock.now >= self.end

    def remaining_bytes(self) -> int:
        left = (self.end - self._gpu.clock.now) / self.seconds
        return int(self.num_bytes * min(1.0, max(0.0, left)))

    def fence(self) -> None:
        self._gpu.busy_until = max(self._gpu.busy_until, self.end)


class VirtualGpu(Copier):
    """Compute in the order it was queued, and one copy at a time in each direction."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.busy_until = 0.0
        self._link = {"load": 0.0, "store": 0.0}

    def compute(self, num_tokens: int) -> float:
        """When a step that is queued now is over."""
        seconds = max(SMALL_STEP_S, num_tokens / PREFILL_TOKENS_PER_S)
        self.busy_until = max(self.busy_until, self.clock.now) + seconds
        return self.busy_until

    def _copy(self, way: str, count: int) -> Transfer:
        transfer = VirtualTransfer(self, count * BLOCK_BYTES, max(self.clock.now, self._link[way]))
        self._link[way] = transfer.end
        return transfer

    def load(self, slots: Any, blocks: Any) -> Transfer:
        return self._copy("load", len(slots))

    def store(self, blocks: Any, slots: Any) -> Transfer:
        return self._copy("store", len(slots))

    def check(self, slots: Any) -> Verdict:
        return Verdict()

    def record(self, slots: Any) -> None: ...

    def end_step(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Asked:
    at: float
    tokens_at: list[float]

    @property
    def first_token_s(self) -> float:
        return self.tokens_at[0] - self.at

    @property
    def longest_pause_s(self) -> float:
        return max(later - sooner for sooner, later in itertools.pairwise(self.tokens_at))


class VirtualEngine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool) -> None:
        self.clock = Clock()
        monkeypatch.setattr("overspill.kv.worker.time", self.clock)
        self._depth = 2 if asynchronous else 1
        self._engine = Engine(
            Setup(gpu_blocks=200, host_slots=200, batched_tokens=512, max_seqs=16, asynchronous=asynchronous)
        )
        self.gpu = VirtualGpu(self.clock)
        (self._worker,) = self._engine.workers
        self._worker._copier = self._worker.checksums = self.gpu  # type: ignore[assignment]
        speeds = self._engine.offload.speeds
        speeds.load_bytes_per_s, speeds.plain_step_s = LOAD_BYTES_PER_S, SMALL_STEP_S
        speeds.prefill_tokens_per_s = PREFILL_TOKENS_PER_S
        self._worker.idle_wait_s, self._worker.load_bytes_per_s = 0.05, LOAD_BYTES_PER_S
        self._queue: deque[tuple[float, SchedulerOutput, ModelRunnerOutput]] = deque()
        self.asked: dict[str, Asked] = {}

    def ask(self, prompt: list[int], max_tokens: int) -> Asked:
        name = self._engine.add(prompt, max_tokens)
        self.asked[name] = Asked(self.clock.now, [])
        return self.asked[name]

    def run(self, until: float | None = None) -> None:
        """To a point in time, or until nothing is left to do."""
        scheduler = self._engine.scheduler
        while until is None or self.clock.now < until:
            if scheduler.has_requests():
                output = scheduler.schedule()
                self._queue.append(self._execute(output))
                if len(self._queue) < self._depth and (output.num_scheduled_tokens or scheduler.has_requests()):
                    continue
            elif not self._queue:
                if until is not None:
                    self.clock.now = until
                return
            self._take_one_back()

    def forget_gpu(self) -> None:
        self._engine.forget_gpu()

    def _execute(self, output: SchedulerOutput) -> tuple[float, SchedulerOutput, ModelRunnerOutput]:
        jobs, num_tokens = output.kv_connector_metadata, output.total_num_scheduled_tokens
        self._worker.begin_step(jobs)
        self.clock.now += _LAUNCH_S if num_tokens else _IDLE_STEP_S
        over = self.gpu.compute(num_tokens) if num_tokens else self.clock.now
        self._worker.end_step(jobs)
        results = self._worker.results(jobs)
        names = list(output.num_scheduled_tokens)
        requests = self._engine.scheduler.requests
        answer = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[] if requests[name].is_prefill_chunk else [7] for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=results.finished_recving or None, kv_connector_worker_meta=_report(self._worker)
            ),
        )  # fmt: skip
        return over, output, answer

    def _take_one_back(self) -> None:
        over, output, answer = self._queue.popleft()
        self.clock.now = max(self.clock.now, over)
        before = {name: self._engine.requests[name].num_output_tokens for name in output.num_scheduled_tokens}
        self._engine.scheduler.update_from_output(output, answer)
        for name, count in before.items():
            if self._engine.requests[name].num_output_tokens > count:
                self.asked[name].tokens_at.append(self.clock.now)
