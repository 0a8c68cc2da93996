"""Models of the registry, and their plans."""

import asyncio
from typing import Any

from fastapi import APIRouter

from overspill.manager.api import shapes
from overspill.manager.application import Application
from overspill.manager.asking import App, Who
from overspill.registry import Model, UnknownModel, get_model, list_models

router = APIRouter(tags=["models"], responses=shapes.REFUSALS)


@router.get("/models", response_model=list[shapes.Model], summary="All models, by name")
async def all_models(app: App) -> list[dict[str, Any]]:
    found = await asyncio.to_thread(list_models, app.registry)
    return [_shown(app, model) for model in found]


@router.post("/models", response_model=shapes.Model, status_code=201, summary="Add a model")
async def add(app: App, who: Who, body: shapes.NewModel) -> dict[str, Any]:
    settings = body.model_dump(exclude_unset=True, exclude={"name"})
    return _shown(app, await app.actions.add(who, body.name, settings))


@router.get("/models/{name:path}", response_model=shapes.Model, summary="One model")
async def one_model(app: App, name: str) -> dict[str, Any]:
    return _shown(app, await asyncio.to_thread(get_model, app.registry, name))


@router.patch("/models/{name:path}", response_model=shapes.Edited, summary="Change settings of a model")
async def edit(app: App, who: Who, name: str, body: shapes.ModelEdit) -> dict[str, Any]:
    changes = body.model_dump(exclude_unset=True, exclude={"version"})
    edited = await app.actions.edit(who, name, changes, body.version)
    return {
        "model": _shown(app, edited.after), "changed": edited.changed, "needs_restart": list(edited.needs_restart),
    }  # fmt: skip


@router.delete("/models/{name:path}", response_model=shapes.Model, summary="Remove a model that does not run")
async def remove(app: App, who: Who, name: str, version: int | None = None) -> dict[str, Any]:
    removed = await app.actions.remove(who, name, version)
    return {**removed.as_json(), "state": "stopped"}


@router.post("/plan", response_model=shapes.Plan, summary="What would fit, what would go to RAM, and how fast")
async def plan(app: App, body: shapes.PlanRequest) -> dict[str, Any]:
    changes = body.model_dump(exclude_unset=True, exclude={"name"})
    return (await app.actions.plan(body.name, changes)).as_json()


def _shown(app: Application, model: Model) -> dict[str, Any]:
    try:
        state = str(app.engines.snapshot(model.name).state)
    except UnknownModel:
        state = "stopped"
    return {**model.as_json(), "state": state}
