"""A server for a measurement: started, waited for, its caches emptied, and surely gone afterwards."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from overspill.bench import Target
from overspill.errors import CannotServe
from overspill.experiment.launches import Launch
from overspill.serve import server
from overspill.serve.differences import differences
from overspill.serve.engine_report import Phase
from overspill.serve.log import open_log

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
        self._server: server.Server | None = None
        self.load_s = 0.0

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
        assert self._server is not None
        return Target(
            url=self.launch.address.url, model=self.launch.served_name, api_key=api_key, pid=self._server.session
        )

    @property
    def is_running(self) -> bool:
        return self._server is not None and self._server.poll() is None

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

    @property
    def phase(self) -> Phase:
        return Phase.STARTING if self._server is None else self._server.phase

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()

    def epitaph(self) -> str:
        """Why it ended, with the end of its log, once it has."""
        assert self._server is not None
        return self._server.epitaph()

    def _start(self) -> None:
        launch = self.launch
        environment = {**launch.environment, **({DEV_MODE: "1"} if self._can_reset else {})}
        self._server = server.Server(
            launch.command, environment, launch.address, log_file=open_log(self.log_file, launch.address.port),
            is_planned=launch.prepared is not None,
        )  # fmt: skip
        for _ in self._server.starting():
            self._go_on()
        self.load_s = self._server.seconds
        self._require_planned()
        deadline = time.monotonic() + _PINNING_S
        # RAM is filled and pinned while requests are answered already; a measurement would be disturbed by it.
        for _ in self._server.pinning():
            self._go_on()
            if time.monotonic() > deadline:
                break
        self._server.require_alive()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Interrupted

    def _require_planned(self) -> None:
        """Numbers of an engine that did not become what was planned would be of something else."""
        assert self._server is not None
        prepared = self.launch.prepared
        if prepared is None or not prepared.combined.follows_plan or prepared.plan.wishes.force:
            return
        found = [one for report in self._server.reports for one in differences(prepared.plan, prepared.way, report)]
        if stopping := [str(one) for one in found if one.stops]:
            raise CannotServe(f"the engine did not become what was planned: {'; '.join(dict.fromkeys(stopping))}")
