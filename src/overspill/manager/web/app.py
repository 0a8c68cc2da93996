"""The web application: API, pages, gateway and metrics on one port, behind the guards."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from overspill import registry
from overspill.kv.errors import OverspillError
from overspill.manager.allowlist import NotAllowed
from overspill.manager.errors import NotParked, NotServed
from overspill.manager.gateway import Gateway, is_gateways
from overspill.manager.jobs import UnknownJob
from overspill.manager.messages import error_json
from overspill.manager.metrics import metrics_page
from overspill.manager.web import api, model_pages, pages, run_pages
from overspill.manager.web.application import App, Application
from overspill.manager.web.guards import Guards
from overspill.manager.web.rendering import PAGES, STATIC, page, section

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# The first match counts. A model that cannot be started conflicts with the machine's resources: repeating the request
# would not help.
_STATUS: dict[int, tuple[type[OverspillError], ...]] = {
    404: (registry.UnknownModel, registry.UnknownRecord, UnknownJob),
    409: (registry.DuplicateModel, registry.ChangedMeanwhile, registry.StillRunning, NotParked, NotServed),
    503: (registry.RegistryUnavailable, registry.CannotNow),
    403: (NotAllowed,),
    400: (OverspillError,),
}
_CODES = {
    400: "bad_request", 403: "forbidden", 404: "not_found", 405: "not_allowed", 409: "conflict", 422: "invalid",
    503: "unavailable",
}  # fmt: skip
_NOT_PAGES = ("/api/", "/v1/", "/static/", "/events/")


def make_app(application: Application) -> ASGIApp:
    gateway, web = Gateway(application.engines, application.activity, application.servers), make_web(application)

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        """Send gateway requests past the web framework, which would slow down each of them."""
        is_gateway = scope["type"] == "http" and (is_gateways(scope["path"]) or scope["path"] == "/v1")
        await (gateway if is_gateway else web)(scope, receive, send)

    return Guards(routed, application.access, application.setup)


def make_web(application: Application | None) -> FastAPI:
    """Pages, API and metrics without guards. Without an application only the API's description can be used."""
    web = FastAPI(
        title="Overspill manager",
        version="1",
        description="Models, engines, measurements and logs. OpenAI's API for the models is under /v1.",
        openapi_url="/api/openapi.json",
        # FastAPI's own documentation pages load scripts from other sites.
        docs_url=None,
        redoc_url=None,
    )
    web.state.application = application
    web.include_router(api.router)
    for part in (pages, model_pages, run_pages):
        web.include_router(part.router, include_in_schema=False)
    web.mount("/static", StaticFiles(directory=STATIC), name="static")
    web.add_api_route("/metrics", _metrics, include_in_schema=False)
    web.add_api_route("/healthz", _health, methods=["GET", "HEAD"], include_in_schema=False)
    web.add_exception_handler(OverspillError, _refused)
    web.add_exception_handler(RequestValidationError, _invalid)
    web.add_exception_handler(HTTPException, _http)
    return web


async def _metrics(app: App) -> Response:
    text = await metrics_page(app.engines, app.watching, app.jobs, app.since)
    return Response(text, media_type=_PROMETHEUS)


async def _health() -> Response:
    return PlainTextResponse("ok\n")


# Errors as answers


def _answer(request: Request, status: int, message: str) -> Response:
    """An error page with a way back if a browser followed a link or a typed address; JSON for programs and htmx."""
    path = request.url.path
    is_navigation = request.method == "GET" or (request.method, path) == ("POST", "/login")
    # htmx shows the error next to the element that sent the request.
    is_page = not path.startswith(_NOT_PAGES) and "hx-request" not in request.headers
    if is_navigation and is_page and "text/html" in request.headers.get("accept", ""):
        return page(request, "refused.html", status, message=message, back=_way_back(path))
    return JSONResponse(error_json(status, message, _CODES.get(status, "refused"), "manager"), status_code=status)


def _way_back(path: str) -> tuple[str, str]:
    """Address and name of the list page that a path belongs to."""
    if path.startswith("/login"):
        return "/login", "Log in"
    return next((one for one in PAGES if one[0] == section(path)), PAGES[0])


async def _refused(request: Request, error: Exception) -> Response:
    status = next(status for status, kinds in _STATUS.items() if isinstance(error, kinds))
    lines = getattr(error, "log_lines", ())
    message = "\n".join([str(error), *(("the last lines of its log:", *lines) if lines else ())])
    return _answer(request, status, message)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = []
    for one in error.errors()[:10]:
        where = ".".join(str(part) for part in one["loc"][1:]) or str(one["loc"][0])
        wrong.append(f"{where}: {one['msg']}"[:200])
    return _answer(request, 422, "; ".join(wrong).encode("utf-8", "replace").decode())


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _answer(request, 404, f"there is no {request.url.path[:200]!r} here; /api lists what there is")
    answer = _answer(request, error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer
