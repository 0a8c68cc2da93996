"""`overspill bench`: one measurement of a running server, saved as a result even if it is cut short."""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.measurement import TIERS, Outcome, Tier, measure, require_tier
from overspill.measure.metrics import Limits, goodput_metrics, limits_as_text, parse_limits
from overspill.measure.progress import Progress, Say
from overspill.measure.provenance import Provenance, find_server, server_changes, server_provenance
from overspill.measure.report.text import outcome_as_text
from overspill.measure.target import Target, find_target, parse_url
from overspill.measure.workload import FILE, Workload, parse_workload
from overspill.registry import (
    CannotNow,
    RegistryError,
    Result,
    get_result,
    open_registry,
    save_result,
)  # fmt: skip

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_WORKLOAD = "multi-turn"
_PART = "part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    url: str
    workload: Workload
    seed: int
    model: str | None
    api_key: str | None
    expects: Tier | None
    label: str | None
    experiment: str | None
    goodput: Limits | None = None
    earlier: Result | None = None
    """The incomplete result to resume."""
    part: Mapping[str, Any] | None = None

    def words(self, model: str) -> list[str]:
        """Command line that repeats this measurement on a model."""
        words = ["overspill", "bench", self.url, "--workload", self.workload.as_text(), "--model", model]
        words += ["--prompts", self.workload.file] if self.workload.file else []
        words += ["--seed", str(self.seed)]
        limits = None if self.goodput is None else limits_as_text(self.goodput)
        for flag, value in (
            ("expect", self.expects), ("goodput", limits), ("label", self.label), ("experiment", self.experiment),
        ):  # fmt: skip
            words += [f"--{flag}", value] if value is not None else []
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    request: Request
    target: Target
    outcome: Outcome
    result_id: int | None = None
    not_saved: str | None = None
    """Reason why the registry has no result, or None if it has one."""

    @property
    def unmet(self) -> str | None:
        return require_tier(self.outcome, self.request.expects)

    @property
    def exit_code(self) -> int:
        return 0 if self.outcome.is_complete and self.unmet is None and self.result_id is not None else 1

    def as_text(self) -> str:
        head = f"{self.request.workload.as_text()}, seed {self.request.seed}: {self.target.model} at {self.target.url}"
        return f"{head}\n\n{outcome_as_text(self.outcome)}"

    def errors(self) -> list[str]:
        found = []
        if not self.outcome.is_complete:
            command = f"overspill bench {self.target.url} --resume {self.result_id}"
            again = f"; to resume: {command}" if self.result_id else ""
            found.append(f"the measurement is not complete: {self.outcome.problem}{again}")
        elif self.unmet is not None:
            found.append(self.unmet)
        if self.not_saved is not None:
            found.append(f"the result was not saved: {self.not_saved}")
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.result_id,
            "is_complete": self.outcome.is_complete,
            "problem": self.outcome.problem,
            "errors": self.errors(),
            "notes": list(self.outcome.notes),
            "model": self.target.model,
            "url": self.target.url,
            "workload": self.request.workload.name,
            "parameters": dict(self.request.workload.parameters),
            "seed": self.request.seed,
            "metrics": self.outcome.metrics,
            "answers": self.outcome.answers,
        }


def read_request(
    *, url: str | None, workload: str | None, seed: int | None, model: str | None, api_key: str | None,
    expect: str | None, label: str | None, experiment: str | None, resume: int | None, goodput: str | None = None,
    prompts: str | None = None,
) -> Request:  # fmt: skip
    """Validate a command's arguments, each None if not given."""
    expects = next((tier for tier in TIERS if tier == expect), None)
    if expect is not None and expects is None:
        raise MeasureError(f"--expect {expect!r:.40} is not a tier; write offload or spill")
    file = "" if prompts is None else os.path.expanduser(prompts)
    sent = parse_workload(workload or (FILE.name if file else DEFAULT_WORKLOAD), file)
    request = Request(
        url=parse_url(DEFAULT_URL if url is None else url), workload=sent,
        seed=seed or 0, model=model, api_key=api_key or None, expects=expects, label=label, experiment=experiment,
        goodput=None if goodput is None else parse_limits(goodput),
    )  # fmt: skip
    if resume is None:
        return request
    return _resumed(request, resume, url=url, workload=workload, prompts=prompts, seed=seed, model=model)


