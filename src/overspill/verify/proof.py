"""From what was asked to what was found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overspill.launch.launch import Launch
from overspill.planning.planner import Plan
from overspill.settings import GivenBy, as_flags, plain
from overspill.verify.outcome import exit_code
from overspill.verify.progress import Progress
from overspill.verify.report import report_as_json, report_as_text
from overspill.verify.request import Request, require_this_machine
from overspill.verify.run import Result, num_lives, verify
from overspill.verify.stage import Stage, make_stage

# Each of a dozen engines would compile and capture graphs, for a minute on a GPU, to run for seconds.
DEFAULTS = {"enforce_eager": True}


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


def prove(launch: Launch, request: Request, say: Callable[[str], None]) -> Proof:
    """Raises `CannotVerify` where it cannot be tried; `say` gets a line whenever something begins."""
    plan, model = launch.plan, launch.ref.source
    require_this_machine(plan)
    stage = make_stage(plan)
    progress = Progress(say, lives=num_lives(request.scenarios, stage), seconds=request.seconds)
    result = verify(plan, stage, model, request, progress)
    # The environment and the file say the rest again.
    given = {name: one.value for name, one in launch.values.items() if one.origin is GivenBy.FLAG}
    command = ("overspill", "verify", launch.ref.name, *request.words, *as_flags(given))
    return Proof(plan=plan, stage=stage, result=result, command=command, settings=plain(launch.values))
