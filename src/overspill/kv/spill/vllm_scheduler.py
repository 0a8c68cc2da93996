"""vLLM's scheduler with spill: spilled requests sit out some steps, so that others keep their pace.

Set as vLLM's `--scheduler-cls`; with Overspill installed, that is done when `spill_bytes` is given.
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


def space_out(scheduler: Scheduler, scheduler_output: SchedulerOutput) -> None:
    """Let the spilled requests of this step sit out the next ones, as many as their share of the time asks."""
    from overspill.kv.connector import OverspillConnector

    connector = scheduler.connector
    if not isinstance(connector, OverspillConnector) or connector.spill_scheduler is None:
        return
    spill = connector.spill_scheduler
    apart = spill.steps_apart(len(scheduler.running))
    if apart == 1:
        return
    for request_id in scheduler_output.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        # Prefill computes more than it streams.
        if spill.is_spilled(request_id) and not request.is_prefill_chunk:
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, scheduler.current_step + apart)


class OverspillScheduler(Scheduler):
    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        space_out(self, scheduler_output)


class OverspillAsyncScheduler(AsyncScheduler):
    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        space_out(self, scheduler_output)
