"""Pages of models: cards that follow engines, settings, a slider that plans the context, and adding models."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import Response

from overspill.kv.errors import OverspillError
from overspill.manager import sse
from overspill.manager.errors import ManagerError
from overspill.manager.library import local_models, search_hub
from overspill.manager.states import EngineAction, Snapshot, State
from overspill.manager.telemetry.machine import ProcessSample
from overspill.manager.web.application import App, Application, Who
from overspill.manager.web.forms import GROUPS, changes_of, form_values
from overspill.manager.web.rendering import (
    element_id,
    form_of,
    fragment,
    page,
    part,
    redirect,
)
from overspill.registry import Model, Registry, get_model, list_results

router = APIRouter()
_NO_LENGTH = "that is not a context length; write a number of tokens, for example 4096"
_MOST_TEXT = 200
_SPEEDS = ("output_throughput", "mean_ttft_ms")


@router.get("/models")
async def models(request: Request, app: App) -> Response:
    await app.engines.catalogue.refresh()
    names = [one.name for one in app.engines.snapshots()]
    app.speeds.update(await asyncio.to_thread(last_speeds, app.registry, names))
    running = _running(app)
    cards = [_card(app, name, running) for name in names]
    return page(request, "models.html", cards=cards, problem=app.engines.catalogue.problem)


@router.get("/events/models")
async def model_events(app: App) -> Response:
    """Stream the part of each card that follows its engine; forms stay untouched while somebody types in them."""

    async def events() -> AsyncIterator[str]:
        before: list[str] = []
        async for changed in app.engines.events():
            running = _running(app)
            # Every card names the running engines in the question it asks before a switch.
            shown = changed if running == before else app.engines.snapshots()
            before = running
            for name in {one.name: None for one in [*changed, *shown]}:
                card = _card(app, name, running)
                yield sse.event(f"state-{card.id}", fragment("card_state.html", card=card))

    return sse.stream(events(), app.closing)


@router.get("/models/settings/{name:path}")
async def settings(request: Request, app: App, name: str) -> Response:
    model = await asyncio.to_thread(get_model, app.registry, name)
    return part("card_settings.html", model=model, groups=GROUPS, values=form_values(model), edited=None)


@router.post("/models/settings/{name:path}")
async def edit(request: Request, app: App, who: Who, name: str) -> Response:
    form = await form_of(request)
    version = form.get("version", "")
    edited = await app.actions.edit(who, name, changes_of(form), int(version) if version.isdecimal() else None)
    values = form_values(edited.after)
    return part("card_settings.html", model=edited.after, groups=GROUPS, values=values, edited=edited)


@router.post("/models/context/{name:path}")
async def save_context(request: Request, app: App, who: Who, name: str) -> Response:
    """Save the slider's context and answer with its plan; a context that does not fit is saved too."""
    length = (await form_of(request)).get("max_model_len", "").strip()
    if not length:  # an empty value would reset the setting
        raise ManagerError(_NO_LENGTH)
    edited = await app.actions.edit(who, name, {"max_model_len": length}, None)
    try:
        planned = await app.actions.plan(name, {})
        answer = part("saved_context.html", edited=edited, planned=planned, plan=planned.plan, **_saving(name))
    except OverspillError as error:  # the context is saved all the same
        answer = part("saved_context.html", edited=edited, planned=None, problem=str(error))
    # Reloads the form of all settings, if open, which otherwise holds an outdated version.
    answer.headers["hx-trigger"] = f"saved-{element_id(name)}"
    return answer


@router.post("/models/remove/{name:path}")
async def remove(app: App, who: Who, name: str) -> Response:
    await app.actions.remove(who, name, None)
    return redirect("/models")


@router.get("/models/slider/{name:path}")
async def slider(app: App, name: str) -> Response:
    """The slider with the model's plan, or in its place the reason why planning failed."""
    try:
        planned = await app.actions.plan(name, {})
    except OverspillError as error:
        return part("notice.html", text=str(error))
    return part("slider.html", name=name, planned=planned, plan=planned.plan, **_saving(name))


