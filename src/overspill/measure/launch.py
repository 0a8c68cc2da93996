"""Launches of configurations, planned once so that every repeat starts the same engine, and their servers."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from overspill.address import Address
from overspill.errors import CannotServe
from overspill.flags import Flag, find, read_flags
from overspill.kv.sizes import GiB
from overspill.launch.launch import Launch, Prepared, require_this_machine
from overspill.launch.machine import num_ranks
from overspill.launch.reference import ModelRef
from overspill.launch.vllm import installed_vllm, server_command
from overspill.measure import MeasureError
from overspill.measure.configuration import Configuration, require_usable
from overspill.measure.target import Target
from overspill.planning.report import plan_as_json
from overspill.serve import server
from overspill.serve.differences import differences
from overspill.serve.log import open_log
from overspill.settings import BY_NAME, SHARED, as_flags

_HOST, _ANY_PORT = "127.0.0.1", 1
# Settings that become vLLM's own flags, or that the experiment decides.
_TAKEN = (*SHARED, "weights_ram", "host", "port")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLaunch:
    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    served_name: str
    tiers: frozenset[str]
    """Tiers the engine has: offload, spill, both or neither."""
    warnings: tuple[str, ...]
    prepared: Prepared | None
    """Plan that the started engine must match; None for a configuration without a plan."""
    address: Address = Address(_HOST, _ANY_PORT)

    def on(self, port: int) -> "MeasuredLaunch":
        """A copy of the launch for one start, on this port."""
        place = self.command.index("--port") + 1
        command = (*self.command[:place], str(port), *self.command[place + 1 :])
        return replace(self, command=command, address=Address(_HOST, port))

    @property
    def plan_as_json(self) -> dict[str, Any] | None:
        return plan_as_json(self.prepared.plan) if self.prepared is not None else None


def make_launch(configuration: Configuration, model: ModelRef) -> MeasuredLaunch:
    """Turn a configuration into a command; raises for what cannot start, as far as that is known beforehand."""
    if (vllm := installed_vllm()) is None:
        raise CannotServe(
            "vLLM is not installed in this Python environment, and comparing needs it; install it with: "
            "pip install 'overspill[cuda]'"
        )
    peer = configuration.peer
    if peer is not None:
        require_usable(peer, on_cpu=vllm.is_cpu)
    prepared = None
    if configuration.is_planned:
        registered = tuple(_not_replaced(model.vllm_args, configuration.vllm_args))
        planned = Launch.of(replace(model, vllm_args=registered), configuration.settings, configuration.vllm_args)
        prepared = planned.prepared(by_name=False, host=_HOST, port=_ANY_PORT)
        require_this_machine(prepared)
        flags, warnings = list(prepared.combined.flags), prepared.warnings
        command, environment = prepared.command, prepared.full_environment()
    else:
        given = (*configuration.vllm_args, *(peer.words if peer is not None else ()))
        words = (*_not_replaced((*_as_flags(model.settings), *model.vllm_args), given), *given)
        flags, warnings = read_flags(words), _unused(model)
        command = (*server_command(model.source, vllm), *words, "--host", _HOST, "--port", str(_ANY_PORT))
        environment = {**os.environ, **(peer.environment if peer is not None else {})}
    name = find(flags, "--served-model-name")
    return MeasuredLaunch(
        label=configuration.label, command=tuple(command), environment=environment,
        served_name=name.value.split()[0] if name is not None and name.value else model.source, tiers=_tiers(flags),
        warnings=warnings, prepared=prepared,
    )  # fmt: skip


def require_emptied(configurations: Sequence[Configuration]) -> None:
    """Refuse caches that vLLM cannot empty: a kept engine would answer from an earlier repeat's KV."""
    if any(one.peer is not None and one.peer.peer.name == "lmcache" for one in configurations):
        raise MeasureError("LMCache's cache cannot be emptied while its engine runs; leave out --keep")


def _tiers(flags: Sequence[Flag]) -> frozenset[str]:
    transfer = find(flags, "--kv-transfer-config")
    found = {"offload"} if find(flags, "--kv-offloading-size") is not None else set()
    if transfer is not None:
        try:
            options = dict(json.loads(transfer.value).get("kv_connector_extra_config") or {})
        except (ValueError, AttributeError, TypeError):
            options = {}  # vLLM reports what is wrong with it
        has_spill = bool(options.get("spill_bytes"))
        found |= {"spill"} if has_spill else set()
        found |= {"offload"} if options.get("host_bytes") or not has_spill else set()
    return frozenset(found)


def _unused(model: ModelRef) -> tuple[str, ...]:
    """Warning about a model's registered settings that vLLM without a plan cannot use."""
    names = [BY_NAME[name].flag for name, value in model.settings.items() if value is not None and name not in _TAKEN]
    if not names:
        return ()
    what = f"{', '.join(names)} of {model.name} in the registry {'is' if len(names) == 1 else 'are'} not used"
    return (f"{what}: this is vLLM without a plan. Its own flags can be given, such as --gpu-memory-utilization",)


def _not_replaced(before: Sequence[str], given: Sequence[str]) -> list[str]:
    """Words of the flags in `before` that `given` does not override."""
    names = {flag.name for flag in read_flags(given)}
    return [word for flag in read_flags(before) if flag.name not in names for word in flag.words]


def _as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Registered settings that vLLM has too, as its flags."""
    words = as_flags({name: settings[name] for name in SHARED if settings.get(name) not in (None, False)})
    weights = settings.get("weights_ram")
    return words if weights is None else [*words, "--cpu-offload-gb", f"{weights / num_ranks(settings) / GiB:g}"]


_POLL_S = 0.2
_RESET_S = 120.0
_PINNING_S = 600.0
_DEV_MODE = "VLLM_SERVER_DEV_MODE"


class Interrupted(Exception):
    """Stop requested while a server was starting."""


class Server(server.Server):
    """A server that is checked against its plan, awaited until its RAM is pinned, and can empty its caches."""

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
        """Wait until the server answers and its RAM is pinned: pinning would disturb a measurement."""
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
        """Raise if the engine differs from its plan: its numbers would describe another configuration."""
        prepared = self.launch.prepared
        if prepared is None or not prepared.combined.follows_plan or prepared.plan.wishes.force:
            return
        found = [one for report in self.reports for one in differences(prepared.plan, prepared.way, report)]
        if stopping := [str(one) for one in found if one.stops]:
            raise CannotServe(f"the engine differs from its plan: {'; '.join(dict.fromkeys(stopping))}")

    def reset(self, api_key: str | None) -> None:
        """Empty the KV cache and its tiers in RAM, with retries: vLLM refuses while copies are under way."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        deadline = time.monotonic() + _RESET_S
        while not self._stopping.is_set():
            try:
                answer = httpx.post(
                    f"{self.address.url}/reset_prefix_cache", params={"reset_external": "true"}, headers=headers,
                    timeout=60, trust_env=False,
                )  # fmt: skip
            except httpx.HTTPError as error:
                raise CannotServe(f"{self.launch.label} no longer answers: {error}") from error
            if answer.status_code == 200 and answer.json().get("success"):
                return
            if answer.status_code != 200 or time.monotonic() > deadline:
                raise CannotServe(
                    f"the caches of {self.launch.label} could not be emptied (vLLM answered {answer.status_code}); "
                    "leave out --keep"
                )
            time.sleep(_POLL_S)
