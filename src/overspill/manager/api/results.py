"""Runs and results: listed, compared, exported."""

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from overspill.manager.api import shapes
from overspill.manager.asking import App
from overspill.measure.report import Report
from overspill.registry import Registry, get_result, list_results, list_runs

router = APIRouter(tags=["results"], responses=shapes.REFUSALS)
Ids = Annotated[
    str, Query(max_length=1000, description="Numbers of results or names of experiments, separated by commas.")
]
Limit = Annotated[int, Query(ge=1, le=1000)]
_TYPES = {"json": "application/json", "csv": "text/csv; charset=utf-8", "html": "text/html; charset=utf-8"}
# Every request's times: of use in an export, and too much for a list.
_LONG = ("samples", "ttfts", "tpots", "itls", "requests", "answers")


@router.get("/runs", response_model=list[dict[str, Any]], summary="Starts of engines, the newest first")
async def runs(
    app: App, model: Annotated[str | None, Query(max_length=250)] = None, limit: Limit = 50
) -> list[dict[str, Any]]:
    return [
        {
            "id": one.id,
            "model": one.model,
            "argv": list(one.argv),
            "started_at": one.started_at.isoformat(),
            "ended_at": one.ended_at.isoformat() if one.ended_at is not None else None,
            "end": str(one.end) if one.end is not None else None,
            "exit_code": one.exit_code,
            "detail": one.detail,
            "is_running": one.is_running,
        }
        for one in await asyncio.to_thread(list_runs, app.registry, model, limit)
    ]


@router.get("/results", response_model=list[dict[str, Any]], summary="What was measured, the newest first")
async def results(
    app: App,
    model: Annotated[str | None, Query(max_length=250)] = None,
    experiment: Annotated[str | None, Query(max_length=250)] = None,
    limit: Limit = 100,
) -> list[dict[str, Any]]:
    found = await asyncio.to_thread(
        list_results, app.registry, model=model, experiment=experiment, limit=limit
    )  # fmt: skip
    return [{**one.as_json(), "metrics": _short(one.metrics)} for one in found]


@router.get("/results/{number}", response_model=dict[str, Any], summary="One result, with everything to repeat it")
async def result(app: App, number: int) -> dict[str, Any]:
    return (await asyncio.to_thread(get_result, app.registry, number)).as_json()


@router.get("/compare", response_model=dict[str, Any], summary="Results side by side, each compared with the first")
async def compare(app: App, ids: Ids) -> dict[str, Any]:
    return (await asyncio.to_thread(report_of, app.registry, ids)).as_json()


@router.get("/export", summary="Results as a file", response_class=Response)
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


def _short(metrics: Any) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in _LONG and not isinstance(value, list)}
