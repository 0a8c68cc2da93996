"""vLLM's scheduler with spill: requests that stream much sit out some steps, so that others keep their pace.

Set as vLLM's `--scheduler-cls`; with Overspill installed, the plugin does so when `spill_bytes` is given.
"""

import time
from typing import Any

from overspill.kv.connector import OverspillConnector
from overspill.kv.vllm_api import AsyncScheduler, Request, RequestStatus, ScheduleHooks, Scheduler, SchedulerOutput


class Pacing:
    """Requests that sit out steps: vLLM skips a request until its `next_decode_eligible_step`."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Request, float]] = {}  # with deadlines

    def hold(self, scheduler: Scheduler, scheduler_output: SchedulerOutput) -> None:
        """Let requests of this step that stream much sit out the next steps."""
        connector = scheduler.connector
        if not isinstance(connector, OverspillConnector) or connector.spill_scheduler is None:
            return
        spacing = connector.spill_scheduler.spacing(request.request_id for request in scheduler.running)
        if spacing.steps_apart == 1:
            return
        for request_id in spacing.requests & scheduler_output.num_scheduled_tokens.keys():
            request = scheduler.requests[request_id]
            # Prefill computes more than it streams.
            if not request.is_prefill_chunk:
                request.next_decode_eligible_step = max(
                    request.next_decode_eligible_step, scheduler.current_step + spacing.steps_apart
                )
                self._held[request_id] = request, time.monotonic() + spacing.seconds_apart

    def release(self, scheduler: Scheduler) -> None:
        """Before a step, release requests whose wait has ended, that were preempted, or that are the only ones left."""
        if not self._held:
            return
        only_held = all(request.request_id in self._held for request in scheduler.running)
        now = time.monotonic()
        for request_id, (request, deadline) in list(self._held.items()):
            if only_held or request.status != RequestStatus.RUNNING or now >= deadline:
                request.next_decode_eligible_step = 0
            if request.next_decode_eligible_step <= scheduler.current_step + 1:
                del self._held[request_id]


class OverspillScheduler(ScheduleHooks, Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pacing = Pacing()

    def before_schedule(self) -> None:
        self._pacing.release(self)
        if isinstance(self.connector, OverspillConnector) and self.connector.spill_scheduler is not None:
            self.connector.spill_scheduler.before_pass(self)

    def after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        self._pacing.hold(self, scheduler_output)


class OverspillAsyncScheduler(OverspillScheduler, AsyncScheduler):
    """OverspillScheduler around vLLM's asynchronous scheduler, which comes next in the method resolution order."""
