"""A model's name on the command line, with what the registry sets for it."""

import sys

import typer

from overspill.named import Named, NoRegistry, look_up
from overspill.settings import Value


def find_named(model: str, values: dict[str, Value]) -> tuple[Named, dict[str, Value]]:
    """And says what came from the registry. Exits with 1 if the registry is needed and cannot be asked."""
    try:
        named = look_up(model)
    except NoRegistry as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    values = named.applied(values)
    for note in named.notes(values):
        print(note, file=sys.stderr, flush=True)
    return named, values
