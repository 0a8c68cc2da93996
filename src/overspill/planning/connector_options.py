"""The connector's options as one text, for a flag, a variable or a form: `store=lazy,eviction=arc`.

Sizes are excluded: the plan derives them from settings of their own.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.kv.options import Options, hint_for
from overspill.kv.sizes import exact_size

_ELSEWHERE = {
    "host_bytes": "--offload-ram sets it",
    "spill_bytes": "the plan determines it, within --ram",
    "resident_bytes": "the plan determines it, within --gpu-memory",
}
_FIELDS = {field.name: field for field in fields(Options) if field.name not in _ELSEWHERE}
_FLAGS = {
    "disk_bytes": "--disk", "disk_path": "--disk-path", "remote": "--remote",
    "spill_compute": "--spill-compute", "spill_threads": "--spill-threads",
}  # fmt: skip
_NUMBER = re.compile(r"\d*\.?\d+", re.ASCII)
_SWITCH = {"true": True, "false": False}


def read_options(text: str) -> dict[str, Any]:
    """Parse options into a dict, as `kv_connector_extra_config` takes them; an empty text has none."""
    options: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, written = (word.strip() for word in part.partition("="))
        if not equals or not name or not written:
            raise OverspillError(f"{part!r:.80} is not an option with a value; write for example store=lazy,verify=all")
        if name in _ELSEWHERE:
            raise OverspillError(f"{name} is not set here: {_ELSEWHERE[name]}")
        if name not in _FIELDS:
            raise OverspillError(f"the connector has no option {name!r:.80}{hint_for(name, _FIELDS)}")
        if name in options:
            raise OverspillError(f"{name} is given twice; leave one of the two out")
        options[name] = _value(name, written)
    return options


def write_options(options: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={_written(value)}" for name, value in options.items())


def options_as_flags(options: Mapping[str, Any]) -> str:
    """Options as a command takes them, through their own flags where they have one."""
    words = [
        f"{flag} {exact_size(options[name]) if name == 'disk_bytes' else options[name]}"
        for name, flag in _FLAGS.items()
        if name in options
    ]
    rest = write_options({name: value for name, value in options.items() if name not in _FLAGS})
    return " ".join([*words, *([f"--kv-options {rest}"] if rest else [])])


def used_options(options: Mapping[str, Any], sizes: Collection[str]) -> dict[str, Any]:
    """Options that have an effect where only `sizes`, of host_bytes and spill_bytes, are given."""

    def is_used(name: str) -> bool:
        needs = _FIELDS[name].metadata["needs"]
        return bool(sizes) if not needs else needs in sizes or (bool(options.get(needs)) and is_used(needs))

    return {name: value for name, value in options.items() if is_used(name)}


def unused_options(options: Mapping[str, Any], sizes: Collection[str]) -> dict[str, Any]:
    used = used_options(options, sizes)
    return {name: value for name, value in options.items() if name not in used}


def _value(name: str, written: str) -> Any:
    try:
        return _FIELDS[name].metadata["parse"](_typed(name, written))
    except OverspillError as error:
        raise OverspillError(f"{name}: {error}") from error


def _typed(name: str, written: str) -> object:
    """The text as JSON would type it. Malformed text is left to the option's parser, whose error says what it takes."""
    default = _FIELDS[name].default
    if isinstance(default, bool):
        return _SWITCH.get(written.lower(), written)
    if isinstance(default, int) and written.isdigit():
        return int(written)
    return float(written) if isinstance(default, float) and _NUMBER.fullmatch(written) else written


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
