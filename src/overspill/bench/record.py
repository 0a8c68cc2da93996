"""A measurement as the registry keeps it, with everything needed to repeat it, or to go on with it."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import overspill
from overspill.bench.errors import BenchError
from overspill.bench.outcome import Outcome
from overspill.bench.target import Target, ask
from overspill.bench.workload import Workload, parse_workload
from overspill.hardware.nvml import read_gpus
from overspill.registry import Measurement, Result, installed_versions

_PART = "part"


def measurement_of(
    outcome: Outcome,
    target: Target,
    workload: Workload,
    *,
    seed: int,
    argv: Sequence[str],
    started_at: datetime,
    facts: Mapping[str, Any],
    label: str | None = None,
    experiment: str | None = None,
    resumes: int | None = None,
) -> Measurement:
    """`facts` are those of `server_facts`, asked while the server still lived."""
    kept: dict[str, Any] = {"answers": outcome.answers, "notes": list(outcome.notes), "problem": outcome.problem}
    if outcome.part is not None:
        kept[_PART] = outcome.part
    config = {
        "workload": workload.as_text(), "parameters": dict(workload.parameters), "seed": seed, "url": target.url,
        "resumes": resumes,
    }  # fmt: skip
    return Measurement(
        benchmark=workload.name,
        model=target.model,
        config=config,
        argv=tuple(argv),
        environment=os.environ,
        versions=facts["versions"],
        gpu=facts["gpu"],
        driver=facts["driver"],
        git_revision=git_revision(),
        metrics={**outcome.metrics, **kept},
        started_at=started_at,
        is_complete=outcome.is_complete,
        experiment=experiment,
        label=label,
    )


def server_facts(target: Target) -> dict[str, Any]:
    """Versions, and the GPUs where the server is on this machine."""
    versions = installed_versions()
    answer = ask(target, "/version")
    if answer.status_code == 200 and answer.headers.get("content-type", "").startswith("application/json"):
        told = answer.json()
        if isinstance(told, dict) and "version" in told:
            versions["server"] = str(told["version"])
    gpus = read_gpus().gpus if target.is_here else ()
    names = sorted({gpu.name for gpu in gpus})
    counted = [f"{sum(gpu.name == name for gpu in gpus)} × {name}" for name in names]
    return {
        "versions": versions,
        "gpu": names[0] if len(gpus) == 1 else ", ".join(counted) or None,
        "driver": gpus[0].driver_version if gpus else None,
    }


def server_changes(earlier: Result, facts: Mapping[str, Any]) -> list[str]:
    """How the server, where that is known, is another than the one that `earlier` was measured with."""
    told = {
        f"the version of the server at {earlier.config.get('url')}": (
            earlier.versions.get("server"), facts["versions"].get("server"),
        ),
        "the GPU": (earlier.gpu, facts["gpu"]),
    }  # fmt: skip
    return [f"{name} was {was}, and is {now}" for name, (was, now) in told.items() if was and now and was != now]


def git_revision(folder: Path = Path(overspill.__file__).parent) -> str | None:
    """Of the checkout that Overspill runs from, with `+` if something in it was changed; None where it is installed."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        revision = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{revision}+" if changed else revision


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()


def require_resumable(result: Result) -> tuple[Workload, int, dict[str, Any]]:
    """Its workload, its seed and its finished part."""
    if result.is_complete:
        raise BenchError(f"result {result.id} is complete; there is nothing to resume. Leave --resume out to repeat it")
    part, config = result.metrics.get(_PART), result.config
    parameters = config.get("parameters")
    if not isinstance(part, dict) or not isinstance(parameters, dict) or "seed" not in config:
        raise BenchError(f"result {result.id} is not of overspill bench, so it cannot be resumed")
    # All of them: defaults may have changed since.
    settings = ",".join(f"{name}={value}" for name, value in parameters.items())
    return parse_workload(f"{result.benchmark}:{settings}"), int(config["seed"]), part
