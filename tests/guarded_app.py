"""A small app behind the manager's guards, and a clock that a test sets."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from overspill.manager.web.access import LOCAL, Identity
from overspill.manager.web.guards import Guards
from overspill.manager.web.setup import Setup

SETUP = Setup(folder=Path())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def echo(request: Request) -> Response:
    body = await request.body()
    return JSONResponse({"length": len(body), "path": request.url.path})


async def parts(request: Request) -> Response:
    async def numbers() -> Any:
        for number in range(3):
            yield f"data: {number}\n\n"

    return StreamingResponse(numbers(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


class Anybody:
    """Access for everybody, without a registry."""

    async def identify(self, *given: Any, **more: Any) -> Identity:
        return LOCAL


def open_to_all(app: ASGIApp, setup: Setup = SETUP, **limits: Any) -> ASGIApp:
    return Guards(app, Anybody(), setup, **limits)  # type: ignore[arg-type]


METHODS = ["GET", "POST", "PUT", "DELETE"]
APP = Starlette(routes=[Route("/parts", parts), Route("/{path:path}", echo, methods=METHODS)])


def asked(app: ASGIApp, method: str, path: str, base: str = "http://localhost:7999", **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


def message_of(answer: httpx.Response) -> str:
    """In OpenAI's shape, the same everywhere."""
    told = answer.json()
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert told["source"] == ("gateway" if answer.request.url.path.startswith("/v1/") else "manager")
    assert isinstance(told["error"]["code"], str)
    return str(told["error"]["message"])
