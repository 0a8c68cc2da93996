"""Other ways to keep KV in RAM, by name: what stock vLLM is given for each."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overspill.errors import CannotServe
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB, parse_size
from overspill.measure import MeasureError
from overspill.settings import nearest


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    help: str
    connector: str | None = None
    """vLLM's name of it; None for one without KV in RAM."""
    extra: Callable[[int], dict[str, Any]] = lambda _: {}
    """The connector's options, of a size in bytes."""
    package: str | None = None
    """Beside vLLM, what it needs."""
    needs_gpu: bool = True
    environment: Callable[[int], dict[str, str]] = lambda _: {}


def _overspill(store: str) -> Callable[[int], dict[str, Any]]:
    return lambda size: {"host_bytes": size, "store": store}


def _simple(*, lazy: bool) -> Callable[[int], dict[str, Any]]:
    return lambda size: {"cpu_bytes_to_use": size, "lazy_offload": lazy}


def _lmcache(num_bytes: int) -> dict[str, str]:
    # LMCache takes no size from vLLM.
    return {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{num_bytes / GiB:g}"}


_NATIVE, _SIMPLE, _OVERSPILL = "OffloadingConnector", "SimpleCPUOffloadConnector", "OverspillConnector"
PEERS = {
    peer.name: peer
    for peer in (
        Peer("none", "vLLM without KV in RAM", needs_gpu=False),
        Peer("native", "vLLM's OffloadingConnector", _NATIVE, lambda size: {"cpu_bytes_to_use": size}),
        Peer("native-decode", "the same, and what was generated goes to RAM too", _NATIVE,
             lambda size: {"cpu_bytes_to_use": size, "offload_prompt_only": False}),
        Peer("simple", "as simple-eager", _SIMPLE, _simple(lazy=False)),
        Peer("simple-eager", "vLLM's SimpleCPUOffloadConnector, which stores at once", _SIMPLE, _simple(lazy=False)),
        Peer("simple-lazy", "the same, which stores before a block is evicted", _SIMPLE, _simple(lazy=True)),
        Peer("lmcache", "LMCache's connector", "LMCacheConnectorV1", package="lmcache", environment=_lmcache),
        Peer("overspill-eager", "Overspill's connector alone, without a plan, which stores at once", _OVERSPILL,
             _overspill("eager"), needs_gpu=False),
        Peer("overspill-lazy", "the same, which stores before a block is evicted", _OVERSPILL, _overspill("lazy"),
             needs_gpu=False),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """A peer with its size and options, as flags and variables for vLLM."""

    peer: Peer
    num_bytes: int = 0
    options: Mapping[str, Any]

    @property
    def words(self) -> tuple[str, ...]:
        if self.peer.connector is None:
            return ()
        extra = {**self.peer.extra(self.num_bytes), **self.options}
        transfer = {"kv_connector": self.peer.connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return ("--kv-transfer-config", json.dumps(transfer))

    @property
    def environment(self) -> dict[str, str]:
        return self.peer.environment(self.num_bytes)


def read_peer(text: str) -> PeerSettings:
    """`name[:SIZE[,option=value…]]`, such as `native:8GiB` or `overspill-eager:8GiB,verify=all`."""
    name, _, rest = text.partition(":")
    if (peer := PEERS.get(name)) is None:
        raise MeasureError(f"there is no peer {name!r:.80}; {nearest(name, PEERS)} They are: {', '.join(PEERS)}")
    size, *options = rest.split(",") if rest else ("",)
    if peer.connector is None:
        if rest:
            raise MeasureError(f"{text!r:.80}: {name} keeps nothing in RAM, and takes no size; write {name}")
        return PeerSettings(peer=peer, options={})
    if not size:
        raise MeasureError(f"{name} needs the RAM that it may use; write for example {name}:8GiB")
    try:
        num_bytes = parse_size(size)
    except OverspillError as error:
        raise MeasureError(f"{text!r:.80}: {error}") from error
    if num_bytes <= 0:
        raise MeasureError(f"{text!r:.80}: {name} needs some RAM; write for example {name}:8GiB, or none for none")
    return PeerSettings(peer=peer, num_bytes=num_bytes, options=dict(_option(text, option) for option in options))


def require_usable(settings: PeerSettings, *, on_cpu: bool) -> None:
    """As far as it is known before an engine starts."""
    if on_cpu and settings.peer.needs_gpu:
        raise CannotServe(
            f"{settings.peer.name} needs a GPU, and the vLLM that is installed is the CPU build; on a CPU there are "
            f"{', '.join(peer.name for peer in PEERS.values() if not peer.needs_gpu)}"
        )
    package = settings.peer.package
    if package is not None and importlib.util.find_spec(package) is None:
        raise MeasureError(
            f"{settings.peer.name} needs the package {package}, which is not installed in this Python environment; "
            f"install it with: pip install {package}"
        )


def _option(text: str, option: str) -> tuple[str, Any]:
    name, equals, value = option.partition("=")
    if not equals or not name.strip():
        raise MeasureError(f"{text!r:.80}: {option!r:.40} is not an option; write option=value, such as verify=all")
    try:
        return name.strip(), json.loads(value)  # 4 and true are JSON,
    except json.JSONDecodeError:
        return name.strip(), value  # and lru is a word