def _resumed(request: Request, resume: int, *, url: str | None, **given: object) -> Request:
    if extra := [name for name, value in given.items() if value is not None]:
        raise MeasureError(f"--{extra[0]} cannot be given with --resume: result {resume} sets it; leave it out")
    with open_registry() as registry:
        result = get_result(registry, resume)
    if result.is_complete:
        raise MeasureError(f"result {resume} is complete; there is nothing to resume. Leave --resume out to repeat it")
    part, config = result.metrics.get(_PART), result.config
    parameters = config.get("parameters")
    if not isinstance(part, dict) or not isinstance(parameters, dict) or "seed" not in config:
        raise MeasureError(f"result {resume} is not of overspill bench, so it cannot be resumed")
    measured_at = str(config.get("url") or request.url)
    if url is not None and request.url != measured_at:
        raise MeasureError(
            f"result {resume} was measured at {measured_at}, not at {request.url}, and parts measured at two "
            f"addresses cannot be combined. Leave the address out to resume there, or measure {request.url} anew "
            "without --resume"
        )
    # Pass all parameters: defaults may have changed since.
    written = ",".join(f"{name}={value}" for name, value in parameters.items())
    workload = parse_workload(f"{result.benchmark}:{written}", str(config.get("file") or ""))
    if workload.digest != config.get("digest", ""):
        raise MeasureError(f"{workload.file} has changed since result {resume}; measure it anew without --resume")
    expects = next((tier for tier in TIERS if tier == config.get("expect")), None)
    if request.goodput is None and config.get("goodput"):
        request = replace(request, goodput=parse_limits(str(config["goodput"])))
    return replace(
        request, url=measured_at, workload=workload, seed=int(config["seed"]), expects=request.expects or expects,
        model=result.model, label=request.label or result.label, experiment=request.experiment or result.experiment,
        earlier=result, part=part,
    )  # fmt: skip


def run_bench(
    request: Request, *, say: Say, on_progress: Callable[[Progress], None], stop: threading.Event
) -> Bench:  # fmt: skip
    """Measure and save; raises if nothing can be measured, but returns a measurement that cannot be saved."""
    try:
        open_registry().close()
    except CannotNow as error:
        say(f"warning: {error}. The result will be printed, not saved")
    target = find_target(request.url, request.model, request.api_key)
    provenance = server_provenance(target)
    if request.earlier is not None and (changes := server_changes(request.earlier, provenance)):
        raise CannotMeasure(
            f"result {request.earlier.id} cannot be resumed: {'; '.join(changes)}. Serve as before, or measure anew "
            "without --resume"
        )
    started_at = datetime.now(UTC)
    outcome = measure(
        target, request.workload, seed=request.seed, on_progress=on_progress, stop=stop, resume=request.part
    )
    if request.goodput is not None:
        outcome = replace(outcome, metrics={**outcome.metrics, **goodput_metrics(outcome.metrics, request.goodput)})
    found = Bench(request=request, target=target, outcome=outcome)
    if not outcome.metrics["completed"]:
        return replace(found, not_saved="no request was answered")
    try:
        with open_registry() as registry:
            return replace(found, result_id=save_result(registry, _measurement(found, provenance, started_at)).id)
    except RegistryError as error:
        return replace(found, not_saved=str(error))


def _measurement(bench: Bench, found: Provenance, started_at: datetime) -> Result:
    request, target, outcome = bench.request, bench.target, bench.outcome
    kept: dict[str, Any] = {"answers": outcome.answers, "notes": list(outcome.notes), "problem": outcome.problem}
    config: dict[str, Any] = {"url": target.url, "resumes": request.earlier.id if request.earlier is not None else None}
    if request.goodput is not None:
        config["goodput"] = limits_as_text(request.goodput)
    if request.expects is not None:
        config["expect"] = request.expects
    server = find_server(target)
    if server is not None:
        config["server"] = list(server.argv)
    return found.measurement(
        request.workload, request.seed, config, model=target.model, plan=server.plan if server is not None else None,
        argv=tuple(request.words(target.model)), environment=os.environ,
        metrics={**outcome.metrics, **kept, **({_PART: outcome.part} if outcome.part is not None else {})},
        started_at=started_at, is_complete=outcome.is_complete, experiment=request.experiment, label=request.label,
    )  # fmt: skip
