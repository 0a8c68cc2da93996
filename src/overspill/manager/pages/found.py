"""Found services: vLLM servers of others, with what they serve and hold."""

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from overspill.manager.api import found as api
from overspill.manager.api.shapes import Confirmation
from overspill.manager.asking import App, Who
from overspill.manager.pages.rendering import form_of, page, part

router = APIRouter()
_TO_LIST = {"hx-redirect": "/found"}


@router.get("/found")
async def found(request: Request, app: App) -> Response:
    return page(request, "found.html", servers=await api.look(app), watched=app.watching.found)


@router.get("/found/list")
async def listed(app: App) -> Response:
    return part("found_list.html", servers=await api.look(app), watched=app.watching.found)


@router.post("/found/{pid}/watch")
async def watch(app: App, who: Who, pid: int) -> Response:
    await api.watch(app, who, pid)
    return HTMLResponse("", headers=_TO_LIST)


@router.post("/found/{pid}/unwatch")
async def unwatch(app: App, who: Who, pid: int) -> Response:
    await api.unwatch(app, who, pid)
    return HTMLResponse("", headers=_TO_LIST)


@router.post("/found/{pid}/stop")
async def stop(request: Request, app: App, who: Who, pid: int) -> Response:
    form = await form_of(request)
    confirmed = Confirmation(identity=form.get("identity", "")[:200], confirm_name=form.get("confirm_name", "")[:1000])
    await api.stop(app, who, pid, confirmed)
    return HTMLResponse("", headers=_TO_LIST)
