"""Activity: gateway requests, noted in memory and written to the registry in batches, off the requests' path."""

import asyncio
import contextlib
import logging
import time
from collections import deque

from overspill.registry import Registry, RegistryError
from overspill.registry.activity import Request, add_requests, forget_old_requests, list_requests

logger = logging.getLogger(__name__)
_EVERY_S = 1.0
_FORGET_EVERY_S = 3600.0
_MOST_UNWRITTEN = 10_000
_RECENT = 8


class Activity:
    """Log of requests. `note` costs one append; while the registry is not writable, rows beyond a bound are lost."""

    def __init__(self, registry: Registry, *, every_s: float = _EVERY_S) -> None:
        self._registry, self._every_s = registry, every_s
        self._unwritten: deque[Request] = deque(maxlen=_MOST_UNWRITTEN)
        self._forgot_at = float("-inf")
        self._has_failed = False
        self.recent: deque[Request] = deque(maxlen=_RECENT)
        """The latest requests, newest first."""

    def note(self, request: Request) -> None:
        self._unwritten.append(request)
        self.recent.appendleft(request)

    async def run(self) -> None:
        with contextlib.suppress(RegistryError):
            earlier = await asyncio.to_thread(list_requests, self._registry, limit=_RECENT)
            self.recent.extend(earlier[: _RECENT - len(self.recent)])  # a full deque would drop the newest
        while True:
            await self.write()
            await asyncio.sleep(self._every_s)

    async def write(self) -> None:
        """Write all requests noted so far; once an hour, also delete old rows."""
        batch = list(self._unwritten)
        is_due = time.monotonic() - self._forgot_at > _FORGET_EVERY_S
        if not batch and not is_due:
            return
        try:
            await asyncio.to_thread(self._write, batch, is_due)
        except RegistryError as error:
            if not self._has_failed:
                logger.warning("Overspill: the request log cannot be written now, will retry: %s", error)
            self._has_failed = True
            return
        self._has_failed = False
        if is_due:
            self._forgot_at = time.monotonic()
        written = set(map(id, batch))
        while self._unwritten and id(self._unwritten[0]) in written:
            self._unwritten.popleft()

    def _write(self, batch: list[Request], is_due: bool) -> None:
        if batch:
            add_requests(self._registry, batch)
        if is_due:
            forget_old_requests(self._registry)
