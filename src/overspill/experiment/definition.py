"""What is to be compared, complete: kept with every result, so that an experiment can be repeated and resumed."""

import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from overspill.experiment.configurations import Configuration, read_configurations
from overspill.experiment.errors import ExperimentError

KEYS = ("a", "b", "c", "d", "e", "f")
TIERS = ("offload", "spill")
BENCHMARK = "ab"
_MOST_REPEATS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    model: str
    configurations: tuple[tuple[str, str], ...]
    """The letter of each flag, and what was written."""
    common: str = ""
    workload: str = "multi-turn"
    """With all parameters, as `overspill.bench` writes it."""
    seed: int = 0
    repeats: int = 3
    keeps_engines: bool = False
    expects: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.repeats <= _MOST_REPEATS:
            raise ExperimentError(f"--repeats {self.repeats} is not possible; give 1 to {_MOST_REPEATS}")
        if self.seed < 0:
            raise ExperimentError(f"--seed {self.seed} is negative; give 0 or more")
        if self.expects is not None and self.expects not in TIERS:
            raise ExperimentError(f"--expect {self.expects!r:.40} is no tier; use {' or '.join(TIERS)}")

    def read(self) -> tuple[Configuration, ...]:
        return read_configurations(self.configurations, self.common)

    def seed_of(self, repeat: int) -> int:
        """Other requests in every repeat, the same for all configurations."""
        return self.seed + repeat - 1

    def as_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "configurations": [list(pair) for pair in self.configurations]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Definition":
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        try:
            pairs = tuple((str(key), str(text)) for key, text in known["configurations"])
            return cls(**{**known, "configurations": pairs})
        except (KeyError, TypeError, ValueError) as error:
            raise ExperimentError("what is stored of this experiment cannot be read; start it anew") from error

    @property
    def command(self) -> str:
        """As a shell takes it."""
        words: list[str] = ["overspill", "ab", self.model]
        for key, text in self.configurations:
            words += [f"--{key}", text]
        if self.common:
            words += ["--common", self.common]
        words += ["--workload", self.workload, "--repeats", str(self.repeats), "--seed", str(self.seed)]
        words += ["--keep"] if self.keeps_engines else []
        words += ["--expect", self.expects] if self.expects is not None else []
        return shlex.join(words)


def require_same(stored: Definition, given: Mapping[str, Any], experiment: str) -> None:
    """`given` are the fields that the command of a resume names itself; None for the others."""
    for name, value in given.items():
        was = getattr(stored, name)
        if value is not None and value != was:
            flag = _FLAGS[name]
            raise ExperimentError(
                f"experiment {experiment} has another {flag}: {_shown(was)}, and not {_shown(value)}. Leave it out to "
                "go on with the experiment, or start a new one without --resume"
            )


_FLAGS = {
    "model": "model",
    "configurations": "set of configurations",
    "common": "--common",
    "workload": "--workload",
    "seed": "--seed",
    "repeats": "--repeats",
    "keeps_engines": "--keep",
    "expects": "--expect",
}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(f"--{key} {shlex.quote(text)}" for key, text in value)
    return repr(value)


def new_name(now: datetime | None = None) -> str:
    """By time, so that a list of them is in order; the end keeps two of the same second apart."""
    at = now or datetime.now(UTC)
    return f"ab-{at:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def written_configurations(given: Sequence[str | None]) -> tuple[tuple[str, str], ...]:
    """Of --a, --b and so on, in order; None for those that were not given."""
    found = tuple((key, text) for key, text in zip(KEYS, given) if text is not None)
    if found and [key for key, _ in found] != list(KEYS[: len(found)]):
        missing = next(key for key in KEYS if key not in dict(found))
        raise ExperimentError(f"--{missing} is missing, and --{found[-1][0]} is given; use the letters in order")
    return found
