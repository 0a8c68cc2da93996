"""What `overspill ab` compares: an experiment's definition, from a command's words or from stored results."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from overspill.measure import MeasureError
from overspill.measure.configuration import Configuration, read_configurations
from overspill.measure.measurement import TIERS
from overspill.measure.trial import Definition
from overspill.measure.workload import parse_workload
from overspill.registry import Registry

KEYS = ("a", "b", "c", "d", "e", "f")
_FLAGS = {"model": "model", "configurations": "set of configurations", "keeps_engines": "--keep", "expects": "--expect"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Definition):
    COMMAND: ClassVar[str] = "ab"
    KEY: ClassVar[str] = "experiment"
    MOST_REPEATS: ClassVar[int] = 1000

    configurations: tuple[tuple[str, str], ...]
    """The letter of each flag, and what was written."""
    common: str = ""
    keeps_engines: bool = False
    expects: str | None = None

    def __post_init__(self) -> None:
        Definition.__post_init__(self)
        if self.expects is not None and self.expects not in TIERS:
            raise MeasureError(f"--expect {self.expects!r:.40} is not a tier; use {' or '.join(TIERS)}")

    def read(self) -> tuple[Configuration, ...]:
        return read_configurations(self.configurations, self.common)

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


def read_definition(
    registry: Registry, resume: str | None, *, configurations: Sequence[str | None], workload: str | None, **given: Any
) -> Experiment:
    """A new experiment from a command's words, or a stored one. `given` are fields; None for what was not given."""
    written = written_configurations(configurations)
    given["workload"] = parse_workload(workload).as_text() if workload is not None else None
    if resume is not None:
        stored, _ = Experiment.load(registry, resume)
        require_same(stored, {**given, "configurations": written or None}, resume)
        return stored
    if given["model"] is None:
        raise MeasureError('name a model: overspill ab MODEL --a "…" --b "…"')
    if given["model"].startswith("-"):
        raise MeasureError(f"the model comes first; {given['model']!r:.60} is a flag")
    definition = Experiment(
        configurations=written, **{name: value for name, value in given.items() if value is not None}
    )
    definition.read()
    return definition


def written_configurations(given: Sequence[str | None]) -> tuple[tuple[str, str], ...]:
    """Of --a, --b and so on, in order; None for those that were not given."""
    found = tuple((key, text) for key, text in zip(KEYS, given) if text is not None)
    if found and [key for key, _ in found] != list(KEYS[: len(found)]):
        missing = next(key for key in KEYS if key not in dict(found))
        raise MeasureError(f"--{missing} is missing, and --{found[-1][0]} is given; use the letters in order")
    return found


def require_same(stored: Experiment, given: Mapping[str, Any], experiment: str) -> None:
    """`given` are the fields that the command of a resume names itself; None for the others."""

    def shown(value: object) -> str:
        if not isinstance(value, tuple):
            return repr(value)
        return " ".join(f"--{key} {shlex.quote(text)}" for key, text in value)

    for name, value in given.items():
        was = getattr(stored, name)
        if value is not None and value != was:
            raise MeasureError(
                f"experiment {experiment} has another {_FLAGS.get(name, f'--{name}')}: {shown(was)}, and not "
                f"{shown(value)}. Leave it out to go on with the experiment, or start a new one without --resume"
            )
