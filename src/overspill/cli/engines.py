"""`overspill ps`, `overspill stop` and `overspill logs`: through the manager where one runs, else directly."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.flags import print_table
from overspill.kv.errors import OverspillError

if TYPE_CHECKING:
    from overspill.manager.asked import Manager

Name = Annotated[str, typer.Argument(help="The model, as `overspill ps` names it.")]
ApiKey = Annotated[
    str | None, typer.Option(help="The manager's key, if it has one.", envvar="OVERSPILL_API_KEY", show_envvar=False)
]


def ps(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, api_key: ApiKey = None) -> None:
    """Engines that run, with their state; with a manager, all models."""
    from overspill.manager.serving import engines_here

    manager = _manager(api_key)
    shown = manager.engines() if manager is not None else engines_here()
    if as_json:
        print(json.dumps({"manager": manager.url if manager is not None else None, "engines": shown}, indent=2))
        return
    print(f"manager: {manager.url}" if manager is not None else "no manager runs; these are the servers of this user")
    rows = [("name", "state", "since", "process", "address")]
    rows += [
        (one["name"], _state(one), _since(one["since"]), str(one["pid"] or "-"), one["url"] or "-") for one in shown
    ]
    print_table(rows)


def stop(name: Name, api_key: ApiKey = None) -> None:
    """Stops a model's engine, and waits until it has ended."""
    from overspill.manager.serving import stop_here

    manager = _manager(api_key)
    if manager is not None:
        manager.stop(name)
    else:
        stop_here(name)
    print(f"stopped {name}")


def logs(
    name: Name,
    lines: Annotated[int, typer.Option(min=1, max=10_000, help="How many of the last ones.")] = 200,
    search: Annotated[str, typer.Option(help="Only lines that hold this, whatever its case.")] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on with new lines as they are written.")] = False,
    api_key: ApiKey = None,
) -> None:
    """The end of an engine's log."""
    from overspill.manager.serving import log_here

    if follow and search:
        raise OverspillError("--follow shows all lines, and --search looks for some; leave one of them out")
    manager = _manager(api_key)
    shown = (
        manager.log(name, lines, search, follow=follow)
        if manager is not None
        else log_here(name, lines, search, follow=follow)
    )
    try:
        for line in shown:
            print(line, flush=follow)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _manager(api_key: str | None) -> "Manager | None":
    """One that runs and lets us in; else what this user may see and stop is done without it."""
    from overspill.manager.asked import find, is_open

    manager = find(api_key)
    if manager is None or is_open(manager):
        return manager
    if api_key is not None:
        raise OverspillError(
            f"the manager at {manager.url} does not accept this key; overspill manager keys list names them"
        )
    print(f"note: the manager at {manager.url} wants a key (--api-key); going on without it", file=sys.stderr)
    return None


def _state(engine: dict[str, Any]) -> str:
    phase = engine.get("phase") or ""
    return f"{engine['state']} ({phase})" if engine["state"] == "starting" and phase else str(engine["state"])


def _since(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
