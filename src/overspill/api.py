"""Planning from Python: a plan, and the keyword arguments that make vLLM follow it."""

import inspect
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from overspill.flags import read_flags
from overspill.kv.errors import OverspillError
from overspill.launch.arguments import combine
from overspill.launch.launch import Launch
from overspill.launch.reference import ModelRef, look_up
from overspill.planning.arguments import CONTRADICTING_VARIABLES, vllm_args
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.settings import SETTINGS, SettingsError, nearest

# The rest of the table is only for servers.
_SETTINGS = {setting.name: setting for setting in SETTINGS if setting.name not in ("host", "port")}


class DoesNotFit(OverspillError):
    """No known way serves the context on the machine. The message says need, have and what would work; `plan` has the
    numbers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        super().__init__(refusal(plan))


class PlanContradicted(UserWarning):
    """A user's argument contradicts the plan or was unknown to it; the argument wins."""


def plan(
    model: str,
    *,
    max_model_len: int | str | None = None,
    ram: int | str | None = None,
    gpu_memory: int | str | None = None,
    gpu: str | None = None,
    link: str | None = None,
    kv_cache_dtype: str | None = None,
    **settings: Any,
) -> Plan:
    """Plan what fits, what goes to RAM and how fast it will be, as `overspill plan` prints it.

    Accepts all settings of the command under the same names. Settings not given come from the registry, if `model` is
    one of its names, and from the environment, config.toml and the defaults. Sizes are bytes or "40GiB", lengths are
    tokens or "128k".
    """
    for name in settings:
        if name not in _SETTINGS:
            raise SettingsError(f"plan() has no setting {name!r}; {nearest(name, list(_SETTINGS))}")
    given = {
        "max_model_len": max_model_len, "ram": ram, "gpu_memory": gpu_memory, "gpu": gpu, "link": link,
        "kv_cache_dtype": kv_cache_dtype, **settings,
    }  # fmt: skip
    return Launch.of(_look_up(model), _parsed(given)).plan


def engine_args(
    model: str,
    *,
    max_model_len: int | str | None = None,
    ram: int | str | None = None,
    gpu_memory: int | str | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM`, `EngineArgs` or `AsyncEngineArgs` that follow the plan.

    Further arguments are settings, as `plan` takes them, or vLLM's own, which win over the plan, with a warning where
    they contradict it.
    """
    given = {"max_model_len": max_model_len, "ram": ram, "gpu_memory": gpu_memory, **arguments}
    _, planned = planned_arguments(model, given)
    for name in contradicting_variables(planned):
        warnings.warn(
            f"{name} is set, and would override the plan's kv_cache_memory_bytes; unset it",
            PlanContradicted,
            stacklevel=2,
        )
    return planned


def planned_arguments(model: str, given: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan for the given settings, and vLLM's arguments for it, overridden by the user's own."""
    own = {name: value for name, value in given.items() if name not in _SETTINGS}
    _refuse_unknown(own)
    ref = _look_up(model)
    ref = replace(ref, vllm_args=_engine_flags(ref.vllm_args))
    launch = Launch.of(
        ref, _parsed({name: value for name, value in given.items() if name in _SETTINGS}), _as_flags(own)
    )
    made = launch.plan
    if made.chosen is None:
        raise DoesNotFit(made)
    # Imported here, as they load vLLM, which takes seconds. vLLM finds no plugins if Overspill is only on the path.
    from overspill.kv import plugin as kv_plugin
    from overspill.weights import plugin as weights_plugin

    kv_plugin.register()
    weights_plugin.register()
    left = {_name(flag.name) for flag in read_flags(launch.vllm_args)}
    adopted = {_name(flag.name) for flag in read_flags(_as_flags(own))} - left
    own = {name: value for name, value in own.items() if name not in adopted}
    combined = combine(vllm_args(made, made.chosen), launch.vllm_args)
    for warning in (*made.warnings, *combined.contradictions, *combined.changes):
        # Points past this function and the public one, to the user's own line.
        warnings.warn(warning, PlanContradicted, stacklevel=3)
    names = {_name(flag.name) for flag in combined.flags} - own.keys()
    planned = _read_by_vllm([word for flag in combined.flags if _name(flag.name) in names for word in flag.words])
    return made, {"model": ref.source, **{name: getattr(planned, name) for name in sorted(names)}, **own}


def _look_up(model: str) -> ModelRef:
    named = look_up(model)
    if named.warning:
        warnings.warn(named.warning, RuntimeWarning, stacklevel=4)
    return named


def contradicting_variables(arguments: Mapping[str, Any]) -> list[str]:
    """Environment variables that are set and would win over the arguments."""
    return [name for name in CONTRADICTING_VARIABLES if os.environ.get(name) and "kv_cache_memory_bytes" in arguments]


def _parsed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the values here, so that an error names the argument and not a flag."""
    parsed = {}
    for name, value in given.items():
        try:
            parsed[name] = None if value is None else _SETTINGS[name].parse(value)
        except OverspillError as error:
            raise SettingsError(f"{name}: {error}") from error
    return parsed


def _refuse_unknown(own: Mapping[str, Any]) -> None:
    """Refuse unknown arguments before anything is read: vLLM would do so later, and without the nearest name."""
    import vllm

    known = {*inspect.signature(vllm.LLM.__init__).parameters, *inspect.signature(vllm.AsyncEngineArgs).parameters}
    for name in own:
        if name not in known - {"self", "model", "kwargs"}:
            near = nearest(name, [*_SETTINGS, *sorted(known - {"self", "kwargs"})])
            raise SettingsError(f"neither Overspill nor vLLM has an argument {name!r}; {near}")


def _as_flags(own: Mapping[str, Any]) -> list[str]:
    """Arguments as words of a command line, only for comparison: vLLM gets the original values."""
    flags = []
    for name, value in own.items():
        flag = "--" + name.replace("_", "-")
        if value is False:
            flags.append("--no-" + flag.removeprefix("--"))
        elif value is True:
            flags.append(flag)
        elif value is not None:
            flags.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def _engine_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """The registry's flags that an engine takes, without those of a server."""
    from vllm import EngineArgs

    known = inspect.signature(EngineArgs).parameters
    return tuple(word for flag in read_flags(flags) if _name(flag.name) in known for word in flag.words)


def _name(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


def _read_by_vllm(flags: Sequence[str]) -> Any:
    """Parse flags with vLLM's own parser: the plan only decides which flags it needs, vLLM what they mean."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # Not EngineArgs.from_cli_args: it would look for a default model, and needs the hub for that.
    read = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(flags))
    if read.kv_transfer_config is not None:
        # The engine's process does not find the plugin if Overspill is only on the path.
        read.kv_transfer_config.kv_connector_module_path = "overspill.kv.connector"
    return read
