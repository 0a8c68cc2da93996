"""One `overspill bench`: from what was asked to a saved result, whatever happens in between."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from overspill.bench.errors import BenchError, CannotBench
from overspill.bench.measuring import measure
from overspill.bench.outcome import Outcome, Tier, require_tier
from overspill.bench.progress import Progress
from overspill.bench.record import measurement_of, require_resumable, server_changes, server_facts
from overspill.bench.report import report_as_text
from overspill.bench.target import Target, find_target, parse_url
from overspill.bench.workload import Workload, parse_workload
from overspill.registry import CannotNow, RegistryError, Result, get_result, open_registry, save_result

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_WORKLOAD = "multi-turn"


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
    earlier: Result | None = None
    """What it goes on with."""
    part: Mapping[str, Any] | None = None

    @property
    def resumes(self) -> int | None:
        return None if self.earlier is None else self.earlier.id

    def words(self, model: str) -> list[str]:
        """The command that repeats it."""
        words = ["overspill", "bench", self.url, "--workload", self.workload.as_text(), "--model", model]
        words += ["--seed", str(self.seed)]
        for name in ("expects", "label", "experiment"):
            if (value := getattr(self, name)) is not None:
                words += [f"--{name.removesuffix('s')}", value]
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    request: Request
    target: Target
    outcome: Outcome
    result_id: int | None
    not_saved: str | None
    """Why there is no result in the registry."""

    @property
    def unmet(self) -> str | None:
        return require_tier(self.outcome, self.request.expects)

    @property
    def exit_code(self) -> int:
        is_well = self.outcome.is_complete and self.unmet is None and self.result_id is not None
        return 0 if is_well else 1

    def as_text(self) -> str:
        head = f"{self.request.workload.as_text()}, seed {self.request.seed}: {self.target.model} at {self.target.url}"
        return f"{head}\n\n{report_as_text(self.outcome)}"

    def errors(self) -> list[str]:
        found = []
        if not self.outcome.is_complete:
            again = f"; to go on: overspill bench {self.target.url} --resume {self.result_id}" if self.result_id else ""
            found.append(f"the measurement is not complete: {self.outcome.problem}{again}")
        if self.outcome.is_complete and self.unmet is not None:
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
    expect: str | None, label: str | None, experiment: str | None, resume: int | None,
) -> Request:  # fmt: skip
    """None for what was not given."""
    expects: Tier | None = None
    if expect is not None:
        if expect not in ("offload", "spill"):
            raise BenchError(f"--expect {expect!r:.40} is not a tier; write offload or spill")
        expects = "offload" if expect == "offload" else "spill"
    request = Request(
        url=parse_url(DEFAULT_URL if url is None else url), workload=parse_workload(workload or DEFAULT_WORKLOAD),
        seed=seed or 0, model=model, api_key=api_key or None, expects=expects, label=label, experiment=experiment,
    )  # fmt: skip
    if resume is None:
        return request
    return _resumed(request, resume, url=url, workload=workload, seed=seed, model=model)


def _resumed(request: Request, resume: int, *, url: str | None, **given: object) -> Request:
    if extra := [name for name, value in given.items() if value is not None]:
        raise BenchError(f"--{extra[0]} cannot be given with --resume: it is that of result {resume}; leave it out")
    with open_registry() as registry:
        result = get_result(registry, resume)
    workload, seed, part = require_resumable(result)
    measured_at = str(result.config.get("url") or request.url)
    if url is not None and request.url != measured_at:
        raise BenchError(
            f"result {resume} was measured at {measured_at}, and not at {request.url}: half of each would be a "
            f"measurement of neither. Leave the address out to go on there, or measure {request.url} anew without "
            "--resume"
        )
    return Request(
        url=measured_at, workload=workload, seed=seed, model=result.model, api_key=request.api_key,
        expects=request.expects, label=request.label or result.label,
        experiment=request.experiment or result.experiment, earlier=result, part=part,
    )  # fmt: skip


def run_session(
    request: Request, *, say: Callable[[str], None], on_progress: Callable[[Progress], None], stop: threading.Event
) -> Session:
    """Raises if nothing can be measured; what was measured is returned even if it cannot be saved."""
    try:
        open_registry().close()
    except CannotNow as error:
        say(f"warning: {error}. The result will be printed only")
    target = find_target(request.url, request.model, request.api_key)
    facts = server_facts(target)
    if request.earlier is not None and (changes := server_changes(request.earlier, facts)):
        raise CannotBench(
            f"result {request.resumes} cannot be gone on with: {'; '.join(changes)}. Serve as before, or measure anew "
            "without --resume"
        )
    started_at = datetime.now(UTC)
    outcome = measure(
        target, request.workload, seed=request.seed, on_progress=on_progress, stop=stop, resume=request.part
    )
    if not outcome.metrics["completed"]:
        return Session(
            request=request, target=target, outcome=outcome, result_id=None, not_saved="nothing was answered"
        )
    measurement = measurement_of(
        outcome, target, request.workload, seed=request.seed, argv=request.words(target.model), started_at=started_at,
        facts=facts, label=request.label, experiment=request.experiment, resumes=request.resumes,
    )  # fmt: skip
    try:
        with open_registry() as registry:
            result_id, not_saved = save_result(registry, measurement).id, None
    except RegistryError as error:
        result_id, not_saved = None, str(error)
    return Session(request=request, target=target, outcome=outcome, result_id=result_id, not_saved=not_saved)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that the first signal sets; the second ends the program."""
    stop = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def set_once(*_: object) -> None:
        stop.set()
        for sign in signals:
            signal.signal(sign, signal.SIG_DFL)

    before = {sign: signal.signal(sign, set_once) for sign in signals}
    try:
        yield stop
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
