"""One server's life: start, phases, the check against the plan, ready, and its end."""

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from overspill.address import require_free
from overspill.errors import CannotServe
from overspill.kv.sizes import format_size
from overspill.launch.launch import Prepared
from overspill.launch.profiles import remember_profile
from overspill.launch.traps import require_tokenizer
from overspill.serve import notice
from overspill.serve.differences import Difference, confirmations, differences, profile_of
from overspill.serve.engine import Engine
from overspill.serve.notice import notify
from overspill.serve.reasons import epitaph
from overspill.serve.report import VARIABLE, Phase, Report, earliest, read
from overspill.serve.status import read_statuses
from overspill.serve.telling import Telling

_POLL_S = 0.2


def run_server(prepared: Prepared, *, force: bool, quiet: bool, log_file: Path | None) -> None:
    """Returns when the server was asked to stop and is gone; raises if it ends otherwise."""
    address = prepared.address
    there = next((one.text for one in read_statuses() if one.is_alive and one.url == address.url), "")
    require_free(address, {prepared.model, prepared.served_name}, there)
    require_tokenizer(prepared.model, prepared.plan, prepared.combined)
    folder = Path(tempfile.mkdtemp(prefix="overspill-"))
    environment = {**prepared.full_environment(), VARIABLE: str(folder)}
    # Ours to answer: vLLM's processes are not the service's main one.
    environment.pop(notice.VARIABLE, None)
    try:
        engine = Engine(prepared.command, environment, quiet=quiet, log_file=log_file)
        life = _Life(prepared, engine, folder, Telling(prepared, log_file=log_file), force=force)
        with _stopping_on_signals(engine):
            life.run_and_record()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Life:
    prepared: Prepared
    engine: Engine
    folder: Path
    telling: Telling
    force: bool = field(kw_only=True)
    phase: Phase = Phase.STARTING

    def run_and_record(self) -> None:
        """However it ends, everything it started is gone before anybody is told of the end."""
        try:
            self.run()
        except BaseException as error:
            code = self.engine.poll()  # None where it was not vLLM that ended
            self.engine.stop()
            self.telling.fails(str(error) or type(error).__name__, code)
            raise
        self.engine.stop()
        self.telling.stops()

    def run(self) -> None:
        self.telling.starts(self.engine.session)
        self._start()
        if not self.engine.was_asked_to_stop:
            self.engine.ready()
            self._reached(Phase.READY)
            self.telling.is_ready(self._ready_line(read(self.folder)))
            self._follow_pinning()
        code = self.engine.wait()
        notify("STOPPING=1")
        if not self.engine.was_asked_to_stop:
            raise CannotServe(self._epitaph(code))

    def _start(self) -> None:
        """Until the server answers; facts only: workers' reports, the server's health, the process's life."""
        is_checked = False
        while not self.engine.was_asked_to_stop:
            if (code := self.engine.poll()) is not None:
                raise CannotServe(self._epitaph(code))
            reports = read(self.folder)
            self._reached(earliest(reports))
            if self.phase is Phase.STARTED and not is_checked:
                self._check(reports)
                is_checked = True
            if self._is_healthy():
                if not is_checked:
                    self._unchecked()
                return
            time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        answer = self.prepared.address.get("/health")
        return answer is not None and answer[0] == 200

    def _reached(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.telling.reaches(phase)

    def _check(self, reports: list[Report]) -> None:
        """Each worker against the plan; where the user's own flags replaced some of it, differences are only told."""
        plan, way = self.prepared.plan, self.prepared.way
        self.telling.measures(reports)
        found: list[Difference] = []
        for report in reports:
            found += [one for one in differences(plan, way, report) if one not in found]
        profile = profile_of(reports[0])
        # What was measured with other flags is of another engine.
        if profile is not None and self.prepared.combined.follows_plan:
            remember_profile(plan, way, profile, self.prepared.vllm)
        for line in confirmations(way, reports[0], on_cpu=plan.platform.is_cpu):
            self.telling.say(f"as planned: {line}" if not found else line, keep=True)
        for one in found:
            self.telling.say(f"not as planned: {one}", keep=True)
        stopping = [one for one in found if one.stops]
        if stopping and self.prepared.combined.follows_plan and not self.force:
            raise CannotServe(
                f"the engine was stopped, since it did not become what was planned: {'; '.join(map(str, stopping))} "
                "--force goes on with it"
            )

    def _unchecked(self) -> None:
        """vLLM serves, and no worker has reported: it did not load our plugins."""
        told = "vLLM loaded no plugin of Overspill's, so nothing goes to RAM; install overspill where vLLM is installed"
        if self.force:
            self.telling.say(told, keep=True)
        else:
            raise CannotServe(f"the engine was stopped: {told}")

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
        """RAM is filled and pinned while requests are answered already."""
        told = 0.0
        while self.engine.poll() is None and not self.engine.was_asked_to_stop:
            reports = read(self.folder)
            self.telling.measures(reports)
            memory = [one for report in reports for one in report.host_memory]
            if refused := next((one.refused for one in memory if one.refused), ""):
                slow = f"warning: pinning RAM was refused ({refused}), so copies are slower; raise ulimit -l"
                self.telling.say(slow, keep=True)
                return
            pinned, total = sum(one.pinned_bytes for one in memory), sum(one.num_bytes for one in memory)
            if all(report.is_prepared for report in reports):
                if told:
                    self.telling.say(f"RAM is ready: {format_size(pinned)} of {format_size(total)} pinned")
                return
            if time.monotonic() - told > 5:
                told = time.monotonic()
                self.telling.say(f"pinning RAM: {format_size(pinned)} of {format_size(total)}")
            self.engine.wait(_POLL_S)

    def _epitaph(self, code: int | None) -> str:
        while_doing = f" while {self.phase}" if self.phase is not Phase.READY else ""
        return epitaph(code, self.engine.log.lines(), during=f"after {self.telling.seconds:.0f} s{while_doing}")


@contextlib.contextmanager
def _stopping_on_signals(engine: Engine) -> Iterator[None]:
    """A signal closes the engine's life line, and whatever waits for the engine returns."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {sign: signal.signal(sign, lambda *_: engine.ask_to_stop()) for sign in signals}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
