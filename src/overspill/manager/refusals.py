"""Errors as answers: which status a mistake, a conflict or a failure gets, in one shape for pages and programs."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from overspill.kv.errors import OverspillError
from overspill.manager.errors import NotServed
from overspill.manager.jobs import UnknownJob
from overspill.manager.pages.rendering import PAGES, page
from overspill.manager.security.model_sources import ModelNotAllowed
from overspill.manager.vllm_flags import FlagNotAllowed
from overspill.registry import (
    CannotNow,
    ChangedMeanwhile,
    DuplicateModel,
    RegistryUnavailable,
    StillRunning,
    UnknownModel,
    UnknownRecord,
)

# The first that fits. A model that cannot be started is a conflict with what the machine has: asking again as it is
# would not help.
_STATUS: tuple[tuple[type[OverspillError], int], ...] = (
    (UnknownModel, 404),
    (UnknownRecord, 404),
    (UnknownJob, 404),
    (DuplicateModel, 409),
    (ChangedMeanwhile, 409),
    (StillRunning, 409),
    (RegistryUnavailable, 503),
    (CannotNow, 503),
    (ModelNotAllowed, 403),
    (FlagNotAllowed, 403),
    (NotServed, 409),
    (OverspillError, 400),
)


_NOT_PAGES = ("/api/", "/v1/", "/static/", "/events/")
# Results have no list of their own.
_LISTED_AT = {"results": "runs", "compare": "runs"}


def status_of(error: OverspillError) -> int:
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def answer(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"src": "overspill", "error": error}, status_code=status)


def told(request: Request, status: int, message: str) -> Response:
    """As a page to somebody who followed a link or typed an address, with a way back; else as a program reads it."""
    if not _is_navigation(request):
        return answer(status, message)
    return page(request, "refused.html", status, message=message, back=_way_back(request.url.path))


def install(app: FastAPI) -> None:
    app.add_exception_handler(OverspillError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)


def _is_navigation(request: Request) -> bool:
    is_asked = request.method == "GET" or (request.method, request.url.path) == ("POST", "/login")
    # htmx shows what was refused beside what it asked for.
    is_page = not request.url.path.startswith(_NOT_PAGES) and "hx-request" not in request.headers
    return is_asked and is_page and "text/html" in request.headers.get("accept", "")


def _way_back(path: str) -> tuple[str, str]:
    """The page that has more of what was asked for, and its name."""
    if path.startswith("/login"):
        return "/login", "Log in"
    first = path.split("/")[1]
    place = f"/{_LISTED_AT.get(first, first)}"
    return next((one for one in PAGES if one[0] == place), PAGES[0])


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, OverspillError)
    lines = getattr(error, "log_lines", ())
    message = "\n".join([str(error), *(("the last lines of its log:", *lines) if lines else ())])
    return told(request, status_of(error), message)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = []
    for one in error.errors()[:10]:
        where = ".".join(str(part) for part in one["loc"][1:]) or str(one["loc"][0])
        wrong.append(f"{where}: {one['msg']}"[:200])
    return told(request, 422, "; ".join(wrong).encode("utf-8", "replace").decode())


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return told(request, 404, f"there is no {request.url.path[:200]!r} here; /api lists what there is")
    made = told(request, error.status_code, str(error.detail))
    made.headers.update(error.headers or {})
    return made
