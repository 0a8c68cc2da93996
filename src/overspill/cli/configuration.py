"""`overspill config`."""

import json
from typing import Annotated

import typer

from overspill.settings import Value, config_path, resolve


def config(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Every setting, its value, and whether a flag, the environment, the file or the default gave it."""
    values = resolve({}, file=config_path())
    if as_json:
        told = {name: {"value": value.value, "origin": str(value.origin)} for name, value in values.items()}
        print(json.dumps(told, indent=2))
        return
    width = max(len(name) for name in values)
    for value in values.values():
        print(_setting_line(value, width))
    print(f"file: {config_path()}")


def _setting_line(value: Value, width: int) -> str:
    shown = "-" if value.value is None else str(value.value)
    return f"{value.setting.name:{width}}{shown:>16}   {value.place or value.origin}"
