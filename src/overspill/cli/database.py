"""The registry, opened for a command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from overspill.registry import Registry


@contextmanager
def opened_registry() -> Iterator["Registry"]:
    """Ends the command with 1 where the registry cannot be used now."""
    from overspill.registry import CannotNow, open_registry

    try:
        with open_registry() as registry:
            yield registry
    except CannotNow as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
