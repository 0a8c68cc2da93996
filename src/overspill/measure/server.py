"""A server for a measurement: awaited until its RAM is ready, held against its plan, its caches emptied on request."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from overspill.errors import CannotServe
from overspill.measure.launch import MeasuredLaunch
from overspill.measure.target import Target
from overspill.serve import server
from overspill.serve.differences import differences
from overspill.serve.log import open_log

_POLL_S = 0.2
_RESET_S = 120.0
_PINNING_S = 600.0
_DEV_MODE = "VLLM_SERVER_DEV_MODE"


class Interrupted(Exception):
    """A stop was requested while a server was starting."""


class Server(server.Server):
    def __init__(self, launch: MeasuredLaunch, log_file: Path, stop: threading.Event, *, can_reset: bool) -> None:
        environment = {**launch.environment, **({_DEV_MODE: "1"} if can_reset else {})}
        super().__init__(
            launch.command, environment, launch.address, log_file=open_log(log_file, launch.address.port),
            is_planned=launch.prepared is not None,
        )  # fmt: skip
        self.launch = launch
        self._stopping = stop
        self.load_s = 0.0

    def target(self, api_key: str | None) -> Target:
        return Target(url=self.address.url, model=self.launch.served_name, api_key=api_key, pid=self.session)

    def start(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Until it answers and its RAM is pinned, which would disturb a measurement."""
        for _ in self.starting():
            self._go_on()
            on_wait()
        self.load_s = self.seconds
        self._require_planned()
        deadline = time.monotonic() + _PINNING_S
        for _ in self.pinning():
            self._go_on()
            on_wait()
            if time.monotonic() > deadline:
                break
        self.require_alive()

    def _go_on(self) -> None:
        if self._stopping.is_set():
            raise Interrupted

    def _require_planned(self) -> None:
        """Numbers of an engine that did not become what was planned would be of something else."""
        prepared = self.launch.prepared
        if prepared is None or not prepared.combined.follows_plan or prepared.plan.wishes.force:
            return
        found = [one for report in self.reports for one in differences(prepared.plan, prepared.way, report)]
        if stopping := [str(one) for one in found if one.stops]:
            raise CannotServe(f"the engine did not become what was planned: {'; '.join(dict.fromkeys(stopping))}")

    def reset(self, api_key: str | None) -> None:
        """Empties the KV cache and its tiers in RAM. vLLM refuses while copies are under way, so it is retried."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        deadline = time.monotonic() + _RESET_S
        while not self._stopping.is_set():
            try:
                answer = httpx.post(
                    f"{self.address.url}/reset_prefix_cache", params={"reset_external": "true"}, headers=headers,
                    timeout=60, trust_env=False,
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
