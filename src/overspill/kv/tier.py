"""What lies below RAM, as the scheduler sees it: the disk, and the store between machines."""

from pathlib import Path
from typing import Protocol

from overspill.kv.jobs import StepJobs, StepReport
from overspill.kv.vllm_api import Request


class Tier(Protocol):
    """Blocks that a request needs are brought into free slots of RAM while it waits, and are ordinary hits from there.
    So a tier that fails is a miss."""

    digests: Path
    """Folder for digests of weights and adapters."""

    def wants(self, request: Request, num_local_tokens: int, max_tokens: int) -> bool:
        """Whether the request should wait for blocks of this tier. May evict from RAM to make room."""

    def plan(self, jobs: StepJobs) -> None:
        """Add calls to a step's jobs."""

    def complete(self, report: StepReport) -> None:
        """Process the workers' report of a step."""

    def finished(self, request_id: str) -> None: ...

    def is_busy(self) -> bool: ...

    def reset(self) -> None:
        """RAM was cleared: what is being read for it, and what left it before, is not to be used."""

    def detach(self, reason: str) -> None:
        """Neither read nor write any more: KV computed from now on may not be that of the key."""

    def clear(self) -> None:
        """Forget everything that is this server's alone, and detach."""

    def take_stats(self) -> None: ...

    def close(self) -> None: ...
