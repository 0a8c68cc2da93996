"""Shared parts of commands: flags made from the table of settings, launches, and the registry."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from overspill.kv.errors import OverspillError
from overspill.settings import BY_NAME, COUNT, LENGTH, MODEL_SETTINGS, SETTINGS, Scope, Setting

if TYPE_CHECKING:
    from overspill.launch.launch import Launch
    from overspill.registry import Registry

Model = Annotated[
    str,
    typer.Argument(
        help="A folder, a model's name in the registry, or a repository in Hugging Face's cache or on its hub."
    ),
]
Command = Callable[..., None]
_METAVARS = {LENGTH.note: "<tokens>", "port": "<int>"}

SERVING = frozenset(setting.name for setting in SETTINGS)
PLANNING = SERVING - {"host", "port"}
# vLLM's own flags are trailing words, not an option.
OF_MODELS = frozenset(setting.name for setting in MODEL_SETTINGS) - {"vllm_args"}
OF_MODELS_AND_COMMANDS = frozenset(name for name in OF_MODELS if BY_NAME[name].scope is Scope.EVERYWHERE)


class Commands(TyperGroup):
    """A group of commands whose summaries are wrapped in the help instead of cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=1000)) for name, one in commands if one])


def group(help: str, *, is_command: bool = False, **more: Any) -> typer.Typer:
    """A group of commands; called without one of them it shows its help, unless it `is_command` itself."""
    more |= {"invoke_without_command": is_command, "no_args_is_help": not is_command}
    return typer.Typer(cls=Commands, rich_markup_mode=None, help=help, **more)


def with_settings(names: Collection[str], hidden: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command a flag for each of these settings; their values arrive as its argument `given`. Settings in
    `hidden` are left out of the help, and accepted only to be refused with the reason."""
    settings = [setting for setting in BY_NAME.values() if setting.name in names]
    return with_flags("given", [_parameter(setting, is_hidden=setting.name in hidden) for setting in settings])


@contextmanager
def failing(*kinds: type[Exception]) -> Iterator[None]:
    """Exit with 1 on these errors: the command is valid but cannot be done now. Mistakes in it exit with 2."""
    try:
        yield
    except kinds as error:
        to_stderr(f"error: {error}")
        raise typer.Exit(1) from None


def passed_on(context: typer.Context) -> tuple[list[str], list[str]]:
    """vLLM's own flags that a command was given, and the names of the command's flags."""
    return context.args, [name for one in context.command.params for name in one.opts if name.startswith("--")]


def launch_of(
    model: str, given: dict[str, Any], vllm_args: Sequence[str] = (), own: Sequence[str] = (), **how: Any
) -> "Launch":
    """A model's launch, with a line on stderr for what came from the registry. Exits with 1 if the registry is needed
    and cannot be read, or if no context is fast enough. `own` are flags of the command that are not settings."""
    from overspill.errors import CannotServe
    from overspill.flags import read_flags
    from overspill.launch.launch import Launch
    from overspill.launch.reference import NoRegistry
    from overspill.launch.traps import refuse_flags

    if model.startswith("-"):
        raise OverspillError(f"the model comes first, before vLLM's own flags; {model} is a flag")
    refuse_flags(read_flags(vllm_args), own)  # before the hub or the registry is contacted
    with failing(CannotServe, NoRegistry):
        return Launch.of(model, given, vllm_args, note=to_stderr, **how)


@contextmanager
def opened_registry() -> Iterator["Registry"]:
    from overspill.registry import CannotNow, open_registry

    with failing(CannotNow), open_registry() as registry:
        yield registry


def to_stderr(text: str) -> None:
    """Print to standard error; standard output is for a command's result."""
    print(text, file=sys.stderr, flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def with_flags(argument: str, flags: Sequence[inspect.Parameter]) -> Callable[[Command], Command]:
    """Replace one argument of a command with these flags; it receives their values by name."""

    def decorate(command: Command) -> Command:
        own = [each for each in inspect.signature(command).parameters.values() if each.name != argument]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *flags)]

        @functools.wraps(command)
        def with_collected(**arguments: Any) -> None:
            given = {flag.name: arguments.pop(flag.name) for flag in flags}
            command(**{argument: given}, **arguments)

        with_collected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_collected.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_collected

    return decorate


def flag(name: str, option: Any, kind: Any = str | None, default: Any = None) -> inspect.Parameter:
    """A flag for `with_flags`; `option` is a typer.Option."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _parameter(setting: Setting, *, is_hidden: bool) -> inspect.Parameter:
    if not setting.is_yes_or_no:
        metavar = "<size>" if setting.is_size else _METAVARS.get(setting.kind.note or setting.name)
        metavar = "<int>" if setting.kind is COUNT else metavar
        return flag(setting.name, typer.Option(setting.flag, help=setting.help, metavar=metavar, hidden=is_hidden))
    # --no-… switches off what the registry, the environment or the file switched on; without a flag they decide.
    # Nobody leaves `--force` switched on.
    off = f"/--no-{setting.flag.removeprefix('--')}" if setting.name != "force" else ""
    return flag(setting.name, typer.Option(f"{setting.flag}{off}", help=setting.help), bool | None)
