"""Methods of vLLM's that do more where Overspill is loaded."""

import functools
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]


def wrap_once(owner: type, name: str, make: Callable[[Method], Method]) -> None:
    """Replace a method by what `make` makes of it. vLLM loads plugins more than once in a process: what was replaced
    stays as it is."""
    method = getattr(owner, name)
    if hasattr(method, "overspill"):
        return
    replacement = functools.wraps(method)(make(method))
    replacement.overspill = True  # type: ignore[attr-defined]
    setattr(owner, name, replacement)