@router.get("/models/plan/{name:path}")
async def plan(request: Request, app: App, name: str) -> Response:
    """Plan of a context while the slider moves; errors are shown in its place on the page."""
    length = request.query_params.get("max_model_len", "").strip()
    if not length:
        return part("notice.html", text=_NO_LENGTH)
    try:
        planned = await app.actions.plan(name, {"max_model_len": length})
    except OverspillError as error:
        return part("notice.html", text=str(error))
    return part("planned.html", planned=planned, plan=planned.plan, **_saving(name))


def _saving(name: str) -> dict[str, Any]:
    return {"save_url": f"/models/context/{quote(name, safe='/')}", "is_first": False}


@router.post("/models/{action}/{name:path}")
async def control(app: App, who: Who, action: EngineAction, name: str) -> Response:
    """Begin the action and answer without content: events update the card, and a late answer would overwrite them."""
    await app.engines.known(name)
    app.actions.begin(who, action, name)
    return Response(status_code=202)


def _running(app: Application) -> list[str]:
    """Engines that the manager may stop to make room, so none that somebody else started."""
    return [one.name for one in app.engines.snapshots() if one.pid is not None and one.is_managed]


def _card(app: Application, name: str, running: Sequence[str]) -> "Card":
    return Card(
        model=app.engines.catalogue.get(name),
        engine=app.engines.snapshot(name),
        refusal=app.actions.refusals.get(name, ""),
        speed=app.speeds.get(name),
        measured=latest.sample.processes.get(name) if (latest := app.watching.latest) is not None else None,
        others=[other for other in running if other != name],
        held_by=app.engines.reserved_for,
    )


