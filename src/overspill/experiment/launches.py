"""A configuration as a command: planned once, so that every repeat starts the same engine."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overspill.address import Address
from overspill.errors import CannotServe
from overspill.experiment.configurations import Configuration
from overspill.experiment.errors import ExperimentError
from overspill.experiment.peers import require_usable
from overspill.flags import Flag, find, read_flags
from overspill.kv.sizes import GiB
from overspill.launch.launch import Launch as PlannedLaunch
from overspill.launch.launch import Prepared, require_this_machine
from overspill.launch.reference import ModelRef
from overspill.launch.vllm import Vllm, installed_vllm, server_command
from overspill.planning.report import plan_as_json
from overspill.settings import BY_NAME, SHARED, as_flags

_HOST = "127.0.0.1"
_ANY_PORT = 1
# These become flags of vLLM's own, or are an experiment's to say.
_TAKEN = (*SHARED, "weights_ram", "host", "port")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of a server."""

    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    address: Address
    served_name: str
    prepared: Prepared | None
    """Of a configuration that is planned: what its engine must become."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Makes launches of a configuration, each for another port."""

    configuration: Configuration
    model: ModelRef
    vllm: Vllm
    planned: PlannedLaunch | None
    """None for vLLM without a plan."""
    vllm_args: tuple[str, ...]

    def launch(self, port: int, environment: Mapping[str, str] = os.environ) -> Launch:
        prepared = self._prepared(port)
        if prepared is not None:
            command, changed = prepared.command, prepared.full_environment(environment)
        else:
            place = ("--host", _HOST, "--port", str(port))
            command = (*server_command(self.model.source, self.vllm), *self.vllm_args, *place)
            peer = self.configuration.peer
            changed = {**environment, **(peer.environment if peer is not None else {})}
        name = find(self._flags, "--served-model-name")
        return Launch(
            label=self.configuration.label,
            command=tuple(command),
            environment=changed,
            address=Address(_HOST, port),
            served_name=name.value.split()[0] if name is not None and name.value else self.model.source,
            prepared=prepared,
        )

    @property
    def known(self) -> Launch:
        """As every start is, but for the port."""
        return self.launch(_ANY_PORT)

    @property
    def plan_as_json(self) -> dict[str, Any] | None:
        return plan_as_json(self.planned.plan) if self.planned is not None else None

    @property
    def warnings(self) -> tuple[str, ...]:
        prepared = self._prepared(_ANY_PORT)
        return prepared.warnings if prepared is not None else self._unused

    @property
    def tiers(self) -> frozenset[str]:
        """Which of offload and spill the engine has."""
        transfer = find(self._flags, "--kv-transfer-config")
        found = {"offload"} if find(self._flags, "--kv-offloading-size") is not None else set()
        if transfer is not None:
            options = _extra_config(transfer.value)
            has_spill = bool(options.get("spill_bytes"))
            found |= {"spill"} if has_spill else set()
            found |= {"offload"} if options.get("host_bytes") or not has_spill else set()
        return frozenset(found)

    @property
    def _unused(self) -> tuple[str, ...]:
        """What the registry says of the model, and vLLM without a plan cannot take."""
        names = [
            BY_NAME[name].flag
            for name, value in self.model.settings.items()
            if value is not None and name not in _TAKEN
        ]
        if not names:
            return ()
        what = f"{', '.join(names)} of {self.model.name} in the registry {'is' if len(names) == 1 else 'are'} not used"
        return (f"{what}: this is vLLM without a plan. Its own flags can be given, such as --gpu-memory-utilization",)

    @property
    def _flags(self) -> list[Flag]:
        prepared = self._prepared(_ANY_PORT)
        return list(prepared.combined.flags) if prepared is not None else read_flags(self.vllm_args)

    def _prepared(self, port: int) -> Prepared | None:
        return self.planned.prepared(by_name=False, host=_HOST, port=port) if self.planned is not None else None


def make_launcher(configuration: Configuration, model: ModelRef) -> Launcher:
    """Refuses what cannot be started, as far as that is known before an engine is."""
    if (vllm := installed_vllm()) is None:
        raise CannotServe(
            "vLLM is not installed in this Python environment, and comparing needs it; install it with: "
            "pip install 'overspill[cuda]'"
        )
    if configuration.peer is not None:
        require_usable(configuration.peer, on_cpu=vllm.is_cpu)
    planned = None
    if configuration.is_planned:
        registered = _not_replaced(model.vllm_args, configuration.vllm_args)
        ref = replace(model, vllm_args=tuple(registered))
        planned = PlannedLaunch.of(ref, configuration.settings, configuration.vllm_args)
        words = planned.vllm_args
    else:
        peer = configuration.peer
        given = (*configuration.vllm_args, *(peer.words if peer is not None else ()))
        words = (*_not_replaced((*_as_flags(model.settings), *model.vllm_args), given), *given)
    launcher = Launcher(configuration=configuration, model=model, vllm=vllm, planned=planned, vllm_args=words)
    prepared = launcher._prepared(_ANY_PORT)
    if prepared is not None:
        require_this_machine(prepared)
    return launcher


def require_emptied(launchers: Sequence[Launcher]) -> None:
    """For engines that are kept, a cache that vLLM cannot empty would answer with what was there before."""
    for launcher in launchers:
        peer = launcher.configuration.peer
        if peer is not None and peer.peer.name == "lmcache":
            raise ExperimentError("LMCache's cache cannot be emptied while its engine runs; leave out --keep")


def _not_replaced(before: Sequence[str], given: Sequence[str]) -> list[str]:
    """Flags given once: the later ones win."""
    names = {flag.name for flag in read_flags(given)}
    return [word for flag in read_flags(before) if flag.name not in names for word in flag.words]


def _as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings of a model of the registry that vLLM has too."""
    words = as_flags({name: settings[name] for name in SHARED if settings.get(name) not in (None, False)})
    weights = settings.get("weights_ram")
    return words if weights is None else [*words, "--cpu-offload-gb", f"{weights / GiB:g}"]


def _extra_config(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text).get("kv_connector_extra_config") or {})
    except (ValueError, AttributeError, TypeError):
        return {}  # vLLM says what is wrong with it
