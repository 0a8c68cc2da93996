"""Which ports a process listens on, by the kernel's table of sockets and the process's open files."""

import contextlib
import ipaddress
import os
from typing import NamedTuple

_LISTENING = b"0A"


class Listener(NamedTuple):
    host: str
    """Where this machine reaches it."""
    port: int


def listeners_by_inode(pid: int | str = "self") -> dict[str, Listener]:
    """Of the network that the process sees, which in a container may be another one than ours."""
    found: dict[str, Listener] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{name}", "rb") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTENING:
                    found[fields[9].decode()] = _listener(fields[1].decode())
    return found


def ports_of(pids: list[int], listeners: dict[str, Listener]) -> list[Listener]:
    """Lowest port first; of processes whose files this user may not see, none."""
    found = {listeners[inode] for pid in pids for inode in _socket_inodes(pid) if inode in listeners}
    return sorted(found, key=lambda listener: listener.port)


def shares_our_network(pid: int) -> bool:
    """Yes if it cannot be told."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:
        return True


def _listener(address: str) -> Listener:
    """Of `0100007F:1F40`: words of 32 bits in the machine's order, which is little endian wherever vLLM runs."""
    digits, _, port = address.partition(":")
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    host = ipaddress.ip_address(b"".join(words))
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    if host.is_unspecified:
        # A socket for all IPv6 addresses takes IPv4 as well, unless it was told not to; that is rare.
        return Listener("127.0.0.1", int(port, 16))
    return Listener(str(host), int(port, 16))


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found
