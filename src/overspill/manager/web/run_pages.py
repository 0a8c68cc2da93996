"""Pages of runs: jobs with their progress, results, and results side by side."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from overspill.manager.job_commands import FIELDS, JobKind
from overspill.manager.jobs import Job, measured, progress
from overspill.manager.telemetry.machine import ProcessSample
from overspill.manager.web.api import report_of
from overspill.manager.web.application import App, Application, Who
from overspill.manager.web.rendering import form_of, page, part, redirect
from overspill.measure.compare import BY_KEY
from overspill.measure.report.text import LISTED, listed_values
from overspill.registry import list_results, list_runs

router = APIRouter()
_MOST_LISTED = 100
_STOP_POLLING = 286
"""HTTP status by which a server makes htmx stop polling."""


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
    """List jobs. The page sends the last end it knows; if a job has ended since, an event reloads the results."""
    listed = _listed(app)
    answer = part("jobs.html", **listed)
    if request.query_params.get("ended") not in (None, listed["ended"]):
        answer.headers["hx-trigger"] = "job-ended"
    return answer


@router.post("/runs/jobs")
async def add(request: Request, app: App, who: Who) -> Response:
    form = await form_of(request)
    kind, model = form.pop("kind", ""), form.pop("model", "")
    stops_others = form.pop("stops_others", "") == "on"
    given = {name: value.strip() for name, value in form.items() if value.strip()}
    added = await app.actions.add_job(who, kind, model, given, stops_others=stops_others)
    return redirect(f"/runs/jobs/{added.id}")


@router.get("/runs/jobs/{number}")
async def job(request: Request, app: App, number: int) -> Response:
    one = app.jobs.get(number)
    return page(request, "job.html", **await _doing(app, one), **_state(app, one))


@router.get("/runs/jobs/{number}/state")
async def job_state(app: App, number: int) -> Response:
    one = app.jobs.get(number)
    answer = part("job_state.html", job=one, **_state(app, one))
    if one.is_over:
        answer.status_code = _STOP_POLLING
        answer.headers["hx-trigger"] = "job-over"
    return answer


@router.get("/runs/jobs/{number}/doing")
async def job_doing(app: App, number: int) -> Response:
    return part("job_doing.html", **await _doing(app, app.jobs.get(number)))


@router.post("/runs/jobs/{number}/stop")
async def stop(app: App, who: Who, number: int) -> Response:
    """Stop a job once: a second click, or one in another tab, does not kill a job that is about to end."""
    if not app.jobs.is_stopping(number):
        await app.actions.stop_job(who, number)
    return _accepted()


@router.post("/runs/jobs/{number}/kill")
async def kill(app: App, who: Who, number: int) -> Response:
    """Kill a job, but only after a stop."""
    if app.jobs.is_stopping(number):
        await app.actions.stop_job(who, number, "kill job")
    return _accepted()


@router.post("/runs/jobs/{number}/resume")
async def resume(app: App, who: Who, number: int) -> Response:
    return redirect(f"/runs/jobs/{(await app.actions.resume_job(who, number)).id}")


@router.get("/results/{number}")
async def result(request: Request, app: App, number: int) -> Response:
    report = await asyncio.to_thread(report_of, app.registry, str(number))
    one = report.results[0]
    return page(request, "compare.html", title=f"Result {number}", result=one, ids=str(number), body=report.as_body())


@router.get("/compare")
async def compare(request: Request, app: App) -> Response:
    named = request.query_params.getlist("ids")
    ids = ",".join(named)
    report = await asyncio.to_thread(report_of, app.registry, ids)
    return page(request, "compare.html", title=report.title, result=None, ids=ids, body=report.as_body())


def _accepted() -> Response:
    """Answer without the job's state, which the page then reads: a late answer could show an ended job as running."""
    return Response(status_code=202, headers={"hx-trigger": "job-asked"})


def _models(app: Application) -> list[str]:
    """Registered models, running ones first: a bench of any other would have to start its engine."""
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
    """Template values for the actions that a job offers, and for its results."""
    left = await asyncio.to_thread(measured, app.registry, one) if one.is_over else None
    body = ""
    if left is not None and left.results:
        shown = str(left.results[-1]) if one.needs_engine or not left.experiment else left.experiment
        body = (await asyncio.to_thread(report_of, app.registry, shown)).as_body()
    return {"job": one, "measured": left, "body": body, "is_stopping": app.jobs.is_stopping(one.id)}


def _state(app: Application, one: Job) -> dict[str, Any]:
    return {"memory": _memory(app, one), "progress": None if one.is_over else progress(one)}


def _memory(app: Application, one: Job) -> list[tuple[str, ProcessSample | None]]:
    """Label suffix and sample of each row. A bench is a client: the engine that it measures is another process."""
    processes = app.watching.latest.sample.processes if app.watching.latest is not None else {}
    own = processes.get(f"job {one.id}")
    if not one.needs_engine:
        return [("", own)]
    return [(" of the client", own), (" of the engine", processes.get(one.model))]
