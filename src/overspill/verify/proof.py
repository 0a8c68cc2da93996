"""From what was asked to what was found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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


def prove(
    model: str, values: Mapping[str, Value], request: Request, say: Callable[[str], None], *, name: str | None = None
) -> Proof:
    """Raises `CannotVerify` where it cannot be tried; `say` gets a line whenever something begins. `name` is what the
    model is called where it is repeated, if not `model`."""
    values = eager_unless_asked(values)
    settings = plain(values)
    plan = plan_for(model, settings)
    require_this_machine(plan)
    stage = make_stage(plan)
    progress = Progress(say, lives=num_lives(request.scenarios, stage), seconds=request.seconds)
    result = verify(plan, stage, model, request, progress)
    command = ("overspill", "verify", name or model, *request.words, *_given(values))
    return Proof(plan=plan, stage=stage, result=result, command=command, settings=settings)


def eager_unless_asked(values: Mapping[str, Value]) -> Mapping[str, Value]:
    """Each of a dozen engines would compile and capture graphs, for a minute on a GPU, to run for seconds."""
    if values["enforce_eager"].origin is not GivenBy.DEFAULT:
        return values
    return {**values, "enforce_eager": replace(values["enforce_eager"], value=True)}


def _given(values: Mapping[str, Value]) -> list[str]:
    """The flags of this command; what the environment and the file say they say again."""
    words = []
    for value in values.values():
        if value.origin is not GivenBy.FLAG:
            continue
        if isinstance(value.value, bool):
            words.append(value.setting.flag if value.value else f"--no-{value.setting.flag.removeprefix('--')}")
        else:
            words += [value.setting.flag, str(value.value)]
    return words
