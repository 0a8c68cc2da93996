"""Flags that several commands take: one for each setting, made from the table of settings."""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from overspill.settings import SETTINGS, Setting, config_path, resolve

Model = Annotated[str, typer.Argument(help="A folder, or a repository of Hugging Face's cache or hub.")]
Text = str | None
Command = Callable[..., None]
HELP = {setting.name: setting.help for setting in SETTINGS}

SERVING = frozenset(setting.name for setting in SETTINGS)
PLANNING = SERVING - {"host", "port"}


def with_settings(names: Collection[str]) -> Callable[[Command], Command]:
    """Gives a command a flag for each of these settings, and the values of all of them as its argument `values`."""
    settings = [setting for setting in SETTINGS if setting.name in names]

    def decorate(command: Command) -> Command:
        own = [each for each in inspect.signature(command).parameters.values() if each.name != "values"]
        flags = [_parameter(setting) for setting in settings]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *flags)]

        @functools.wraps(command)
        def with_values(**arguments: Any) -> None:
            given = {setting.name: arguments.pop(setting.name) for setting in settings}
            # A switch that is not given leaves it to the environment and the file.
            stated = {name: None if value is False else value for name, value in given.items()}
            command(values=resolve(stated, file=config_path()), **arguments)

        with_values.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_values.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_values

    return decorate


def _parameter(setting: Setting) -> inspect.Parameter:
    is_switch = isinstance(setting.default, bool)
    kind, default = (bool, False) if is_switch else (str | None, None)
    option = Annotated[kind, typer.Option(setting.flag, help=setting.help)]  # type: ignore[valid-type]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
