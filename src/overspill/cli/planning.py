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
    device: Annotated[Text, typer.Option(help=HELP["device"])] = None,
    gpu: Annotated[Text, typer.Option(help=HELP["gpu"])] = None,
    gpu_memory: Annotated[Text, typer.Option(help=HELP["gpu_memory"])] = None,
    ram: Annotated[Text, typer.Option(help=HELP["ram"])] = None,
    offload_ram: Annotated[Text, typer.Option(help=HELP["offload_ram"])] = None,
    link: Annotated[Text, typer.Option(help=HELP["link"])] = None,
    dtype: Annotated[Text, typer.Option(help=HELP["dtype"])] = None,
    kv_cache_dtype: Annotated[Text, typer.Option(help=HELP["kv_cache_dtype"])] = None,
    max_num_seqs: Annotated[Text, typer.Option(help=HELP["max_num_seqs"])] = None,
    max_num_batched_tokens: Annotated[Text, typer.Option(help=HELP["max_num_batched_tokens"])] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help=HELP["enforce_eager"])] = False,
    force: Annotated[bool, typer.Option("--force", help=HELP["force"])] = False,
    cards: Annotated[bool, typer.Option("--cards", help="Tell which cards would serve this context.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; bytes are integers.")] = False,
) -> None:
    """What fits, what goes to RAM, and how fast it will be. Exits with 1 if it does not fit."""
    from overspill.plan.machine import plan_for
    from overspill.plan.report import plan_as_json
    from overspill.plan.text import plan_as_text

    values = resolve(
        {
            "max_model_len": max_model_len, "device": device, "gpu": gpu, "gpu_memory": gpu_memory, "ram": ram,
            "offload_ram": offload_ram, "link": link, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype,
            "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
            # A switch that is not given leaves it to the environment and the file.
            "enforce_eager": enforce_eager or None, "force": force or None,
        },
        file=config_path(),
    )  # fmt: skip
    made = plan_for(model, {name: value.value for name, value in values.items()}, cards=cards)
    print(json.dumps(plan_as_json(made), indent=2) if as_json else plan_as_text(made))
    if made.chosen is None:
        raise typer.Exit(1)
