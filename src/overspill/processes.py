"""Processes of this machine: liveness, identity, memory, listening ports, exit codes and signals.

Standard library only, except in `listeners`: every server has a guard process, which should start fast.
"""

import contextlib
import fcntl
import ipaddress
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Errors by which /proc says that a process is gone or hidden from this user. Others, such as too many open files, say
# nothing about it.
_GONE = (FileNotFoundError, NotADirectoryError, PermissionError, ProcessLookupError)
# struct pidfd_info (linux/pidfd.h): the mask, 13 fields that are not needed here, and the wait status.
_PIDFD_INFO = struct.Struct("QQ11Ii")
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC000FF0B | _PIDFD_INFO.size << 16, 1 << 3


# psutil can only exclude mapped files by smaps, which walks page tables for seconds where hundreds of GiB are mapped,
# and holds the lock that the engine's own memory calls wait for.
_SIZES = re.compile(rb"^(Rss(?:Anon|Shmem)|Vm(?:Lck|Pin)):\s+(\d+) kB", re.MULTILINE)


class Process(NamedTuple):
    """One line of /proc/PID/stat."""

    pid: int
    state: str
    parent: int
    session: int
    cpu_ticks: int
    num_threads: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        return self.state not in "ZX"

    @property
    def has_threads(self) -> bool:
        """Whether any thread runs. A zombie keeps its memory as long as some of its threads are still in a driver."""
        return self.is_alive or (self.state == "Z" and self.num_threads > 1)


class Listener(NamedTuple):
    """A TCP port that a process listens on."""

    host: str
    """Address by which this machine reaches the port."""
    port: int
    pid: int


def read_process(pid: int) -> Process | None:
    """State of a process; None if it is gone. A zombie is returned, but is not alive."""
    with contextlib.suppress(*_GONE, ValueError, IndexError):
        fields = _stat_fields(Path(f"/proc/{pid}/stat").read_bytes())
        cpu_ticks = int(fields[11]) + int(fields[12])
        parent, session, num_threads, start_ticks = (int(fields[index]) for index in (1, 3, 17, 19))
        return Process(pid, fields[0].decode(), parent, session, cpu_ticks, num_threads, start_ticks)
    return None


def processes() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (one := read_process(int(name))) is not None:
            yield one


def identity(pid: int, *, or_zombie: bool = False) -> str | None:
    """Boot and start time of a living process, else None; needed since PIDs are reused."""
    one = read_process(pid)
    return f"{boot()}:{one.start_ticks}" if one is not None and (one.is_alive or or_zombie) else None


@cache
def boot() -> str:
    """ID of the machine's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def in_session(session: int) -> list[int]:
    return [one.pid for one in processes() if one.session == session and one.is_alive]


def below(pid: int) -> list[int]:
    """Living descendants of a process."""
    every = list(processes())
    alive = {one.pid for one in every if one.is_alive}
    return [child for child in family(pid, every)[1:] if child in alive]


def family(pid: int, every: Iterable[Process]) -> list[int]:
    """A process and all its descendants, parents first, zombies included."""
    children: dict[int, list[int]] = {}
    for one in every:
        children.setdefault(one.parent, []).append(one.pid)
    found = [pid]
    for parent in found:  # grows during the loop
        found += children.get(parent, ())
    return found


def argv_of(pid: int) -> list[str]:
    """Command line of a process; empty if it is gone or the kernel's."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return [word.decode(errors="replace") for word in words if word]
    return []


def title_of(pid: int) -> str:
    """First word of the command line, which a process may have replaced by a title; empty if it is gone."""
    return next(iter(argv_of(pid)), "")


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of anonymous and shared memory (so pools and arenas, but no mapped files), and of locked memory."""
    sizes = {b"Rs": 0, b"Vm": 0}
    for name, kilobytes in _SIZES.findall(Path(f"/proc/{pid}/status").read_bytes()):
        sizes[name[:2]] += int(kilobytes) * 1024
    return sizes[b"Rs"], sizes[b"Vm"]


def ram_of(pids: Iterable[int]) -> int:
    """Bytes of anonymous and shared memory of those processes that still live."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += memory_of(pid)[0]
    return total


def listeners(pids: Iterable[int] | None = None) -> list[Listener]:
    """Listening TCP ports, lowest first: of all processes whose files this user may see, or of `pids`, each in its own
    network namespace, which in a container may differ from this process's."""
    import psutil  # takes 0.1 s, and the guard does not need it

    found: set[Listener] = set()
    if pids is None:
        found = {
            _listener(one.laddr, one.pid) for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.pid
        }
    for pid in pids or ():
        with contextlib.suppress(psutil.Error):
            sockets = psutil.Process(pid).net_connections("tcp")
            found |= {_listener(one.laddr, pid) for one in sockets if one.status == "LISTEN"}
    return sorted(found, key=lambda listener: (listener.port, listener.pid))


def _listener(address: tuple[str, int], pid: int) -> Listener:
    host = ipaddress.ip_address(address[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    # A socket for all IPv6 addresses accepts IPv4 as well, unless that was switched off, which is rare.
    return Listener("127.0.0.1" if host.is_unspecified else str(host), address[1], pid)


def exit_code_of(pid: int, handle: int) -> int | None:
    """Exit code of an ended process that is another one's child, by its PID and pidfd; negative for a signal.

    /proc has it until the parent has read it, and the pidfd afterwards too since Linux 6.15; None if neither does.
    """
    with contextlib.suppress(*_GONE, ValueError, IndexError):
        fields = _stat_fields(Path(f"/proc/{pid}/stat").read_bytes())
        if fields[0] == b"Z":
            return os.waitstatus_to_exitcode(int(fields[49]))
    with contextlib.suppress(OSError):
        request = _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13)
        mask, *_, status = _PIDFD_INFO.unpack(fcntl.ioctl(handle, _PIDFD_GET_INFO, request))
        if mask & _PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(status)
    return None


def _stat_fields(text: bytes) -> list[bytes]:
    # The name is in brackets and may hold spaces and brackets, so fields are counted from the last one.
    return text.rpartition(b")")[2].split()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def stop_signals() -> list[signal.Signals]:
    """Signals that end a program, without a SIGHUP that nohup has switched off."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [signal.SIGHUP])]


@contextlib.contextmanager
def on_stop_signals(call: Callable[[], object], *, once: bool = False) -> Iterator[None]:
    """Run `call` on each stop signal instead of ending; with `once`, a second signal ends the program. No-op outside
    the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = stop_signals()

    def handle(*_: object) -> None:
        call()
        for sign in signals if once else ():
            signal.signal(sign, signal.SIG_DFL)

    before = {sign: signal.signal(sign, handle) for sign in signals}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def kill(pids: list[int], sign: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def wait_until_none(living: Callable[[], list[int]], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while living():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
