"""The API: everything that the pages do, as JSON, documented in /api/openapi.json."""

import asyncio
import csv
import io
import json
import math
import os
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path as File
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import PlainTextResponse
from starlette.responses import StreamingResponse

from overspill.manager import logs, sse
from overspill.manager.errors import ManagerError
from overspill.manager.job_commands import FIELDS as JOB_FIELDS
from overspill.manager.job_commands import JobKind
from overspill.manager.jobs import Job
from overspill.manager.states import EngineAction
from overspill.manager.telemetry.overview import engine_tiers, memory_maps
from overspill.manager.telemetry.watcher import Moment
from overspill.manager.web import schemas
from overspill.manager.web.application import App, Application, Who
from overspill.manager.web.charts import charts_of
from overspill.measure.report import Report
from overspill.registry import (
    Model,
    Registry,
    UnknownModel,
    get_model,
    get_result,
    list_models,
    list_results,
    list_runs,
)
from overspill.registry.activity import FIELDS, MAX_REQUESTS, Request, RequestOutcome, keys_and_use, list_requests
from overspill.registry.audit import list_audit

Json = dict[str, Any]

# Models and their plans

models = APIRouter(tags=["models"])


@models.get("/models", response_model=list[schemas.Model], summary="All models, by name")
async def all_models(app: App) -> list[Json]:
    return [_with_state(app, model) for model in await asyncio.to_thread(list_models, app.registry)]


@models.post("/models", response_model=schemas.Model, status_code=201, summary="Add a model")
async def add_model(app: App, who: Who, body: schemas.NewModel) -> Json:
    settings = body.model_dump(exclude_unset=True, exclude={"name"})
    return _with_state(app, await app.actions.add(who, body.name, settings))


@models.get("/models/{name:path}", response_model=schemas.Model, summary="One model")
async def one_model(app: App, name: str) -> Json:
    return _with_state(app, await asyncio.to_thread(get_model, app.registry, name))


@models.patch("/models/{name:path}", response_model=schemas.Edited, summary="Change settings of a model")
async def edit_model(app: App, who: Who, name: str, body: schemas.ModelEdit) -> Json:
    changes = body.model_dump(exclude_unset=True, exclude={"version"})
    edit = await app.actions.edit(who, name, changes, body.version)
    return {"model": _with_state(app, edit.after), "changed": edit.changed, "needs_restart": list(edit.needs_restart)}


@models.delete("/models/{name:path}", response_model=schemas.Model, summary="Remove a model that does not run")
async def remove_model(app: App, who: Who, name: str, version: int | None = None) -> Json:
    return {**(await app.actions.remove(who, name, version)).as_json(), "state": "stopped"}


@models.post("/plan", response_model=schemas.Plan, summary="What would fit, what would go to RAM, and how fast")
async def plan(app: App, body: schemas.PlanRequest) -> Json:
    changes = body.model_dump(exclude_unset=True, exclude={"name"})
    return (await app.actions.plan(body.name, changes)).as_json()


def _with_state(app: Application, model: Model) -> Json:
    try:
        state = str(app.engines.snapshot(model.name).state)
    except UnknownModel:
        state = "stopped"
    return {**model.as_json(), "state": state}


# Engines

engines = APIRouter(tags=["engines"])
Wait = Annotated[bool, Query(description="Answer when the action is done; otherwise at once, with the current state.")]
_BEGUN: dict[int | str, Json] = {
    202: {"model": schemas.Engine, "description": "Without waiting: the action has begun; the state is current."}
}


@engines.get("/engines", response_model=list[schemas.Engine], summary="All engines, by name")
async def all_engines(app: App) -> list[Json]:
    return [one.as_json() for one in app.engines.snapshots()]


@engines.get("/engines/{name:path}", response_model=schemas.Engine, summary="One engine")
async def one_engine(app: App, name: str) -> Json:
    await app.engines.known(name)
    return app.engines.snapshot(name).as_json()


@engines.post(
    "/engines/{action}/{name:path}",
    response_model=schemas.Engine,
    responses=_BEGUN,
    summary="Start if there is room; switch to it, parking or stopping others for it; stop; restart; park; or wake",
)
async def control_engine(
    app: App,
    who: Who,
    response: Response,
    action: EngineAction,
    name: str,
    wait: Wait = True,
) -> Json:
    await app.engines.known(name)
    if wait:
        return (await app.actions.control(who, action, name)).as_json()
    app.actions.begin(who, action, name)
    response.status_code = 202
    return app.engines.snapshot(name).as_json()


