"""Logs of engines and jobs, as plain text: for a terminal as well as for the page."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from overspill.manager import logs, sse
from overspill.manager.api import shapes
from overspill.manager.application import Application
from overspill.manager.asking import App

router = APIRouter(tags=["logs"], responses=shapes.REFUSALS)
Lines = Annotated[int, Query(ge=1, le=10_000, description="How many of the last ones.")]
Text = Annotated[str, Query(max_length=200, description="Only lines that hold this, whatever its case.")]
Follow = Annotated[bool, Query(description="Go on with new lines as they are written.")]
Before = Annotated[
    int | None, Query(ge=0, le=1 << 53, description="Search before this place, as X-Searched-From told it.")
]


@router.get("/logs/{name:path}", response_class=PlainTextResponse, summary="An engine's log")
async def engine_log(
    app: App, name: str, lines: Lines = 200, search: Text = "", before: Before = None, follow: Follow = False
) -> Response:
    await app.engines.require_known(name)
    if hint := app.engines.log_hint(name):
        return PlainTextResponse(f"{hint}\n")
    return await answer(app, app.engines.log_file(name), lines, search, before, follow=follow)


@router.get("/jobs/{number}/log", response_class=PlainTextResponse, summary="A job's log")
async def job_log(
    app: App, number: int, lines: Lines = 200, search: Text = "", before: Before = None, follow: Follow = False
) -> Response:
    return await answer(app, Path(app.jobs.get(number).log_file), lines, search, before, follow=follow)


async def answer(
    app: Application, path: Path, num_lines: int, search: str, before: int | None, *, follow: bool
) -> Response:
    if follow:
        return sse.stream(_followed(path, num_lines), app.closing, "text/plain; charset=utf-8")
    if search:
        found = await asyncio.to_thread(logs.search, path, search, limit=num_lines, before=before)
        headers = {"x-searched-from": str(found.searched_from)}
        return PlainTextResponse("".join(f"{line.text}\n" for line in found.lines), headers=headers)
    told = await asyncio.to_thread(logs.tail, path, num_lines)
    return PlainTextResponse("".join(f"{line}\n" for line in told))


async def _followed(path: Path, num_lines: int) -> AsyncIterator[str]:
    async for some in logs.follow(path, num_lines):
        yield "".join(f"{line}\n" for line in some)
