"""`overspill serve`: one server's life as its user sees it, from the port check to its end."""

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from overspill.address import require_free
from overspill.errors import CannotServe
from overspill.flags import find
from overspill.kv.sizes import format_size
from overspill.launch.launch import Prepared
from overspill.launch.profiles import remember_profile
from overspill.launch.traps import require_tokenizer
from overspill.planning.planner import is_elastic
from overspill.processes import on_stop_signals
from overspill.serve.control import VARIABLE, forget_secret, make_secret
from overspill.serve.differences import Difference, confirmations, differences, profile_of
from overspill.serve.engine_report import Phase, Report
from overspill.serve.reporter import HEARTBEAT_S, Reporter, notify
from overspill.serve.server import Server
from overspill.serve.status import read_statuses

# A client notices a dead engine before the server has ended.
_LAST_WORDS_S = 5.0


def run_server(
    prepared: Prepared, *, force: bool, quiet: bool, log_file: Path | None, during: Callable[[], None] | None = None
) -> None:
    """Run a server until it is stopped and gone; raise if it ends otherwise. With `during`, the server exists only for
    that call, which is made once it answers, and prints nothing to standard output."""
    address = prepared.address
    there = next((one.text for one in read_statuses() if one.is_alive and one.url == address.url), "")
    require_free(address, {prepared.model, prepared.served_name}, there)
    require_tokenizer(prepared.model, prepared.plan, prepared.combined)
    secret = make_secret() if prepared.way.parks else ""
    environment = prepared.full_environment() | ({VARIABLE: secret} if secret else {})
    server = Server(prepared.command, environment, address, log_file=log_file, show_log=not quiet)
    reporter = Reporter(prepared, log_file=log_file, can_park=bool(secret))
    run = _Run(prepared, server, reporter, force=force, during=during)
    try:
        with on_stop_signals(server.ask_to_stop):
            run.run_and_record()
    finally:
        forget_secret()


def example_request(prepared: Prepared) -> str | None:
    """A curl command to try the server; None where it does not answer text prompts."""
    combined = prepared.combined
    if find(combined.flags, "--skip-tokenizer-init", "--runner") is not None:
        return None
    words = ["curl", "-s", f"{prepared.address.url}/v1/completions", "-H", "Content-Type: application/json"]
    if (certificate := combined.value("--ssl-certfile")) is not None:
        words += ["--cacert", certificate]
    asked = {"model": prepared.served_name, "prompt": "Hello", "max_tokens": 16}
    needs_key = find(combined.flags, "--api-key") is not None or bool(prepared.full_environment().get("VLLM_API_KEY"))
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if needs_key else ""
    return f"{shlex.join([*words, '-d', json.dumps(asked)])}{key}"


