"""Settings: one table for flags, environment, config.toml, the registry, the API, its form and the documentation.

A flag wins over a model's value in the registry, which wins over the environment (`OVERSPILL_…`), then the file, then
the default; each value remembers its origin.
"""

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from overspill.flags import Flag, choices_of, hide_in_text, matches, none_of, read_flags, refuse_secrets, refuse_unknown
from overspill.flags import among as among  # noqa: PLC0414
from overspill.flags import nearest as nearest  # noqa: PLC0414
from overspill.kv.errors import OverspillError
from overspill.kv.options import parse_folder, parse_remote
from overspill.kv.sizes import GiB, MiB, exact_size, format_size, parse_size
from overspill.model.kv import KV_CACHE_DTYPE_BYTES
from overspill.model.source import is_repo_id
from overspill.planning.connector_options import read_options, write_options
from overspill.planning.drafts import parse_drafts
from overspill.planning.setup import AT_ONCE, MAX_NUM_SEQS

_DURATION = re.compile(r"(\d+)\s*([smhd]?)", re.ASCII)
# Parts begin with a letter, a digit or an underscore: no `..`, no hidden file, nothing that looks like a flag.
_PART = r"[A-Za-z0-9_][A-Za-z0-9._:-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")
_VARIANT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
MAX_NAME_LENGTH = 200
# The gateway reads these fields of a request before it applies a variant.
_READ_BEFORE = ("model", "stream", "stream_options")
_GPU = re.compile(r"\d{1,3}|(?:GPU|MIG)-[0-9A-Za-z/-]{1,60}", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_TEXT = 10_000
RAM_RESERVE_BYTES = 4 * GiB
AUTO = "auto"
CONFIG_FILE = "OVERSPILL_CONFIG"
"""Variable that names the file of settings."""
_LARGEST = (1 << 63) - 1  # every reader of the registry's JSON can hold it
# Control characters but tab and newline, and the surrogates of bytes that are not UTF-8, which no database stores.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class SettingsError(OverspillError):
    """A value cannot be used; the message says where it was given, what it was and what is accepted."""


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
    # Nobody who writes 64 or 0.5 means bytes.
    if isinstance(text, str) and not re.search("[A-Za-z]", text) and 0 < float(text) < MiB:
        raise OverspillError(f"{text} without a unit is {size} bytes; write for example {text}GiB")
    return size


def _gpu_memory(text: object) -> int:
    if (size := _size(text)) == 0:
        raise OverspillError(
            "an engine needs some GPU memory; leave the setting out to use all of it, or write for example 24GiB"
        )
    return size


def _length(text: object) -> int:
    """Tokens as people write them: 131072, 128k (k is 1,024), 1m."""
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise OverspillError(f"{text!r} is not a number of tokens; write for example 131072 or 128k")
    digits = str(text).strip().lower().replace("_", "").replace(",", "")
    factor = {"k": 1024, "m": 1024 * 1024}.get(digits[-1:], 1)
    digits = digits[:-1] if factor > 1 else digits
    if not digits.isdecimal() or int(digits) == 0:
        raise OverspillError(f"{text!r} is not a number of tokens; write for example 131072 or 128k")
    return int(digits) * factor


def _context(text: object) -> int | str:
    if isinstance(text, str) and text.strip().lower() == AUTO:
        return AUTO
    try:
        return _length(text)
    except OverspillError as error:
        raise OverspillError(f"{error}, or {AUTO}") from error


def _speed(text: object) -> float:
    try:
        speed = float(str(text))
    except ValueError:
        speed = 0.0
    if isinstance(text, bool) or not 0 < speed < math.inf:
        raise OverspillError(f"{text!r:.40} is not a number of tokens/s; write for example 10 or 2.5")
    return speed


def _count(text: object) -> int:
    if isinstance(text, bool) or not str(text).isdecimal() or int(str(text)) == 0:
        raise OverspillError(f"{text!r} is not a whole number above 0; write for example 64")
    return int(str(text))


def _gpus(text: object) -> str:
    """GPUs by number or UUID, in the format of CUDA_VISIBLE_DEVICES."""
    names = [name.strip() for name in str(text).split(",")]
    if isinstance(text, bool) or not all(_GPU.fullmatch(name) for name in names) or len(set(names)) < len(names):
        raise OverspillError(
            f"{text!r:.80} is not a list of different GPUs; write for example 0,1, as nvidia-smi counts"
        )
    return ",".join(names)


def _share(text: object) -> float:
    """A share of the GPU's memory, rounded to the four digits that vLLM gets."""
    try:
        share = round(float(str(text)), 4)
    except ValueError:
        share = 0.0
    if isinstance(text, bool) or not 0 < share <= 1:
        raise OverspillError(
            f"{text!r} is not a share of the GPU's memory; write a number above 0 and at most 1, such as 0.85"
        )
    return share


def _one_of(*choices: str) -> Callable[[object], str]:
    def parse(text: object) -> str:
        if text not in choices:
            raise OverspillError(none_of(str(text), choices))
        return str(text)

    return parse


def _kv_cache_dtype(text: object) -> str:
    return _one_of(*choices_of("--kv-cache-dtype"))(text)


def _port(text: object) -> int:
    if isinstance(text, bool) or not str(text).isdecimal() or not 1 <= int(str(text)) <= 65535:
        raise OverspillError(f"{text!r} is not a port; ports are 1 to 65535")
    return int(str(text))


def _text(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise OverspillError(f"{text!r} is not a text; it must not be empty")
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


def _source(text: object) -> str:
    if not isinstance(text, str) or not text or len(text) > os.pathconf("/", "PC_PATH_MAX") or _CONTROL.search(text):
        raise OverspillError(f"{text!r:.80} is not a model; give a folder, or a repository such as Qwen/Qwen3-8B")
    path = os.path.expanduser(text)
    if text.startswith(("/", ".", "~")) or os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise OverspillError(f"{text} is not a model's folder: there is no {os.path.join(path, 'config.json')}")
        # The model is not always started from the folder in which it was added.
        return str(Path(path).absolute())
    if not is_repo_id(text):
        raise OverspillError(
            f"{text!r} is neither a folder here nor the name of a repository; give for example ./model or Qwen/Qwen3-8B"
        )
    return text


def _vllm_args(given: object) -> tuple[str, ...]:
    """vLLM's flags from a list of words, or from one text that is split as by a shell."""
    if isinstance(given, str):
        text = given
        try:
            given = shlex.split(text)
        except ValueError as error:
            raise OverspillError(
                f"{hide_in_text(text)!r:.80} cannot be split into words: {error}; close the quotation"
            ) from error
    # YAML reads 16 as a number; vLLM gets a word anyway.
    if not isinstance(given, list | tuple) or not all(type(word) in (str, int, float) for word in given):
        raise OverspillError("vLLM's flags are a list of words; write for example [--block-size, 32]")
    words = tuple(str(word) for word in given)
    if any(_CONTROL.search(word) for word in words) or sum(map(len, words)) > _MAX_TEXT:
        raise OverspillError(f"vLLM's flags hold control characters, or more than {_MAX_TEXT} characters")
    flags = read_flags(words)
    refuse_secrets(flags, "the registry")  # it is printed and copied
    for flag in flags:
        refuse_address(flag)
        if own := _OWN_FLAGS.get(flag.name):
            raise OverspillError(f"Overspill has its own setting for {flag.name}; use {own.flag} ({own.name})")
    refuse_unknown(flags, [setting.flag for setting in MODEL_SETTINGS])
    return words


def refuse_address(flag: Flag) -> None:
    """Raise for a model's flag that would say where its server listens: that is for whoever starts it to say."""
    if any(matches(flag.name, name) for name in ("--host", "--port")):
        raise OverspillError(
            f"{flag.name} is not a model's: give it to the command that serves the model, as in overspill serve NAME "
            f"{flag}"
        )


def is_name(name: str) -> bool:
    """Whether a model can have this name."""
    return len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


def _aliases(given: object) -> str:
    """Names from a list, or from a text with commas between them."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(one, str) and is_name(one.strip()) for one in names):
        raise OverspillError(f"{given!r:.80} is not a comma-separated list of names; write for example gpt-4o,chat")
    return ",".join(dict.fromkeys(one.strip() for one in names))


def _variants(given: object) -> str:
    try:
        variants = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(variants, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OverspillError(f"{given!r:.80} is not JSON: {error}; {_WRITE_VARIANTS}") from error
    if not isinstance(variants, dict) or not all(isinstance(one, dict) and one for one in variants.values()):
        raise OverspillError(f"variants must map each name to an object with at least one parameter; {_WRITE_VARIANTS}")
    for name, changes in variants.items():
        if not isinstance(name, str):  # YAML reads off, yes and 1 as other things than names
            raise OverspillError(f"{name!r} is not a name for a variant; put the name in quotes")
        if _VARIANT.fullmatch(name) is None:
            raise OverspillError(f"{name!r:.80} is not a name for a variant: letters, digits and . _ - are accepted")
        if read := sorted(changes.keys() & set(_READ_BEFORE)):
            raise OverspillError(f"the variant {name} changes {read[0]}, which only the client can set; leave it out")
    if len(text) > _MAX_TEXT:
        raise OverspillError(f"variants have at most {_MAX_TEXT} characters, and these have {len(text)}")
    return text


_WRITE_VARIANTS = """write for example {"fast": {"chat_template_kwargs": {"enable_thinking": false}}}"""


def parse_duration(text: object) -> int:
    match = _DURATION.fullmatch(str(text).strip().lower()) if isinstance(text, int | str) else None
    if match is None or isinstance(text, bool) or len(match[1]) > 15 or int(match[1]) == 0:
        raise OverspillError(f"{text!r:.80} is not a duration; write seconds, or for example 90s, 10m, 2h or 1d")
    return int(match[1]) * _SECONDS[match[2]]


def _notes(text: object) -> str:
    if not isinstance(text, str) or len(text) > _MAX_TEXT or _CONTROL.search(text):
        raise OverspillError(f"notes are a text of at most {_MAX_TEXT} characters, without control characters")
    return text


class Scope(StrEnum):
    """Where a setting can be given."""

    EVERYWHERE = "everywhere"
    """Flags of commands, the environment, config.toml, and a model of the registry."""
    COMMANDS = "commands"
    """Everywhere but in the registry."""
    MODELS = "models"
    """A model of the registry only."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Type of a setting's values, whether from a flag, a variable, a file, the API or a form."""

    parse: Callable[[object], Any]
    json: Any = str
    """Types that the API accepts."""
    note: str = ""
    """How to write a value, for the API's documentation."""
    example: Any = None
    max_length: int | None = None


SIZE = Kind(_size, int | str, "Bytes, or for example 8GiB.", "8GiB")
LENGTH = Kind(_length, int | str, "Tokens, or for example 128k.", "128k")
CONTEXT = Kind(_context, int | str, LENGTH.note, LENGTH.example)
COUNT = Kind(_count, int | str)
YES_OR_NO = Kind(_flag, bool)
TEXT = Kind(_text, max_length=20)


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    kind: Kind
    default: Any
    help: str
    scope: Scope = Scope.EVERYWHERE
    takes_restart: bool = True
    """Whether a running server keeps the old value until it is restarted."""
    is_vllms: bool = False
    """Whether vLLM has the same setting under the same flag."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that commands accept: a yes-or-no setting has one each for on and off."""
        own = "--no-" + self.flag.removeprefix("--")
        return (self.flag, own) if self.is_yes_or_no and self.name != "force" else (self.flag,)

    @property
    def variable(self) -> str:
        return "OVERSPILL_" + self.name.upper()

    @property
    def is_size(self) -> bool:
        return self.kind.note == SIZE.note

    @property
    def is_yes_or_no(self) -> bool:
        return self.kind is YES_OR_NO

    def parse(self, given: object) -> Any:
        return self.kind.parse(given)

    def shown(self, value: Any) -> str:
        """A value for people to read; `-` where it is not set."""
        if isinstance(value, list | tuple):
            return shlex.join(map(str, value)) or "-"
        return "-" if value is None else format_size(value) if self.is_size else str(value)


TABLE = (
    Setting(
        "source", Kind(_source, example="Qwen/Qwen3-8B", max_length=1024), None,
        "The model: a folder, or a repository of Hugging Face's cache or hub.", Scope.MODELS,
    ),
    Setting(
        "max_model_len", CONTEXT, None,
        "The longest context to serve, in tokens; `128k` is 131,072, `auto` the longest that decodes at `--min-speed`. "
        "Without it, the model's own limit.",
        is_vllms=True,
    ),
    Setting(
        "min_speed", Kind(_speed, float | str, example=10), 10.0,
        "With `--max-model-len auto`: least tokens/s at which one request decodes at that length; 10 if not given.",
    ),
    Setting(
        "device", Kind(_one_of("auto", "cuda", "cpu")), "auto",
        "What to plan for: `cuda`, `cpu` (vLLM's CPU build, with a part of RAM as GPU memory), or `auto`.",
        Scope.COMMANDS,
    ),
    Setting(
        "gpu", TEXT, None, "Plan for this card, or this much GPU memory, instead of the one here: `rtx4090`, `24GiB`.",
        Scope.COMMANDS,
    ),
    Setting(
        "gpu_memory", Kind(_gpu_memory, int | str, SIZE.note, "24GiB"), None,
        "Most GPU memory to use, weights and CUDA's context included; on a CPU, the RAM that takes its place.",
    ),
    Setting(
        "gpu_memory_utilization", Kind(_share, float | str, example=0.9), None,
        "Share of the GPU's memory for vLLM, from 0 to 1, without CUDA's context; without it, vLLM's own 0.92. "
        "Not together with gpu_memory.",
        is_vllms=True,
    ),
    Setting(
        "tensor_parallel_size", COUNT, 1,
        "GPUs among which every layer is divided; 1 if not given. Amounts of RAM are totals for all of them.",
        is_vllms=True,
    ),
    Setting(
        "pipeline_parallel_size", COUNT, 1,
        "Stages among which layers are divided, each on `--tensor-parallel-size` GPUs; 1 if not given. With 2 or more, "
        "no KV spills.",
        is_vllms=True,
    ),
    Setting(
        "gpus", Kind(_gpus, int | str, example="0,1", max_length=400), None,
        "Which GPUs to use, as nvidia-smi numbers them (`0,1`), or by UUID; without it, the first that are visible.",
    ),
    Setting("ram", SIZE, None, "RAM that may be used; without it, the available RAM less `--ram-reserve`."),
    Setting(
        "ram_reserve", SIZE, RAM_RESERVE_BYTES,
        "RAM left to the rest of the machine where `--ram` is not given; 4 GiB if not set.",
    ),
    Setting(
        "offload_ram", SIZE, None,
        "Part of `--ram` for idle KV; without it, the rest of `--ram`, or up to half of the available RAM. 0 keeps "
        "none.",
    ),
    Setting(
        "weights_ram", SIZE, None,
        "Part of `--ram` for weights (`4GiB`), in whole layers; without it, the plan chooses. 0 keeps no weights in "
        "RAM.",
    ),
    Setting(
        "link", TEXT, None,
        "Speed of the link to the GPU, such as `25GB/s` or `pcie4x16`; without it, derived from the GPU's PCIe link.",
        Scope.COMMANDS,
    ),
    Setting(
        "cpu_attention", TEXT, None,
        "How fast the CPU attends to KV in RAM, such as `80GB/s`; without it, measured, or estimated from its cores.",
        Scope.COMMANDS,
    ),
    Setting(
        "dtype", Kind(_one_of("auto", "bfloat16", "float16", "float32", "half", "float"), example="auto"), "auto",
        "Data type the model computes in; `auto` follows its config.", is_vllms=True,
    ),
    Setting(
        "kv_cache_dtype", Kind(_kv_cache_dtype, example="fp8", max_length=20), None,
        "Data type of the KV cache: `auto` for the model's; `fp8` halves its size by rounding, so answers may change.",
        is_vllms=True,
    ),
    Setting(
        "kv_options", Kind(_kv_options, example="store=lazy,verify=all", max_length=200), None,
        "How KV is kept in RAM, except for sizes, which the plan determines: `store=lazy,eviction=arc,verify=all`.",
    ),
    Setting(
        "disk", SIZE, None,
        "Disk space for KV that RAM drops, and for all KV at a stop, to reuse after a restart; without it, none.",
    ),
    Setting(
        "disk_path", Kind(parse_folder, example="/var/cache/overspill", max_length=1024), None,
        "Folder for `--disk`, for one server at a time; without it, one in the user's cache folder for each model.",
    ),
    Setting(
        "remote", Kind(parse_remote, example="mooncake://127.0.0.1:50051", max_length=300), None,
        "Address of a Mooncake master, whose store machines share: engines of one model reuse each other's KV from it.",
    ),
    Setting(
        "spill_compute", Kind(_one_of("auto", "gpu"), example="gpu"), None,
        "Where attention to spilled KV runs: with `auto`, the default, the CPU takes a part, whose rounding may differ "
        "in the last bits; `gpu` streams all of it, and gives bit for bit what the GPU alone computes.",
    ),
    Setting(
        "spill_threads", COUNT, None,
        "CPU threads that attend to spilled KV; without it, one for each physical core near the GPU, less two.",
    ),
    Setting(
        "drafts", Kind(parse_drafts, example="ngram:4", max_length=20), "off",
        "How vLLM guesses tokens from the text so far, so that one step gives several: `ngram`, `ngram_gpu` or "
        "`suffix`, each with up to 4 guesses, or another number as in `ngram:8`; `off` if not given.",
    ),
    Setting(
        "park", YES_OR_NO, None,
        "Let the engine be parked: its GPU memory goes to other models while its weights, KV and process wait in RAM.",
    ),
    Setting(
        "elastic", YES_OR_NO, None,
        "Let the manager move GPU memory between the KV caches of running engines, by what their requests need.",
    ),
    Setting(
        "elastic_weight", COUNT, None,
        "With `--elastic`, the engine's weight when contended or spare GPU memory is divided; 1 if not given.",
    ),
    Setting("at_once", COUNT, AT_ONCE, "Requests of the full length whose KV must fit at once; 1 if not given."),
    Setting(
        "max_num_seqs", COUNT, MAX_NUM_SEQS,
        "Requests that may run at once; 64 if not given, and at least `--at-once`.",
        is_vllms=True,
    ),
    Setting(
        "max_num_batched_tokens", LENGTH, None,
        "Most tokens that one step computes, and so the length of a prompt's chunks; without it, the plan chooses.",
        is_vllms=True,
    ),
    Setting(
        "enforce_eager", YES_OR_NO, False, "Run without CUDA graphs: less memory, slower steps.", is_vllms=True
    ),
    Setting(
        "vllm_args", Kind(_vllm_args, list[str] | str, example=["--seed", "7"]), (), "vLLM's own flags, after `--`.",
        Scope.MODELS,
    ),
    Setting(
        "ttl", Kind(parse_duration, int | str, example="10m"), None,
        "Stop the model after this long without use, such as `10m`; with park, park it then and stop it later.",
        Scope.MODELS, takes_restart=False,
    ),
    Setting(
        "keep", YES_OR_NO, None, "Once the model runs, keep it running: neither another model nor its TTL stops it.",
        Scope.MODELS, takes_restart=False,
    ),
    Setting(
        "preload", YES_OR_NO, None, "Start the model with the manager, if there is room.",
        Scope.MODELS, takes_restart=False,
    ),
    Setting(
        "aliases", Kind(_aliases, list[str] | str, example="gpt-4o,chat", max_length=_MAX_TEXT), None,
        "Other names under which the manager's gateway serves the model, separated by commas: `gpt-4o,chat`.",
        Scope.MODELS, takes_restart=False,
    ),
    Setting(
        "variants", Kind(_variants, dict[str, dict[str, Any]] | str, example={"cold": {"temperature": 0}},
                         max_length=_MAX_TEXT), None,
        "Variants, requested as MODEL:NAME, with the parameters that the gateway sets in their requests, as JSON; null "
        "strips one: "
        '`{"cold": {"temperature": 0, "top_p": null}}`.',
        Scope.MODELS, takes_restart=False,
    ),
    Setting(
        "notes", Kind(_notes, max_length=_MAX_TEXT), None, "Anything worth knowing about the model.", Scope.MODELS,
        takes_restart=False,
    ),
    Setting(
        "host", TEXT, "127.0.0.1", "Address to listen on; without it 127.0.0.1, so this machine only.", Scope.COMMANDS
    ),
    Setting("port", Kind(_port, int), 8000, "Port to listen on; 8000 if not given.", Scope.COMMANDS),
    Setting("force", YES_OR_NO, False, "Start even if the plan says that the model does not fit.", Scope.COMMANDS),
)  # fmt: skip
SETTINGS = tuple(setting for setting in TABLE if setting.scope is not Scope.MODELS)
"""Settings that commands take."""
MODEL_SETTINGS = tuple(setting for setting in TABLE if setting.scope is not Scope.COMMANDS)
"""Settings that a model of the registry has."""
BY_NAME = {setting.name: setting for setting in TABLE}
SHARED = tuple(setting.name for setting in TABLE if setting.is_vllms)
"""Settings that vLLM has too, but it reads 4k as 4,000, and Overspill as 4,096."""
# vLLM's flags that would contradict a setting of a model.
_OWN_FLAGS = {
    **{setting.flag: setting for setting in TABLE if setting.is_vllms},
    "--no-enforce-eager": BY_NAME["enforce_eager"],
    "--cpu-offload-gb": BY_NAME["weights_ram"],
}


_STRUCTURED: dict[str, type | tuple[type, ...]] = {"vllm_args": (dict, list), "aliases": list, "variants": dict}


def parse_settings(given: Mapping[str, object], where: str = "") -> dict[str, Any]:
    """Parse and check settings of a model; None unsets one. `where` is the place in a file, for messages."""
    known = {setting.name: setting for setting in MODEL_SETTINGS}
    parsed = {}
    for name, value in given.items():
        if name not in known:
            raise SettingsError(
                f"{where}{': ' if where else ''}there is no setting {name!r:.80}; {nearest(str(name), known)}"
            )
        if value is None and name == "source":
            raise SettingsError("a model needs a source; give another one with --source")
        parsed[name] = known[name].default if value is None and name == "vllm_args" else None
        if value is not None:
            parsed[name] = _parse_kept(known[name], value, where)
    return parsed


def _parse_kept(setting: Setting, value: object, where: str) -> Any:
    place = f"{where}: {setting.name}" if where else setting.flag
    # Parsers repeat values in their messages, so values must be short; a file can hold anything.
    if isinstance(value, dict | list) and not isinstance(value, _STRUCTURED.get(setting.name, ())):
        raise SettingsError(f"{place}: a single value is needed here, not a {type(value).__name__}")
    # Files are written by hand: a size without a unit is as doubtful as in a flag.
    value = str(value) if setting.is_size and where and not isinstance(value, bool) else value
    # A command passes dtypes unknown to the plan on to vLLM without a plan; a registered model is always planned.
    parse = _one_of("auto", *KV_CACHE_DTYPE_BYTES) if setting.name == "kv_cache_dtype" else setting.parse
    return _checked(parse, value, place)


def _checked(parse: Callable[[object], Any], value: object, place: str) -> Any:
    try:
        parsed = parse(value)
    except OverspillError as error:
        raise SettingsError(f"{place}: {error}") from error
    except (ValueError, OverflowError) as error:  # int() of thousands of digits
        raise SettingsError(f"{place}: {str(value)[:40]}… is too long for a number") from error
    if isinstance(parsed, int) and parsed > _LARGEST:
        raise SettingsError(f"{place}: {str(value)[:40]} is too large; at most {_LARGEST}")
    return parsed


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Settings, parsed or as given, as words of a command; those that are None are left out."""
    words: list[str] = []
    for name, value in values.items():
        setting = BY_NAME[name]
        if isinstance(value, bool):
            words.append(setting.flag if value else f"--no-{setting.flag.removeprefix('--')}")
        elif value is not None:
            words += [setting.flag, exact_size(value) if setting.is_size and isinstance(value, int) else str(value)]
    return words


@dataclass(frozen=True, slots=True)
class Value:
    setting: Setting
    value: Any
    origin: GivenBy
    place: str  # the exact place, for messages: "--port", "OVERSPILL_PORT", a file's path


def resolve(
    flags: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Value]:
    """Every setting's value and origin. `flags` holds values of given flags by setting name; `defaults` are the
    caller's own."""
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
            # Written by hand: a size without a unit is as doubtful as in a flag.
            found = str(written[setting.name]) if setting.is_size else written[setting.name]
            values[setting.name] = _value(setting, found, GivenBy.FILE, f"{file}: {setting.name}")
        else:
            values[setting.name] = Value(
                setting, {**(defaults or {})}.get(setting.name, setting.default), GivenBy.DEFAULT, ""
            )
    return values


def with_registered(values: Mapping[str, Value], model: str, registered: Mapping[str, Any]) -> dict[str, Value]:
    """Apply a model's values in the registry, which win over everything but flags."""
    return {
        name: Value(value.setting, registered[name], GivenBy.REGISTRY, f"registry: {model}")
        if name in registered and value.origin is not GivenBy.FLAG
        else value
        for name, value in values.items()
    }


def plain(values: Mapping[str, Value]) -> dict[str, Any]:
    """Values by name, without their origins."""
    return {name: value.value for name, value in values.items()}


def origins(values: Mapping[str, Value]) -> dict[str, Any]:
    """Each value with its origin (flag, registry, environment, file or default), for JSON."""
    return {name: {"value": value.value, "origin": str(value.origin)} for name, value in values.items()}


def _value(setting: Setting, given: object, origin: GivenBy, place: str) -> Value:
    return Value(setting, _checked(setting.parse, given, place), origin, place)


def config_path(environment: Mapping[str, str] | None = None) -> Path | None:
    """`OVERSPILL_CONFIG`, or config.toml in the XDG configuration folder; None for a user without a home, as in some
    containers."""
    environment = os.environ if environment is None else environment
    if given := environment.get(CONFIG_FILE):
        if not Path(given).exists():
            raise SettingsError(
                f"{CONFIG_FILE} names {given}, and there is no such file; create it, or unset {CONFIG_FILE}"
            )
        return Path(given)
    try:
        folder = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError:
        return None
    return folder / "overspill" / "config.toml"


def read_file(path: Path) -> dict[str, Any]:
    """Settings in a config file; empty if the file does not exist."""
    try:
        written = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    known = [setting.name for setting in SETTINGS]
    for name in written:
        if name in BY_NAME and name not in known:
            raise SettingsError(
                f"{path}: {name} is a setting of a model; set it with: overspill models edit NAME {BY_NAME[name].flag}"
            )
        if name not in known:
            raise SettingsError(f"{path}: there is no setting {name!r}; {nearest(name, known)}")
    return written


# Variables with Overspill's prefix that are not settings.
_OTHER_VARIABLES = {"OVERSPILL_API_KEY", CONFIG_FILE, "OVERSPILL_DATABASE_URL"}


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Refuse unknown variables: a misspelt one would be ignored in silence."""
    known = {setting.variable for setting in SETTINGS} | _OTHER_VARIABLES
    for name in environment:
        if name.startswith("OVERSPILL_") and name not in known:
            raise SettingsError(f"there is no variable {name}; {nearest(name, sorted(known))}")
