"""Pages of a manager over stand-ins: as a program asks for them, and with what earlier managers left."""

import time
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec

from overspill.manager.job_commands import JobKind
from overspill.manager.jobs import Job, JobState
from overspill.registry import Result, save_result
from tests.managed_here import Here
from tests.manager_process import Place


def program(here: Here) -> httpx.Client:
    """A client that keeps no cookie: a browser's requests would need the page's token."""
    client = here.client()
    client.event_hooks = {"request": [lambda request: request.headers.pop("cookie", None)]}
    return client


def save(place: Place, **more: Any) -> int:
    values: dict[str, Any] = {
        "benchmark": "multi-turn", "model": "a", "config": {}, "argv": (), "environment": {}, "versions": {},
        "metrics": {"output_throughput": 5.0, "mean_ttft_ms": 9.0}, "started_at": datetime.now(UTC),
    }  # fmt: skip
    with place.registry() as registry:
        return save_result(registry, Result(**{**values, **more})).id


def old_job(place: Place, kind: JobKind, state: JobState, output: str, **given: str) -> None:
    """As an earlier manager left it: number 1."""
    folder = place.folder / "manager/jobs"
    folder.mkdir(parents=True)
    (folder / "1.log").write_text(output)
    job = Job(
        id=1, kind=str(kind), model="a", given=given, state=state, log_file=str(folder / "1.log"), asked_at=1.0,
        started_at=2.0, ended_at=3.0,
    )  # fmt: skip
    (folder / "1.json").write_text(msgspec.json.encode(job).decode())


def until(client: httpx.Client, number: int, state: str) -> Any:
    deadline = time.monotonic() + 60
    while (job := client.get(f"/api/jobs/{number}").json())["state"] != state:
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return job
