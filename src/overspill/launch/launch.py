"""Launch preparation before vLLM starts: settings, plan, exact command, environment and warnings.

`Launch.of` is the only path from a model's name to its plan; `Launch.prepared` continues to vLLM's server command.
"""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overspill.address import Address
from overspill.errors import CannotServe
from overspill.flags import HIDDEN, VARIABLES, find, into_environment, read_flags, without_secrets
from overspill.hardware import Hardware
from overspill.kv.errors import OverspillError
from overspill.launch import traps
from overspill.launch.arguments import Adopted, Combined, adopt, combine
from overspill.launch.machine import plan_for, rank_environment
from overspill.launch.reference import ModelRef, look_up
from overspill.launch.vllm import CONTROL, Vllm, installed_vllm, server_command, wrong_build
from overspill.planning.arguments import device_share, vllm_args
from overspill.planning.device_share import VARIABLE
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.planning.report import plan_as_json
from overspill.planning.ways import Way
from overspill.settings import AUTO, GivenBy, Value, config_path, resolve

_LEFT_TO_VLLM = "; --force leaves it to vLLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    model: str
    """The folder or repository that vLLM is given."""
    asked_for: str | None = None
    """The model's registry name, if the user gave that."""
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
        """Name by which clients address the model, the first if vLLM has several."""
        given = self.combined.value("--served-model-name")
        return given.split()[0] if given else self.model

    @property
    def line(self) -> str:
        """The command for a shell, with secrets hidden."""
        removed = [word for name, value in self.environment.items() if value is None for word in ("-u", name)]
        changed = [f"{name}={value}" for name, value in self._shown_environment.items() if value is not None]
        return shlex.join([*(["env", *removed, *changed] if self.environment else []), *without_secrets(self.command)])

    @property
    def _shown_environment(self) -> dict[str, str | None]:
        secret = VARIABLES.values()
        return {name: HIDDEN if value and name in secret else value for name, value in self.environment.items()}

    def full_environment(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        share = device_share(self.plan, self.way) if self.combined.has_planned_kv else None
        # A share found in the environment is of an engine that this process runs in.
        changed = {**environment, VARIABLE: None, **(share.written() if share is not None else {}), **self.environment}
        return {name: value for name, value in changed.items() if value is not None}

    def as_json(self) -> dict[str, Any]:
        return {
            "command": without_secrets(self.command),
            "line": self.line,
            "environment": self._shown_environment,
            "warnings": list(self.warnings),
            "plan": plan_as_json(self.plan),
        }


def _idle_flags(values: Mapping[str, Value]) -> Iterator[str]:
    """Warnings about typed flags that need another one; those in the registry or a file may be for other models."""

    def is_flag(name: str) -> bool:
        return values[name].origin is GivenBy.FLAG

    if is_flag("disk_path") and not values["disk"].value and "disk_bytes" not in (values["kv_options"].value or ""):
        yield "warning: --disk-path does nothing without --disk; add that, or leave it out"
    if is_flag("elastic_weight") and not values["elastic"].value:
        yield "warning: --elastic-weight does nothing without --elastic; add that, or leave it out"
    if is_flag("ram_reserve") and values["ram"].value is not None:
        yield f"warning: --ram-reserve does nothing where RAM is stated ({values['ram'].place}); leave one of them out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Adopted):
    """A model with its settings and its plan."""

    ref: ModelRef
    plan: Plan

    @classmethod
    def of(
        cls,
        ref: str | ModelRef,
        given: Mapping[str, object],
        vllm_args: Sequence[str] = (),
        *,
        defaults: Mapping[str, Any] | None = None,
        found: Hardware | None = None,
        cards: bool = False,
        is_server: bool = False,
        note: Callable[[str], None] | None = None,
    ) -> "Launch":
        """Plan a model. `given` holds settings by name and `vllm_args` vLLM's own flags, as the user gave them; both
        win over the registry, the environment and config.toml. `defaults` are the caller's, `found` replaces the
        machine as it is now, and `note` receives lines on what came from the registry before the plan is made. Only a
        server's KV may be elastic.

        Raises `NoRegistry` if the name needs a registry that cannot be read, and `OverspillError` for mistakes. A
        context that does not fit raises nothing: the plan says so.
        """
        ref = look_up(ref) if isinstance(ref, str) else ref
        values = ref.applied(resolve(given, file=config_path(), defaults=defaults))
        if note is not None:
            for line in (*ref.notes(values), *_idle_flags(values)):
                note(line)
        adopted = adopt(values, vllm_args, registered=ref.vllm_args)
        is_auto, speed = values["max_model_len"].value == AUTO, values["min_speed"]
        if speed.origin is GivenBy.FLAG and not is_auto:
            raise OverspillError("--min-speed is for --max-model-len auto; add that, or leave --min-speed out")
        flags = read_flags(adopted.vllm_args)
        revision, (_, secrets) = find(flags, "--revision"), into_environment(flags)
        plan = plan_for(
            ref.source, adopted.settings, cards=cards, found=found, is_server=is_server,
            revision=revision.value if revision is not None else "main", environ={**os.environ, **secrets},
        )  # fmt: skip
        found_here = {}
        if is_auto:  # fixed, so that everything made from this launch has this length
            found_here = {
                "max_model_len": replace(values["max_model_len"], value=plan.max_model_len),
                "min_speed": Value(speed.setting, speed.setting.default, GivenBy.DEFAULT, ""),
            }
        return cls(
            ref=ref, plan=plan, values={**adopted.values, **found_here}, vllm_args=adopted.vllm_args,
            offload_groups=adopted.offload_groups,
        )  # fmt: skip

    @property
    def too_long(self) -> str | None:
        """Why vLLM would refuse the length even if it fits; None if it would not."""
        why = traps.too_long(self.plan, self.plan.max_model_len, read_flags(self.vllm_args), os.environ)
        return None if why is None else f"{why}{_LEFT_TO_VLLM}."

    def prepared(
        self,
        *,
        environment: Mapping[str, str] = os.environ,
        by_name: bool = True,
        can_force: bool = True,
        **place: object,
    ) -> "Prepared":
        """Prepare vLLM's server command. With `by_name` clients may also use the registry name, with `can_force`
        refusals say what --force would do, and `place` overrides the settings' host or port."""
        name = self.ref.name if self.ref.is_registered and by_name else None
        settings = {**self.settings, **place}
        return prepare(
            self.ref.source, self.plan, settings, self.vllm_args, vllm=installed_vllm(), environment=environment,
            name=name, can_force=can_force,
        )  # fmt: skip


def prepare(
    model: str,
    plan: Plan,
    settings: Mapping[str, Any],
    given: Sequence[str],
    *,
    vllm: Vllm | None,
    environment: Mapping[str, str] = os.environ,
    name: str | None = None,
    can_force: bool = True,
) -> Prepared:
    """Prepare a server from values of `overspill.settings` and the user's own vLLM flags (`given`). Clients may use the
    registry's `name` as well as the model's own."""
    if vllm is None:
        raise CannotServe(
            "vLLM is not installed in this Python environment, and serving needs it; install it with: "
            "pip install 'overspill[cuda]'"
        )
    if (way := plan.chosen) is None:
        raise CannotServe(refusal(plan) + (" --force starts the nearest, where there is one." if can_force else ""))
    place = ["--host", str(settings["host"]), "--port", str(settings["port"])]
    names = ["--served-model-name", name, model] if name is not None and name != model else []
    combined = combine([*vllm_args(plan, way), *place, *names], given)
    port = combined.value("--port") or ""
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        raise OverspillError(f"--port {port!r} is not a port; ports are 1 to 65535")
    traps.require_positions(plan, combined, environment, _LEFT_TO_VLLM if can_force else "")
    checked = traps.check(combined, environment, on_cpu=plan.platform.is_cpu)
    flags, secrets = into_environment(combined.flags)
    # Not among the plan's flags, which the user's replace: vLLM accepts several middlewares.
    control = ("--middleware", CONTROL) if way.parks else ()
    return Prepared(
        model=model,
        asked_for=name,
        vllm=vllm,
        plan=plan,
        way=way,
        combined=combined,
        command=(*server_command(model, vllm), *(word for flag in flags for word in flag.words), *control),
        environment={**checked.environment, **rank_environment(plan, environment), **secrets},
        warnings=(*combined.contradictions, *combined.changes, *checked.warnings),
    )


def require_this_machine(prepared: Prepared) -> None:
    """Refuse a plan for another machine: a server runs on this one."""
    plan, vllm = prepared.plan, prepared.vllm
    if plan.gpu.is_stated and not plan.platform.is_cpu:
        raise OverspillError(
            "--gpu names a card to plan for, and a model is served on this machine's GPU; leave --gpu out, use "
            "--gpu-memory to limit the GPU memory, or use overspill serve --dry-run for the command that would serve "
            "it on that card"
        )
    if (why := wrong_build(plan, vllm)) is not None:
        raise CannotServe(why)
