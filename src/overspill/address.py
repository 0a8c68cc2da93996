"""Server addresses: URLs, TLS, free ports, and the program that listens on a taken one."""

import errno
import http.client
import ipaddress
import json
import random
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from overspill.errors import CannotServe
from overspill.kv.errors import OverspillError
from overspill.processes import argv_of, listeners

# Lower ports are for services common on many machines. Linux itself assigns those of _LINUX_GIVES by default.
_FIRST_PORT, _LAST_PORT = 10000, 65535
_LINUX_GIVES = (32768, 60999)
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    is_tls: bool = False

    @property
    def reachable_host(self) -> str:
        """Host by which this machine reaches the server, even if that listens on all addresses."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.reachable_host}]" if ":" in self.reachable_host else self.reachable_host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"

    def get(self, path: str, timeout: float = 2.0) -> tuple[int, bytes] | None:
        """Status and body of a GET request; None if nothing answers."""
        host, port = self.reachable_host, self.port
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        if self.is_tls:
            # Overspill's own server, and no secret is sent: the request only checks that it is there.
            connection = http.client.HTTPSConnection(
                host, port, timeout=timeout, context=_tls_context(is_verified=False)
            )
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def require_free(address: Address, model_names: set[str], known: str = "") -> None:
    """Refuse a taken port or wrong host before the model loads: vLLM finds the first after a minute, and the second
    after several. `known` describes the server known to listen there."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OverspillError(f"--host {address.host!r} is not a host: {error}; use 127.0.0.1") from error
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError as error:
            raise _why(address, model_names, error, known) from error


def free_port(proc: Path = Path("/proc")) -> int:
    """A port for a server on this machine that is free now. The server listens many seconds later and fails if the port
    is taken by then, so ports that Linux assigns on demand (to a vLLM engine for its own processes, or to a client for
    a connection) are avoided."""
    first, last = _given_to_anybody(proc)
    ports = [port for port in range(_FIRST_PORT, _LAST_PORT + 1) if not first <= port <= last]
    # At random, or two programs would get the same port at the same time.
    for port in (*random.sample(ports, k=min(len(ports), _TRIES)), 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise CannotServe("no port of this machine is free")


def _given_to_anybody(proc: Path) -> tuple[int, int]:
    with suppress(OSError, ValueError):
        first, last = (proc / "sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    return _LINUX_GIVES


def _why(address: Address, model_names: set[str], error: OSError, known: str) -> CannotServe:
    if error.errno == errno.EADDRINUSE:
        pid = None if known else listening_pid(address.port)
        listener = known if pid is None else f"process {pid} ({' '.join(argv_of(pid))[:80]})"
        served = _served_models(address) & model_names
        if served:
            who = f" by {listener}" if listener else ""
            return CannotServe(
                f"{served.pop()} is already served on {address.url}{who}. Use it, stop it, or give another --port"
            )
        who = listener or "another program"
        return CannotServe(f"port {address.port} is in use: {who} listens there. Stop it, or give another --port")
    if error.errno == errno.EACCES:
        return CannotServe(f"port {address.port} needs rights that this user lacks; use --port 1024 or above")
    if error.errno == errno.EADDRNOTAVAIL:
        return CannotServe(f"this machine has no address {address.host}; use --host 127.0.0.1, or 0.0.0.0 for all")
    return CannotServe(f"cannot listen on {address.host} port {address.port}: {error.strerror}")


def listening_pid(port: int) -> int | None:
    """PID of the process that listens on a port; None if there is none this user may inspect."""
    return next((one.pid for one in listeners() if one.port == port), None)


def _served_models(address: Address) -> set[str]:
    answer = address.get("/v1/models")
    with suppress(ValueError, KeyError, TypeError):
        if answer is not None and answer[0] == http.client.OK:
            models = json.loads(answer[1])["data"]
            return {model[name] for model in models for name in ("id", "root") if model.get(name)}
    return set()


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def client_context(url: str) -> ssl.SSLContext | None:
    """TLS context for a server, whose certificate may be self-signed on loopback; None if `url` is not encrypted."""
    parts = urlsplit(url)
    return _tls_context(is_verified=not is_loopback(parts.hostname or "")) if parts.scheme == "https" else None


@cache
def _tls_context(*, is_verified: bool) -> ssl.SSLContext:
    """TLS context. Loopback needs no verification: certificates are for the names clients use, and nobody is between.
    Other certificates are checked against the system's authorities, or those of SSL_CERT_FILE."""
    context = ssl.create_default_context()
    if not is_verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
