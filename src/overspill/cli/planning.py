"""`overspill plan`."""

import json
from typing import Annotated

import typer

from overspill.settings import SETTINGS, config_path, resolve

HELP = {setting.name: setting.help for setting in SETTINGS}
Text = str | None


def plan(
    model: Annotated[str, typer.Argument(help="A folder, or a repository of Hugging Face's cache or hub.")],
    max_model_len: Annotated[Text, typer.Option(help=HELP["max_model_len"])] = None,
    gpu: Annotated[Text, typer.Option(help=HELP["gpu"])] = None,
    gpu_memory: Annotated[Text, typer.Option(help=HELP["gpu_memory"])] = None,
    ram: Annotated[Text, typer.Option(help=HELP["ram"])] = None,
    link: Annotated[Text, typer.Option(help=HELP["link"])] = None,
    kv_cache_dtype: Annotated[Text, typer.Option(help=HELP["kv_cache_dtype"])] = None,
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
