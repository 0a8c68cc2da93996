"""Everything that is decided before vLLM starts: the plan, the exact command, its environment, and what to warn of."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.planning.arguments import vllm_args
from overspill.planning.installed import Vllm
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal, wrong_build
from overspill.planning.report import plan_as_json
from overspill.planning.ways import Way
from overspill.serve.address import Address
from overspill.serve.command import Combined, combine, server_command
from overspill.serve.errors import CannotServe
from overspill.serve.positions import require_positions
from overspill.serve.secret_flags import HIDDEN, VARIABLES, into_environment, without_secrets
from overspill.serve.traps import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    model: str
    """What vLLM is given: a folder, or a repository."""
    asked_for: str | None = None
    """The name by which it was asked for, if not that: the registry's."""
    vllm: Vllm
    plan: Plan
    way: Way
    combined: Combined
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    """Variables to change; None removes one."""
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.asked_for or self.model

    @property
    def address(self) -> Address:
        host = self.combined.value("--host") or ""
        is_tls = self.combined.value("--ssl-certfile") is not None
        return Address(host, int(self.combined.value("--port") or 0), is_tls)

    @property
    def served_name(self) -> str:
        """By which clients ask for the model; vLLM takes several."""
        given = self.combined.value("--served-model-name")
        return given.split()[0] if given else self.model

    @property
    def line(self) -> str:
        """The command as a shell takes it, but for secrets."""
        removed = [word for name, value in self.environment.items() if value is None for word in ("-u", name)]
        changed = [f"{name}={value}" for name, value in self._shown_environment.items() if value is not None]
        return shlex.join([*(["env", *removed, *changed] if self.environment else []), *without_secrets(self.command)])

    @property
    def _shown_environment(self) -> dict[str, str | None]:
        secret = VARIABLES.values()
        return {name: HIDDEN if value and name in secret else value for name, value in self.environment.items()}

    def full_environment(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        changed = {**environment, **self.environment}
        return {name: value for name, value in changed.items() if value is not None}

    def as_json(self) -> dict[str, Any]:
        return {
            "command": without_secrets(self.command),
            "line": self.line,
            "environment": self._shown_environment,
            "warnings": list(self.warnings),
            "plan": plan_as_json(self.plan),
        }


def prepare(
    model: str,
    plan: Plan,
    settings: Mapping[str, Any],
    given: Sequence[str],
    *,
    vllm: Vllm | None,
    environment: Mapping[str, str] = os.environ,
    name: str | None = None,
) -> Prepared:
    """`settings` are the values of `overspill.settings`, `given` are vLLM's own flags, from the user. `name` is the
    model's in the registry: clients may ask for it by that name, and by its own."""
    if vllm is None:
        raise CannotServe(
            "vLLM is not installed in this Python environment, and serving needs it; install it with: "
            "pip install 'overspill[cuda]'"
        )
    if (way := plan.chosen) is None:
        raise CannotServe(f"{refusal(plan)} --force starts the nearest, where there is one.")
    place = ["--host", str(settings["host"]), "--port", str(settings["port"])]
    names = ["--served-model-name", name, model] if name is not None and name != model else []
    combined = combine([*vllm_args(plan, way), *place, *names], given)
    port = combined.value("--port") or ""
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        raise OverspillError(f"--port {port!r} is not a port; ports are 1 to 65535")
    require_positions(plan, combined, environment)
    checked = check(combined, environment, on_cpu=plan.platform.is_cpu)
    flags, secrets = into_environment(combined.flags)
    return Prepared(
        model=model,
        asked_for=name,
        vllm=vllm,
        plan=plan,
        way=way,
        combined=combined,
        command=(*server_command(model, vllm), *(word for flag in flags for word in flag.words)),
        environment={**checked.environment, **secrets},
        warnings=(*combined.contradictions, *combined.changes, *checked.warnings),
    )


def require_this_machine(prepared: Prepared) -> None:
    """A plan can be made for any machine; a server runs on this one."""
    plan, vllm = prepared.plan, prepared.vllm
    if plan.gpu.is_stated and not plan.platform.is_cpu:
        raise OverspillError(
            "--gpu states a card, and a model is served on the GPU that is here; leave it out, use --gpu-memory to "
            "keep to a part of the GPU, or add --dry-run for the command that would serve it there"
        )
    if (why := wrong_build(plan, vllm)) is not None:
        raise CannotServe(why)
