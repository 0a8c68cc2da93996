"""Results as text: many in a list, or one with all that is known of it."""

import json
import shlex
from collections.abc import Sequence

from overspill.experiment.measures import BY_KEY, MEASURES
from overspill.experiment.text import aligned
from overspill.registry import Result

_LISTED = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "tokens_from_ram")


def results_as_text(results: Sequence[Result]) -> str:
    if not results:
        return "no results yet; measure with overspill bench or overspill ab"
    rows = [["id", "when (UTC)", "model", "workload", "experiment", "label", "repeat", "output", "TTFT", "TPOT",
             "from RAM", ""]]  # fmt: skip
    for one in results:
        numbers = [BY_KEY[key].shown(BY_KEY[key].value(one.metrics)) for key in _LISTED]
        rows.append(
            [str(one.id), f"{one.started_at:%Y-%m-%d %H:%M}", one.model, one.benchmark, one.experiment or "-",
             one.label or "-", str(one.repeat or "-"), *numbers, "" if one.is_complete else "not complete"]
        )  # fmt: skip
    return aligned(rows, left=(1, 2, 3, 4, 5, 11))


def result_as_text(result: Result) -> str:
    config = result.config
    machine = config.get("machine") if isinstance(config.get("machine"), dict) else {}
    facts = {
        "result": str(result.id),
        "model": result.model,
        "workload": f"{config.get('workload') or result.benchmark}, seed {config.get('seed', '-')}",
        "experiment": result.experiment,
        "configuration": result.label,
        "repeat": result.repeat,
        "started": f"{result.started_at:%Y-%m-%d %H:%M:%S} UTC",
        "complete": "yes" if result.is_complete else f"no: {result.metrics.get('problem') or 'not finished'}",
        "GPU": result.gpu,
        "driver": result.driver,
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        "revision": result.git_revision,
        "machine": ", ".join(f"{name} {value}" for name, value in (machine or {}).items()),
        "log": config.get("log_file"),
        "command": shlex.join(result.argv),
        "environment": " ".join(f"{name}={shlex.quote(value)}" for name, value in result.environment.items()),
        "plan": json.dumps(result.plan) if result.plan is not None else None,
    }
    lines = [f"{name:16}{value}" for name, value in facts.items() if value not in (None, "")]
    values = [(measure, measure.value(result.metrics)) for measure in MEASURES]
    numbers = [[measure.name, measure.shown(value)] for measure, value in values if value is not None]
    notes = [f"note: {note}" for note in result.metrics.get("notes") or []]
    return "\n".join([*lines, "", *([aligned(numbers, left=(0,))] if numbers else []), *notes])
