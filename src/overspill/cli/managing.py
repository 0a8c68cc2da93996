"""`overspill manager`, its password and its keys."""

import getpass
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from overspill.cli.flags import failing, flag, group, opened_registry, print_table, to_stderr, with_flags
from overspill.kv.errors import OverspillError

manager = group(
    "A page and an API to watch, switch and tune models, and a gateway that loads the model a request names.",
    is_command=True,
    epilog="Example: overspill manager --models-folder /models",
)
keys = group("API keys of the manager: add, list, rm.")
manager.add_typer(keys, name="keys")

KeyName = Annotated[str, typer.Argument(help="The key's name.")]


class Scope(StrEnum):
    ALL = "all"
    GATEWAY = "gateway"
    METRICS = "metrics"


of_the_manager = with_flags("given", [
    flag("host", typer.Option(help="Address to listen on; one that other machines reach needs a password or a "
         "key."), str, "127.0.0.1"),
    flag("port", typer.Option(min=1, max=65535, help="Port to listen on."), int, 7999),
    flag("models_folder", typer.Option(help="A folder that models may come from; may be repeated."), list[Path] | None),
    flag("public_url", typer.Option(help="URL under which browsers reach the manager through a TLS proxy, such as "
         "https://manager.example.")),
    flag("allow_host", typer.Option(help="A further host name to accept in requests; may be repeated."),
         list[str] | None),
    flag("allow_origin", typer.Option(help="A site whose scripts may use the gateway; may be repeated."),
         list[str] | None),
    flag("ram", typer.Option(help="RAM that all engines together may hold; without it, all that is free.")),
    flag("gpu_memory", typer.Option(help="Memory of each GPU that all engines together may hold; without it, all that "
         "is free.")),
    flag("upstream", typer.Option(help="Another server of OpenAI's API, as NAME=URL, whose models are served as "
         "NAME/MODEL; may be repeated."), list[str] | None),
    flag("upstream_key", typer.Option(help="Environment variable with the key of an --upstream server, as "
         "NAME=VARIABLE; may be repeated."), list[str] | None),
    flag("any_vllm_flag", typer.Option("--any-vllm-flag", help="Let the page and the API set vLLM flags that run code "
         "or open files."), bool, False),
    flag("keep_engines", typer.Option("--keep-engines", help="Leave engines running when the manager ends."), bool,
         False),
])  # fmt: skip
"""Decorator that gives a command the manager's flags."""


@manager.callback()
@of_the_manager
def run_manager(given: dict[str, Any], context: typer.Context) -> None:
    """Run the manager until it is stopped; it then stops what it started."""
    if context.invoked_subcommand is not None:
        return
    from overspill.manager.web.setup import make_setup

    setup = make_setup(**given)
    from overspill.errors import CannotServe
    from overspill.manager.errors import AlreadyManaged
    from overspill.manager.web.server import run_until_stopped

    with failing(AlreadyManaged, CannotServe), opened_registry() as registry:
        run_until_stopped(setup, registry, to_stderr)


@manager.command(epilog="Example: overspill manager password")
def password(
    remove: Annotated[bool, typer.Option("--remove", help="Remove the password instead of setting one.")] = False,
) -> None:
    """Set the password of the page; it is typed in, or read from standard input."""
    from overspill.registry.access import remove_password, set_password

    with opened_registry() as registry:
        if remove:
            print("removed" if remove_password(registry) else "there was none")
            return
        set_password(registry, _new_password())
    print("the password is set; everybody has to log in again")


@keys.command(epilog="Example: overspill manager keys add laptop --scope gateway")
def add(
    name: KeyName,
    scope: Annotated[
        Scope, typer.Option(help="Everything, requests to models under /v1 only, or /metrics only.")
    ] = Scope.ALL,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the key may use, with --scope gateway; may be repeated.")
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(help="How long the key is valid, such as 30d; without it, it does not expire.")
    ] = None,
) -> None:
    """Make an API key and print it, once."""
    from overspill.registry.access import KeyScope, create_key

    with opened_registry() as registry:
        secret, _ = create_key(registry, name, KeyScope(scope), models=model or (), expires_in=expires_in)
    print(secret)
    to_stderr("the key is shown only once; send it as: Authorization: Bearer KEY")


@keys.command("list", epilog="Example: overspill manager keys list")
def list_all() -> None:
    """List all keys by name, without their secrets, and how much each was used."""
    from overspill.registry.activity import keys_and_use

    with opened_registry() as registry:
        found = keys_and_use(registry)
    if not found:
        print("no keys yet; make one with: overspill manager keys add NAME")
        return
    rows = [["name", "begins with", "for", "models", "expires", "last used", "requests", "tokens in", "tokens out"]]
    for key, use in found:
        models, over = ",".join(key.models or ("all",)), ", over" if key.is_expired else ""
        counted = [str(use.requests), str(use.prompt_tokens), str(use.completion_tokens)]
        row = [key.name, f"osk_{key.prefix}", str(key.scope), models, _time(key.expires_at) + over]
        rows.append([*row, _time(key.last_used_at), *counted])
    print_table(rows)


@keys.command(epilog="Example: overspill manager keys rm laptop")
def rm(name: KeyName) -> None:
    """Remove a key, and end the sessions that were begun with it."""
    from overspill.registry.access import remove_key

    with opened_registry() as registry:
        remove_key(registry, name)
    print(f"removed {name}")


def _time(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC" if at is not None else "never"


def _new_password() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    first = getpass.getpass("new password: ")
    if first != getpass.getpass("the same again: "):
        raise OverspillError("the passwords differ; nothing was changed")
    return first
