"""Service definitions: a model's command as planned, with the RAM it may take, and the manager's service."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from overspill.flags import into_environment, read_flags, refuse_secrets
from overspill.kv.options import Options
from overspill.kv.sizes import GiB
from overspill.planning.planner import Plan
from overspill.registry.place import VARIABLE as DATABASE_URL
from overspill.registry.place import find_place
from overspill.service.units import ManagerService, Mode, ModelService
from overspill.settings import CONFIG_FILE, SETTINGS, GivenBy, Value, as_flags

# The HTTP server's process; the engine's are counted by the plan.
SERVER_RAM_BYTES = 2 * GiB
# A unit starts with a bare environment. It keeps variables that decide which GPUs and files are found, but no secrets.
_KEPT_VARIABLES = (
    "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE",
    "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME",
)  # fmt: skip
# Folders of the installing user's registry, settings and server status; another user has others.
_OWN_FOLDERS = ("XDG_CONFIG_HOME", "XDG_STATE_HOME")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def planned_service(
    model: str, values: Mapping[str, Value], plan: Plan, vllm_args: Sequence[str], *,
    mode: Mode, name: str | None, run_as: str | None, program: str, environment: Mapping[str, str], folder: Path,
) -> ModelService:  # fmt: skip
    """The service that runs a model's plan; `folder` is where its units will be installed."""
    given, secrets = into_environment(read_flags(vllm_args))
    refuse_secrets(given, "a unit, which everybody may read")
    model = absolute(model)
    ram_bytes = _ram_bytes(values, plan)
    # Where RAM stands in for GPU memory, its share of free RAM is fixed too, not left to a later start.
    stand_in_bytes = plan.budget.limit_bytes.value if plan.platform.is_cpu else 0
    fixed = {"ram": ram_bytes, "gpu_memory": stand_in_bytes or values["gpu_memory"].value}
    if values["ram"].value is None and values["offload_ram"].value is None and plan.chosen is not None:
        # The planner uses all of a stated --ram, but only half of free RAM: so the pool is stated as planned.
        fixed["offload_ram"] = plan.num_ranks * plan.chosen.offload_bytes
    # Everything that was set, including by the environment or the file, which may change.
    given_now = {name: one.value for name, one in values.items() if one.origin is not GivenBy.DEFAULT}
    flags = as_flags({name: value for name, value in {**given_now, **fixed}.items() if value is not False})
    return ModelService(
        mode=mode,
        name=name or model,
        command=(program, "-m", "overspill", "serve", model, *flags, *(word for flag in given for word in flag.words)),
        memory_max_bytes=memory_max_bytes(ram_bytes + plan.stand_in_bytes),
        environment=tuple(environment.items()),
        secrets=tuple(secrets.items()),
        folder=PurePosixPath(folder.absolute()),
        run_as=run_as,
    )


def absolute(model: str) -> str:
    """The model, a folder as an absolute path: systemd does not start units from the current folder."""
    path = Path(os.path.expanduser(model))
    return str(path.absolute()) if model and path.exists() else model


def memory_max_bytes(ram_bytes: int) -> int:
    """The unit's RAM limit: `--ram`, which includes the engine's own; the reserve that Overspill insists on leaving
    free, counted inside the limit; and the server."""
    return ram_bytes + Options.reserve_bytes + SERVER_RAM_BYTES


def _ram_bytes(values: Mapping[str, Value], plan: Plan) -> int:
    """RAM as given, or as planned: the RAM that happens to be free at a later start must not change the plan."""
    given, way = values["ram"].value, plan.chosen
    if given is not None or way is None:
        return int(given if given is not None else plan.ram_bytes.value)
    return way.peak_ram_bytes


def other_users_settings(user: str | None, asking: str) -> list[str]:
    """Warnings for a service of another user: settings are the installing user's, which is root with sudo."""
    if user is None or user == asking:
        return []
    return [
        f"the service runs as {user}, and is planned with {asking}'s config.toml, registry and model cache as they are "
        f"now. Make sure that {user} can read the model, and set up what the unit leaves out, such as HF_TOKEN"
    ]


def other_users_registry(user: str | None, asking: str) -> list[str]:
    """Warnings for a manager of another user: models, password and keys come from that user's registry."""
    if user is None or user == asking:
        return []
    return [
        f"the manager runs as {user}, with the registry of {user}: the models, the password and the keys of {asking} "
        f"are not in it. Set them as {user}"
    ]


def kept_environment(program: str, environment: Mapping[str, str], *, for_oneself: bool) -> dict[str, str]:
    """Variables of the unit. PATH has the folder of Python and the system's: kernels are compiled with tools from both,
    such as ninja beside Python."""
    names = (*_KEPT_VARIABLES, *_OWN_FOLDERS) if for_oneself else _KEPT_VARIABLES
    kept = {name: environment[name] for name in names if environment.get(name)}
    return {"PATH": f"{Path(program).parent}:{_SYSTEM_PATH}", **kept}


def manager_service(
    given: Mapping[str, object], *, mode: Mode, run_as: str | None, program: str, environment: Mapping[str, str]
) -> ManagerService:
    """The manager's service; `given` holds the values of its flags by name, folders as absolute paths."""
    return ManagerService(
        mode=mode,
        command=(program, "-m", "overspill", "manager", *_manager_flags(given)),
        environment=tuple(environment.items()),
        run_as=run_as,
    )


def manager_environment(program: str, environment: Mapping[str, str], *, for_oneself: bool) -> dict[str, str]:
    """Variables of the manager's unit, without secrets; engines are planned at their start, so settings are kept."""
    kept = kept_environment(program, environment, for_oneself=for_oneself)
    if not for_oneself:
        return kept
    # A model cannot be served on a GPU that is only stated, and nobody leaves `--force` switched on.
    settings = [one.variable for one in SETTINGS if one.name not in ("gpu", "force")]
    kept |= {name: environment[name] for name in settings if environment.get(name)}
    if file := environment.get(CONFIG_FILE):
        kept[CONFIG_FILE] = os.path.abspath(file)
    if not left_out(environment, for_oneself=True) and environment.get(DATABASE_URL):
        kept[DATABASE_URL] = environment[DATABASE_URL]
    return kept


def left_out(environment: Mapping[str, str], *, for_oneself: bool) -> list[str]:
    """Warnings about variables that the unit would need but must not hold."""
    if not for_oneself or not environment.get(DATABASE_URL) or find_place(environ=environment).file is not None:
        return []
    return [
        f"{DATABASE_URL} names a server and may hold a password, and everybody may read a unit: it is not in the unit. "
        "Write it into the file that the unit's EnvironmentFile= names, readable by its owner only"
    ]


def _manager_flags(given: Mapping[str, object]) -> Iterator[str]:
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            yield flag
        elif isinstance(value, list | tuple):
            for each in value:
                yield from (flag, str(each))
        elif value is not None and value is not False:
            yield from (flag, str(value))