@engines.get("/engine-metrics/{name:path}", response_model=dict[str, float | None], summary="An engine's counters now")
async def engine_metrics(app: App, name: str) -> Json:
    await app.engines.known(name)
    engine = app.engines.snapshot(name)
    counters = await app.watching.numbers_of(engine.url) if engine.url is not None else None
    if counters is None:
        raise ManagerError(f"{name} does not report its counters: it is {engine.state}")
    return {field: getattr(counters, field) for field in counters.__dataclass_fields__}


@engines.get("/events", response_class=StreamingResponse, summary="Events: all engines, then each engine that changes")
async def engine_events(app: App) -> StreamingResponse:
    async def events() -> AsyncIterator[str]:
        async for changed in app.engines.events():
            for one in changed:
                yield sse.event("engine", json.dumps(one.as_json()))

    return sse.stream(events(), app.closing)


@engines.get("/upstreams", response_model=list[Json], summary="Other servers whose models the gateway serves")
async def upstreams(app: App) -> list[Json]:
    return [one.as_json() for one in app.servers.all.values()]


# The machine, and the manager itself

machine = APIRouter(tags=["machine"])


@machine.get("/status", response_model=Json, summary="The manager itself")
async def status(app: App) -> Json:
    return {
        "pid": os.getpid(),
        "since": app.since,
        "host": app.setup.host,
        "port": app.setup.port,
        "is_protected": await app.access.is_protected(),
        "registry": str(app.registry.place),
        "registry_problem": app.engines.catalogue.problem,
        "models_folders": [str(folder) for folder in app.setup.models_folders],
    }


@machine.get("/sample", response_model=Json, summary="The latest measurements of the machine")
async def sample(app: App) -> Json:
    return asdict(_moment(app).sample)


@machine.get("/memory", response_model=Json, summary="Where memory goes, and where KV lies")
async def memory(app: App) -> Json:
    moment, snapshots = _moment(app), app.engines.snapshots()
    return {
        "at": moment.sample.at,
        "maps": [one.as_json() for one in memory_maps(moment.sample, snapshots)],
        "engines": [asdict(one) for one in engine_tiers(moment, snapshots)],
    }


@machine.get("/history", response_model=schemas.History, summary="Numbers of the last 15 minutes, or of the last day")
async def history(
    app: App,
    names: Annotated[str, Query(max_length=4000, description="Separated by commas; empty for all.")] = "",
    charts: Annotated[bool, Query(description="Only those of the dashboard's charts.")] = False,
    by: Annotated[str, Query(pattern="^(second|minute)$")] = "second",
    after: Annotated[float | None, Query(description="Only rows after this time, in seconds since 1970.")] = None,
) -> Json:
    ring = app.watching.history.by_second if by == "second" else app.watching.history.by_minute
    wanted = {name for name in names.split(",") if name} or None
    begin = after if after is not None and math.isfinite(after) else -math.inf
    if charts:
        wanted = {line.name for chart in charts_of(ring.names(after=begin)) for line in chart.lines}
    return ring.columns(wanted, after=begin)


@machine.get("/charts", response_model=list[Json], summary="The charts of the dashboard, by name")
async def charts(
    app: App,
    seconds: Annotated[float, Query(gt=0, le=86400, description="Only charts with data this recent.")] = 900.0,
) -> list[Json]:
    ring = app.watching.history.ring(seconds)
    return [asdict(chart) for chart in charts_of(ring.names(after=time.time() - seconds))]


@machine.get("/audit", response_model=list[Json], summary="Who did what, the newest first")
async def audit(
    app: App,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(description="Number of the previous page's last entry.")] = None,
) -> list[Json]:
    entries = await asyncio.to_thread(list_audit, app.registry, limit, before)
    return [{**asdict(one), "at": one.at.isoformat()} for one in entries]


@machine.get("/activity", response_class=Response, summary="Requests through the gateway, the newest first")
async def activity(
    app: App,
    model: Annotated[str, Query(max_length=250)] = "",
    who: Annotated[str, Query(max_length=250, description="As the list shows it: key NAME, or local.")] = "",
    outcome: Annotated[str, Query(pattern=f"^({'|'.join(RequestOutcome)})?$")] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_REQUESTS)] = 100,
    before: Annotated[int | None, Query(description="Number of the previous page's last request.")] = None,
    form: Annotated[str, Query(pattern="^(json|csv)$")] = "json",
) -> Response:
    def made() -> str:
        found = list_requests(app.registry, model=model, who=who, outcome=outcome, before=before, limit=limit)
        return as_csv(found) if form == "csv" else json.dumps([one.as_json() for one in found])

    headers = {"content-disposition": 'attachment; filename="overspill-activity.csv"'} if form == "csv" else {}
    return Response(await asyncio.to_thread(made), media_type=_TYPES[form], headers=headers)


