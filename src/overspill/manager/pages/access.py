"""Logging in and out, the audit log, and what the API has."""

import asyncio
import contextlib
import math

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from overspill.manager.actions import Caller
from overspill.manager.asking import App, Who
from overspill.manager.errors import ManagerError
from overspill.manager.pages.rendering import form_of, page
from overspill.manager.security.cookies import clear_cookie, set_cookie
from overspill.registry.audit import list_audit

router = APIRouter()
_MAX_SECRET = 4096


@router.get("/login")
async def login(request: Request) -> Response:
    return page(request, "login.html", problem="")


@router.post("/login")
async def log_in(request: Request, app: App) -> Response:
    address = request.state.address
    wait = app.limit.try_now(address)
    if wait > 0:
        text = f"too many tries; the next one is possible in {math.ceil(wait)} s"
        refused = page(request, "login.html", 429, problem=text)
        refused.headers["retry-after"] = str(math.ceil(wait))
        return refused
    secret = (await form_of(request)).get("secret", "")[:_MAX_SECRET]
    session = await app.access.log_in(secret, address)
    if session is None:
        problem = "that is neither the password nor a key for everything"
        with contextlib.suppress(ManagerError):
            async with app.actions.audited(Caller(who="nobody", address=address), "log in", ""):
                raise ManagerError(problem)
        return page(request, "login.html", 403, problem=problem)
    app.limit.succeeded(address)
    known = await app.access.identify(None, session)
    async with app.actions.audited(Caller(who=known.who if known else "nobody", address=address), "log in", ""):
        pass
    response = RedirectResponse("/", status_code=303)
    response.headers.append("set-cookie", set_cookie(session, is_tls=request.state.is_tls))
    return response


@router.post("/logout")
async def log_out(request: Request, app: App, who: Who) -> Response:
    async with app.actions.audited(who, "log out", ""):
        await app.access.log_out(request.state.identity)
    response = Response(headers={"hx-redirect": "/login"})
    response.headers.append("set-cookie", clear_cookie(is_tls=request.state.is_tls))
    return response


@router.get("/audit")
async def audit(request: Request, app: App) -> Response:
    before = request.query_params.get("before", "")
    entries = await asyncio.to_thread(
        list_audit, app.registry, 100, int(before) if before.isdigit() and len(before) < 12 else None
    )  # fmt: skip
    return page(request, "audit.html", entries=entries)


@router.get("/api")
async def api(request: Request) -> Response:
    paths = request.app.openapi()["paths"]
    told = [(method.upper(), path, one) for path, methods in paths.items() for method, one in methods.items()]
    return page(request, "api.html", told=told)
