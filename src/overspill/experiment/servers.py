"""A server for a measurement: started, waited for, its caches emptied, and surely gone afterwards."""

import shutil
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from overspill.bench import Target
from overspill.errors import CannotServe
from overspill.experiment.launches import Launch
from overspill.serve import notice
from overspill.serve.differences import differences
from overspill.serve.engine import Engine
from overspill.serve.log import open_log
from overspill.serve.reasons import epitaph
from overspill.serve.report import VARIABLE, Phase, earliest, read

_POLL_S = 0.2
_RESET_S = 120.0
_PINNING_S = 600.0
DEV_MODE = "VLLM_SERVER_DEV_MODE"


class Interrupted(Exception):
    """Asked to stop while a server was starting."""


class Server:
    """Leaving it ends every process that it started."""

    def __init__(self, launch: Launch, *, log_file: Path, stop: threading.Event, can_reset: bool = False) -> None:
        self.launch, self.log_file = launch, log_file
        self._stop, self._can_reset = stop, can_reset
        self._folder: Path | None = None
        self._engine: Engine | None = None
        self.load_s = 0.0
        self.phase = Phase.STARTING

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def target(self, api_key: str | None) -> Target:
        assert self._engine is not None
        return Target(
            url=self.launch.address.url, model=self.launch.served_name, api_key=api_key, pid=self._engine.session
        )

    @property
    def is_running(self) -> bool:
        return self._engine is not None and self._engine.poll() is None

    def reset(self, api_key: str | None) -> None:
        """Empties the KV cache and what is in RAM. vLLM refuses while copies are under way, so it is asked again."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        deadline = time.monotonic() + _RESET_S
        while not self._stop.is_set():
            try:
                answer = httpx.post(
                    f"{self.launch.address.url}/reset_prefix_cache", params={"reset_external": "true"},
                    headers=headers, timeout=60, trust_env=False,
                )  # fmt: skip
            except httpx.HTTPError as error:
                raise CannotServe(f"{self.launch.label} does not answer any more: {error}") from error
            if answer.status_code == 200 and answer.json().get("success"):
                return
            if answer.status_code != 200 or time.monotonic() > deadline:
                raise CannotServe(
                    f"the caches of {self.launch.label} could not be emptied (vLLM answered {answer.status_code}); "
                    "leave out --keep"
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def epitaph(self) -> str:
        """Why it ended, with the end of its log, once it has."""
        assert self._engine is not None
        return epitaph(
            self._engine.poll(), self._engine.log.lines(), during=f"while {self.phase}", log=str(self.log_file),
            is_planned=self.launch.prepared is not None,
        )  # fmt: skip

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="overspill-ab-"))
        environment = {**self.launch.environment, VARIABLE: str(self._folder)}
        environment.pop(notice.VARIABLE, None)
        if self._can_reset:
            environment[DEV_MODE] = "1"
        log_file = open_log(self.log_file, self.launch.address.port)
        began = time.monotonic()
        self._engine = Engine(self.launch.command, environment, quiet=True, log_file=log_file)
        while not self._is_healthy():
            self._go_on()
        self.load_s = time.monotonic() - began
        self._engine.ready()
        self.phase = Phase.READY
        self._require_planned()
        self._wait_for_ram(time.monotonic() + _PINNING_S)

    def _go_on(self) -> None:
        assert self._engine is not None and self._folder is not None
        if self._stop.is_set():
            raise Interrupted
        if self._engine.poll() is not None:
            raise CannotServe(self.epitaph())
        self.phase = earliest(read(self._folder))
        time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        answer = self.launch.address.get("/health")
        return answer is not None and answer[0] == 200

    def _require_planned(self) -> None:
        """Numbers of an engine that did not become what was planned would be of something else."""
        assert self._folder is not None
        prepared = self.launch.prepared
        if prepared is None or not prepared.combined.follows_plan or prepared.plan.wishes.force:
            return
        found = [one for report in read(self._folder) for one in differences(prepared.plan, prepared.way, report)]
        if stopping := [str(one) for one in found if one.stops]:
            raise CannotServe(f"the engine did not become what was planned: {'; '.join(dict.fromkeys(stopping))}")

    def _wait_for_ram(self, deadline: float) -> None:
        """RAM is filled and pinned while requests are answered already; a measurement would be disturbed by it."""
        assert self._folder is not None
        while not all(report.is_prepared for report in read(self._folder)) and time.monotonic() < deadline:
            self._go_on()
        self.phase = Phase.READY
