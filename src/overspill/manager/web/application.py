"""The one object behind pages and API: all parts of a manager, started and ended in order."""

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from overspill.manager.activity import Activity
from overspill.manager.fleet import Engines, Options
from overspill.manager.jobs import Jobs
from overspill.manager.library import Downloads
from overspill.manager.telemetry.watcher import Watching
from overspill.manager.upstreams import Servers
from overspill.manager.web.access import Access, LoginLimit
from overspill.manager.web.actions import Actions, Caller
from overspill.manager.web.setup import Setup
from overspill.model.source import cache_folder
from overspill.registry import Registry

_NOTE_USE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    setup: Setup
    registry: Registry
    engines: Engines
    access: Access
    watching: Watching
    actions: Actions
    jobs: Jobs
    activity: Activity
    downloads: Downloads
    servers: Servers
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Newest measured speeds by model, as of the last time somebody opened the models page."""
    rendered: dict[str, Any] = field(default_factory=dict)
    """Rendered live parts of the dashboard, and the moment they show."""
    limit: LoginLimit = field(default_factory=LoginLimit)
    since: float = field(default_factory=time.time)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the manager shuts down, so that open streams end and do not delay it."""


def _application(request: Request) -> Application:
    application: Application = request.app.state.application
    return application


def _caller(request: Request) -> Caller:
    return Caller(who=request.state.identity.who, address=request.state.address)


App = Annotated[Application, Depends(_application)]
Who = Annotated[Caller, Depends(_caller)]


@asynccontextmanager
async def running(setup: Setup, registry: Registry, access: Access, options: Options) -> AsyncIterator[Application]:
    """Start all parts of a manager in the running event loop; leaving stops jobs, and engines unless they are kept."""
    # Every stream through the gateway takes two file descriptors; the usual limit of 1,024 is meant for select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with Engines(registry, options) as engines:
        jobs = Jobs(engines, setup.folder / "jobs")
        watching = Watching(engines, {"models": cache_folder(), "logs": setup.folder}, jobs.processes)
        downloads = Downloads(cache_folder(), setup.folder / "downloads")
        actions = Actions(registry, engines, setup, jobs, watching, downloads, access)
        application = Application(
            setup=setup, registry=registry, engines=engines, access=access, watching=watching, actions=actions,
            jobs=jobs, activity=Activity(registry), downloads=downloads,
            servers=Servers(setup.upstreams, engines.upstream),
        )  # fmt: skip
        tasks = [
            asyncio.create_task(watching.run(), name="watching"),
            asyncio.create_task(jobs.run(), name="jobs"),
            asyncio.create_task(application.activity.run(), name="activity"),
            asyncio.create_task(application.servers.run(), name="upstreams"),
            asyncio.create_task(_note_use(access), name="note use"),
        ]
        try:
            yield application
        finally:
            application.closing.set()
            downloads.close()
            await actions.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await application.activity.write()
            with contextlib.suppress(Exception):
                await access.note_use()
            if setup.keeps_engines:
                await engines.close(keep=True)


async def _note_use(access: Access) -> None:
    while True:
        await asyncio.sleep(_NOTE_USE_S)
        await access.note_use()
