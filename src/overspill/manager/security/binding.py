"""Where the manager may listen: anywhere but on loopback only with a key or a password."""

from overspill.address import is_loopback
from overspill.manager.errors import ManagerError

DEFAULT_HOST = "127.0.0.1"
SET_PASSWORD = "overspill manager password"
ADD_KEY = "overspill manager keys add NAME"


def require_protection(host: str, *, is_protected: bool, public: str = "") -> None:
    """`public` is a flag that says that there is a way to it from elsewhere, such as a proxy."""
    if is_protected:
        return
    if not is_loopback(host):
        flag, instead = f"--host {host}", f"use --host {DEFAULT_HOST}"
    elif public:
        flag, instead = public, "leave that out"
    else:
        return
    raise ManagerError(
        f"{flag} lets other machines reach the manager, which starts and stops programs, and it has neither a "
        f"password nor an API key. Set one with: {SET_PASSWORD}, or: {ADD_KEY}. Or {instead}"
    )
