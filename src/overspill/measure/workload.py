"""Workloads by name: which there are, what can be set of each, and reading them from one word of a command."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from overspill.measure import MeasureError
from overspill.settings import nearest

Number = int | float
_MOST = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Whole numbers where the default is one."""

    name: str
    default: Number
    help: str
    least: Number = 1
    most: Number = _MOST

    def parse(self, text: str) -> Number:
        kind = int if isinstance(self.default, int) else float
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most:
            what = "a whole number" if kind is int else "a number"
            upto = "" if self.most == _MOST else f" to {self.most}"
            raise MeasureError(
                f"{self.name}={text!r:.40} is not {what} from {self.least}{upto}; {self.name} is {self.help}"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadKind:
    name: str
    help: str
    parameters: tuple[Parameter, ...]
    shortened_by: tuple[str, ...]
    """Parameters that make the longest request shorter, the first to be tried first."""

    @property
    def defaults(self) -> dict[str, Number]:
        return {parameter.name: parameter.default for parameter in self.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    parameters: Mapping[str, Number]
    """All of them."""

    def as_text(self) -> str:
        """What `parse_workload` reads; defaults are left out."""
        defaults = WORKLOADS[self.name].defaults
        other = [f"{name}={value}" for name, value in self.parameters.items() if value != defaults[name]]
        return f"{self.name}:{','.join(other)}" if other else self.name


def _output(tokens: int) -> Parameter:
    return Parameter(name="output", default=tokens, help="tokens of each answer")


def _concurrency(requests: int) -> Parameter:
    return Parameter(name="concurrency", default=requests, help="requests under way at once, at most")


WORKLOADS: Mapping[str, WorkloadKind] = {
    kind.name: kind
    for kind in (
        WorkloadKind(
            name="overhead",
            help="new prompts at a fixed rate: what offload costs where nothing comes back",
            parameters=(
                Parameter(name="requests", default=60, help="how many"),
                Parameter(name="rate", default=2.0, help="requests a second", least=0.001),
                Parameter(name="input", default=8192, help="tokens of each prompt"),
                _output(1024),
            ),
            shortened_by=("input", "output"),
        ),
        WorkloadKind(
            name="multi-turn",
            help="conversations that take turns; each turn sends all that was said before",
            parameters=(
                Parameter(name="conversations", default=16, help="how many"),
                Parameter(name="turns", default=4, help="questions in a conversation that returns", least=2),
                Parameter(name="first", default=4096, help="tokens of the first question"),
                Parameter(name="input", default=2000, help="tokens of each later question"),
                _output(128),
                Parameter(name="returning", default=1.0, help="share of conversations with a second turn",
                          least=0.0, most=1.0),
                Parameter(name="think_time", default=1.0, help="seconds from an answer to the next question; half to "
                          "one and a half times this", least=0.0),
                _concurrency(6),
            ),
            shortened_by=("input", "first", "output"),
        ),
        WorkloadKind(
            name="shared-prefix",
            help="groups of requests that begin alike, in turns",
            parameters=(
                Parameter(name="groups", default=8, help="how many"),
                Parameter(name="requests", default=8, help="requests of each group"),
                Parameter(name="prefix", default=4096, help="tokens that a group's prompts begin with"),
                Parameter(name="suffix", default=128, help="tokens of their own"),
                _output(128),
                _concurrency(8),
            ),
            shortened_by=("prefix", "suffix", "output"),
        ),
        WorkloadKind(
            name="long-context",
            help="long prompts one after the other, then the same again",
            parameters=(
                Parameter(name="prompts", default=4, help="how many"),
                Parameter(name="passes", default=2, help="how often each is sent", least=2),
                Parameter(name="input", default=16384, help="tokens of each prompt"),
                _output(16),
                _concurrency(1),
            ),
            shortened_by=("input", "output"),
        ),
        WorkloadKind(
            name="offline",
            help="new prompts, all at once: throughput",
            parameters=(
                Parameter(name="requests", default=256, help="how many"),
                Parameter(name="input", default=512, help="tokens of each prompt"),
                _output(128),
            ),
            shortened_by=("input", "output"),
        ),
    )
}  # fmt: skip


def parse_workload(text: str) -> Workload:
    """`multi-turn`, or `multi-turn:conversations=8,turns=4`."""
    name, _, settings = text.strip().partition(":")
    if name not in WORKLOADS:
        raise MeasureError(
            f"there is no workload {name!r:.60}; {nearest(name, WORKLOADS)} There are {', '.join(WORKLOADS)}"
        )
    kind = WORKLOADS[name]
    known = {parameter.name: parameter for parameter in kind.parameters}
    given: dict[str, Number] = {}
    for setting in filter(None, (part.strip() for part in settings.split(","))):
        key, equals, value = (part.strip() for part in setting.partition("="))
        key = key.replace("-", "_")
        if not equals:
            raise MeasureError(f"{setting!r:.60} in {text!r:.80} has no value; write for example {_example(kind)}")
        if key not in known:
            raise MeasureError(f"{name} has no parameter {key!r:.60}; {nearest(key, known)} It has {', '.join(known)}")
        if key in given:
            raise MeasureError(f"{key} is given twice in {text!r:.80}; leave one out")
        given[key] = known[key].parse(value)
    return Workload(name=name, parameters={**kind.defaults, **given})


def _example(kind: WorkloadKind) -> str:
    first = kind.parameters[0]
    return f"{kind.name}:{first.name}={first.default}"
