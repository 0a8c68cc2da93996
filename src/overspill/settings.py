"""Settings of the commands: one table for flags, environment, config.toml, validation and the documentation.

A flag wins over what the registry sets for a model, that over the environment (`OVERSPILL_…`), that over the file, and
that over the default; each value remembers which it was.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import MiB, parse_size
from overspill.planning.connector_options import read_options, write_options
from overspill.planning.wishes import AT_ONCE, MAX_NUM_SEQS


class SettingsError(OverspillError):
    """A value that cannot be used; says where it was given, what it was and what is accepted."""


class GivenBy(StrEnum):
    FLAG = "flag"
    REGISTRY = "registry"
    ENVIRONMENT = "environment"
    FILE = "config.toml"
    DEFAULT = "default"


def _size(text: object) -> int:
    size = parse_size(text)
    if size < 0:
        raise OverspillError(f"a size cannot be negative, got {text!r}; write for example 24GiB")
    # Nobody who writes 64 means bytes.
    if isinstance(text, str) and text.strip().isdigit() and 0 < size < MiB:
        raise OverspillError(f"{text} without a unit is {size} bytes; write for example {text}GiB")
    return size


def _gpu_memory(text: object) -> int:
    if (size := _size(text)) == 0:
        raise OverspillError("an engine needs some GPU memory; leave it out for all of it, or write for example 24GiB")
    return size


def _length(text: object) -> int:
    """Tokens, as people write them: 131072, 128k (of 1,024 each), 1m."""
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise OverspillError(f"{text!r} is not a number of tokens; write for example 131072 or 128k")
    digits = str(text).strip().lower().replace("_", "").replace(",", "")
    factor = {"k": 1024, "m": 1024 * 1024}.get(digits[-1:], 1)
    digits = digits[:-1] if factor > 1 else digits
    if not digits.isdigit() or int(digits) == 0:
        raise OverspillError(f"{text!r} is not a number of tokens; write for example 131072 or 128k")
    return int(digits) * factor


def _count(text: object) -> int:
    if isinstance(text, bool) or not str(text).isdigit() or int(str(text)) == 0:
        raise OverspillError(f"{text!r} is not a number from 1 on; write for example 64")
    return int(str(text))


def _share(text: object) -> float:
    """Of the GPU's memory, to four digits, as vLLM is told it."""
    try:
        share = round(float(str(text)), 4)
    except ValueError:
        share = 0.0
    if isinstance(text, bool) or not 0 < share <= 1:
        raise OverspillError(f"{text!r} is not a share of the GPU's memory: above 0 and at most 1; for example 0.85")
    return share


def _one_of(*choices: str) -> Callable[[object], str]:
    def parse(text: object) -> str:
        if text not in choices:
            raise OverspillError(f"{text!r} is none of {', '.join(choices)}; use one of these")
        return str(text)

    return parse


def _port(text: object) -> int:
    if isinstance(text, bool) or not str(text).isdigit() or not 1 <= int(str(text)) <= 65535:
        raise OverspillError(f"{text!r} is not a port; ports are 1 to 65535")
    return int(str(text))


