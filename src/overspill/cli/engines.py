"""`overspill ps`, `stop`, `park`, `wake` and `logs`: through the manager where one runs, else directly."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.flags import print_table
from overspill.kv.errors import OverspillError

if TYPE_CHECKING:
    from overspill.manager.web.client import Manager, ThisMachine

Name = Annotated[str, typer.Argument(help="The model, as `overspill ps` names it.")]
ApiKey = Annotated[
    str | None, typer.Option(help="The manager's key, if it has one.", envvar="OVERSPILL_API_KEY", show_envvar=False)
]


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="First remove this user's failed servers from the list.")
    ] = False,
    api_key: ApiKey = None,
) -> None:
    """List running engines with their state; with a manager, all models."""
    if clear:
        from overspill.serve.status import clear_ended

        clear_ended()
    source = _source(api_key)
    engines = source.engines()
    if as_json:
        print(json.dumps({"manager": source.url, "engines": engines}, indent=2))
        return
    print(
        f"manager: {source.url}" if source.url is not None else "no manager is running; these are this user's servers"
    )
    rows = [("name", "state", "since", "process", "address")]
    rows += [
        (one["name"], _state(one), _since(one["since"]), str(one["pid"] or "-"), one["url"] or "-") for one in engines
    ]
    print_table(rows)


def stop(name: Name, api_key: ApiKey = None) -> None:
    """Stop a model's engine, and wait until it has ended."""
    _source(api_key).control("stop", name)
    print(f"stopped {name}")


def park(name: Name, api_key: ApiKey = None) -> None:
    """Park a model's engine: its GPU memory is free for others, and it waits in RAM until it is woken."""
    source = _source(api_key)
    source.control("park", name)
    # A manager wakes a parked engine when a request arrives.
    print(f"parked {name}" if source.url is not None else f"parked {name}; requests wait until: overspill wake {name}")


def wake(name: Name, api_key: ApiKey = None) -> None:
    """Wake a parked model; with a manager, engines that are in its way are parked or stopped."""
    _source(api_key).control("wake", name)
    print(f"{name} is awake")


def logs(
    name: Name,
    lines: Annotated[int, typer.Option(min=1, max=10_000, help="How many lines, from the end.")] = 200,
    search: Annotated[str, typer.Option(help="Only lines that contain this text, in any case.")] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing new lines as they are written.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Show the end of an engine's log."""
    if follow and search:
        raise OverspillError("--follow and --search cannot be used together; leave one of them out")
    try:
        for line in _source(api_key).log(name, lines, search, follow=follow):
            print(line, flush=follow)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _source(api_key: str | None) -> "Manager | ThisMachine":
    """The running manager if it lets us in, else this user's servers on this machine."""
    from overspill.manager.web.client import ThisMachine, find

    manager = find(api_key)
    if manager is None:
        return ThisMachine()
    if manager.is_open():
        return manager
    if api_key is not None:
        raise OverspillError(
            f"the manager at {manager.url} does not accept this key; overspill manager keys list names them"
        )
    print(
        f"note: the manager at {manager.url} requires a key (--api-key); continuing without the manager",
        file=sys.stderr,
    )
    return ThisMachine()


def _state(engine: dict[str, Any]) -> str:
    phase = engine.get("phase") or ""
    return f"{engine['state']} ({phase})" if engine["state"] == "starting" and phase else str(engine["state"])


def _since(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
