"""Answers that go on after whoever gets them has lost the right to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from overspill.manager.web import access as module
from overspill.manager.web.access import IDLE, Access
from overspill.manager.web.guards import Guards
from overspill.registry import Registry
from overspill.registry.access import create_key, remove_key, set_password
from tests.guarded_app import SETUP

PASSWORD = "four words, not together"


@pytest.fixture(autouse=True)
def asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECHECK_S", 0.0)


class Endless:
    """An app that sends numbers until nobody listens."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()
        self.app = Starlette(routes=[Route("/numbers", self.numbers)])

    async def numbers(self, request: Request) -> Response:
        return StreamingResponse(self._numbers(), media_type="text/event-stream")

    async def _numbers(self) -> AsyncIterator[str]:
        try:
            while True:
                yield "data: 1\n\n"
                await asyncio.sleep(0.01)
        finally:
            self.has_ended.set()


async def listen(
    access: Access, headers: list[tuple[bytes, bytes]], when: Callable[[int], Awaitable[None]]
) -> tuple[int, list[bytes]]:
    """Status and parts of an answer, which must end by itself; `when` is told after each part."""
    endless, status, parts = Endless(), 0, []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message["body"])
            await when(len(parts))

    scope = {
        "type": "http", "method": "GET", "path": "/numbers", "raw_path": b"/numbers", "query_string": b"",
        "headers": [(b"host", b"localhost"), *headers], "http_version": "1.1", "scheme": "http",
        "asgi": {"version": "3.0"},
    }  # fmt: skip
    async with asyncio.timeout(60):
        await Guards(endless.app, access, SETUP)(scope, receive, send)
        await endless.has_ended.wait()
    return status, parts


def test_a_stream_ends_when_its_key_is_removed(registry: Registry) -> None:
    async def story() -> None:
        access = Access(registry, is_loopback=True)
        secret, _ = create_key(registry, "laptop")
        create_key(registry, "other")

        async def when(parts: int) -> None:
            if parts == 5:
                remove_key(registry, "laptop")
                access.forget()

        status, parts = await listen(access, [(b"authorization", f"Bearer {secret}".encode())], when)
        assert status == 200 and parts == [b"data: 1\n\n"] * 5 + [b""]

    asyncio.run(story())


def test_a_stream_ends_when_its_session_is_logged_out(registry: Registry) -> None:
    async def story() -> None:
        set_password(registry, PASSWORD)
        access = Access(registry, is_loopback=True)
        session = await access.log_in(PASSWORD, "127.0.0.1")
        assert session is not None

        async def when(parts: int) -> None:
            if parts == 3 and (identity := await access.identify(None, session)) is not None:
                await access.log_out(identity)

        status, parts = await listen(access, [(b"cookie", f"overspill={session}".encode())], when)
        assert status == 200 and parts == [b"data: 1\n\n"] * 3 + [b""]

    asyncio.run(story())


def test_a_page_that_is_only_open_does_not_keep_its_session(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        set_password(registry, PASSWORD)
        access = Access(registry, is_loopback=True)
        session = await access.log_in(PASSWORD, "127.0.0.1")
        real, late = module.now, [0]
        monkeypatch.setattr(module, "now", lambda: real() + late[0] * IDLE / 10)

        async def when(parts: int) -> None:
            late[0] = parts

        _, parts = await listen(access, [(b"cookie", f"overspill={session}".encode())], when)
        assert 9 <= len(parts) <= 12, "it ended when the session had been idle for too long"

    asyncio.run(story())


def test_a_loopback_stream_is_not_identified_again(registry: Registry) -> None:
    """Access from loopback cannot be revoked, so that such a stream costs nothing more."""

    async def story() -> None:
        access, asked = Access(registry, is_loopback=True), 0
        identify = access.identify

        async def counted(*given: Any, **more: Any) -> Any:
            nonlocal asked
            asked += 1
            return await identify(*given, **more)

        access.identify = counted  # type: ignore[method-assign]

        class Enough(Exception):
            pass

        async def when(parts: int) -> None:
            if parts == 20:
                raise Enough

        with pytest.raises(Enough):
            await listen(access, [], when)
        assert asked == 1

    asyncio.run(story())
