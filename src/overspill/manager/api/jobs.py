"""Jobs: benchmarks, comparisons and proofs, started and stopped."""

from typing import Any

from fastapi import APIRouter

from overspill.manager.api import shapes
from overspill.manager.asking import App, Who
from overspill.manager.errors import ManagerError
from overspill.manager.job_commands import FIELDS, JobKind

router = APIRouter(tags=["jobs"], responses=shapes.REFUSALS)


@router.get("/job-kinds", response_model=dict[str, list[dict[str, str]]], summary="What can be run, and its fields")
async def kinds() -> dict[str, list[dict[str, str]]]:
    return {
        str(kind): [{"name": one.name, "kind": one.kind, "help": one.help} for one in FIELDS[kind]] for kind in JobKind
    }


@router.get("/jobs", response_model=list[shapes.Job], summary="Jobs, the newest first")
async def jobs(app: App) -> list[dict[str, Any]]:
    return [job.as_json() for job in app.jobs.list()]


@router.post("/jobs", response_model=shapes.Job, status_code=201, summary="Start a bench, an A/B, a verify or a tune")
async def add(app: App, who: Who, body: shapes.NewJob) -> dict[str, Any]:
    try:
        kind = JobKind(body.kind)
    except ValueError:
        raise ManagerError(f"{body.kind!r} is none of {', '.join(JobKind)}; use one of these") from None
    async with app.actions.audited(who, f"start {kind}", body.model):
        return (await app.jobs.add(kind, body.model, body.given, stops_others=body.stops_others)).as_json()


@router.get("/jobs/{number}", response_model=shapes.Job, summary="One job")
async def job(app: App, number: int) -> dict[str, Any]:
    return app.jobs.get(number).as_json()


@router.post("/jobs/{number}/stop", response_model=shapes.Job, summary="Stop a job; a second time kills it")
async def stop(app: App, who: Who, number: int) -> dict[str, Any]:
    async with app.actions.audited(who, "stop job", str(number)):
        return (await app.jobs.stop(number)).as_json()
