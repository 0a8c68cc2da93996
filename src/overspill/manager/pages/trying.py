"""Try it: a prompt to a model through the gateway, and what its answer took."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from overspill.manager.asking import App
from overspill.manager.pages.rendering import page

router = APIRouter()


@router.get("/try")
async def try_it(request: Request, app: App) -> Response:
    await app.engines.catalogue.refresh()
    return page(
        request, "try.html", engines=app.engines.snapshots(), chosen=request.query_params.get("model", "")
    )  # fmt: skip
