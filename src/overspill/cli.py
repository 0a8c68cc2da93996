"""The `overspill` command. Handlers hold no logic: they read settings, call a function, and print."""

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from overspill.kv.errors import OverspillError
from overspill.settings import SETTINGS, Value, config_path, resolve

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Makes a GPU behave as if it had the machine's RAM, on stock vLLM.",
)
_HELP = {setting.name: setting.help for setting in SETTINGS}
Text = str | None


@app.callback()
def _commands() -> None:
    """A command is always named, even while there is only one."""


@app.command(epilog="Example: overspill plan Qwen/Qwen3-8B --max-model-len 128k --gpu rtx4090 --ram 64GiB")
def plan(
    model: Annotated[str, typer.Argument(help="A folder, or a repository of Hugging Face's cache or hub.")],
    max_model_len: Annotated[Text, typer.Option(help=_HELP["max_model_len"])] = None,
    gpu: Annotated[Text, typer.Option(help=_HELP["gpu"])] = None,
    gpu_memory: Annotated[Text, typer.Option(help=_HELP["gpu_memory"])] = None,
    ram: Annotated[Text, typer.Option(help=_HELP["ram"])] = None,
    link: Annotated[Text, typer.Option(help=_HELP["link"])] = None,
    kv_cache_dtype: Annotated[Text, typer.Option(help=_HELP["kv_cache_dtype"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; bytes are integers.")] = False,
) -> None:
    """What fits, what goes to RAM, and how fast it will be. Exits with 1 if it does not fit."""
    from overspill.plan.machine import plan_for
    from overspill.plan.report import plan_as_json
    from overspill.plan.text import plan_as_text

    values = resolve(
        {
            "max_model_len": max_model_len, "gpu": gpu, "gpu_memory": gpu_memory, "ram": ram, "link": link,
            "kv_cache_dtype": kv_cache_dtype,
        },
        file=config_path(),
    )  # fmt: skip
    made = plan_for(model, {name: value.value for name, value in values.items()})
    print(json.dumps(plan_as_json(made), indent=2) if as_json else plan_as_text(made))
    if made.recommended is None:
        raise typer.Exit(1)


@app.command(epilog="Example: overspill config --json")
def config(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Every setting, its value, and whether a flag, the environment, the file or the default gave it."""
    values = resolve({}, file=config_path())
    if as_json:
        told = {name: {"value": value.value, "origin": str(value.origin)} for name, value in values.items()}
        print(json.dumps(told, indent=2))
        return
    for value in values.values():
        print(_setting_line(value))
    print(f"file: {config_path()}")


def _setting_line(value: Value) -> str:
    shown = "-" if value.value is None else str(value.value)
    return f"{value.setting.name:18}{shown:>16}   {value.place or value.origin}"


def main(run: Callable[[], Any] = app) -> None:
    """0 if it went well, 1 if what was asked for cannot be, 2 for a mistake in how it was asked."""
    try:
        run()
    except OverspillError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
