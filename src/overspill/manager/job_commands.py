"""Job commands: `overspill bench`, `ab`, `verify` or `tune`, built from a filled-in form."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from overspill.manager.allowlist import FlagNotAllowed, require_allowed, require_harmless
from overspill.manager.errors import ManagerError
from overspill.measure.bench import DEFAULT_WORKLOAD
from overspill.measure.configuration import read_configuration
from overspill.measure.measurement import TIERS
from overspill.measure.tuning import Goal
from overspill.measure.workload import WORKLOADS

_MAX_TEXT = 500


class JobKind(StrEnum):
    BENCH = "bench"
    AB = "ab"
    VERIFY = "verify"
    TUNE = "tune"


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    label: str
    help: str
    kind: str = "text"
    """Either text, number, yes (a switch) or one (of the choices)."""
    default: str = ""
    """Value that the command uses for an empty field."""
    choices: Sequence[str] = ()
    """All allowed values, or what a text may begin with."""


_WORKLOAD = "the requests to send; parameters follow a colon: multi-turn:conversations=8,turns=4"
_RESUME = Field("resume", "Resume", "the name of an interrupted experiment; leave the other fields empty")
# Every field is a flag of the command; none takes free text that the command would pass to vLLM as flags.
FIELDS: Mapping[JobKind, Sequence[Field]] = {
    JobKind.BENCH: (
        Field("workload", "Workload", _WORKLOAD, default=DEFAULT_WORKLOAD, choices=tuple(WORKLOADS)),
        Field("seed", "Seed", "random seed for prompts", "number", "0"),
        Field("expect", "Expect", "fail unless this tier served tokens", "one", "nothing", TIERS),
        Field("label", "Label", "a name for this configuration"),
        Field("experiment", "Experiment", "a name shared by the results to compare"),
    ),
    JobKind.AB: (
        Field("a", "A", "none, native:8GiB, simple-lazy:8GiB, or a flag such as --ram 8GiB"),
        Field("b", "B", "the configuration to compare with A"),
        Field("c", "C", "a third configuration"),
        Field("workload", "Workload", _WORKLOAD, default=DEFAULT_WORKLOAD, choices=tuple(WORKLOADS)),
        Field("repeats", "Repeats", "how often each configuration is measured", "number", "3"),
        Field("seed", "Seed", "random seed for requests", "number", "0"),
        Field("keep", "Keep engines", "start each engine once, and empty its caches between repeats", "yes"),
        _RESUME,
    ),
    JobKind.VERIFY: (
        Field("quick", "Quick", "every scenario once", "yes"),
        Field("soak", "Soak", "repeat with other lengths and orders", "yes"),
        Field("minutes", "Minutes", "with soak: how long", "number", "30"),
        Field("seed", "Seed", "random seed for prompts and orders", "number", "0"),
    ),
    JobKind.TUNE: (
        Field("goal", "Goal", "what to optimise", "one", str(Goal.THROUGHPUT), tuple(Goal)),
        Field("budget", "Budget", "how long it may take: 90s, 10m, 2h", default="30m"),
        Field("workload", "Workload", _WORKLOAD, default="the goal's own", choices=tuple(WORKLOADS)),
        Field("repeats", "Repeats", "how often the best candidates are measured", "number", "3"),
        Field("candidates", "Candidates", "at most this many candidates", "number"),
        Field("max_model_len", "Context", "required context, in tokens: 32k"),
        Field("allow_fp8", "Allow fp8", "try KV in fp8 too, which rounds it", "yes"),
        Field("dry_run", "Leave settings alone", "measure only", "yes"),
        _RESUME,
    ),
}  # fmt: skip
_CONFIGURATIONS = ("a", "b", "c")


def command(
    kind: JobKind, model: str, given: Mapping[str, str], *, url: str | None = None, served: str = ""
) -> list[str]:
    """Command line of a job; for a bench, `url` and `served` are the engine's address and model name."""
    fields = {field.name: field for field in FIELDS[kind]}
    words = [sys.executable, "-P", "-m", "overspill", str(kind)]
    words += [url or "", "--model", served or model] if kind is JobKind.BENCH else [model]
    for name, value in given.items():
        if name not in fields:
            raise ManagerError(f"a {kind} has no field {name!r:.80}; it has {', '.join(fields) or 'none'}")
        words += _flag(fields[name], value)
    return words


def _flag(field: Field, value: str) -> list[str]:
    flag = "--" + field.name.replace("_", "-")
    if len(value) > _MAX_TEXT or not value.isprintable():
        raise ManagerError(f"{field.label}: at most {_MAX_TEXT} printable characters are accepted")
    if not value:
        return []
    if field.kind == "yes":
        return [flag] if value.lower() in ("1", "true", "yes", "on") else []
    if field.kind == "number" and not (value.isascii() and value.isdigit()):
        raise ManagerError(f"{field.label}: {value!r:.40} is not a number; write for example 3")
    if field.kind == "one" and value not in field.choices:
        raise ManagerError(f"{field.label}: {value!r:.40} is none of {', '.join(field.choices)}; use one of these")
    if field.name in _CONFIGURATIONS:
        _require_safe(field, value)
    # With `=`, a value that begins with a dash is not read as a flag.
    return [f"{flag}={value}"]


def _require_safe(field: Field, value: str) -> None:
    """Check the value as the command will parse it, so that quotes and labels hide nothing."""
    configuration = read_configuration(field.name, value)
    try:
        require_allowed(configuration.vllm_args)
        if configuration.peer is not None:
            require_harmless(configuration.peer.options)
    except FlagNotAllowed as error:
        raise FlagNotAllowed(f"{field.label}: {error}") from error