def as_csv(requests: list[Request]) -> str:
    written = io.StringIO()
    table = csv.writer(written)
    table.writerow(names := ("id", *(name for name in FIELDS if name != "id"), "tokens_per_s"))
    for one in requests:
        told = one.as_json()
        # Clients choose some of these texts, and a spreadsheet evaluates a cell that begins like a formula.
        cells = (told[name] for name in names)
        table.writerow(f"'{cell}" if isinstance(cell, str) and cell[:1] in tuple("=+-@") else cell for cell in cells)
    return written.getvalue()


def _moment(app: Application) -> Moment:
    if app.watching.latest is None:
        raise ManagerError("nothing was measured yet; ask again in a second")
    return app.watching.latest


# Logs, as plain text: for a terminal as well as for the page

log_files = APIRouter(tags=["logs"])
Lines = Annotated[int, Query(ge=1, le=10_000, description="Number of last lines.")]
Text = Annotated[str, Query(max_length=200, description="Only lines with this text, ignoring case.")]
Before = Annotated[int | None, Query(ge=0, le=1 << 53, description="Search before this byte, as in X-Searched-From.")]
Follow = Annotated[bool, Query(description="Keep sending new lines as they are written.")]


@log_files.get("/logs/{name:path}", response_class=PlainTextResponse, summary="An engine's log")
async def engine_log(
    app: App, name: str, lines: Lines = 200, search: Text = "", before: Before = None, follow: Follow = False
) -> Response:
    await app.engines.known(name)
    if hint := app.engines.log_hint(name):
        return PlainTextResponse(f"{hint}\n")
    return await _log(app, app.engines.log_file(name), lines, search, before, follow=follow)


@log_files.get("/jobs/{number}/log", response_class=PlainTextResponse, summary="A job's log")
async def job_log(
    app: App, number: int, lines: Lines = 200, search: Text = "", before: Before = None, follow: Follow = False
) -> Response:
    return await _log(app, File(app.jobs.get(number).log_file), lines, search, before, follow=follow)


async def _log(app: App, path: File, num_lines: int, search: str, before: int | None, *, follow: bool) -> Response:
    async def followed() -> AsyncIterator[str]:
        async for lines in logs.follow(path, num_lines):
            yield "".join(f"{line}\n" for line in lines)

    if follow:
        return sse.stream(followed(), app.closing, "text/plain; charset=utf-8")
    if search:
        found = await asyncio.to_thread(logs.search, path, search, limit=num_lines, before=before)
        headers = {"x-searched-from": str(found.searched_from)}
        return PlainTextResponse("".join(f"{line.text}\n" for line in found.lines), headers=headers)
    return PlainTextResponse("".join(f"{line}\n" for line in await asyncio.to_thread(logs.tail, path, num_lines)))


# Jobs: benchmarks, comparisons and proofs

jobs = APIRouter(tags=["jobs"])


@jobs.get("/job-kinds", response_model=dict[str, list[dict[str, str]]], summary="Kinds of jobs, and their fields")
async def job_kinds() -> Json:
    return {
        str(kind): [{"name": one.name, "kind": one.kind, "help": one.help} for one in JOB_FIELDS[kind]]
        for kind in JobKind
    }


@jobs.get("/jobs", summary="Jobs, the newest first")
async def all_jobs(app: App) -> list[Job]:
    return app.jobs.list()


@jobs.post("/jobs", status_code=201, summary="Start a bench, an A/B, a verify or a tune")
async def add_job(app: App, who: Who, body: schemas.NewJob) -> Job:
    return await app.actions.add_job(who, body.kind, body.model, body.given, stops_others=body.stops_others)


@jobs.get("/jobs/{number}", summary="One job")
async def one_job(app: App, number: int) -> Job:
    return app.jobs.get(number)


@jobs.post("/jobs/{number}/stop", summary="Stop a job; a second time kills it")
async def stop_job(app: App, who: Who, number: int) -> Job:
    return await app.actions.stop_job(who, number)


# Runs and results

