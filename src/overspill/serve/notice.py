"""Notices to systemd (sd_notify): a service counts as started when the server answers, not when it begins to load."""

import os
import socket
import sys
from collections.abc import Mapping

VARIABLE = "NOTIFY_SOCKET"


def notify(*lines: str, environment: Mapping[str, str] = os.environ) -> None:
    """Nothing happens where no service manager asked for it. One that does not listen any more changes nothing."""
    path = environment.get(VARIABLE, "")
    if not path.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notices:
            # "@" stands for the zero byte that begins an abstract name.
            notices.sendto("\n".join(lines).encode(), f"\0{path[1:]}" if path[0] == "@" else path)
    except OSError as error:
        print(f"overspill: warning: systemd could not be told ({error})", file=sys.stderr, flush=True)
