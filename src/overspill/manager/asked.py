"""A manager that runs, asked by a command over its API."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from overspill.manager.errors import ManagerError
from overspill.manager.records import find_manager
from overspill.manager.setup import own_folder

# Stopping waits for requests in flight, and for what does not end by itself.
_STOP_S = 300.0
_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Manager:
    url: str
    key: str | None = None

    def engines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("GET", "/api/engines").json()
        return found

    def stop(self, name: str) -> None:
        self._ask("POST", f"/api/engines/stop/{quote(name)}", timeout=_STOP_S)

    def log(self, name: str, num_lines: int, search: str, *, follow: bool) -> Iterator[str]:
        asked = {"lines": str(num_lines), "search": search, "follow": str(follow).lower()}
        with self._client(None) as client, client.stream("GET", f"/api/logs/{quote(name)}", params=asked) as answer:
            if answer.is_error:
                answer.read()
                raise _refused(answer)
            yield from answer.iter_lines()

    def status_code(self) -> int:
        return self._sent("GET", "/api/status").status_code

    def _ask(self, method: str, path: str, timeout: float = _WAIT_S) -> httpx.Response:
        answer = self._sent(method, path, timeout)
        if answer.is_error:
            raise _refused(answer)
        return answer

    def _sent(self, method: str, path: str, timeout: float = _WAIT_S) -> httpx.Response:
        try:
            with self._client(timeout) as client:
                return client.request(method, path)
        except httpx.HTTPError as error:
            raise ManagerError(f"the manager at {self.url} does not answer: {error}; look at its log") from error

    def _client(self, timeout: float | None) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"} if self.key is not None else {}
        # trust_env: a proxy that is set for the internet must not be asked for this machine's ports.
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)


def find(key: str | None) -> Manager | None:
    """The one of this user that runs, if any."""
    told = find_manager(own_folder())
    return None if told is None else Manager(told.url, key)


def is_open(manager: Manager) -> bool:
    return manager.status_code() not in (401, 403)


def _refused(answer: httpx.Response) -> ManagerError:
    try:
        return ManagerError(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ManagerError(f"the manager answered {answer.status_code}: {answer.text[:200]}")