results = APIRouter(tags=["results"])
Name = Annotated[str | None, Query(max_length=250)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Ids = Annotated[
    str, Query(max_length=1000, description="Numbers of results or names of experiments, separated by commas.")
]
_TYPES = {"json": "application/json", "csv": "text/csv; charset=utf-8", "html": "text/html; charset=utf-8"}
# Every request's times: useful in an export, too much for a list.
_LONG = ("samples", "ttfts", "tpots", "itls", "requests", "answers")
_RUN = ("id", "model", "argv", "end", "exit_code", "detail", "is_running")


@results.get("/runs", response_model=list[Json], summary="Starts of engines, the newest first")
async def runs(app: App, model: Name = None, limit: Limit = 50) -> list[Json]:
    return [
        {
            **{field: getattr(run, field) for field in _RUN},
            "started_at": run.started_at.isoformat(),
            "ended_at": run.ended_at.isoformat() if run.ended_at is not None else None,
        }
        for run in await asyncio.to_thread(list_runs, app.registry, model, limit)
    ]


@results.get("/results", response_model=list[Json], summary="Results, the newest first")
async def all_results(app: App, model: Name = None, experiment: Name = None, limit: Limit = 100) -> list[Json]:
    found = await asyncio.to_thread(list_results, app.registry, model=model, experiment=experiment, limit=limit)
    return [{**one.as_json(), "metrics": _short(one.metrics)} for one in found]


@results.get("/results/{number}", response_model=Json, summary="One result, with everything to repeat it")
async def one_result(app: App, number: int) -> Json:
    return (await asyncio.to_thread(get_result, app.registry, number)).as_json()


@results.get("/compare", response_model=Json, summary="Results side by side, each compared with the first")
async def compare(app: App, ids: Ids) -> Json:
    return (await asyncio.to_thread(report_of, app.registry, ids)).as_json()


@results.get("/export", summary="Results as a file", response_class=Response)
async def export(app: App, ids: Ids, form: Annotated[str, Query(pattern="^(json|csv|html)$")] = "json") -> Response:
    def made() -> str:
        report = report_of(app.registry, ids)
        if form == "json":
            return json.dumps(report.as_json(), indent=2) + "\n"
        return report.as_csv() if form == "csv" else report.as_html()

    headers = {"content-disposition": f'attachment; filename="overspill-results.{form}"'}
    return Response(await asyncio.to_thread(made), media_type=_TYPES[form], headers=headers)


def report_of(registry: Registry, ids: str) -> Report:
    return Report.of_names(registry, [one.strip() for one in ids.split(",") if one.strip()])


def _short(metrics: Any) -> Json:
    return {name: value for name, value in metrics.items() if name not in _LONG and not isinstance(value, list)}


# Keys

keys = APIRouter(tags=["keys"])


@keys.get("/keys", response_model=list[schemas.Key], summary="Keys by name, with the use of each")
async def all_keys(app: App) -> list[Json]:
    return [{**key.as_json(), **asdict(use)} for key, use in await asyncio.to_thread(keys_and_use, app.registry)]


@keys.post("/keys", response_model=schemas.Key, status_code=201, summary="Make a key; only this answer shows it")
async def add_key(app: App, who: Who, body: schemas.NewKey) -> Json:
    limits = {"models": body.models, "expires_in": body.expires_in}
    secret, key = await app.actions.add_key(who, body.name, body.scope, **limits)
    return {**key.as_json(), "key": secret}


@keys.delete("/keys/{name}", response_model=schemas.Key, summary="Revoke a key")
async def remove_key(app: App, who: Who, name: str) -> Json:
    return (await app.actions.remove_key(who, name)).as_json()


# vLLM servers that Overspill did not start: shown, watched, and stopped by their name

found = APIRouter(tags=["found services"])
Pid = Annotated[int, Path(ge=1, le=1 << 22)]


@found.get("/found", response_model=list[schemas.Found], summary="vLLM servers that Overspill did not start")
async def found_servers(app: App) -> list[Json]:
    servers = await app.actions.found_servers()
    return [{**asdict(one), "is_watched": one.name in app.watching.found} for one in servers]


@found.post("/found/{pid}/watch", response_model=schemas.Found, summary="Show its numbers on the dashboard")
async def watch(app: App, who: Who, pid: Pid) -> Json:
    return asdict(await app.actions.watch_found(who, pid, is_watched=True))


@found.delete("/found/{pid}/watch", response_model=schemas.Found, summary="Stop watching it")
async def unwatch(app: App, who: Who, pid: Pid) -> Json:
    return asdict(await app.actions.watch_found(who, pid, is_watched=False))


@found.post("/found/{pid}/stop", response_model=dict[str, bool], summary="Stop it; its name is the confirmation")
async def stop_found(app: App, who: Who, pid: Pid, body: schemas.Confirmation) -> dict[str, bool]:
    return {"was_killed": await app.actions.stop_found(who, pid, body.identity, body.confirm_name)}


router = APIRouter(prefix="/api", responses=schemas.REFUSALS)
for part in (models, engines, machine, log_files, jobs, results, keys, found):
    router.include_router(part)
