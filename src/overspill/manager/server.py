"""Runs a manager: checks that it may listen where it is asked to, serves, and ends in order."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable

import uvicorn
import uvloop

from overspill.address import Address, require_free
from overspill.manager.app import make_app
from overspill.manager.application import running
from overspill.manager.backend import backend_here
from overspill.manager.fleet import Options
from overspill.manager.records import announce, withdraw
from overspill.manager.security.access import Access
from overspill.manager.security.binding import require_protection
from overspill.manager.security.connections import BoundedProtocol
from overspill.manager.security.log_text import OneLine
from overspill.manager.setup import Setup, is_for_this_machine_only, public_flag
from overspill.registry import Registry
from overspill.serve.reporter import notify

_GRACE_S = 3


def run_until_stopped(
    setup: Setup, registry: Registry, say: Callable[[str], None], options: Options | None = None
) -> None:
    """Blocks. Not on asyncio's own event loop, on which every token costs more."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(setup, registry, say, options))


async def run(setup: Setup, registry: Registry, say: Callable[[str], None], options: Options | None = None) -> None:
    """Until SIGTERM, SIGINT or SIGHUP. `say` tells where it is."""
    access = Access(registry, is_loopback=is_for_this_machine_only(setup))
    require_protection(setup.host, is_protected=await access.is_protected(), public=public_flag(setup))
    address = Address(setup.host, setup.port)
    require_free(address, set())
    options = options or Options(folder=setup.folder, memory=setup.memory, backend=backend_here())
    _log_what_it_does()
    async with running(setup, registry, access, options) as application:
        server = _Server(_config(make_app(application), setup))
        task = asyncio.create_task(server.serve())

        def end() -> None:
            application.closing.set()
            server.end()

        with _signals(end):
            while not server.started and not task.done():
                await asyncio.sleep(0.01)
            if server.started:
                _spare_what_stays()
                announce(setup.folder, address.url)
                say(told := f"the manager is at {address.url}, OpenAI's API for all models at {address.url}/v1")
                notify("READY=1", f"STATUS={told}")
            try:
                await task
            finally:
                withdraw(setup.folder)
                notify("STOPPING=1")
                with contextlib.suppress(OSError):  # a terminal that was closed, which is why it ends
                    say("stopping what was started here")


def _log_what_it_does() -> None:
    """On standard error: without a handler Python shows warnings only, and not why a model was stopped."""
    ours = logging.getLogger("overspill.manager")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(OneLine())
        ours.addHandler(handler)


def _spare_what_stays() -> None:
    """A full collection looks at all that was imported, and took 0.1 s of CPU time, in which no token passes."""
    gc.collect()
    gc.freeze()


def _config(app: object, setup: Setup) -> uvicorn.Config:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=setup.host,
        port=setup.port,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=_GRACE_S,
    )
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(OneLine())
    return config


class _Server(uvicorn.Server):
    """Its own signal handlers would end it before the engines are stopped, and raise the signal once more."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    def end(self) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


@contextlib.contextmanager
def _signals(end: Callable[[], None]):  # type: ignore[no-untyped-def]
    loop = asyncio.get_running_loop()
    signs = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signs.append(signal.SIGHUP)
    for sign in signs:
        loop.add_signal_handler(sign, end)
    try:
        yield
    finally:
        # What follows takes up to a minute, in which a second Ctrl-C must not leave engines behind: it is ignored.
        for sign in signs:
            loop.add_signal_handler(sign, lambda: None)
