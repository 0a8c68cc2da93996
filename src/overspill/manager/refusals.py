"""Errors as answers: which status a mistake, a conflict or a failure gets, in one shape for pages and programs."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from overspill.kv.errors import OverspillError
from overspill.manager.errors import NotServed
from overspill.manager.jobs.queue import UnknownJob
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


def status_of(error: OverspillError) -> int:
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def answer(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"src": "overspill", "error": error}, status_code=status)


def install(app: FastAPI) -> None:
    app.add_exception_handler(OverspillError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OverspillError)
    lines = getattr(error, "log_lines", ())
    message = "\n".join([str(error), *(("the last lines of its log:", *lines) if lines else ())])
    return answer(status_of(error), message)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    told = []
    for one in error.errors()[:10]:
        where = ".".join(str(part) for part in one["loc"][1:]) or str(one["loc"][0])
        told.append(f"{where}: {one['msg']}"[:200])
    return answer(422, "; ".join(told).encode("utf-8", "replace").decode())


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return answer(404, f"there is no {request.url.path[:200]!r} here; /api lists what there is")
    made = answer(error.status_code, str(error.detail))
    made.headers.update(error.headers or {})
    return made
