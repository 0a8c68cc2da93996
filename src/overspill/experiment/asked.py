"""From the words of a command to what is to be compared: a new experiment, or one that goes on."""

from collections.abc import Sequence
from typing import Any

from overspill.bench import parse_workload
from overspill.experiment.definition import Definition, require_same, written_configurations
from overspill.experiment.errors import ExperimentError
from overspill.experiment.stored import load_experiment
from overspill.registry import Registry


def read_definition(
    registry: Registry, resume: str | None, *, configurations: Sequence[str | None], workload: str | None, **given: Any
) -> Definition:
    """`given` are fields of a definition; None for what was not given."""
    written = written_configurations(configurations)
    given["workload"] = parse_workload(workload).as_text() if workload is not None else None
    if resume is not None:
        stored = load_experiment(registry, resume).definition
        require_same(stored, {**given, "configurations": written or None}, resume)
        return stored
    if given["model"] is None:
        raise ExperimentError('name a model: overspill ab MODEL --a "…" --b "…"')
    if given["model"].startswith("-"):
        raise ExperimentError(f"the model comes first; {given['model']!r:.60} is a flag")
    definition = Definition(
        configurations=written, **{name: value for name, value in given.items() if value is not None}
    )
    definition.read()
    return definition
