"""A manager with stand-ins for engines, in a thread of this process: the whole application, and fast."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn
import uvloop

from overspill.manager.web.access import Access
from overspill.manager.web.app import make_app
from overspill.manager.web.application import Application, running
from overspill.manager.web.server import BoundedProtocol
from overspill.manager.web.setup import Setup
from tests import zygote
from tests.manager_process import Place


class Here:
    def __init__(self, url: str) -> None:
        self.url = url
        self.application: Application | None = None

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers=headers, trust_env=False)


@contextlib.contextmanager
def managed_here(place: Place, **setup: Any) -> Iterator[Here]:
    zygote.prepare()
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    here = Here(f"http://127.0.0.1:{listening.getsockname()[1]}")
    ready, end = threading.Event(), threading.Event()
    problems: list[BaseException] = []

    async def serve() -> None:
        made = Setup(folder=place.folder / "manager", models_folders=(place.folder,), **setup)
        with place.registry() as registry:
            access = Access(registry, is_loopback=made.is_local)
            async with running(made, registry, access, place.options()) as application:
                here.application = application
                config = uvicorn.Config(
                    make_app(application), http=BoundedProtocol, lifespan="off", log_level="warning", access_log=False,
                    timeout_graceful_shutdown=1,
                )  # fmt: skip
                server = uvicorn.Server(config)
                server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
                task = asyncio.create_task(server.serve([listening]))
                while not server.started:
                    await asyncio.sleep(0.01)
                ready.set()
                while not end.is_set():
                    await asyncio.sleep(0.02)
                application.closing.set()
                server.should_exit = True
                await task

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as error:
            problems.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(120)
        if problems:
            raise problems[0]
        yield here
    finally:
        end.set()
        thread.join(60)
        assert not thread.is_alive()
        if problems:
            raise problems[0]
