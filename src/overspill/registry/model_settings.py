"""What is set for a model: one table for the database, the flags, files of models, and what needs a restart."""

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.model.settings import KV_CACHE_DTYPE_BYTES
from overspill.registry.names import nearest
from overspill.serve.flags import read_flags
from overspill.serve.secret_flags import hide_in_text, refuse_secrets
from overspill.settings import SETTINGS, SettingsError

_COMMON = {setting.name: setting for setting in SETTINGS}
_REPO_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_DURATION = re.compile(r"(\d+)\s*([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_TEXT = 10_000
_LARGEST = (1 << 63) - 1  # that a column holds
# All but tab and newline; and what Python makes of bytes that are not UTF-8, which no database keeps.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """None leaves it to the environment, config.toml and the plan. Sizes are bytes, times seconds."""

    source: str
    max_model_len: int | None = None
    gpu_memory: int | None = None
    gpu_memory_utilization: float | None = None
    ram: int | None = None
    offload_ram: int | None = None
    weights_ram: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    kv_options: str | None = None
    at_once: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    vllm_args: tuple[str, ...] = ()
    ttl: int | None = None
    keep: bool | None = None
    preload: bool | None = None
    notes: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSetting:
    name: str
    parse: Callable[[object], Any]
    help: str
    takes_restart: bool = True
    """Whether a running server keeps the old value until it is started again."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_yes_or_no(self) -> bool:
        return self.parse is _COMMON["enforce_eager"].parse


def _source(text: object) -> str:
    if not isinstance(text, str) or not text or len(text) > os.pathconf("/", "PC_PATH_MAX") or _CONTROL.search(text):
        raise OverspillError(f"{text!r:.80} is not a model; give a folder, or a repository such as Qwen/Qwen3-8B")
    path = os.path.expanduser(text)
    if text.startswith(("/", ".", "~")) or os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise OverspillError(f"{text} is no folder of a model: there is no {os.path.join(path, 'config.json')}")
        # The model is not always started from the folder in which it was added.
        return str(Path(path).absolute())
    if not _REPO_ID.fullmatch(text) or ".." in text or "--" in text:
        raise OverspillError(
            f"{text!r} is neither a folder here nor the name of a repository; give for example ./model or Qwen/Qwen3-8B"
        )
    return text


def _kv_cache_dtype(text: object) -> str:
    known = ("auto", *KV_CACHE_DTYPE_BYTES)
    if text not in known:
        raise OverspillError(f"{text!r} is none of {', '.join(known)}; use one of these")
    return str(text)


def _vllm_args(given: object) -> tuple[str, ...]:
    """A list of words, or one text as a shell would split it."""
    if isinstance(given, str):
        text = given
        try:
            given = shlex.split(text)
        except ValueError as error:
            raise OverspillError(
                f"{hide_in_text(text)!r:.80} cannot be split into words: {error}; close the quotation"
            ) from error
    # YAML reads 16 as a number; what vLLM gets is a word anyway.
    if not isinstance(given, list | tuple) or not all(type(word) in (str, int, float) for word in given):
        raise OverspillError("vLLM's flags are a list of words; write for example [--block-size, 32]")
    words = tuple(str(word) for word in given)
    if any(_CONTROL.search(word) for word in words) or sum(map(len, words)) > _MAX_TEXT:
        raise OverspillError(f"vLLM's flags hold control characters, or more than {_MAX_TEXT} characters")
    flags = read_flags(words)
    refuse_secrets(flags, "the registry")  # which is printed and copied
    for flag in flags:
        if own := _OWN_FLAGS.get(flag.name):
            raise OverspillError(f"{flag.name} is a setting of its own here; use --{own.replace('_', '-')} ({own})")
    return words


def _ttl(text: object) -> int:
    match = _DURATION.fullmatch(str(text).strip().lower()) if isinstance(text, int | str) else None
    if match is None or isinstance(text, bool) or len(match[1]) > 15 or int(match[1]) == 0:
        raise OverspillError(f"{text!r:.80} is not a duration; write seconds, or for example 90s, 10m, 2h or 1d")
    return int(match[1]) * _SECONDS[match[2]]


def _notes(text: object) -> str:
    if not isinstance(text, str) or len(text) > _MAX_TEXT or _CONTROL.search(text):
        raise OverspillError(f"notes are a text of at most {_MAX_TEXT} characters, without control characters")
    return text


def _common(name: str) -> ModelSetting:
    return ModelSetting(name, _COMMON[name].parse, _COMMON[name].help)


MODEL_SETTINGS = (
    ModelSetting("source", _source, "The model: a folder, or a repository of Hugging Face's cache or hub."),
    _common("max_model_len"),
    _common("gpu_memory"),
    _common("gpu_memory_utilization"),
    _common("ram"),
    _common("offload_ram"),
    _common("weights_ram"),
    _common("dtype"),
    ModelSetting("kv_cache_dtype", _kv_cache_dtype, _COMMON["kv_cache_dtype"].help),
    _common("kv_options"),
    _common("at_once"),
    _common("max_num_seqs"),
    _common("max_num_batched_tokens"),
    _common("enforce_eager"),
    ModelSetting("vllm_args", _vllm_args, "vLLM's own flags, after `--`."),
    ModelSetting("ttl", _ttl, "Stop the model when it has not been used for so long: `10m`.", takes_restart=False),
    ModelSetting(
        "keep",
        _COMMON["enforce_eager"].parse,
        "Once it runs, keep it: not stopped for another model, nor by its TTL.",
        takes_restart=False,
    ),
    ModelSetting(
        "preload", _COMMON["enforce_eager"].parse, "Start it with the manager, if there is room.", takes_restart=False
    ),
    ModelSetting("notes", _notes, "Anything worth knowing about it.", takes_restart=False),
)
_BY_NAME = {setting.name: setting for setting in MODEL_SETTINGS}
# vLLM's flags that would contradict a setting.
_OWN_FLAGS = {
    **{_BY_NAME[name].flag: name for name in (
        "max_model_len", "gpu_memory_utilization", "dtype", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens",
        "enforce_eager",
    )},
    "--no-enforce-eager": "enforce_eager",
    "--cpu-offload-gb": "weights_ram",
}  # fmt: skip
_EMPTY = {"vllm_args": ()}


def parse_settings(given: Mapping[str, object], where: str = "") -> dict[str, Any]:
    """What is given, checked, by name; None takes a setting back. `where` is the place in a file, for messages."""
    parsed = {}
    for name, value in given.items():
        if name not in _BY_NAME:
            raise SettingsError(
                f"{where}{': ' if where else ''}there is no setting {name!r:.80}; {nearest(str(name), _BY_NAME)}"
            )
        setting = _BY_NAME[name]
        if value is None and name == "source":
            raise SettingsError("the source of a model cannot be taken back; give another one with --source")
        parsed[name] = _EMPTY.get(name) if value is None else _parse(setting, value, where)
    return parsed


def _parse(setting: ModelSetting, value: object, where: str) -> Any:
    place = f"{where}: {setting.name}" if where else setting.flag
    # What parsers repeat in their messages must be short; a file can hold anything.
    if isinstance(value, dict | list) and setting.name != "vllm_args":
        raise SettingsError(f"{place}: a single value is needed here, not a {type(value).__name__}")
    try:
        parsed = setting.parse(value)
    except OverspillError as error:
        raise SettingsError(f"{place}: {error}") from error
    except (ValueError, OverflowError) as error:  # int() of thousands of digits
        raise SettingsError(f"{place}: {str(value)[:40]}… is too long for a number") from error
    if isinstance(parsed, int) and parsed > _LARGEST:
        raise SettingsError(f"{place}: {str(value)[:40]} is too large; at most {_LARGEST} can be kept")
    return parsed


def settings_as_json(settings: ModelSettings) -> dict[str, Any]:
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {**values, "vllm_args": list(settings.vllm_args)}


def settings_from_json(values: Mapping[str, Any]) -> ModelSettings:
    """Names of later versions are left out."""
    known = {name: value for name, value in values.items() if name in _BY_NAME}
    return ModelSettings(**{**known, "vllm_args": tuple(known.get("vllm_args") or ())})


def needs_restart(before: ModelSettings, after: ModelSettings) -> list[str]:
    """Of what differs, the settings that a running server takes only when it is started again."""
    return [
        setting.name
        for setting in MODEL_SETTINGS
        if setting.takes_restart and getattr(before, setting.name) != getattr(after, setting.name)
    ]


def serve_settings(settings: ModelSettings) -> tuple[dict[str, Any], list[str]]:
    """For `overspill serve`: values for the settings of `overspill.settings` that are set, and vLLM's own flags."""
    values = {name: value for name in _COMMON if (value := getattr(settings, name, None)) is not None}
    return values, list(settings.vllm_args)
