"""Runs and results: jobs with their progress, what was measured, and results side by side."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from overspill.experiment.listing import result_as_text
from overspill.experiment.measures import BY_KEY
from overspill.manager import logs, sse
from overspill.manager.api.results import report_of
from overspill.manager.application import Application
from overspill.manager.asking import App, Who
from overspill.manager.errors import ManagerError
from overspill.manager.jobs.commands import FIELDS, JobKind, known_kinds
from overspill.manager.pages.comparing import comparison_charts, comparison_rows
from overspill.manager.pages.rendering import form_of, page, part
from overspill.manager.watching.samples import ProcessSample
from overspill.registry import get_result, list_results, list_runs

router = APIRouter()
_LISTED = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "tokens_from_ram")
_MOST_LISTED = 100


@router.get("/runs")
async def runs(request: Request, app: App) -> Response:
    found = await asyncio.to_thread(list_results, app.registry, limit=_MOST_LISTED)
    started = await asyncio.to_thread(list_runs, app.registry, None, 30)
    rows = [(one, [BY_KEY[key].shown(BY_KEY[key].value(one.metrics)) for key in _LISTED]) for one in found]
    return page(
        request, "runs.html", jobs=app.jobs.list(), results=rows, runs=started, kinds=known_kinds(), fields=FIELDS,
        models=_models(app), heads=[BY_KEY[key].name.strip() for key in _LISTED],
    )  # fmt: skip


@router.get("/runs/jobs")
async def jobs(app: App) -> Response:
    return part("jobs.html", jobs=app.jobs.list())


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
    lines = await asyncio.to_thread(logs.tail, Path(one.log_file), 200)
    return page(request, "job.html", job=one, lines=lines, memory=_memory(app, number))


@router.get("/runs/jobs/{number}/state")
async def job_state(app: App, number: int) -> Response:
    return part("job_state.html", job=app.jobs.get(number), memory=_memory(app, number))


@router.post("/runs/jobs/{number}/stop")
async def stop(app: App, who: Who, number: int) -> Response:
    async with app.actions.audited(who, "stop job", str(number)):
        one = await app.jobs.stop(number)
    return part("job_state.html", job=one, memory=_memory(app, number))


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
        request, "compare.html", report=report, ids=ids, rows=comparison_rows(report.comparison),
        charts=comparison_charts(report.comparison),
    )  # fmt: skip


def _models(app: Application) -> list[str]:
    """Those that run first: a bench of another would have to start it."""
    known = [one for one in app.engines.snapshots() if one.is_registered]
    return [one.name for one in sorted(known, key=lambda one: (one.pid is None, one.name))]


def _memory(app: Application, number: int) -> ProcessSample | None:
    latest = app.watching.latest
    return latest.sample.processes.get(f"job {number}") if latest is not None else None
