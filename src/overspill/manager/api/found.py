"""vLLM servers that Overspill did not start: shown, watched, and stopped by their name."""

import asyncio
import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Path

from overspill.manager.api import shapes
from overspill.manager.application import Application
from overspill.manager.asking import App, Who
from overspill.manager.errors import ManagerError
from overspill.manager.foreign import FoundServer, find_servers, look_at, stop_found

router = APIRouter(tags=["found services"], responses=shapes.REFUSALS)
Pid = Annotated[int, Path(ge=1, le=1 << 22)]


@router.get("/found", response_model=list[shapes.Found], summary="vLLM servers that Overspill did not start")
async def found(app: App) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(one), "is_watched": one.name in app.watching.found} for one in await look(app)]


@router.post("/found/{pid}/watch", response_model=shapes.Found, summary="Show its numbers on the dashboard")
async def watch(app: App, who: Who, pid: Pid) -> dict[str, Any]:
    server = await _one(app, pid)
    if server.url is None:
        raise ManagerError(f"process {pid} does not answer, so its numbers cannot be read; it may still be starting")
    async with app.actions.audited(who, "watch", server.name):
        app.watching.found[server.name] = server.url
    return dataclasses.asdict(server)


@router.delete("/found/{pid}/watch", response_model=shapes.Found, summary="Watch it no more")
async def unwatch(app: App, who: Who, pid: Pid) -> dict[str, Any]:
    server = await _one(app, pid)
    async with app.actions.audited(who, "watch no more", server.name):
        app.watching.found.pop(server.name, None)
    return dataclasses.asdict(server)


@router.post("/found/{pid}/stop", response_model=dict[str, bool], summary="Stop it; its name confirms that")
async def stop(app: App, who: Who, pid: Pid, body: shapes.Confirmation) -> dict[str, bool]:
    async with app.actions.audited(who, "stop found server", f"{body.confirm_name} (process {pid})"):
        was_killed = await asyncio.to_thread(
            stop_found, pid, body.identity, body.confirm_name, ours=app.own_processes
        )  # fmt: skip
    app.watching.found.pop(body.confirm_name, None)
    return {"was_killed": was_killed}


async def look(app: Application) -> list[FoundServer]:
    latest = app.watching.latest
    gpus = latest.sample.gpus if latest is not None else ()
    sizes = {pid: size for gpu in gpus for pid, size in gpu.processes.items()} if gpus else None
    return await look_at(await asyncio.to_thread(find_servers, app.own_processes, sizes))


async def _one(app: Application, pid: int) -> FoundServer:
    server = next((one for one in await look(app) if one.pid == pid), None)
    if server is None:
        raise ManagerError(f"process {pid} is no vLLM server that was found; look again")
    return server
