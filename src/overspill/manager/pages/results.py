"""Runs and results: jobs with their progress, what was measured, and results side by side."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from overspill.manager import logs, sse
from overspill.manager.api.results import report_of
from overspill.manager.application import Application
from overspill.manager.asking import App, Who
from overspill.manager.errors import ManagerError
from overspill.manager.job_commands import FIELDS, JobKind
from overspill.manager.jobs import Job, given_to_resume, measured
from overspill.manager.pages.rendering import form_of, page, part
from overspill.manager.telemetry.machine import ProcessSample
from overspill.measure.compare import BY_KEY
from overspill.measure.report.page import bar_charts, table_heads, table_rows
from overspill.measure.report.text import LISTED, listed_values, result_as_text
from overspill.registry import get_result, list_results, list_runs

router = APIRouter()
_MOST_LISTED = 100
_STOP_ASKING = 286
"""htmx's own status: what was asked every second is not asked again."""


@router.get("/runs")
async def runs(request: Request, app: App) -> Response:
    started = await asyncio.to_thread(list_runs, app.registry, None, 30)
    return page(
        request, "runs.html", **_listed(app), **await _results(app), runs=started, kinds=list(JobKind), fields=FIELDS,
        models=_models(app),
    )  # fmt: skip


@router.get("/runs/results")
async def results(app: App) -> Response:
    return part("results.html", **await _results(app))


@router.get("/runs/jobs")
async def jobs(request: Request, app: App) -> Response:
    """The page sends what it knows, so that it is told when a job has ended since: its results are new."""
    listed = _listed(app)
    answer = part("jobs.html", **listed)
    if request.query_params.get("ended") not in (None, listed["ended"]):
        answer.headers["hx-trigger"] = "job-ended"
    return answer


@router.post("/runs/jobs")
async def add(request: Request, app: App, who: Who) -> Response:
    form = await form_of(request)
    kind, model = form.pop("kind", ""), form.pop("model", "")
    if kind not in list(JobKind):
        raise ManagerError(f"{kind!r:.40} is none of {', '.join(JobKind)}")
    stops_others = form.pop("stops_others", "") == "on"
    given = {name: value.strip() for name, value in form.items() if value.strip()}
    async with app.actions.audited(who, f"start {kind}", model):
        job = await app.jobs.add(JobKind(kind), model, given, stops_others=stops_others)
    return HTMLResponse("", headers={"hx-redirect": f"/runs/jobs/{job.id}"})


@router.get("/runs/jobs/{number}")
async def job(request: Request, app: App, number: int) -> Response:
    one = app.jobs.get(number)
    return page(request, "job.html", **await _doing(app, one), memory=_memory(app, one))


@router.get("/runs/jobs/{number}/state")
async def job_state(app: App, number: int) -> Response:
    one = app.jobs.get(number)
    answer = part("job_state.html", job=one, memory=_memory(app, one))
    if one.is_over:
        answer.status_code = _STOP_ASKING
        answer.headers["hx-trigger"] = "job-over"
    return answer


@router.get("/runs/jobs/{number}/doing")
async def job_doing(app: App, number: int) -> Response:
    return part("job_doing.html", **await _doing(app, app.jobs.get(number)))


@router.post("/runs/jobs/{number}/stop")
async def stop(app: App, who: Who, number: int) -> Response:
    """Once: a second click, or one in another tab, does not kill what is about to end."""
    if not app.jobs.is_stopping(number):
        async with app.actions.audited(who, "stop job", str(number)):
            await app.jobs.stop(number)
    return _asked()


@router.post("/runs/jobs/{number}/kill")
async def kill(app: App, who: Who, number: int) -> Response:
    """Only one that was asked to stop."""
    if app.jobs.is_stopping(number):
        async with app.actions.audited(who, "kill job", str(number)):
            await app.jobs.stop(number)
    return _asked()


@router.post("/runs/jobs/{number}/resume")
async def resume(app: App, who: Who, number: int) -> Response:
    """What is missing of it, as a new job."""
    one = app.jobs.get(number)
    found = await asyncio.to_thread(measured, app.registry, one)
    if not found.can_go_on or found.experiment is None:
        raise ManagerError(f"job {number} left nothing that could be gone on with; start a new one")
    async with app.actions.audited(who, f"resume {one.kind}", one.model):
        given = given_to_resume(one, found.experiment)
        new = await app.jobs.add(JobKind(one.kind), one.model, given, stops_others=one.stops_others)
    return HTMLResponse("", headers={"hx-redirect": f"/runs/jobs/{new.id}"})


@router.get("/events/jobs/{number}")
async def job_events(app: App, number: int) -> Response:
    path = Path(app.jobs.get(number).log_file)

    async def told() -> AsyncIterator[str]:
        async for some in logs.follow(path, 200):
            yield sse.event("lines", "\n".join(some))

    return sse.stream(told(), app.closing)


@router.get("/results/{number}")
async def result(request: Request, app: App, number: int) -> Response:
    one = await asyncio.to_thread(get_result, app.registry, number)
    return page(request, "result.html", result=one, text=result_as_text(one))


@router.get("/compare")
async def compare(request: Request, app: App) -> Response:
    named = request.query_params.getlist("ids")
    ids = ",".join(named)
    report = await asyncio.to_thread(report_of, app.registry, ids)
    return page(
        request, "compare.html", report=report, ids=ids, heads=table_heads(report.comparison),
        rows=table_rows(report.comparison), charts=bar_charts(report.comparison),
    )  # fmt: skip


def _asked() -> Response:
    """The page asks what the job does now. An answer that told it could come after the job's end, and would stay."""
    return Response(status_code=202, headers={"hx-trigger": "job-asked"})


def _models(app: Application) -> list[str]:
    """Those that run first: a bench of another would have to start it."""
    known = [one for one in app.engines.snapshots() if one.is_registered]
    return [one.name for one in sorted(known, key=lambda one: (one.pid is None, one.name))]


def _listed(app: Application) -> dict[str, Any]:
    known = app.jobs.list()
    return {"jobs": known, "ended": str(max((one.ended_at or 0.0 for one in known), default=0.0))}


async def _results(app: Application) -> dict[str, Any]:
    found = await asyncio.to_thread(list_results, app.registry, limit=_MOST_LISTED)
    rows = [(one, listed_values(one)) for one in found]
    return {"results": rows, "heads": [BY_KEY[key].name.strip() for key in LISTED]}


async def _doing(app: Application, one: Job) -> dict[str, Any]:
    """What can be done with a job, and what it left."""
    left = await asyncio.to_thread(measured, app.registry, one) if one.is_over else None
    return {"job": one, "measured": left, "is_stopping": app.jobs.is_stopping(one.id)}


def _memory(app: Application, one: Job) -> list[tuple[str, ProcessSample | None]]:
    """Whose, as it is added to a name. A bench is a client, and what it measures is elsewhere."""
    processes = app.watching.latest.sample.processes if app.watching.latest is not None else {}
    own = processes.get(f"job {one.id}")
    if not one.needs_engine:
        return [("", own)]
    return [(" of the client", own), (" of the engine", processes.get(one.model))]
