"""Logs: the last lines, new ones as they come, and a search."""

import asyncio
import shlex
from collections.abc import AsyncIterator
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import Response

from overspill.manager import logs, sse
from overspill.manager.asking import App
from overspill.manager.pages.rendering import page

router = APIRouter()
_SHOWN = 500


@router.get("/logs")
async def log(request: Request, app: App) -> Response:
    engines = app.engines.snapshots()
    names = [one.name for one in engines]
    running = [one.name for one in engines if one.pid is not None]
    name = request.query_params.get("name") or next(iter([*running, *names]), "")
    search = request.query_params.get("search", "")[:200]
    found, hint = None, ""
    if name:
        await app.engines.require_known(name)
        hint = app.engines.log_hint(name)
    if name and search and not hint:
        found = await asyncio.to_thread(logs.search, app.engines.log_file(name), search, limit=_SHOWN)
    return page(
        request, "logs.html", names=names, name=name, search=search, found=found, hint=hint,
        command=_command(request, name),
    )  # fmt: skip


@router.get("/events/logs/{name:path}")
async def events(app: App, name: str) -> Response:
    await app.engines.require_known(name)
    path = app.engines.log_file(name)

    async def told() -> AsyncIterator[str]:
        async for some in logs.follow(path, _SHOWN):
            yield sse.event("lines", "\n".join(some))

    return sse.stream(told(), app.closing)


def _command(request: Request, name: str) -> str:
    """What follows the log in a terminal, at the address by which this page was found."""
    words = ["curl", "-N", f"{request.base_url}api/logs/{quote(name)}?follow=true"]
    if request.state.identity.session is not None:  # a program has no login
        words += ["-H", "Authorization: Bearer KEY"]
    return shlex.join(words)
