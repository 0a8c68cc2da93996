"""The dashboard: charts, where memory goes, and the KV tiers, every second."""

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from overspill.manager import sse
from overspill.manager.application import Application
from overspill.manager.asking import App
from overspill.manager.pages.rendering import fragment, page
from overspill.manager.telemetry.memory_map import engine_tiers, memory_maps
from overspill.manager.telemetry.watcher import Moment

router = APIRouter()


@router.get("/")
async def dashboard(request: Request, app: App) -> Response:
    panels = _panels(app, app.watching.latest) if app.watching.latest is not None else ""
    return page(request, "dashboard.html", panels=panels)


@router.get("/events/dashboard")
async def events(app: App) -> Response:
    async def told() -> AsyncIterator[str]:
        with app.watching.changes.listening() as listener:
            while True:
                moment = (await listener.next())["moment"]
                yield sse.event("sample", moment.event) + sse.event("panels", _panels(app, moment))

    return sse.stream(told(), app.closing)


def _panels(app: Application, moment: Moment) -> str:
    """The same for everybody who watches, so it is made once for each moment."""
    if _made.get(id(app), (None, ""))[0] is not moment:
        engines = app.engines.snapshots()
        text = fragment(
            "panels.html", sample=moment.sample, maps=memory_maps(moment.sample, engines),
            tiers=engine_tiers(moment, engines), engines=engines,
        )  # fmt: skip
        _made.clear()
        _made[id(app)] = (moment, text)
    return _made[id(app)][1]


_made: dict[int, tuple[Moment | None, str]] = {}