@dataclass(frozen=True, slots=True)
class Button:
    action: str
    label: str
    help: str
    confirm: str = ""
    """Question that the user confirms before the action; empty for none."""
    is_main: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    model: Model | None
    """The registered model; None if it has been removed since its engine started."""
    engine: Snapshot
    refusal: str = ""
    speed: Mapping[str, float] | None = None
    measured: ProcessSample | None = None
    """Resource use of the engine's processes, as the kernel and the driver count it."""
    held_by: str = ""
    """Why no engine is started now; empty if engines may start."""
    others: Sequence[str] = ()
    """Other models with running engines, which may have to make room for this one."""

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def id(self) -> str:
        return element_id(self.name)

    @property
    def phases(self) -> tuple[str, ...]:
        """Remarks shown next to the engine's state."""
        engine = self.engine
        is_kept, is_preloaded = (self.model.settings.keep, self.model.settings.preload) if self.model else (None, None)
        # Without a process the engine waits for memory; a new process has not reported its phase yet.
        starting = engine.phase or ("the process begins" if engine.pid is not None else "waiting for room")
        remarks = (
            (engine.state is State.STARTING, starting),
            (engine.is_leaving, f"finishes its requests ({engine.traffic.in_flight}), then stops"),
            (engine.is_draining and not engine.is_leaving, "finishes its requests, then stops for another model"),
            (not engine.is_managed and engine.pid is not None, "started outside the manager"),
            (is_kept, "kept"),
            (is_preloaded, "starts with the manager"),
        )
        return tuple(text for is_so, text in remarks if is_so)

    @property
    def buttons(self) -> tuple[Button, ...]:
        engine = self.engine
        match engine.state:
            case State.STOPPED | State.FAILED:
                return (
                    Button("start", "Start", "Starts it, if there is memory for it", is_main=True),
                    Button("switch", "Switch to it", "Starts it, stopping others if needed", self._what_may_stop),
                )
            case State.STARTING:
                return (Button("stop", "Stop", "Cancels the start"),)
            case State.PARKED:
                return (
                    Button("wake", "Wake", "Wakes it; others are parked or stopped if needed", is_main=True),
                    Button("stop", "Stop", "Stops it, and frees its RAM"),
                )
            case State.READY:
                park = Button("park", "Park", "Frees its GPU memory; it waits in RAM for the next request")
                stop = Button("stop", "Stop", "Finishes its requests, then stops")
                if engine.is_leaving:
                    cut = f"Stop {self.name} now? {engine.traffic.in_flight} requests in flight are cut off."
                    stop = Button("stop", "Stop now", "Cuts off requests in flight", cut)
                anew = "Stops it, and starts it with its current settings"
                restart = Button("restart", "Restart", anew, is_main=bool(engine.needs_restart))
                return (*((park,) if engine.can_park else ()), stop, restart)
        return ()

    @property
    def start_ends_at(self) -> float | None:
        """Expected end of the start, if it takes as long as the last one; None if unknown."""
        engine = self.engine
        if engine.state is not State.STARTING or engine.start_s is None or not engine.phases:
            return None
        return engine.phases[0][1] + engine.start_s

    @property
    def timed_phases(self) -> list[tuple[str, float, float | None]]:
        """Name, begin and duration of each phase; the duration is None for the current one."""
        begun = self.engine.phases
        ends = [at for _, at in begun[1:]]
        return [
            (name, at, end - at if end is not None else None)
            for (name, at), end in zip(begun, [*ends, None], strict=True)
        ]

    @property
    def facts(self) -> list[tuple[str, Any, str]]:
        """Name, value and unit from the plan in use, else from the settings; unset settings are up to the plan."""
        plan, settings = self.engine.plan, self.model.settings if self.model is not None else None
        facts: list[tuple[str, Any, str]] = []
        if self.engine.state is State.PARKED:
            return [
                ("Context", plan.get("max_model_len"), "tokens"),
                ("RAM held", self.engine.holds.ram_bytes, "bytes"),
                ("GPU memory held", self.measured.gpu_bytes if self.measured else None, "bytes"),
            ]
        if plan:
            kv_bytes = sum(int(plan.get(name) or 0) for name in ("spilled_kv_bytes", "offload_bytes"))
            facts = [
                ("Context", plan.get("max_model_len"), "tokens"),
                ("RAM for KV", kv_bytes, "bytes"),
                ("Weights in RAM", plan.get("weights_in_ram_bytes"), "bytes"),
            ]
        elif settings is not None:
            facts = [
                ("Context", settings.max_model_len, "tokens"),
                ("RAM, at most", settings.ram, "bytes"),
                ("RAM for idle KV", settings.offload_ram, "bytes"),
                ("Weights in RAM", settings.weights_ram, "bytes"),
            ]
            facts = [fact for fact in facts if fact[1] is not None]
        if self.speed is not None:
            ttft_ms = self.speed.get("mean_ttft_ms")
            facts += [
                ("Last measured", self.speed.get("output_throughput"), "tok/s"),
                ("TTFT then", None if ttft_ms is None else ttft_ms / 1000, "s"),
            ]
        return facts

    @property
    def _what_may_stop(self) -> str:
        if not self.others:
            return ""
        return f"Switch to {self.name}? Others are stopped if needed. Running now: {', '.join(self.others)}."


def last_speeds(registry: Registry, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Speeds from each model's newest result, by model. Blocks."""
    found = {}
    for name in names:
        for result in list_results(registry, model=name, limit=1):
            numbers = {key: result.metrics.get(key) for key in _SPEEDS}
            found[name] = {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}
    return found


# Adding a model


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


@router.post("/add/{action}")
async def change_files(request: Request, app: App, who: Who, action: Literal["download", "stop", "remove"]) -> Response:
    """Download, stop downloading or remove the files of a model on the hub, or in its cache."""
    actions = app.actions
    change = {"download": actions.download, "stop": actions.stop_download, "remove": actions.remove_download}[action]
    await change(who, (await form_of(request)).get("source", ""))
    return part("add_list.html", **await _found(app))


@router.get("/add/plan")
async def plan_new(request: Request, app: App) -> Response:
    """Plan of a model that is not added yet, with the form's settings; errors are shown in its place."""
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
    """Suggested name for a source, as people would call the model."""
    return source.rstrip("/").rpartition("/")[2].lower()
