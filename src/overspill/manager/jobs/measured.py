"""What a job measured: the results that its output names, as far as the registry has them, and what is missing."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from overspill.manager import logs
from overspill.manager.jobs.commands import JobKind
from overspill.manager.jobs.records import Job, JobState
from overspill.measure.results import compare_results
from overspill.registry import Registry, Result, UnknownRecord, get_result, list_results

# As `overspill ab` and `overspill tune` begin, and as `overspill bench` ends. Another of the same model may run in a
# terminal at the same time, so that neither the time nor the model would tell whose a result is.
_EXPERIMENT = re.compile(r"^(?:experiment|tuning) (\S+): ", re.MULTILINE)
_RESULT = re.compile(r"^saved as result (\d+)$")
_HEAD_BYTES = 64 * 1024
_LAST_LINES = 50
_LISTED = 20
_KEPT: Mapping[str, tuple[str, ...]] = {JobKind.AB: (), JobKind.TUNE: ("budget", "dry_run")}
"""What can be gone on with, and what is no part of its definition and so has to be given again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    results: tuple[int, ...] = ()
    """Their numbers, the newest ones if there are many."""
    experiment: str | None = None
    """A name under which they are compared."""
    can_go_on: bool = False


def measured(registry: Registry, job: Job) -> Measured:
    """Blocks."""
    log = Path(job.log_file)
    if job.kind == JobKind.BENCH:
        result = _saved_result(registry, log)
        return Measured() if result is None else Measured(results=(result.id,), experiment=result.experiment)
    name = experiment_of(log)
    results = list_results(registry, experiment=name) if name is not None else []
    if not results:
        return Measured()
    numbers = tuple(sorted(one.id for one in results)[-_LISTED:])
    return Measured(results=numbers, experiment=name, can_go_on=_is_cut_short(job, results))


def experiment_of(log: Path) -> str | None:
    try:
        with log.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:  # it never ran
        return None
    found = _EXPERIMENT.search(head)
    return found[1] if found else None


def given_to_resume(job: Job, experiment: str) -> dict[str, str]:
    """What a job is given that does the rest of this one."""
    kept = {name: job.given[name] for name in _KEPT[job.kind] if name in job.given}
    return {"resume": experiment, **kept}


def _saved_result(registry: Registry, log: Path) -> Result | None:
    found = [match[1] for line in logs.tail(log, _LAST_LINES) if (match := _RESULT.match(line))]
    try:
        return get_result(registry, int(found[-1])) if found else None
    except UnknownRecord:  # the registry was replaced since
        return None


def _is_cut_short(job: Job, results: list[Result]) -> bool:
    if job.kind not in _KEPT or job.state not in (JobState.STOPPED, JobState.FAILED, JobState.LOST):
        return False
    # A comparison also fails where a tier served nothing, and has nothing missing then.
    return job.kind != JobKind.AB or not compare_results(results[::-1]).is_complete
