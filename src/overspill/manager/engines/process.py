"""The processes of one engine: known by number and start time, signalled without mistaking another for them, ended."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from overspill.processes import family, identity, kill, listeners, processes

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Identity:
    """Numbers of processes are used again; with boot and start time they name one for ever, as the registry does."""

    pid: int
    process: str

    @property
    def is_alive(self) -> bool:
        return identify(self.pid) == self


def identify(pid: int) -> Identity | None:
    """None if there is no such process, or only what is left of one until its parent asks for its exit code."""
    process = identity(pid)
    return None if process is None else Identity(pid, process)


@dataclass(slots=True)
class EngineProcess:
    """`overspill serve`, and whatever runs below it or in a session that it or they began."""

    root: Identity
    sessions: set[int] = field(default_factory=set)
    """Kept from when the root lived: what it leaves behind is known by them."""

    @property
    def is_alive(self) -> bool:
        return self.root.is_alive

    def living(self) -> list[int]:
        """All that is left. Reads the whole of /proc: not for the event loop."""
        every = list(processes())
        ours = set[int]()
        if self.root.is_alive:
            ours = set(family(self.root.pid, every))
            # Only sessions of their own: one that a terminal began holds a shell that is not ours to kill.
            self.sessions |= {one.session for one in every if one.pid in ours and one.session in ours}
        left = [one for one in every if one.state not in "ZX" and (one.pid in ours or one.session in self.sessions)]
        # A number that no process has any more may begin a stranger's session later.
        self.sessions &= {one.session for one in left}
        return [one.pid for one in left]

    def signal(self, sign: signal.Signals) -> None:
        """To the root, if it still is the one that is meant."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.root.pid)
            try:
                if self.root.is_alive:
                    signal.pidfd_send_signal(handle, sign)
            finally:
                os.close(handle)

    async def gone(self, within: float) -> bool:
        deadline = time.monotonic() + within
        while await asyncio.to_thread(self.living):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def end(self, patience_s: float) -> bool:
        """Asked, waited for, then killed; False if it had to be killed."""
        await asyncio.to_thread(self.living)  # so that its sessions are known when it is gone
        self.signal(signal.SIGTERM)
        if await self.gone(patience_s):
            return True
        await self.kill()
        return False

    async def kill(self) -> None:
        """Until none is left: one that is just being started may be missed the first time."""
        while left := await asyncio.to_thread(self.living):
            kill(left)
            await self.gone(1.0)


def listens(pids: Iterable[int], port: int) -> bool:
    """Whether one of these processes has the port, and not somebody who took it meanwhile."""
    return any(one.port == port for one in listeners(pids))
