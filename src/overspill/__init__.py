"""Overspill: makes a GPU behave as if it had the machine's RAM, on stock vLLM."""

from typing import TYPE_CHECKING, Any

from overspill.api import DoesNotFit, PlanContradicted, engine_args, plan
from overspill.kv.errors import OverspillError

if TYPE_CHECKING:
    from overspill.llm import LLM

__all__ = ["LLM", "DoesNotFit", "OverspillError", "PlanContradicted", "engine_args", "plan"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # vLLM is loaded when it is asked for: that takes seconds, and a plan needs none of it.
    if name == "LLM":
        from overspill.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
