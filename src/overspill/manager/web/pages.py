"""Pages of the dashboard, trial, activity, logs, found servers, keys, audit log and login; updated by events."""

import asyncio
import contextlib
import math
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from overspill.manager import logs, sse
from overspill.manager.errors import ManagerError
from overspill.manager.telemetry.overview import engine_tiers, memory_maps, overview
from overspill.manager.telemetry.watcher import Moment
from overspill.manager.web.access import set_cookie
from overspill.manager.web.actions import Caller
from overspill.manager.web.application import App, Application, Who
from overspill.manager.web.charts import RANGES
from overspill.manager.web.rendering import form_of, fragment, page, part, redirect
from overspill.registry.access import KeyExpired, KeyScope
from overspill.registry.activity import keys_and_use, list_requests, request_choices
from overspill.registry.audit import list_audit

router = APIRouter()
_SHOWN_LINES = 500
_SHOWN_REQUESTS = 100
_MAX_SECRET = 4096
_SCOPES = {
    KeyScope.GATEWAY: "requests to models", KeyScope.ALL: "everything, this page too", KeyScope.METRICS: "metrics only",
}  # fmt: skip


# Dashboard


@router.get("/")
async def dashboard(request: Request, app: App) -> Response:
    await app.engines.catalogue.refresh(0.5)
    if not app.engines.snapshots() and not app.servers.all:
        return RedirectResponse("/add", status_code=303)
    return page(request, "dashboard.html", live=_live(app, app.watching.latest), ranges=RANGES)


@router.get("/events/dashboard")
async def dashboard_events(app: App) -> Response:
    async def events() -> AsyncIterator[str]:
        with app.watching.changes.listening() as listener:
            while True:
                moment = (await listener.next())["moment"]
                events = (("sample", moment.event), *_live(app, moment).items())
                yield "".join(sse.event(name, text) for name, text in events)

    return sse.stream(events(), app.closing)


def _live(app: Application, moment: Moment | None) -> dict[str, str]:
    """Parts of the dashboard that follow engines, rendered once per moment and shared by all browsers."""
    if app.rendered.get("moment") is not moment or moment is None:
        engines = app.engines.snapshots()
        app.rendered.update(
            moment=moment,
            panels=fragment(
                "panels.html", now=overview(moment, engines), sample=moment.sample if moment is not None else None,
                maps=memory_maps(moment.sample, engines) if moment is not None else (), requests=app.activity.recent,
                held_by=app.engines.reserved_for, upstreams=app.servers.all.values(),
            ),
            tiers=fragment("tiers.html", tiers=engine_tiers(moment, engines) if moment is not None else ()),
        )  # fmt: skip
    return {name: app.rendered[name] for name in ("panels", "tiers")}


# Try it


@router.get("/try")
async def try_it(request: Request, app: App) -> Response:
    await app.engines.catalogue.refresh()
    return page(request, "try.html", engines=app.engines.snapshots(), chosen=request.query_params.get("model", ""))


# Activity


@router.get("/activity")
async def activity(request: Request, app: App) -> Response:
    models, clients = await asyncio.to_thread(request_choices, app.registry)
    return page(request, "activity.html", models=models, clients=clients, **await _requests(request, app))


@router.get("/activity/list")
async def activity_list(request: Request, app: App) -> Response:
    return part("activity_list.html", **await _requests(request, app))


async def _requests(request: Request, app: Application) -> dict[str, Any]:
    wanted = {name: request.query_params.get(name, "")[:250] for name in ("model", "who", "outcome")}
    number = _before(request)
    found = await asyncio.to_thread(list_requests, app.registry, **wanted, before=number, limit=_SHOWN_REQUESTS)
    older = found[-1].id if len(found) == _SHOWN_REQUESTS else None
    return {"requests": found, "wanted": wanted, "query": urlencode(wanted), "older": older, "before": number}


# Logs


@router.get("/logs")
async def log(request: Request, app: App) -> Response:
    engines = app.engines.snapshots()
    names = [one.name for one in engines]
    running = [one.name for one in engines if one.pid is not None]
    name = request.query_params.get("name") or next(iter([*running, *names]), "")
    search = request.query_params.get("search", "")[:200]
    found, hint = None, ""
    if name:
        await app.engines.known(name)
        hint = app.engines.log_hint(name)
    if name and search and not hint:
        found = await asyncio.to_thread(logs.search, app.engines.log_file(name), search, limit=_SHOWN_LINES)
    # A command to follow the log in a terminal, at the address that the browser used for this page.
    command = ["curl", "-N", f"{request.base_url}api/logs/{quote(name)}?follow=true"]
    if request.state.identity.session is not None:  # a program has no session
        command += ["-H", "Authorization: Bearer KEY"]
    return page(
        request, "logs.html", names=names, name=name, search=search, found=found, hint=hint,
        command=shlex.join(command),
    )  # fmt: skip


