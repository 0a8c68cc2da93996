"""Everything that is decided before vLLM starts: settings, plan, exact command, environment and warnings.

`Launch.of` is the one way from a model's name to its plan; `Launch.prepared` goes on to the command of vLLM's server.
"""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overspill.address import Address
from overspill.errors import CannotServe
from overspill.flags import HIDDEN, VARIABLES, into_environment, read_flags, without_secrets
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
    """What vLLM is given: a folder, or a repository."""
    asked_for: str | None = None
    """The registry's name for it, if that was given."""
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
        """By which clients name the model; vLLM takes several."""
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
        share = device_share(self.plan, self.way) if self.combined.has_planned_kv else None
        # One that is there is of an engine that this process runs in.
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
    """Flags that do nothing for want of another. Of the registry or a file they may be there for other models."""

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
        """`given` are settings by name and `vllm_args` vLLM's own flags, as a user gave them; both win over the
        registry's, the environment and config.toml. `defaults` are the caller's own, `found` is the machine if not as
        it is now, and `note` gets a line for what came from the registry before the plan is made. A server's KV may
        be elastic.

        Raises `NoRegistry` where a name needs a registry that cannot be read, and `OverspillError` for mistakes; a
        context that does not fit is for the caller to see in the plan.
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
        plan = plan_for(ref.source, adopted.settings, cards=cards, found=found, is_server=is_server)
        found_here = {}
        if is_auto:  # found once: whatever is made of this launch has the same length
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
        """Why vLLM would refuse the length, whatever fits."""
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
        """The server's command. `by_name`, clients may use the registry's name too; `can_force`, a refusal says what
        --force would do; `place` is another host or port than the settings'."""
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
    """`settings` are the values of `overspill.settings`, `given` are vLLM's own flags, from the user. `name` is the
    model's in the registry: clients may use that name, and the model's own."""
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
    # Not among the plan's flags, which a user's replace: vLLM takes any number of these.
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
    """A plan can be made for any machine; a server runs on this one."""
    plan, vllm = prepared.plan, prepared.vllm
    if plan.gpu.is_stated and not plan.platform.is_cpu:
        raise OverspillError(
            "--gpu states a card, and a model is served on the GPU that is here; leave it out, use --gpu-memory to "
            "keep to a part of the GPU, or use overspill serve --dry-run for the command that would serve it there"
        )
    if (why := wrong_build(plan, vllm)) is not None:
        raise CannotServe(why)
