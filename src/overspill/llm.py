"""`overspill.LLM`: vLLM's LLM with the plan applied."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import vllm

from overspill.api import PlanContradicted, contradicting_variables, planned_arguments
from overspill.kv.errors import OverspillError
from overspill.launch.machine import rank_environment
from overspill.planning.arguments import device_share
from overspill.planning.device_share import VARIABLE
from overspill.planning.planner import Plan


class LLM(vllm.LLM):
    """vLLM's `LLM` on a GPU that behaves as if it had the machine's RAM.

    Further arguments are settings, as `overspill.plan` takes them, or vLLM's own, which win over the plan, with a
    warning where they contradict it. Raises `overspill.DoesNotFit` before anything is loaded.
    """

    plan: Plan
    """The plan; `plan.chosen` is the way the engine was started."""

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int | str | None = None,
        ram: int | str | None = None,
        gpu_memory: int | str | None = None,
        **arguments: Any,
    ) -> None:
        given = {"max_model_len": max_model_len, "ram": ram, "gpu_memory": gpu_memory, **arguments}
        self.plan, planned = planned_arguments(model, given)
        _require_this_machine(self.plan)
        with _environment(_variables(self.plan, planned)):
            super().__init__(**planned)


def _require_this_machine(plan: Plan) -> None:
    """Refuse a plan for another machine: the engine runs on this one."""
    from vllm.platforms import current_platform

    if plan.gpu.is_stated and not plan.platform.is_cpu:
        raise OverspillError(
            "gpu names a card to plan for, and an LLM runs on this machine's GPU; leave gpu out, use gpu_memory to "
            "limit the GPU memory, or overspill.engine_args for the arguments that would serve it on that card"
        )
    if current_platform.is_cpu() != plan.platform.is_cpu:
        here, there = ("cpu", "cuda") if current_platform.is_cpu() else ("cuda", "cpu")
        raise OverspillError(
            f"the plan is for {there}, and the installed vLLM runs on {here}; use device={here!r}, or install "
            "the other build"
        )


def _variables(plan: Plan, arguments: Mapping[str, Any]) -> dict[str, str | None]:
    """Variables for the engine; None removes one."""
    variables: dict[str, str | None] = {**rank_environment(plan), VARIABLE: None}
    for name in contradicting_variables(arguments):
        variables[name] = None
        warnings.warn(
            f"{name} is left out for this engine: it would override the plan's kv_cache_memory_bytes",
            PlanContradicted,
            stacklevel=3,
        )
    # Where the KV size is the plan's, the engine checks it against its share of the GPU.
    way, kv_bytes = plan.chosen, arguments.get("kv_cache_memory_bytes")
    share = device_share(plan, way) if way is not None and kv_bytes == way.kv.device_bytes else None
    return {**variables, **(share.written() if share is not None else {})}


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables while the engine starts: it reads them, and the processes it starts inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
