"""The web application: API, pages, gateway and metrics on one port, behind all guards."""

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from overspill.manager import api, pages, refusals
from overspill.manager.application import Application
from overspill.manager.gateway import Gateway
from overspill.manager.metrics import metrics_page
from overspill.manager.pages.rendering import STATIC
from overspill.manager.security.answers import GATEWAY
from overspill.manager.security.guards import guarded

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(application: Application) -> ASGIApp:
    setup = application.setup
    routed = _Routed(Gateway(application.engines), make_web(application))
    return guarded(
        routed, application.access, bound_host=setup.host, allowed_hosts=setup.allowed_hosts,
        allowed_origins=setup.allowed_origins, public_url=setup.public_url,
    )  # fmt: skip


def make_web(application: Application | None) -> FastAPI:
    """Without guards. Without an application there is the API's description, and nothing that could be asked."""
    web = FastAPI(
        title="Overspill manager",
        version="1",
        description="Models, engines, measurements and logs. OpenAI's API for the models is under /v1.",
        openapi_url="/api/openapi.json",
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    web.state.application = application
    web.include_router(api.router)
    web.include_router(pages.router)
    web.mount("/static", StaticFiles(directory=STATIC), name="static")
    web.add_api_route("/metrics", _metrics, include_in_schema=False)
    web.add_api_route("/healthz", _health, include_in_schema=False)
    refusals.install(web)
    return web


async def _metrics(request: Request) -> Response:
    app = request.app.state.application
    page = await metrics_page(app.engines, app.watching, app.jobs, app.since)
    return Response(page, media_type=_PROMETHEUS)


async def _health() -> Response:
    return PlainTextResponse("ok\n")


class _Routed:
    """ASGI: the gateway first, without what a web framework would cost each of its requests."""

    def __init__(self, gateway: ASGIApp, web: ASGIApp) -> None:
        self._gateway, self._web = gateway, web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"].startswith(GATEWAY) or scope["path"] == "/v1"):
            await self._gateway(scope, receive, send)
        else:
            await self._web(scope, receive, send)