@dataclass
class _Run:
    prepared: Prepared
    server: Server
    reporter: Reporter
    force: bool = field(kw_only=True)
    during: Callable[[], None] | None = field(kw_only=True)
    phase: Phase = Phase.STARTING

    def run_and_record(self) -> None:
        """Run the server; however it ends, all its processes are gone before the end is reported."""
        try:
            self.run()
        except BaseException as error:
            code = self.server.poll()  # None if vLLM was still running
            self.server.stop()
            self.reporter.fails(str(error) or type(error).__name__, code)
            raise
        self.server.stop()
        self.reporter.stops()

    def run(self) -> None:
        self.reporter.starts(self.server.session)
        self._start()
        if not self.server.was_asked_to_stop:
            self._reached(Phase.READY)
            if self.during is not None:
                self._run_during(self.during)
                return
            self.reporter.is_ready(self._ready_line(self.server.reports))
            if (line := example_request(self.prepared)) is not None:
                self.reporter.say(f"try it: {line}")
            self._follow_pinning()
        while self.server.wait(HEARTBEAT_S) is None:
            if self.server.was_asked_to_stop:
                self.reporter.waits("stopping: requests in progress may finish")
        notify("STOPPING=1")
        if not self.server.was_asked_to_stop:
            self.server.require_alive()

    def _run_during(self, call: Callable[[], None]) -> None:
        self.reporter.say(self._ready_line(self.server.reports))
        try:
            call()
        except CannotServe:
            self.server.wait(_LAST_WORDS_S)
            self.server.require_alive()  # raises the reason if vLLM ended
            raise

    def _start(self) -> None:
        """Wait until the server answers, by facts only: workers' reports, the health check, the process's life."""
        is_checked = False
        for reports in self.server.starting():
            self._reached(self.server.phase)
            self.reporter.waits(self.phase)
            if self.phase is Phase.STARTED and not is_checked:
                self._check(reports)
                is_checked = True
        if not is_checked and not self.server.was_asked_to_stop:
            self._unchecked()

    def _reached(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.reporter.reaches(phase)

    def _check(self, reports: list[Report]) -> None:
        """Compare each worker with the plan. Where the user's own flags changed it, differences are only reported."""
        plan, way = self.prepared.plan, self.prepared.way
        self.reporter.measures(reports)
        found: list[Difference] = []
        for report in reports:
            found += [one for one in differences(plan, way, report) if one not in found]
        profile = profile_of(reports[0])
        # A profile measured with other flags would be another engine's.
        if profile is not None and self.prepared.combined.follows_plan:
            remember_profile(plan, way, profile, self.prepared.vllm)
        is_shared = is_elastic(plan, way)
        for line in confirmations(way, reports[0], on_cpu=plan.platform.is_cpu, elastic=is_shared):
            self.reporter.say(f"as planned: {line}" if not found else line, keep=True)
        for one in found:
            self.reporter.say(f"not as planned: {one}", keep=True)
        stopping = [one for one in found if one.stops]
        if stopping and self.prepared.combined.follows_plan and not self.force:
            raise CannotServe(
                f"the engine was stopped, since it differs from the plan: {'; '.join(map(str, stopping))} "
                "--force keeps it running"
            )

    def _unchecked(self) -> None:
        """Refuse a server without a worker's report, as vLLM did not load the plugins; with --force, only say so."""
        problem = (
            "vLLM loaded no plugin of Overspill's, so nothing goes to RAM; install overspill where vLLM is installed"
        )
        if not self.force:
            raise CannotServe(f"the engine was stopped: {problem}")
        self.reporter.say(problem, keep=True)

    def _ready_line(self, reports: list[Report]) -> str:
        prepared = self.prepared
        length = reports[0].max_model_len if reports else prepared.plan.max_model_len
        in_ram = [
            f"{format_size(size)} {what}"
            for size, what in (
                (sum(report.weights_in_ram_bytes or 0 for report in reports), "of weights"),
                (sum(report.spilled_bytes or 0 for report in reports), "for spilled KV"),
                (sum(report.pool.num_bytes for report in reports if report.pool is not None), "for idle KV"),
            )
            if size
        ]
        where = " and ".join(in_ram) if in_ram else "nothing"
        return f"{prepared.address.url}/v1 serves {prepared.served_name}, {length:,} tokens; in RAM: {where}"

    def _follow_pinning(self) -> None:
        last = 0.0
        for reports in self.server.pinning():
            self.reporter.measures(reports)
            memory = [one for report in reports for one in report.host_memory]
            if refused := next((one.refused for one in memory if one.refused), ""):
                slow = f"warning: pinning RAM was refused ({refused}), so copies are slower; raise ulimit -l"
                self.reporter.say(slow, keep=True)
                return
            pinned, total = sum(one.pinned_bytes for one in memory), sum(one.num_bytes for one in memory)
            if all(one.is_prepared for one in memory):
                if last:
                    self.reporter.say(f"RAM is ready: {format_size(pinned)} of {format_size(total)} pinned")
            elif time.monotonic() - last > 5:
                last = time.monotonic()
                self.reporter.say(f"pinning RAM: {format_size(pinned)} of {format_size(total)}")
