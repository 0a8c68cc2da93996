"""Overspill: makes a GPU behave as if it had the machine's RAM, on stock vLLM."""

import importlib
import inspect
import types
from typing import TYPE_CHECKING, Any

from overspill.api import DoesNotFit, PlanContradicted, engine_args
from overspill.api import plan as _make_plan
from overspill.kv.errors import OverspillError

if TYPE_CHECKING:
    from overspill.api import plan
    from overspill.llm import LLM

__all__ = ["LLM", "DoesNotFit", "OverspillError", "PlanContradicted", "engine_args", "plan"]
__version__ = "0.1.0"


class _CallablePackage(types.ModuleType):
    """`overspill.plan(...)` is the function, and `overspill.plan` has modules: Python binds a package's name when the
    first of them is imported, whatever had that name before."""

    __call__ = staticmethod(_make_plan)
    __signature__ = inspect.signature(_make_plan)  # the first parameter would be taken for `self`


importlib.import_module("overspill.plan").__class__ = _CallablePackage


def __getattr__(name: str) -> Any:
    # vLLM is loaded when it is asked for: that takes seconds, and a plan needs none of it.
    if name == "LLM":
        from overspill.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
