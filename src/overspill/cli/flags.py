"""Flags that several commands take: one for each setting, made from the table of settings."""

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any

import typer

from overspill.settings import SETTINGS, Setting, Value, config_path, resolve

Model = Annotated[
    str, typer.Argument(help="A folder, a model of the registry, or a repository of Hugging Face's cache or hub.")
]
Command = Callable[..., None]
HELP = {setting.name: setting.help for setting in SETTINGS}

SERVING = frozenset(setting.name for setting in SETTINGS)
PLANNING = SERVING - {"host", "port"}


def with_settings(names: Collection[str]) -> Callable[[Command], Command]:
    """Gives a command a flag for each of these settings, and the values of all of them as its argument `values`."""
    settings = [setting for setting in SETTINGS if setting.name in names]

    def values(given: dict[str, Any]) -> dict[str, Value]:
        return resolve(given, file=config_path())

    return with_flags("values", [_parameter(setting) for setting in settings], values)


def with_flags(
    argument: str, flags: Sequence[inspect.Parameter], collect: Callable[[dict[str, Any]], Any] = dict
) -> Callable[[Command], Command]:
    """Gives a command these flags in place of one argument, which gets what was given with them."""

    def decorate(command: Command) -> Command:
        own = [each for each in inspect.signature(command).parameters.values() if each.name != argument]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *flags)]

        @functools.wraps(command)
        def with_collected(**arguments: Any) -> None:
            given = {flag.name: arguments.pop(flag.name) for flag in flags}
            command(**{argument: collect(given)}, **arguments)

        with_collected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_collected.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_collected

    return decorate


def flag(name: str, option: Any, kind: Any = str | None, default: Any = None) -> inspect.Parameter:
    """A flag for `with_flags`; `option` is typer's."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _parameter(setting: Setting) -> inspect.Parameter:
    if not isinstance(setting.default, bool):
        return flag(setting.name, typer.Option(setting.flag, help=setting.help))
    # What the registry, the environment or the file switched on can be switched off; not given leaves it to them.
    # Nobody leaves `--force` switched on.
    off = f"/--no-{setting.flag.removeprefix('--')}" if setting.name != "force" else ""
    return flag(setting.name, typer.Option(f"{setting.flag}{off}", help=setting.help), bool | None)
