"""`overspill plan`."""

import json
from typing import Annotated

import typer

from overspill.cli.flags import PLANNING, Model, with_settings
from overspill.cli.naming import find_named
from overspill.settings import Value, origins


@with_settings(PLANNING)
def plan(
    values: dict[str, Value],
    model: Model,
    cards: Annotated[bool, typer.Option("--cards", help="Tell which cards would serve this context.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; bytes are integers.")] = False,
) -> None:
    """What fits, what goes to RAM, and how fast it will be. Exits with 1 if it does not fit."""
    from overspill.planning.machine import plan_for
    from overspill.planning.report import plan_as_json
    from overspill.planning.text import plan_as_text
    from overspill.serve.adopted import adopt

    named, values = find_named(model, values)
    adopted = adopt(values, registered=named.vllm_args)
    made = plan_for(named.source, adopted.settings, cards=cards)
    print(json.dumps({**plan_as_json(made), **origins(adopted.values)}, indent=2) if as_json else plan_as_text(made))
    if made.chosen is None:
        raise typer.Exit(1)
