"""Where the manager may listen: anywhere but on loopback only with a key or a password."""

from overspill.manager.errors import ManagerError
from overspill.serve.address import is_loopback

DEFAULT_HOST = "127.0.0.1"
SET_PASSWORD = "overspill manager password"
ADD_KEY = "overspill manager keys add NAME"


def require_protection(host: str, *, is_protected: bool) -> None:
    if is_loopback(host) or is_protected:
        return
    raise ManagerError(
        f"--host {host} lets other machines reach the manager, which starts and stops programs, and it has neither a "
        f"password nor an API key. Set one with: {SET_PASSWORD}, or: {ADD_KEY}. Or use --host {DEFAULT_HOST}"
    )
