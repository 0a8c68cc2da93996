"""Sites, as browsers write them in `Origin`: how one is reached, its name, and a port that is not the usual one."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from overspill.manager.errors import ManagerError

_USUAL_PORTS = {"http": 80, "https": 443}


def origins(given: Iterable[str]) -> tuple[str, ...]:
    """As browsers write them, or one would never be met."""
    return tuple(origin_of(one, "--allow-origin") for one in given)


def origin_of(given: str, flag: str) -> str:
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in _USUAL_PORTS or not parts.hostname or parts.path not in ("", "/") or "@" in parts.netloc:
        raise ManagerError(
            f"{flag} {given} is not a site; write how it is reached and its name, as https://chat.example"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port in (None, _USUAL_PORTS[parts.scheme]) else f":{port}")
