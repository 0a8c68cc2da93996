"""Upstreams: other servers of OpenAI's API, whose models the gateway serves besides its own."""

import asyncio
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from overspill.manager.errors import ManagerError
from overspill.manager.messages import Header
from overspill.manager.states import Traffic
from overspill.upstream import Upstream, read_names

_LOOK_S = 10.0
_PATIENCE_S = 5.0
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclass(slots=True)
class Server:
    """An upstream server; its model M is served as NAME/M."""

    name: str
    url: str
    """Scheme, host and port."""
    path: str = ""
    """Path before /v1."""
    key_variable: str = ""
    """Environment variable that holds the server's key; nothing else does."""
    traffic: Traffic = field(default_factory=Traffic)
    models: tuple[str, ...] = ()
    """Models that the server listed last."""
    problem: str = "it was not queried yet"
    """Why the server cannot be used; empty if it can."""

    @property
    def headers(self) -> list[Header]:
        key = os.environ.get(self.key_variable, "")
        return [(b"authorization", b"Bearer " + key.encode())] if key else []

    def as_json(self) -> dict[str, Any]:
        """The server without its key."""
        told = {"name": self.name, "url": f"{self.url}{self.path}", "is_reachable": not self.problem}
        models = [f"{self.name}/{one}" for one in self.models]
        return {**told, "problem": self.problem, "models": models, "requests": self.traffic.requests}


def parse_servers(given: Iterable[str], keys: Iterable[str]) -> tuple[Server, ...]:
    """Parse `--upstream NAME=URL` and `--upstream-key NAME=VARIABLE`; a key on the command line would be public."""
    servers: dict[str, Server] = {}
    for one in given:
        name, _, url = one.partition("=")
        parts, is_url = urlsplit(""), False
        with suppress(ValueError):  # the port is not a number
            parts, is_url = urlsplit(url), urlsplit(url).port != 0
        is_url = is_url and parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        if not is_url or _NAME.fullmatch(name) is None or name in servers:
            raise ManagerError(
                f"--upstream {name}={parts.hostname or ''} is not a unique name and an address; write for example "
                "--upstream remote=http://gpu2:8000, and its key with --upstream-key"
            )
        path = parts.path.rstrip("/").removesuffix("/v1")
        servers[name] = Server(name, f"{parts.scheme}://{parts.netloc}", path)
    for one in keys:
        name, _, variable = one.partition("=")
        if name not in servers or _VARIABLE.fullmatch(variable) is None:
            raise ManagerError(
                f"--upstream-key {name!r:.40} needs the name of an --upstream and of the environment "
                "variable with its key; write for example --upstream-key remote=REMOTE_KEY"
            )
        servers[name].key_variable = variable
    return tuple(servers.values())


class Servers:
    """All upstream servers, by name."""

    def __init__(self, servers: Iterable[Server], upstream: Upstream) -> None:
        self.all = {one.name: one for one in servers}
        self._upstream = upstream

    def find(self, model: str) -> tuple[Server, str] | None:
        """The server of a model, and the model's name there."""
        name, slash, there = model.partition("/")
        return (self.all[name], there) if slash and there and name in self.all else None

    def names(self) -> list[str]:
        return [f"{one.name}/{model}" for one in self.all.values() for model in one.models]

    async def run(self) -> None:
        """Poll whether the servers answer, for ever."""
        while self.all:
            await asyncio.gather(*map(self.look, self.all.values()))
            await asyncio.sleep(_LOOK_S)

    async def look(self, server: Server) -> None:
        if server.key_variable and not server.headers:
            server.problem = f"the variable {server.key_variable} that should hold its key is not set"
            return
        answer = await self._upstream.ask(server.url, f"{server.path}/v1/models", _PATIENCE_S, headers=server.headers)
        if answer is None:
            server.problem = f"{server.url} does not answer"
            return
        server.problem = f"{server.url}{server.path}/v1/models answers {answer[0]}, without a list of models"
        if (models := read_names(answer)) is not None:
            server.models, server.problem = models, ""
