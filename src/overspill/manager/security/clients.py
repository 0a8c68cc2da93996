"""From where a request comes: for limits of tries, and for the audit log."""

import ipaddress

from starlette.types import Scope

from overspill.address import is_loopback


def client_address(scope: Scope, *, is_proxied: bool) -> str:
    """Behind a proxy on this machine, what that says: the last of X-Forwarded-For, which it has added itself. Those
    before are whatever a client wrote."""
    peer: str = scope["client"][0] if scope.get("client") else ""
    if not is_proxied or not is_loopback(peer):
        return peer
    told = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
    last = ",".join(told).rpartition(",")[2].strip().strip("[]")
    try:
        return str(ipaddress.ip_address(last))
    except ValueError:
        return peer
