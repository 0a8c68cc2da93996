"""A model's plan at a context of the user's choice, on the machine as it would be without its own engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overspill.hardware import detect
from overspill.launch.launch import Launch
from overspill.launch.reference import ModelRef
from overspill.manager.engines.memory import Memory
from overspill.manager.engines.needs import with_more
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.planning.report import longest_as_text, plan_as_json
from overspill.registry import ModelSettings

_LEAST_CONTEXT = 256
_MOST_STEPS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    plan: Plan
    limit: int
    """The longest context that the model was made for."""

    @property
    def fits(self) -> bool:
        return self.plan.recommended is not None

    @property
    def why_not(self) -> str:
        return "" if self.fits else refusal(self.plan)

    @property
    def longest(self) -> str:
        """What RAM makes of this GPU."""
        return longest_as_text(self.plan)

    @property
    def step(self) -> int:
        """Of a slider over all contexts."""
        step = _LEAST_CONTEXT
        while self.limit / step > _MOST_STEPS:
            step *= 2
        return step

    def as_json(self) -> dict[str, Any]:
        return {**plan_as_json(self.plan), "why_not": self.why_not, "limit": self.limit}


def replan(settings: ModelSettings, changes: Mapping[str, Any], own: Memory) -> Replanned:
    """`changes` are parsed values; `own` is what the model's engine holds now. Reads files and looks at the machine."""
    ref = ModelRef.of_model(settings.source, settings.changed(changes))
    plan = Launch.of(ref, {}, found=with_more(detect(), own)).plan
    return Replanned(plan=plan, limit=max(plan.facts.max_position_embeddings, plan.max_model_len))