@router.get("/events/logs/{name:path}")
async def log_events(app: App, name: str) -> Response:
    await app.engines.known(name)
    return _followed(app, app.engines.log_file(name), _SHOWN_LINES)


@router.get("/events/jobs/{number}")
async def job_events(app: App, number: int) -> Response:
    return _followed(app, Path(app.jobs.get(number).log_file), 200)


def _followed(app: Application, path: Path, num_lines: int) -> Response:
    async def events() -> AsyncIterator[str]:
        async for lines in logs.follow(path, num_lines):
            yield sse.event("lines", "\n".join(lines))

    return sse.stream(events(), app.closing)


# vLLM servers that Overspill did not start


@router.get("/found")
async def found(request: Request, app: App) -> Response:
    return page(request, "found.html", servers=await app.actions.found_servers(), watched=app.watching.found)


@router.get("/found/list")
async def found_list(app: App) -> Response:
    return part("found_list.html", servers=await app.actions.found_servers(), watched=app.watching.found)


@router.post("/found/{pid}/{action}")
async def act_on_found(
    request: Request, app: App, who: Who, pid: int, action: Literal["watch", "unwatch", "stop"]
) -> Response:
    if action == "stop":
        form = await form_of(request)
        await app.actions.stop_found(who, pid, form.get("identity", "")[:200], form.get("confirm_name", "")[:1000])
    else:
        await app.actions.watch_found(who, pid, is_watched=action == "watch")
    return redirect("/found")


# Keys


@router.get("/keys")
async def keys(request: Request, app: App) -> Response:
    return page(request, "keys.html", **await _keys(app))


@router.post("/keys")
async def add_key(request: Request, app: App, who: Who) -> Response:
    """Make a key, and answer with the list and the secret, which is shown this once."""
    form = await form_of(request)
    if (scope := form.get("scope", "")) not in list(KeyScope):
        raise ManagerError(f"{scope!r:.40} is none of {', '.join(KeyScope)}")
    names = [one.strip() for one in form.get("models", "").split(",") if one.strip()]
    limits = {"models": names, "expires_in": form.get("expires_in", "").strip() or None}
    secret, _ = await app.actions.add_key(who, form.get("name", "").strip(), KeyScope(scope), **limits)
    return part("keys_list.html", made=secret, **await _keys(app))


@router.post("/keys/revoke/{name}")
async def revoke_key(app: App, who: Who, name: str) -> Response:
    await app.actions.remove_key(who, name)
    return part("keys_list.html", **await _keys(app))


async def _keys(app: Application) -> dict[str, Any]:
    return {"keys": await asyncio.to_thread(keys_and_use, app.registry), "scopes": _SCOPES}


# Audit and API


@router.get("/audit")
async def audit(request: Request, app: App) -> Response:
    entries = await asyncio.to_thread(list_audit, app.registry, 100, _before(request))
    return page(request, "audit.html", entries=entries)


def _before(request: Request) -> int | None:
    """Number of the previous page's last entry; None for the first page."""
    number = request.query_params.get("before", "")
    return int(number) if number.isdecimal() and len(number) < 12 else None


@router.get("/api")
async def api(request: Request) -> Response:
    paths = request.app.openapi()["paths"]
    listed = [(method.upper(), path, one) for path, methods in paths.items() for method, one in methods.items()]
    return page(request, "api.html", listed=listed)


# Login


@router.get("/login")
async def login(request: Request) -> Response:
    return page(request, "login.html", problem="")


@router.post("/login")
async def log_in(request: Request, app: App) -> Response:
    address = request.state.address
    wait = math.ceil(app.limit.try_now(address))
    if wait > 0:
        refused = page(request, "login.html", 429, problem=f"too many attempts; try again in {wait} s")
        refused.headers["retry-after"] = str(wait)
        return refused
    secret = (await form_of(request)).get("secret", "")[:_MAX_SECRET]
    problem = "that is neither the password nor a key for everything"
    try:
        session = await app.access.log_in(secret, address)
    except KeyExpired as error:
        session, problem = None, str(error)
    identity = await app.access.identify(None, session) if session is not None else None
    caller = Caller(who=identity.who if identity is not None else "nobody", address=address)
    with contextlib.suppress(ManagerError):
        async with app.actions.audited(caller, "log in", ""):
            if session is None:
                raise ManagerError(problem)
    if session is None:
        return page(request, "login.html", 403, problem=problem)
    app.limit.succeeded(address)
    response = RedirectResponse("/", status_code=303)
    set_cookie(response, session, is_tls=request.state.is_tls)
    return response


@router.post("/logout")
async def log_out(request: Request, app: App, who: Who) -> Response:
    async with app.actions.audited(who, "log out", ""):
        await app.access.log_out(request.state.identity)
    response = redirect("/login")
    set_cookie(response, "", is_tls=request.state.is_tls)
    return response
