"""From what was asked to what was found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overspill.planning.machine import plan_for
from overspill.planning.planner import Plan
from overspill.settings import GivenBy, Value, plain
from overspill.verify.outcome import exit_code
from overspill.verify.progress import Progress
from overspill.verify.report import report_as_json, report_as_text
from overspill.verify.request import Request, require_this_machine
from overspill.verify.run import Result, num_lives, verify
from overspill.verify.stage import Stage, make_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Or the opposite of one."""

    plan: Plan
    stage: Stage
    result: Result
    command: tuple[str, ...]
    """That repeats it, but for the seed."""
    settings: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return exit_code(self.result.outcomes)

    def as_text(self) -> str:
        return report_as_text(self.result, self.plan, self.stage, self.command)

    def as_json(self) -> dict[str, Any]:
        return report_as_json(self.result, self.plan, self.stage, self.command, self.settings)


def prove(model: str, values: Mapping[str, Value], request: Request, say: Callable[[str], None]) -> Proof:
    """Raises `CannotVerify` where it cannot be tried; `say` gets a line whenever something begins."""
    settings = plain(values)
    plan = plan_for(model, settings)
    require_this_machine(plan)
    stage = make_stage(plan)
    progress = Progress(say, lives=num_lives(request.scenarios, stage), seconds=request.seconds)
    result = verify(plan, stage, model, request.scenarios, request.seed, progress, soak=request.soak)
    command = ("overspill", "verify", model, *request.words, *_given(values))
    return Proof(plan=plan, stage=stage, result=result, command=command, settings=settings)


def _given(values: Mapping[str, Value]) -> list[str]:
    """The flags of this command; what the environment and the file say they say again."""
    words = []
    for value in values.values():
        if value.origin is GivenBy.FLAG:
            words += [value.setting.flag, *([] if value.value is True else [str(value.value)])]
    return words
