"""Tiers below RAM as the scheduler sees them: the disk, and the store between machines."""

from pathlib import Path
from typing import Protocol

from overspill.kv.jobs import StepJobs, StepReport
from overspill.kv.vllm_api import Request


class Tier(Protocol):
    """Brings blocks into free slots of RAM while the request that needs them waits; from there they are ordinary hits.
    So a tier that fails is a miss, nothing worse."""

    digests: Path
    """Folder for digests of weights and adapters."""

    def wants(self, request: Request, num_local_tokens: int, max_tokens: int) -> bool:
        """Whether the request should wait for blocks of this tier. May evict from RAM to make room."""

    def plan(self, jobs: StepJobs) -> None:
        """Add reads and writes to a step's jobs."""

    def complete(self, report: StepReport) -> None:
        """Process the workers' report of a step."""

    def finished(self, request_id: str) -> None: ...

    def is_busy(self) -> bool: ...

    def reset(self) -> None:
        """Discard reads and writes in flight or queued, since RAM was cleared."""

    def detach(self, reason: str) -> None:
        """Stop reading and writing for good: KV computed from now on may not match the tier's key."""

    def clear(self) -> None:
        """Forget all KV that belongs to this server alone, and detach."""

    def take_stats(self) -> None: ...

    def close(self) -> None: ...
