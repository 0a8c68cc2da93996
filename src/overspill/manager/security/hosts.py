"""The Host header: only names that are this manager's, so that no other name can be pointed at it (DNS rebinding)."""

import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from overspill.address import is_loopback
from overspill.manager.security.answers import refuse

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::\d{1,5})?")


def allowed_names(bound_host: str, configured: Iterable[str] = ()) -> frozenset[str]:
    """Beside addresses: localhost, the address it is bound to, this machine's name if others may reach it, and what
    the user configured."""
    names = {"localhost", bound_host, *configured}
    if not is_loopback(bound_host):
        machine = socket.gethostname()
        names |= {machine, f"{machine}.local", socket.getfqdn()}
    return frozenset(name.lower().strip("[]").rstrip(".") for name in names if name)


def host_is_allowed(header: str, names: Iterable[str]) -> bool:
    match = _HOST.fullmatch(header)
    if match is None:
        return False
    name = match[1].lower().strip("[]").rstrip(".")
    if name in names or name.endswith(".localhost"):  # browsers resolve these to loopback themselves
        return True
    try:
        # Rebinding needs a name: a page whose own address is a number is served from that very address.
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class HostGuard:
    """ASGI: refuses requests for other names."""

    def __init__(self, app: ASGIApp, *, names: Iterable[str]) -> None:
        self._app, self._names = app, frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not host_is_allowed(hosts[0], self._names):
                named = repr(hosts[0][:100]) if len(hosts) == 1 else f"{len(hosts)} hosts"
                await refuse(
                    scope,
                    send,
                    421,
                    f"this manager does not answer for {named}; if it should, name it with --allow-host",
                )
                return
        await self._app(scope, receive, send)
