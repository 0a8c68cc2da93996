"""Results of the registry as configurations to compare."""

import json
from collections.abc import Sequence
from contextlib import suppress

from overspill.kv.errors import OverspillError
from overspill.measure import MeasureError
from overspill.measure.compare import Column, Comparison, Repeat, compare
from overspill.measure.experiment import Experiment
from overspill.registry import Registry, Result, UnknownRecord, get_result, list_results


def find_results(registry: Registry, names: Sequence[str]) -> list[Result]:
    """Of numbers of results and names of experiments, in their order; each result once."""
    found: dict[int, Result] = {}
    for name in names:
        of_name = [get_result(registry, int(name))] if is_number(name) else _of_experiment(registry, name)
        for one in of_name:
            found.setdefault(one.id, one)
    return list(found.values())


def are_all(registry: Registry, results: Sequence[Result]) -> bool:
    """Whether the experiments that these are of have no others."""
    names = {one.experiment for one in results if one.experiment}
    of_them = {one.id for name in names for one in list_results(registry, experiment=name)}
    return of_them <= {one.id for one in results}


def find_result(registry: Registry, name: str) -> Result:
    if not is_number(name):
        raise MeasureError(f"{name!r:.80} is not the number of a result; overspill results list shows them")
    return get_result(registry, int(name))


def compare_results(results: Sequence[Result], *, is_whole: bool = True, keeps_order: bool = False) -> Comparison:
    """Results of the same experiment and label are repeats of one configuration; others stand for themselves.

    Of a whole experiment it is known how many repeats there should be. Its configurations have the order in which it
    names them, unless results are to keep their own.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        key = (one.experiment, one.label) if one.experiment and one.label else ("", f"#{one.id}")
        groups.setdefault(key, []).append(one)
    names = {one.experiment for one in results if one.experiment}
    definition = definition_of(results)
    if definition is not None and not keeps_order:
        with suppress(OverspillError):  # written for a version that knew other peers
            order = [configuration.label for configuration in definition.read()]
            groups = dict(sorted(groups.items(), key=lambda group: _place(order, group[0][1])))
    expected = definition.repeats if definition is not None and is_whole else None
    cold = _first_starts(results)
    is_alone = len(names) < 2
    columns = [
        # Of several attempts at a repeat the last counts, in whatever order they are named.
        _column(key, sorted(group, key=lambda one: one.id), cold, is_alone=is_alone)
        for key, group in groups.items()
    ]
    if not columns:
        raise MeasureError("there is nothing to compare; name results or an experiment")
    defined = [one.config.get("experiment") for one in results if one.experiment]
    shares_starts = any(isinstance(each, dict) and each.get("keeps_engines") for each in defined)
    return compare(columns, expected_repeats=expected, shares_starts=shares_starts)


def definition_of(results: Sequence[Result]) -> Experiment | None:
    """Where all of them are of one experiment of `overspill ab`."""
    defined = results[-1].config.get("experiment") if len({one.experiment for one in results}) == 1 else None
    return Experiment.from_json(defined) if isinstance(defined, dict) else None


def _place(order: Sequence[str], label: str) -> int:
    return order.index(label) if label in order else len(order)


def _first_starts(results: Sequence[Result]) -> frozenset[int]:
    """Of each experiment, the result that began with its first start of an engine."""
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
    # Of what was only measured, the server says more than the command that measured it.
    text = text or " ".join(last.config.get("server") or last.argv)
    return Column(label=shown, text=text, repeats=tuple(_repeats(results, cold)))


def _repeats(results: Sequence[Result], cold: frozenset[int]) -> list[Repeat]:
    """Of several attempts at a repeat the one that was finished, else the last."""
    chosen: dict[int, Result] = {}
    # Those of `overspill bench` have no number, and one that was resumed is part of the one that resumes it.
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
    """What was sent to which model; results of `overspill bench` know it by the same names."""
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