def _text(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise OverspillError(f"{text!r} is not a text; give one without being empty")
    return text


def _kv_options(text: object) -> str:
    return write_options(read_options(_text(text)))


def _flag(text: object) -> bool:
    if isinstance(text, bool):
        return text
    value = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if str(text).lower() not in value:
        raise OverspillError(f"{text!r} is neither yes nor no; write true or false")
    return value[str(text).lower()]


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    parse: Callable[[object], Any]
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "OVERSPILL_" + self.name.upper()


SETTINGS = (
    Setting("max_model_len", _length, None, "The longest context to serve, in tokens; `128k` is 131,072."),
    Setting(
        "device", _one_of("auto", "cuda", "cpu"), "auto",
        "What to plan for: `cuda`, `cpu` (vLLM's CPU build, with a part of RAM as GPU memory), or `auto`.",
    ),
    Setting(
        "gpu", _text, None, "Plan for this card, or this much GPU memory, instead of the one here: `rtx4090`, `24GiB`."
    ),
    Setting(
        "gpu_memory", _gpu_memory, None,
        "GPU memory to keep to on a bigger card, weights and CUDA's context included; on a CPU, the RAM in its place.",
    ),
    Setting(
        "gpu_memory_utilization", _share, None,
        "Share of the GPU's memory for vLLM, from 0 to 1, without CUDA's context; without it, vLLM's own 0.92.",
    ),
    Setting("ram", _size, None, "RAM that may be used; without it, what is available less a reserve."),
    Setting("offload_ram", _size, None, "Of this, RAM for idle KV; without it, what is left. 0 keeps none."),
    Setting(
        "weights_ram", _size, None,
        "Of this, weights to keep in RAM (`4GiB`), in whole layers; without it, the plan chooses. 0 keeps none there.",
    ),
    Setting("link", _text, None, "Speed of the link to the GPU, instead of a measured one: `25GB/s`."),
    Setting(
        "dtype", _one_of("auto", "bfloat16", "float16", "float32", "half", "float"), "auto",
        "What numbers the model computes in; `auto` as its config says.",
    ),
    Setting("kv_cache_dtype", _text, None, "What numbers KV is kept in: `auto` as the model's, `fp8` half of that."),
    Setting(
        "kv_options", _kv_options, None,
        "How KV is kept in RAM, beside the sizes that the plan finds: `store=lazy,eviction=arc,verify=all`.",
    ),
    Setting("at_once", _count, AT_ONCE, "Requests of the full length whose KV is to fit at once."),
    Setting("max_num_seqs", _count, MAX_NUM_SEQS, "Requests that may run at once."),
    Setting(
        "max_num_batched_tokens", _length, None,
        "Tokens that one step computes, so the length of a prompt's chunks; without it, the plan chooses.",
    ),
    Setting("enforce_eager", _flag, False, "Run without CUDA graphs: less memory, slower steps."),
    Setting("host", _text, "127.0.0.1", "Address to listen on."),
    Setting("port", _port, 8000, "Port to listen on."),
    Setting("force", _flag, False, "Go on although the plan says that it does not fit."),
)  # fmt: skip
_BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Value:
    setting: Setting
    value: Any
    origin: GivenBy
    place: str  # where exactly, for messages: "--port", "OVERSPILL_PORT", a file's path


def resolve(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, file: Path | None = None
) -> dict[str, Value]:
    """Every setting's value and where it comes from. `flags` holds those that were given, by name."""
    environment = os.environ if environment is None else environment
    written = read_file(file) if file is not None else {}
    _refuse_unknown_variables(environment)
    values = {}
    for setting in SETTINGS:
        if (given := flags.get(setting.name)) is not None:
            values[setting.name] = _value(setting, given, GivenBy.FLAG, setting.flag)
        elif setting.variable in environment:
            values[setting.name] = _value(setting, environment[setting.variable], GivenBy.ENVIRONMENT, setting.variable)
        elif setting.name in written:
            values[setting.name] = _value(setting, written[setting.name], GivenBy.FILE, f"{file}: {setting.name}")
        else:
            values[setting.name] = Value(setting, setting.default, GivenBy.DEFAULT, "")
    return values


def with_registered(values: Mapping[str, Value], model: str, registered: Mapping[str, Any]) -> dict[str, Value]:
    """What the registry sets for a model wins over everything but flags."""
    return {
        name: Value(value.setting, registered[name], GivenBy.REGISTRY, f"registry: {model}")
        if name in registered and value.origin is not GivenBy.FLAG
        else value
        for name, value in values.items()
    }


def plain(values: Mapping[str, Value]) -> dict[str, Any]:
    """Without where they come from."""
    return {name: value.value for name, value in values.items()}


def origins(values: Mapping[str, Value]) -> dict[str, Any]:
    """For JSON: what was set, and whether a flag, the registry, the environment or the file said so."""
    told = {name: {"value": value.value, "origin": str(value.origin)} for name, value in values.items()}
    return {"settings": {name: each for name, each in told.items() if each["origin"] != GivenBy.DEFAULT}}


def _value(setting: Setting, given: object, origin: GivenBy, place: str) -> Value:
    try:
        return Value(setting, setting.parse(given), origin, place)
    except OverspillError as error:
        raise SettingsError(f"{place}: {error}") from error


def config_path(environment: Mapping[str, str] | None = None) -> Path:
    """`OVERSPILL_CONFIG`, or config.toml in the XDG configuration folder."""
    environment = os.environ if environment is None else environment
    if given := environment.get("OVERSPILL_CONFIG"):
        return Path(given)
    folder = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(folder) / "overspill" / "config.toml"


def read_file(path: Path) -> dict[str, Any]:
    """What a file sets; nothing if there is none."""
    try:
        written = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    for name in written:
        if name not in _BY_NAME:
            raise SettingsError(f"{path}: there is no setting {name!r}; {_nearest(name, list(_BY_NAME))}")
    return written


# Variables with our prefix that are no settings.
_OTHER_VARIABLES = {"OVERSPILL_API_KEY", "OVERSPILL_CONFIG", "OVERSPILL_DATABASE_URL"}


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """A misspelt variable would be ignored in silence."""
    known = {setting.variable for setting in SETTINGS} | _OTHER_VARIABLES
    for name in environment:
        if name.startswith("OVERSPILL_") and name not in known:
            raise SettingsError(f"there is no variable {name}; {_nearest(name, sorted(known))}")


def _nearest(name: str, known: list[str]) -> str:
    return f"did you mean {difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]}?"
