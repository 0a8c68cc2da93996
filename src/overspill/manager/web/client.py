"""Access to engines for commands: through a running manager's API, else by the status files of `overspill serve`."""

import asyncio
import contextlib
import platform
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from overspill.address import client_context
from overspill.manager import logs
from overspill.manager.backend import Identity
from overspill.manager.errors import ManagerError
from overspill.manager.records import file_name, find_manager
from overspill.manager.states import EngineAction, State
from overspill.manager.web.setup import own_folder
from overspill.processes import wait_until_none
from overspill.serve.control import HEADER, PATH, secret_of
from overspill.serve.status import Status, last_start, read_statuses
from overspill.settings import among

# Stopping waits for requests in flight, and for processes that do not end by themselves.
_MANAGER_STOP_S = 300.0
_STOP_S = 120.0
_WAIT_S = 10.0


def find(key: str | None) -> "Manager | None":
    """This user's running manager, if any."""
    found = find_manager(own_folder())
    return None if found is None else Manager(found.url, key)


@dataclass(frozen=True, slots=True)
class Manager:
    url: str
    key: str | None = None

    def engines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = _accepted(self._sent("GET", "/api/engines")).json()
        return found

    def control(self, action: EngineAction, name: str) -> None:
        """Run the action on the manager, and return once it is complete."""
        _accepted(self._sent("POST", f"/api/engines/{action}/{quote(name)}", _MANAGER_STOP_S))

    def log(self, name: str, num_lines: int, search: str, *, follow: bool) -> Iterator[str]:
        query = {"lines": str(num_lines), "search": search, "follow": str(follow).lower()}
        path = f"/api/logs/{quote(name)}"
        with self._explained(), self._client(None) as client, client.stream("GET", path, params=query) as answer:
            if answer.is_error:
                answer.read()
            yield from _accepted(answer).iter_lines()

    def is_open(self) -> bool:
        """Whether the manager accepts our key, or needs none."""
        return self._sent("GET", "/api/status").status_code not in (401, 403)

    def _sent(self, method: str, path: str, timeout: float = _WAIT_S) -> httpx.Response:
        with self._explained(), self._client(timeout) as client:
            return client.request(method, path)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise ManagerError(f"the manager at {self.url} does not answer: {error}; look at its log") from error

    def _client(self, timeout: float | None) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"} if self.key is not None else {}
        # trust_env: a proxy for the internet must not see requests to this machine's ports.
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)


def _accepted(answer: httpx.Response) -> httpx.Response:
    if not answer.is_error:
        return answer
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the manager answered {answer.status_code}: {answer.text[:200]}"
    raise ManagerError(message)


class ThisMachine:
    """Takes Manager's place where none runs: controls this user's servers on this machine directly."""

    url: None = None

    def engines(self) -> list[dict[str, Any]]:
        """Engines in the shape of the manager's API, with the fields that are known without it."""
        return [
            {
                "name": one.model,
                "state": str(_state(one)),
                "since": datetime.fromisoformat(one.ready_at or one.started_at).timestamp(),
                "phase": str(one.phase),
                "pid": one.pid if one.is_alive else None,
                "url": one.url if one.is_alive else None,
                "error": one.problem,
            }
            for one in _statuses()
        ]

    def control(self, action: EngineAction, name: str) -> None:
        if action == "stop":
            self._stop(name)
        else:
            self._park_or_wake(action, name)

    def _stop(self, name: str) -> None:
        """Send SIGTERM, and wait for the process to end."""
        status = _find(name, [one for one in _statuses() if one.is_alive])
        server = Identity(status.pid, status.process or "")
        server.signal(signal.SIGTERM)
        if not wait_until_none(lambda: [server.pid] if server.is_alive else [], _STOP_S):
            raise ManagerError(f"{name} (process {status.pid}) was to end and has not for {_STOP_S:g} s")

    def _park_or_wake(self, action: str, name: str) -> None:
        status = _find(name, [one for one in _statuses() if one.is_ready])
        secret = secret_of(status)
        if secret is None:
            raise ManagerError(f"{name} was started without --park; stop it, and start it with that")
        answer, told = _controlled(status, secret, "POST", action, _MANAGER_STOP_S)
        if answer.is_error:
            raise ManagerError(f"{name}: {told.get('error', told)}")

    def log(self, name: str, num_lines: int, search: str, *, follow: bool) -> Iterator[str]:
        path = _log_file(name)
        if search:
            yield from (line.text for line in logs.search(path, search, limit=num_lines).lines)
            return
        if not follow:
            yield from logs.tail(path, num_lines)
            return
        lines = logs.follow(path, num_lines)

        async def read() -> list[str]:
            return await anext(lines)

        with asyncio.Runner() as runner:
            while True:
                yield from runner.run(read())


def is_parked(status: Status) -> bool:
    """Whether the server reports that it is parked."""
    if not status.is_ready or (secret := secret_of(status)) is None:
        return False
    return bool(_controlled(status, secret, "GET", "state", _WAIT_S)[1].get("state") == "parked")


def _state(status: Status) -> State:
    if not status.is_ready:
        return State.STARTING if status.is_alive else State.FAILED
    with contextlib.suppress(ManagerError):  # a hung server is still listed, by its status file
        return State.PARKED if is_parked(status) else State.READY
    return State.READY


def _controlled(
    status: Status, secret: str, method: str, action: str, timeout: float
) -> tuple[httpx.Response, dict[str, Any]]:
    try:
        verify = client_context(status.url) or True
        with httpx.Client(base_url=status.url, timeout=timeout, trust_env=False, verify=verify) as client:
            answer = client.request(method, f"{PATH}{action}", headers={HEADER: secret})
        return answer, answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ManagerError(f"{status.model} does not answer at {status.url}: {error}") from error


def _log_file(name: str) -> Path:
    known = [one for one in _statuses() if one.log_file is not None]
    with contextlib.suppress(ManagerError):
        return Path(_find(name, known).log_file or "")
    # A manager may have served the model and kept its log.
    kept = own_folder() / "logs" / f"{file_name(name)}.log"
    ended = Path(last_start(name).log_file or kept)
    if ended.exists():
        return ended
    if any(one.is_alive and name in (one.model, one.served_name) for one in _statuses()):
        raise ManagerError(
            f"{name} writes its log where it was started, and to no file; start it with --quiet, or with --log-file"
        )
    hint = among(name, [one.model for one in known], "none is known here")
    raise ManagerError(f"there is no log of {name!r:.220}; {hint}")


def _find(name: str, statuses: list[Status]) -> Status:
    for one in reversed(statuses):
        if name in (one.model, one.served_name):
            return one
    hint = among(name, [one.model for one in statuses], "no server of this user runs here")
    raise ManagerError(f"there is no server of {name!r:.220}; {hint}")


def _statuses() -> list[Status]:
    return [one for one in read_statuses() if one.host == platform.node()]
