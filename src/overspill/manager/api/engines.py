"""Engines: what they are doing, starting and stopping them, and their changes as they happen."""

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from starlette.responses import StreamingResponse

from overspill.manager import sse
from overspill.manager.api import shapes
from overspill.manager.asking import App, Who
from overspill.manager.errors import ManagerError
from overspill.manager.states import Snapshot

router = APIRouter(tags=["engines"], responses=shapes.REFUSALS)
Wait = Annotated[bool, Query(description="Answer when it is done; else at once, with the state as it is then.")]

_BEGUN: dict[int | str, dict[str, Any]] = {
    202: {"model": shapes.Engine, "description": "Without waiting: it has begun, and this is its state now."}
}


@router.get("/engines", response_model=list[shapes.Engine], summary="All engines, by name")
async def engines(app: App) -> list[dict[str, Any]]:
    return [one.as_json() for one in app.engines.snapshots()]


@router.get("/engines/{name:path}", response_model=shapes.Engine, summary="One engine")
async def engine(app: App, name: str) -> dict[str, Any]:
    await app.engines.require_known(name)
    return app.engines.snapshot(name).as_json()


@router.post(
    "/engines/start/{name:path}", response_model=shapes.Engine, responses=_BEGUN, summary="Start, if there is room"
)
async def start(app: App, who: Who, response: Response, name: str, wait: Wait = True) -> dict[str, Any]:
    return await _do(app, response, name, lambda: app.actions.start(who, name), wait=wait)


@router.post(
    "/engines/switch/{name:path}",
    response_model=shapes.Engine,
    responses=_BEGUN,
    summary="Start, and stop what is in its way",
)
async def switch(app: App, who: Who, response: Response, name: str, wait: Wait = True) -> dict[str, Any]:
    return await _do(app, response, name, lambda: app.actions.start(who, name, make_room=True), wait=wait)


@router.post("/engines/stop/{name:path}", response_model=shapes.Engine, responses=_BEGUN, summary="Stop")
async def stop(app: App, who: Who, response: Response, name: str, wait: Wait = True) -> dict[str, Any]:
    return await _do(app, response, name, lambda: app.actions.stop(who, name), wait=wait)


@router.post(
    "/engines/restart/{name:path}", response_model=shapes.Engine, responses=_BEGUN, summary="Stop, and start again"
)
async def restart(app: App, who: Who, response: Response, name: str, wait: Wait = True) -> dict[str, Any]:
    return await _do(app, response, name, lambda: app.actions.restart(who, name), wait=wait)


@router.get("/engine-metrics/{name:path}", response_model=dict[str, float | None], summary="An engine's counters now")
async def metrics(app: App, name: str) -> dict[str, float | None]:
    await app.engines.require_known(name)
    url = app.engines.snapshot(name).url
    counted = await app.watching.numbers_of(url) if url is not None else None
    if counted is None:
        raise ManagerError(f"{name} does not tell its numbers: it is {app.engines.snapshot(name).state}")
    return {field: getattr(counted, field) for field in counted.__dataclass_fields__}


@router.get("/events", response_class=StreamingResponse, summary="All engines, then each that changes, as events")
async def events(app: App) -> StreamingResponse:
    async def told() -> AsyncIterator[str]:
        async for some in app.engines.events():
            for one in some:
                yield sse.event("engine", json.dumps(one.as_json()))

    return sse.stream(told(), app.closing)


async def _do(
    app: App, response: Response, name: str, action: Callable[[], Coroutine[Any, Any, Snapshot]], *, wait: bool
) -> dict[str, Any]:
    """To the end, or only begun."""
    await app.actions.require_known(name)
    if wait:
        return (await action()).as_json()
    app.actions.begin(name, action())
    response.status_code = 202
    return app.engines.snapshot(name).as_json()
