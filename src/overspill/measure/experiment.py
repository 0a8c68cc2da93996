"""Experiments of `overspill ab`, read from a command's words or from results, and results grouped into columns."""

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from overspill.kv.errors import OverspillError
from overspill.measure import MeasureError
from overspill.measure.compare import Column, Comparison, Repeat, compare
from overspill.measure.configuration import Configuration, read_configurations
from overspill.measure.measurement import TIERS
from overspill.measure.trial import Definition
from overspill.measure.workload import parse_workload
from overspill.registry import Registry, Result, UnknownRecord, get_result, list_results

KEYS = ("a", "b", "c", "d", "e", "f")
_FLAGS = {"model": "model", "configurations": "set of configurations", "keeps_engines": "--keep", "expects": "--expect"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Definition):
    COMMAND: ClassVar[str] = "ab"
    KEY: ClassVar[str] = "experiment"
    MOST_REPEATS: ClassVar[int] = 1000

    configurations: tuple[tuple[str, str], ...]
    """Letter and text of each configuration's flag."""
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
        """Shell command that repeats the experiment."""
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
    """A new experiment from a command's words, or the stored one to resume; fields in `given` are None if not given."""
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
    """Letters and texts of --a, --b and so on, in order; `given` has None for each flag not given."""
    found = tuple((key, text) for key, text in zip(KEYS, given) if text is not None)
    if found and [key for key, _ in found] != list(KEYS[: len(found)]):
        missing = next(key for key in KEYS if key not in dict(found))
        raise MeasureError(f"--{missing} is missing, and --{found[-1][0]} is given; use the letters in order")
    return found


def require_same(stored: Experiment, given: Mapping[str, Any], experiment: str) -> None:
    """Raise if a resume's command contradicts the experiment; `given` has None for fields it does not name."""

    def shown(value: object) -> str:
        if not isinstance(value, tuple):
            return repr(value)
        return " ".join(f"--{key} {shlex.quote(text)}" for key, text in value)

    for name, value in given.items():
        was = getattr(stored, name)
        if value is not None and value != was:
            raise MeasureError(
                f"experiment {experiment} has another {_FLAGS.get(name, f'--{name}')}: {shown(was)}, not "
                f"{shown(value)}. Leave it out to resume the experiment, or start a new one without --resume"
            )


def find_results(registry: Registry, names: Sequence[str]) -> list[Result]:
    """Results by number or by experiment name, in the order of `names`, each once."""
    found: dict[int, Result] = {}
    for name in names:
        of_name = [get_result(registry, int(name))] if is_number(name) else _of_experiment(registry, name)
        for one in of_name:
            found.setdefault(one.id, one)
    return list(found.values())


def are_all(registry: Registry, results: Sequence[Result]) -> bool:
    """Whether the results include every result of their experiments."""
    names = {one.experiment for one in results if one.experiment}
    of_them = {one.id for name in names for one in list_results(registry, experiment=name)}
    return of_them <= {one.id for one in results}


def find_result(registry: Registry, name: str) -> Result:
    if not is_number(name):
        raise MeasureError(f"{name!r:.80} is not the number of a result; overspill results list shows them")
    return get_result(registry, int(name))


def compare_results(results: Sequence[Result], *, is_whole: bool = True, keeps_order: bool = False) -> Comparison:
    """Group results of the same experiment and label as repeats of one configuration; any other is its own column.

    Only a whole experiment has a known number of repeats. Configurations come in the order of the experiment's
    definition, or with `keeps_order` in that of the results.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        key = (one.experiment, one.label) if one.experiment and one.label else ("", f"#{one.id}")
        groups.setdefault(key, []).append(one)
    names = {one.experiment for one in results if one.experiment}
    definition = definition_of(results)
    if definition is not None and not keeps_order:
        with suppress(OverspillError):  # defined by a version that knew other peers
            order = [configuration.label for configuration in definition.read()]
            groups = dict(sorted(groups.items(), key=lambda group: _place(order, group[0][1])))
    expected = definition.repeats if definition is not None and is_whole else None
    cold = _first_starts(results)
    is_alone = len(names) < 2
    columns = [
        # Sorted by id: which attempt at a repeat counts must not depend on the order in which results are named.
        _column(key, sorted(group, key=lambda one: one.id), cold, is_alone=is_alone)
        for key, group in groups.items()
    ]
    if not columns:
        raise MeasureError("there is nothing to compare; name results or an experiment")
    defined = [one.config.get("experiment") for one in results if one.experiment]
    shares_starts = any(isinstance(each, dict) and each.get("keeps_engines") for each in defined)
    return compare(columns, expected_repeats=expected, shares_starts=shares_starts)


def definition_of(results: Sequence[Result]) -> Experiment | None:
    """Definition shared by all results, if they belong to one experiment of `overspill ab`."""
    defined = results[-1].config.get("experiment") if len({one.experiment for one in results}) == 1 else None
    return Experiment.from_json(defined) if isinstance(defined, dict) else None


def _place(order: Sequence[str], label: str) -> int:
    return order.index(label) if label in order else len(order)


def _first_starts(results: Sequence[Result]) -> frozenset[int]:
    """Ids of the results that began with their experiment's first start of an engine."""
    started = [one for one in results if one.experiment and one.metrics.get("load_s") is not None]
    first: dict[str | None, Result] = {}
    for one in sorted(started, key=lambda each: (each.started_at, each.id)):
        first.setdefault(one.experiment, one)
    return frozenset(one.id for one in first.values())


def _column(key: tuple[str, str], results: Sequence[Result], cold: frozenset[int], *, is_alone: bool) -> Column:
    experiment, label = key
    last = results[-1]
    shown = label if is_alone or not experiment else f"{experiment} {label}"
    if not experiment:
        shown = f"#{last.id} {last.label or last.benchmark}"
    text = last.config.get("configuration", {}).get("text") if isinstance(last.config, dict) else None
    # For `overspill bench`, the server's command says more than the command that measured it.
    text = text or " ".join(last.config.get("server") or last.argv)
    return Column(label=shown, text=text, repeats=tuple(_repeats(results, cold)))


def _repeats(results: Sequence[Result], cold: frozenset[int]) -> list[Repeat]:
    """One attempt at each repeat: the finished one, else the last."""
    chosen: dict[int, Result] = {}
    # Results of `overspill bench` have no number, and a resumed result is part of the one that resumes it.
    resumed = {one.config.get("resumes") for one in results}
    for one in (each for each in results if each.id not in resumed):
        number = one.repeat or len(chosen) + 1
        before = chosen.get(number)
        if before is None or not before.is_complete:
            chosen[number] = one
    return [
        Repeat(
            number=number, metrics=one.metrics, is_complete=one.is_complete, problem=one.metrics.get("problem"),
            conditions=_conditions(one), is_first_start=one.id in cold, source=one,
        )
        for number, one in sorted(chosen.items())
    ]  # fmt: skip


def _conditions(result: Result) -> str:
    """Model and requests as one comparable text; results of `overspill bench` use the same keys."""
    config = result.config
    sent = config.get("parameters") or config.get("workload")
    return json.dumps([result.model, result.benchmark, sent, config.get("digest"), config.get("seed")], sort_keys=True)


def is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def _of_experiment(registry: Registry, name: str) -> list[Result]:
    found = list_results(registry, experiment=name)
    if not found:
        raise UnknownRecord(
            f"there is neither a result nor an experiment {name!r:.80} in the registry; overspill results list names "
            "them"
        )
    return found[::-1]
