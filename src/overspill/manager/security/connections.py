"""Connections that a slow client cannot keep: a limit of time and size on headers, and of time on unread answers.

Uvicorn waits for ever for the end of a request's headers and keeps all of them, and an ASGI app is not asked before.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_S = 10.0
UNREAD_S = 60.0
MAX_HEADER_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """For uvicorn.Config(http=BoundedProtocol)."""

    headers_s: float = HEADERS_S
    unread_s: float = UNREAD_S
    max_header_bytes: int = MAX_HEADER_BYTES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
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
        if self._headers_timer is None:  # a further request of a connection that is kept alive
            self._header_bytes = 0
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client does not read, and what it was sent fills all buffers."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.unread_s, self._close, "the answer is not read")

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def _await_headers(self) -> None:
        self._headers_timer = self.loop.call_later(self.headers_s, self._close, "the headers did not come")

    def _close(self, why: str) -> None:
        self._stop_timers()
        self.logger.info("closed a connection: %s", why)
        # Not close(): that waits until everything is written, to somebody who does not read.
        self.transport.abort()

    def _stop_timers(self) -> None:
        for timer in (self._headers_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self._headers_timer = self._unread_timer = None
