"""The machine: numbers now and before, where memory goes, and the manager itself."""

import asyncio
import dataclasses
import math
import os
from typing import Annotated, Any

from fastapi import APIRouter, Query

from overspill.manager.api import shapes
from overspill.manager.asking import App
from overspill.manager.errors import ManagerError
from overspill.manager.pages.charts import charts_of
from overspill.manager.telemetry.memory_map import engine_tiers, memory_maps
from overspill.manager.telemetry.watcher import Moment
from overspill.registry.audit import list_audit

router = APIRouter(tags=["machine"], responses=shapes.REFUSALS)


@router.get("/status", response_model=dict[str, Any], summary="The manager itself")
async def status(app: App) -> dict[str, Any]:
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


@router.get("/sample", response_model=dict[str, Any], summary="The machine as it was measured last")
async def sample(app: App) -> dict[str, Any]:
    return dataclasses.asdict(_moment(app).sample)


@router.get("/memory", response_model=dict[str, Any], summary="Where memory goes, and where KV lies")
async def memory(app: App) -> dict[str, Any]:
    moment, engines = _moment(app), app.engines.snapshots()
    return {
        "at": moment.sample.at,
        "maps": [one.as_json() for one in memory_maps(moment.sample, engines)],
        "engines": [dataclasses.asdict(one) for one in engine_tiers(moment, engines)],
    }


@router.get("/history", response_model=shapes.History, summary="Numbers of the last 15 minutes, or of the last day")
async def history(
    app: App,
    names: Annotated[str, Query(max_length=4000, description="Separated by commas; all without it.")] = "",
    by: Annotated[str, Query(pattern="^(second|minute)$")] = "second",
    after: Annotated[float | None, Query(description="Only rows that are newer; seconds since 1970.")] = None,
) -> dict[str, Any]:
    ring = app.watching.history.by_second if by == "second" else app.watching.history.by_minute
    wanted = {name for name in names.split(",") if name} or None
    begin = after if after is not None and math.isfinite(after) else -math.inf
    return ring.columns(wanted, after=begin)


@router.get("/charts", response_model=list[dict[str, Any]], summary="The charts of the dashboard, by name")
async def charts(app: App) -> list[dict[str, Any]]:
    return [chart.as_json() for chart in charts_of(app.watching.history.by_second.names)]


@router.get("/audit", response_model=list[dict[str, Any]], summary="Who did what, the newest first")
async def audit(
    app: App,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(description="The number of the last entry of the page above.")] = None,
) -> list[dict[str, Any]]:
    entries = await asyncio.to_thread(list_audit, app.registry, limit, before)
    return [{**dataclasses.asdict(one), "at": one.at.isoformat(), "outcome": str(one.outcome)} for one in entries]


def _moment(app: App) -> Moment:
    if app.watching.latest is None:
        raise ManagerError("nothing was measured yet; ask again in a second")
    return app.watching.latest
