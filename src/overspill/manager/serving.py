"""Servers of this user on this machine, without a manager: by the status files that `overspill serve` keeps."""

import asyncio
import contextlib
import os
import platform
import queue
import select
import signal
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from overspill.manager import logs
from overspill.manager.errors import ManagerError
from overspill.manager.records import file_name
from overspill.manager.setup import own_folder
from overspill.manager.states import State
from overspill.processes import identity
from overspill.serve.status import Status, read_statuses
from overspill.settings import nearest

_STOP_S = 120.0


def engines_here() -> list[dict[str, Any]]:
    """As the manager's API has them, as far as is known."""
    return [
        {
            "name": one.model,
            "state": str(State.READY if one.is_ready else State.STARTING if one.is_alive else State.FAILED),
            "since": datetime.fromisoformat(one.ready_at or one.started_at).timestamp(),
            "phase": str(one.phase),
            "pid": one.pid if one.is_alive else None,
            "url": one.url if one.is_alive else None,
            "error": one.problem,
        }
        for one in _statuses()
    ]


def stop_here(name: str) -> None:
    """Asks it to end, and waits until it has."""
    status = _find(name, [one for one in _statuses() if one.is_alive])
    try:
        handle = os.pidfd_open(status.pid)
    except OSError:
        return  # it has ended
    try:
        # With the handle open, the number cannot become another process's between this look and the signal.
        if identity(status.pid) != status.process:
            return
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not select.select([handle], [], [], _STOP_S)[0]:
            raise ManagerError(f"{name} (process {status.pid}) was asked to end and has not for {_STOP_S:g} s")
    finally:
        os.close(handle)


def log_here(name: str, num_lines: int, search: str, *, follow: bool) -> Iterator[str]:
    path = _log_file(name)
    if search:
        yield from (line.text for line in logs.search(path, search, limit=num_lines).lines)
    elif not follow:
        yield from logs.tail(path, num_lines)
    else:
        yield from _followed(path, num_lines)


def _followed(path: Path, num_lines: int) -> Iterator[str]:
    lines: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    async def read() -> None:
        async for some in logs.follow(path, num_lines):
            lines.put(some)

    threading.Thread(target=lambda: asyncio.run(read()), daemon=True).start()
    while True:
        yield from lines.get()


def _log_file(name: str) -> Path:
    known = [one for one in _statuses() if one.log_file is not None]
    with contextlib.suppress(ManagerError):
        return Path(_find(name, known).log_file or "")
    # Of a model that a manager served.
    kept = own_folder() / "logs" / f"{file_name(name)}.log"
    if kept.exists():
        return kept
    hint = nearest(name, [one.model for one in known]) or "none is known here"
    raise ManagerError(f"there is no log of {name!r:.220}; {hint}")


def _find(name: str, statuses: list[Status]) -> Status:
    for one in reversed(statuses):
        if name in (one.model, one.served_name):
            return one
    hint = nearest(name, [one.model for one in statuses]) or "no server of this user runs here"
    raise ManagerError(f"there is no server of {name!r:.220}; {hint}")


def _statuses() -> list[Status]:
    return [one for one in read_statuses() if one.host == platform.node()]
