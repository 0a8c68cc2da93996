"""Overspill: makes a GPU behave as if it had the machine's RAM, on stock vLLM."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overspill.kv.errors import OverspillError

if TYPE_CHECKING:
    from overspill.api import DoesNotFit, PlanContradicted, engine_args, plan
    from overspill.llm import LLM

__all__ = ["LLM", "DoesNotFit", "OverspillError", "PlanContradicted", "engine_args", "plan"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported on first use: vLLM takes seconds to load, and an engine's processes need none of these names.
    if name in __all__:
        return getattr(import_module("overspill.llm" if name == "LLM" else "overspill.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
