"""Jobs of a step, sent from the scheduler to the workers, and the workers' reports."""

from dataclasses import dataclass, field, fields
from typing import Literal

from overspill.kv.spill.steps import SpillStep
from overspill.kv.vllm_api import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy host slots into GPU blocks for a request that waits for them."""

    job_id: int
    request_id: str
    slots: list[int]
    block_ids: list[int]
    # The hit was dropped, or does not match vLLM's allocation: nothing is copied, and the request must be recomputed.
    void: bool = False


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy GPU blocks into host slots once this step's forward has written them."""

    job_id: int
    block_ids: list[int]
    slots: list[int]


@dataclass(frozen=True, slots=True)
class DiskReadJob:
    """Read places of a folder on disk into host slots and compare the digests, given per rank and block."""

    job_id: int
    folder: str
    places: list[int]
    slots: list[int]
    digests: list[list[int]]


@dataclass(frozen=True, slots=True)
class DiskWriteJob:
    """Write host slots to places of a folder on disk."""

    job_id: int
    folder: str
    slots: list[int]
    places: list[int]


@dataclass(frozen=True, slots=True)
class RemoteJob:
    """A call to the store between machines: find which keys exist, load their content into slots, or store slots."""

    job_id: int
    kind: Literal["find", "load", "store"]
    prefix: str  # common to all keys
    keys: list[bytes]
    slots: list[int]
    patience_s: float  # longest wait without progress


@dataclass(slots=True)
class RemoteResult:
    """Result of a call to the store, on one rank."""

    bad: list[int]  # positions of keys that were not found, loaded or stored
    failed: bool = False  # the store raised, returned an error or gave no answer
    lost: bool = False  # bytes may still arrive in the slots
    corrupt: int = 0
    seconds: float = 0.0

    def add(self, other: "RemoteResult") -> None:
        self.bad += other.bad
        self.failed |= other.failed
        self.lost |= other.lost
        self.corrupt += other.corrupt
        self.seconds = max(self.seconds, other.seconds)


@dataclass(slots=True)
class StepJobs(KVConnectorMetadata):
    """A step's work for every worker."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    disk_reads: list[DiskReadJob] = field(default_factory=list)
    disk_writes: list[DiskWriteJob] = field(default_factory=list)
    remote: list[RemoteJob] = field(default_factory=list)
    num_tokens: int = 0
    # KV in RAM that the step reads or writes, layer by layer.
    spill: SpillStep | None = None
    # (source, target) blocks to copy before anything reads or writes them.
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    # Units of GPU blocks and of the window that have memory from this step on; None if unchanged.
    units: frozenset[int] | None = None


@dataclass(slots=True)
class Sample:
    """An amount and the seconds it took; both accumulate."""

    amount: int = 0
    seconds: float = 0.0

    def add(self, amount: int, seconds: float) -> None:
        self.amount += amount
        self.seconds += seconds


@dataclass(slots=True)
class Lateness:
    """Layers whose attention the CPU shared, and how many of them made the GPU wait for the CPU's result."""

    layers: int = 0
    late: int = 0

    def add(self, layers: int, late: int) -> None:
        self.layers += layers
        self.late += late


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """Jobs completed since a worker's last report; each worker reports each job once."""

    # job id -> number of workers that are done with the job
    loaded: dict[int, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    # Jobs with a copy that failed on some worker.
    failed: set[int] = field(default_factory=set)
    # Host slots whose content did not match its checksum.
    corrupt_slots: set[int] = field(default_factory=set)
    # job id -> rank -> positions of blocks that could not be read or did not match their digest
    disk_read: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    # job id -> rank -> digest of each block, None for blocks not written
    disk_written: dict[int, dict[int, list[int | None]]] = field(default_factory=dict)
    disk_full_at: int | None = None  # lowest place that the disk has no room for
    remote: dict[int, dict[int, RemoteResult]] = field(default_factory=dict)  # by job id and rank
    remote_late: set[int] = field(default_factory=set)  # jobs that timed out on some rank, but still run
    disk_speed: Sample = field(default_factory=Sample)
    remote_speed: Sample = field(default_factory=Sample)
    load_speed: Sample = field(default_factory=Sample)
    prefill_speed: Sample = field(default_factory=Sample)
    stream_speed: Sample = field(default_factory=Sample)
    plain_steps: Sample = field(default_factory=Sample)
    far_speed: Sample = field(default_factory=Sample)
    spilled_steps: Sample = field(default_factory=Sample)  # amount: bytes of KV in RAM that they read
    lateness: Lateness = field(default_factory=Lateness)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        assert isinstance(other, StepReport)
        for counts, more in ((self.loaded, other.loaded), (self.stored, other.stored)):
            for job_id, count in more.items():
                counts[job_id] = counts.get(job_id, 0) + count
        self.failed |= other.failed
        self.corrupt_slots |= other.corrupt_slots
        for name in ("disk_read", "disk_written", "remote"):
            for job_id, by_rank in getattr(other, name).items():
                getattr(self, name).setdefault(job_id, {}).update(by_rank)
        self.remote_late |= other.remote_late
        full_at = [at for at in (self.disk_full_at, other.disk_full_at) if at is not None]
        self.disk_full_at = min(full_at, default=None)
        # Ranks work in parallel, so each rank's amounts are added along with its own seconds.
        for name in _SAMPLES:
            more = getattr(other, name)
            getattr(self, name).add(more.amount, more.seconds)
        self.lateness.add(other.lateness.layers, other.lateness.late)
        return self

    def is_empty(self) -> bool:
        return self == StepReport()


_SAMPLES = [one.name for one in fields(StepReport) if one.default_factory is Sample]
