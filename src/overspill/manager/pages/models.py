"""The page of models: cards that follow their engines, forms, and a context that is planned while it is moved."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from overspill.kv.errors import OverspillError
from overspill.manager import sse
from overspill.manager.application import Application
from overspill.manager.asking import App, Who
from overspill.manager.errors import ManagerError
from overspill.manager.pages.cards import Card, changes_of, form_values, last_speeds
from overspill.manager.pages.rendering import form_of, fragment, page, part
from overspill.manager.pages.words import element_id
from overspill.registry import get_model
from overspill.settings import MODEL_SETTINGS

router = APIRouter()
_DOING = ("start", "stop", "restart", "switch")
_NO_LENGTH = "that is no length; write how many tokens, for example 4096"


@router.get("/models")
async def models(request: Request, app: App) -> Response:
    await app.engines.catalogue.refresh()
    names = [one.name for one in app.engines.snapshots()]
    app.speeds.update(await asyncio.to_thread(last_speeds, app.registry, names))
    running = _running(app)
    cards = [_card(app, name, running) for name in names]
    return page(
        request, "models.html", cards=cards, problem=app.engines.catalogue.problem, settings=MODEL_SETTINGS,
        values=form_values(None), folders=app.setup.models_folders,
    )  # fmt: skip


@router.get("/events/models")
async def events(app: App) -> Response:
    """The part of each card that follows its engine; the rest is left alone while somebody writes in it."""

    async def told() -> AsyncIterator[str]:
        before: list[str] = []
        async for some in app.engines.events():
            running = _running(app)
            # Every card asks about those that run before it switches.
            changed = some if running == before else app.engines.snapshots()
            before = running
            for name in {one.name: None for one in [*some, *changed]}:
                card = _card(app, name, running)
                yield sse.event(f"state-{card.id}", fragment("card_state.html", card=card))

    return sse.stream(told(), app.closing)


@router.post("/models")
async def add(request: Request, app: App, who: Who) -> Response:
    form = await form_of(request)
    await app.actions.add(who, form.get("name", "").strip(), changes_of(form))
    return HTMLResponse("", headers={"hx-redirect": "/models"})


@router.get("/models/settings/{name:path}")
async def settings(request: Request, app: App, name: str) -> Response:
    model = await asyncio.to_thread(get_model, app.registry, name)
    return part("card_settings.html", model=model, settings=MODEL_SETTINGS, values=form_values(model), edited=None)


@router.post("/models/settings/{name:path}")
async def edit(request: Request, app: App, who: Who, name: str) -> Response:
    form = await form_of(request)
    version = form.get("version", "")
    edited = await app.actions.edit(who, name, changes_of(form), int(version) if version.isdigit() else None)
    return part(
        "card_settings.html", model=edited.after, settings=MODEL_SETTINGS, values=form_values(edited.after),
        edited=edited,
    )  # fmt: skip


@router.post("/models/context/{name:path}")
async def save_context(request: Request, app: App, who: Who, name: str) -> Response:
    """Of the slider. Answers with what becomes of it: one that does not fit is saved too, and cannot be started."""
    length = (await form_of(request)).get("max_model_len", "").strip()
    if not length:  # as a setting it would be taken back
        raise ManagerError(_NO_LENGTH)
    edited = await app.actions.edit(who, name, {"max_model_len": length}, None)
    try:
        planned = await app.actions.plan(name, {})
        answer = part("saved_context.html", edited=edited, planned=planned, plan=planned.plan)
    except OverspillError as error:  # it is saved all the same
        answer = part("saved_context.html", edited=edited, planned=None, problem=str(error))
    # The form of all settings, if it is open, is of an older version now.
    answer.headers["hx-trigger"] = f"saved-{element_id(name)}"
    return answer


@router.post("/models/remove/{name:path}")
async def remove(app: App, who: Who, name: str) -> Response:
    await app.actions.remove(who, name, None)
    return HTMLResponse("", headers={"hx-redirect": "/models"})


@router.get("/models/slider/{name:path}")
async def slider(app: App, name: str) -> Response:
    planned = await app.actions.plan(name, {})
    return part("slider.html", name=name, planned=planned, plan=planned.plan)


@router.get("/models/plan/{name:path}")
async def plan(request: Request, app: App, name: str) -> Response:
    """What becomes of a context while the slider is moved; what is wrong with it is a part of the page."""
    length = request.query_params.get("max_model_len", "").strip()
    if not length:
        return part("notice.html", text=_NO_LENGTH)
    try:
        planned = await app.actions.plan(name, {"max_model_len": length})
    except OverspillError as error:
        return part("notice.html", text=str(error))
    return part("planned.html", planned=planned, plan=planned.plan)


@router.post("/models/{doing}/{name:path}")
async def do(app: App, who: Who, doing: str, name: str) -> Response:
    """Answers at once, and with nothing: events tell how it goes on. An answer with the card as it is then could come
    after the event that follows it, and would stay."""
    if doing not in _DOING:
        raise ManagerError(f"{doing!r:.40} is none of {', '.join(_DOING)}")
    await app.actions.require_known(name)
    actions = app.actions
    if doing == "stop":
        actions.begin(name, actions.stop(who, name))
    elif doing == "restart":
        actions.begin(name, actions.restart(who, name))
    else:
        actions.begin(name, actions.start(who, name, make_room=doing == "switch"))
    return Response(status_code=202)


def _running(app: Application) -> list[str]:
    """Those that the manager would stop to make room; what others started it leaves alone."""
    return [one.name for one in app.engines.snapshots() if one.pid is not None and one.is_managed]


def _card(app: Application, name: str, running: Sequence[str]) -> Card:
    return Card(
        model=app.engines.catalogue.get(name),
        engine=app.engines.snapshot(name),
        refusal=app.actions.refusals.get(name, ""),
        speed=app.speeds.get(name),
        others=[other for other in running if other != name],
    )
