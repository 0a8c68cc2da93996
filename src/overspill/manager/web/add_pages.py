"""The page that adds a model: found here or on the hub, pictured at a context of one's choice, and started."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from overspill.kv.errors import OverspillError
from overspill.manager.errors import ManagerError
from overspill.manager.library import local_models, search_hub
from overspill.manager.web.application import App, Application, Who
from overspill.manager.web.forms import GROUPS, changes_of, form_values
from overspill.manager.web.rendering import form_of, page, part, redirect

router = APIRouter()
_MOST_TEXT = 200


@router.get("/add")
async def add_page(request: Request, app: App) -> Response:
    source = request.query_params.get("source", "")[:500]
    found = await _found(app)
    chosen = next((one for one in found["models"] if one.source == source), None)
    needs_download = bool(source) and not source.startswith("/") and (chosen is None or not chosen.is_complete)
    return page(
        request, "add.html", **found, source=source, chosen=chosen, needs_download=needs_download,
        name=_short_name(source), groups=GROUPS, values=form_values(None) | {"source": source},
    )  # fmt: skip


@router.get("/add/list")
async def add_list(app: App) -> Response:
    return part("add_list.html", **await _found(app))


@router.get("/add/search")
async def search(request: Request) -> Response:
    text = request.query_params.get("q", "")[:_MOST_TEXT].strip()
    try:
        found = await asyncio.to_thread(search_hub, text)
    except ManagerError as error:
        return part("notice.html", text=str(error))
    return part("add_hub.html", found=found, text=text)


@router.post("/add/download")
async def download(request: Request, app: App, who: Who) -> Response:
    source = (await form_of(request)).get("source", "")
    await app.actions.download(who, source)
    return part("add_list.html", **await _found(app))


@router.post("/add/download/stop")
async def stop_download(request: Request, app: App, who: Who) -> Response:
    await app.actions.stop_download(who, (await form_of(request)).get("source", ""))
    return part("add_list.html", **await _found(app))


@router.post("/add/remove")
async def remove(request: Request, app: App, who: Who) -> Response:
    await app.actions.remove_download(who, (await form_of(request)).get("source", ""))
    return part("add_list.html", **await _found(app))


@router.get("/add/plan")
async def plan(request: Request, app: App) -> Response:
    """The picture of a model that is not added yet, with the form's settings; mistakes are a part of it."""
    form = {name: value for name, value in changes_of(request.query_params).items() if value is not None}
    try:
        planned = await app.actions.plan_new(str(form.pop("source", "")), form)
    except OverspillError as error:
        return part("notice.html", text=str(error))
    is_first = "max_model_len" not in form
    return part("planned.html", planned=planned, plan=planned.plan, save_url="", is_first=is_first)


@router.post("/add")
async def add(request: Request, app: App, who: Who) -> Response:
    form = await form_of(request)
    name = form.get("name", "").strip()
    added = await app.actions.add(who, name, changes_of(form))
    if form.get("then") != "start":
        return redirect("/models")
    app.actions.begin(who, "start", added.name)
    return redirect(f"/try?model={added.name}")


async def _found(app: Application) -> dict[str, Any]:
    downloads = await asyncio.to_thread(app.downloads.list)
    models = await asyncio.to_thread(local_models, app.setup.models_folders, app.downloads.cache)
    added = {one.settings.source: one.name for one in app.engines.catalogue.models()}
    return {"models": models, "downloads": downloads, "added": added, "folders": app.setup.models_folders}


def _short_name(source: str) -> str:
    """What people would call it."""
    return source.rstrip("/").rpartition("/")[2].lower()
