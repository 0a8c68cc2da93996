"""The flush at shutdown: the engine core has its workers write all KV in RAM to disk."""

import sys
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.jobs import DiskWriteJob, StepReport
from overspill.kv.plugin import StopTimeout
from overspill.kv.vllm_api import before_engine_shutdown, call_workers, connectors_of, own_connector

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# Longest flush in seconds, less than `StopTimeout`, after which vLLM kills the engine core.
FLUSH_S = 35.0


def flush_at_shutdown(vllm_config: VllmConfig) -> None:
    """Have the engine core write KV in RAM to disk before it shuts down."""
    if isinstance(vllm_config.shutdown_timeout, StopTimeout):
        vllm_config.shutdown_timeout = 0  # requests in flight are aborted at once, as without a timeout
    before_engine_shutdown(_flush)


def _flush(core: Any) -> None:
    # After an engine error, workers may hang and memory may hold anything.
    if sys.exc_info()[0] not in (None, SystemExit):
        return
    for connector in connectors_of(core, "flush_disk"):
        try:
            num_blocks = connector.flush_disk(core, core.vllm_config.shutdown_timeout or FLUSH_S)
        except Exception as error:  # nothing may keep the engine from stopping
            logger.warning("Overspill: KV in RAM was not written to disk: %s", repr(error))
        else:
            if num_blocks:
                logger.info("Overspill: %d block(s) of KV were written to disk", num_blocks)


def write_in_workers(core: Any, job: DiskWriteJob, limit_s: float) -> StepReport:
    report = StepReport()
    for part in call_workers(core, _write, job, timeout=limit_s):
        report.aggregate(part)
    return report


def _write(worker: Any, job: DiskWriteJob) -> StepReport:
    """Perform the job; runs in a worker process."""
    report: StepReport = own_connector("flush_disk").worker.write_now(job)
    return report


_write.needs_no_gpu = True  # type: ignore[attr-defined]
