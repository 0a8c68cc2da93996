"""Control routes beside vLLM's API: park a server, wake it, read its state.

vLLM loads the middleware into its API server. Its routes answer programs on this machine that know the launch's secret:
`overspill serve` generates it, passes it to vLLM in the environment, and writes it to a file only its user may read.
"""

import hmac
import json
import os
import platform
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from overspill.address import is_loopback
from overspill.files import replace_file
from overspill.processes import identity
from overspill.serve.status import Status, folder_of

VARIABLE = "_OVERSPILL_CONTROL"
HEADER = "x-overspill-secret"
PATH = "/overspill/"
_ACTIONS = {
    ("POST", "park"): "overspill_park",
    ("POST", "wake"): "overspill_wake",
    ("GET", "state"): "overspill_state",
}
# vLLM's prefix for an exception raised by an engine's method.
_FAILED = "method failed: "

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ControlMiddleware:
    """ASGI middleware around vLLM's own application."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._secret = os.environ.get(VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PATH):
            await self._app(scope, receive, send)
            return
        status, answer = await self._answer(scope)
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope) -> tuple[int, dict[str, Any]]:
        if not self._is_allowed(scope):
            return 403, {"error": "this request needs the secret of the launch"}
        method = _ACTIONS.get((scope["method"], scope["path"].removeprefix(PATH)))
        if method is None:
            return 404, {"error": "only POST /overspill/park, POST /overspill/wake and GET /overspill/state exist here"}
        client = scope["app"].state.engine_client
        try:
            return 200, await client.engine_core.call_utility_async(method)
        except Exception as error:
            return 503 if client.errored else 409, {"error": str(error).rpartition(_FAILED)[2]}

    def _is_allowed(self, scope: Scope) -> bool:
        client = scope.get("client")  # None on a Unix socket
        given = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        is_known = hmac.compare_digest(given, self._secret.encode())
        return bool(self._secret) and is_known and (client is None or is_loopback(client[0]))


def make_secret(environ: Mapping[str, str] = os.environ) -> str:
    """Generate and store the secret of the server this process starts; empty, with a warning, where it cannot be."""
    path = _path(os.getpid(), environ)
    if path is None:
        return ""
    secret = secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in path.parent.glob(f"{platform.node()}-*.secret"):
            if (pid := other.stem.rpartition("-")[2]).isdigit() and identity(int(pid)) is None:
                other.unlink(missing_ok=True)  # its server was killed
        replace_file(path, json.dumps({"process": identity(os.getpid()), "secret": secret}) + "\n")
    except OSError as error:
        print(f"warning: this server cannot be parked, as its secret cannot be stored: {error}", file=sys.stderr)
        return ""
    return secret


def secret_of(status: Status, environ: Mapping[str, str] = os.environ) -> str | None:
    """The secret of a server running here; None if it has none, or another process with its PID left the file."""
    path = _path(status.pid, environ)
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path is not None:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return str(kept["secret"]) if kept["process"] == status.process else None
    return None


def forget_secret(environ: Mapping[str, str] = os.environ) -> None:
    """Delete the secret of this process's server."""
    if (path := _path(os.getpid(), environ)) is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _path(pid: int, environ: Mapping[str, str]) -> Path | None:
    """File of a secret, beside the status files and named by host: machines may share a home."""
    folder = folder_of(environ)
    return None if folder is None else folder / f"{platform.node()}-{pid}.secret"
