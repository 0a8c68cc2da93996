"""A job, and the files that the next manager finds it by."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from overspill.files import replace_file
from overspill.processes import identity


class JobState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    """The manager that began it ended, and how it ended itself nobody saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: int
    kind: str
    model: str
    given: Mapping[str, str] = field(default_factory=dict)
    stops_others: bool = False
    """Whether engines that run are stopped first, for their memory."""
    state: JobState = JobState.WAITING
    argv: tuple[str, ...] = ()
    pid: int | None = None
    process: str | None = None
    log_file: str
    asked_at: float
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    error: str = ""

    @property
    def is_over(self) -> bool:
        return self.state not in (JobState.WAITING, JobState.RUNNING)

    @property
    def is_alive(self) -> bool:
        """Whether its process lives, whoever began it."""
        if self.pid is None or self.process is None:
            return False
        try:
            return identity(self.pid) == self.process
        except OSError:  # it cannot be looked at now, as when too many files are open
            return True

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "argv": list(self.argv), "state": str(self.state)}


class Records:
    """One file for each job, in a folder of the manager's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def log_file(self, number: int) -> Path:
        return self.folder / f"{number}.log"

    def write(self, job: Job) -> None:
        with contextlib.suppress(OSError):  # a full disk: it goes on, and is forgotten by the next manager
            replace_file(self._path(job.id), json.dumps(job.as_json()))

    def remove(self, number: int) -> None:
        for path in (self._path(number), self.log_file(number)):
            with contextlib.suppress(OSError):
                path.unlink()

    def read_all(self) -> list[Job]:
        found = []
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                told = json.loads(path.read_text())
                job = Job(**{**told, "state": JobState(told["state"]), "argv": tuple(told["argv"])})
                found.append(_seen_again(job))
        return found

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.json"


def _seen_again(job: Job) -> Job:
    """Jobs have sessions of their own, so that one may outlive the manager that began it."""
    if job.is_over or job.is_alive:
        return job
    when = "while it waited" if job.state is JobState.WAITING else "while it ran, and so did the job"
    return replace(job, state=JobState.LOST, error=f"the manager ended {when}")
