"""The manager's server: checks that it may listen, serves on uvicorn with bounded connections, shuts down in order."""

import asyncio
import contextlib
import gc
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from overspill.address import Address, require_free
from overspill.manager.backend import backend_here
from overspill.manager.fleet import Options
from overspill.manager.records import announce, withdraw
from overspill.manager.web.access import Access
from overspill.manager.web.app import make_app
from overspill.manager.web.application import running
from overspill.manager.web.setup import Setup, require_protection
from overspill.processes import stop_signals
from overspill.registry import Registry
from overspill.serve.reporter import notify

_GRACE_S = 3
_MAX_LOG_LENGTH = 2000
_NO_HEADERS, _UNREAD = "the headers did not come", "the answer is not read"
# Control characters, line separators, marks that change the direction of text, halves of surrogate pairs.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def run_until_stopped(
    setup: Setup, registry: Registry, say: Callable[[str], None], options: Options | None = None
) -> None:
    """Run the manager and block. Uses uvloop: on asyncio's own event loop every token costs more."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(setup, registry, say, options))


async def run(setup: Setup, registry: Registry, say: Callable[[str], None], options: Options | None = None) -> None:
    """Run the manager until SIGTERM, SIGINT or SIGHUP; `say` prints its address, and that it stops."""
    access = Access(registry, is_loopback=setup.is_local)
    require_protection(setup, is_protected=await access.is_protected())
    address = Address(setup.host, setup.port)
    require_free(address, set())
    options = options or Options(folder=setup.folder, memory=setup.memory, backend=backend_here())
    _log_to_stderr()
    async with running(setup, registry, access, options) as application:
        server = _Server(_config(make_app(application), setup))
        task = asyncio.create_task(server.serve())

        def end() -> None:
            application.closing.set()
            server.end()

        with _signals(end):
            while not server.started and not task.done():
                await asyncio.sleep(0.01)
            if server.started:
                # A full collection scans all imported objects: 0.1 s of CPU time, during which no token passes.
                gc.collect()
                gc.freeze()
                announce(setup.folder, address.url)
                status = f"the manager is at {address.url}, OpenAI's API for all models at {address.url}/v1"
                say(status)
                notify("READY=1", f"STATUS={status}")
            try:
                await task
            finally:
                withdraw(setup.folder)
                notify("STOPPING=1")
                with contextlib.suppress(OSError):  # a closed terminal may be why the manager ends
                    say("stopping the engines started here")


def _config(app: Any, setup: Setup) -> uvicorn.Config:
    config = uvicorn.Config(
        app, host=setup.host, port=setup.port, http=BoundedProtocol, ws="none", lifespan="off", proxy_headers=False,
        server_header=False, access_log=False, log_level="warning", timeout_graceful_shutdown=_GRACE_S,
    )  # fmt: skip
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(OneLine())
    return config


class _Server(uvicorn.Server):
    """Server without uvicorn's signal handlers, which would end it before the engines stop and re-raise the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


@contextlib.contextmanager
def _signals(end: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = stop_signals()
    for one in signals:
        loop.add_signal_handler(one, end)
    try:
        yield
    finally:
        # Stopping takes up to a minute; a second Ctrl-C is ignored meanwhile, as it would leave engines behind.
        for one in signals:
            loop.add_signal_handler(one, lambda: None)


class BoundedProtocol(HttpToolsProtocol):
    """Connections that a slow client cannot hold: limits on headers, and on answers that are not read.

    Uvicorn waits for ever for the end of a request's headers and buffers all of them, before any ASGI app is called.
    """

    headers_s = 10.0
    unread_s = 60.0
    max_header_bytes = 64 * 1024
    # Longer than uvicorn's 5 s: httpx, and so OpenAI's client, keeps idle connections for 5 s too, and a request sent
    # while its connection closes fails.
    idle_s = 30

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = self.idle_s
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Running timeouts, by the reason for which they close the connection."""
        self._header_bytes = 0
        self._in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit(_NO_HEADERS, self.headers_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unlimit(*self._timers)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.max_header_bytes:
            self._close("too many bytes of headers")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        if _NO_HEADERS not in self._timers:  # a further request on a keep-alive connection
            self._header_bytes = 0
            self._limit(_NO_HEADERS, self.headers_s)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._unlimit(_NO_HEADERS)
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Start the timeout for a client that does not read while the answer fills all buffers."""
        super().pause_writing()
        self._limit(_UNREAD, self.unread_s)

    def resume_writing(self) -> None:
        self._unlimit(_UNREAD)
        super().resume_writing()

    def _limit(self, why: str, seconds: float) -> None:
        if why not in self._timers:
            self._timers[why] = self.loop.call_later(seconds, self._close, why)

    def _unlimit(self, *whys: str) -> None:
        for timer in [self._timers.pop(why) for why in whys if why in self._timers]:
            timer.cancel()

    def _close(self, why: str) -> None:
        self._unlimit(*self._timers)
        self.logger.info("closed a connection: %s", why)
        # Not close(), which waits until everything is written to a client that does not read.
        self.transport.abort()


def one_line(text: str, max_length: int = _MAX_LOG_LENGTH) -> str:
    """A client's text made safe for a log: one line, without control characters that a terminal obeys."""
    shown = _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)
    return shown if len(shown) <= max_length else f"{shown[:max_length]}… ({len(shown)} characters)"


class OneLine(logging.Filter):
    """Filter for log handlers, whose lines contain paths and headers as clients sent them."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = one_line(message)
        if shown != message:
            record.msg, record.args = shown, None
        return True


def _log_to_stderr() -> None:
    """Log to stderr from INFO on; without a handler Python shows only warnings, not why a model was stopped."""
    ours = logging.getLogger("overspill.manager")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(OneLine())
        ours.addHandler(handler)
