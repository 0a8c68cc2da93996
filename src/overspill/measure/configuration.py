"""Configurations to compare: what users write, parsed into settings and flags.

[LABEL =] [overspill] FLAGS     `overspill serve` with these flags, vLLM's own among them
[LABEL =] vllm FLAGS            vLLM without a plan
[LABEL =] PEER[:SIZE] FLAGS     vLLM with a way to keep KV in RAM, by name
"""

import importlib.util
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overspill.errors import CannotServe
from overspill.flags import Flag, hide_in_text, nearest, read_flags, refuse_secrets, refuse_unknown
from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.kv.sizes import GiB, parse_size
from overspill.measure import MeasureError
from overspill.settings import SETTINGS, SHARED, Setting


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    help: str
    connector: str | None = None
    """vLLM's name for the connector; None for a peer without KV in RAM."""
    size_option: str | None = "cpu_bytes_to_use"
    """The connector's name for its size in bytes; None for LMCache, which takes no size from vLLM."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of the connector."""
    package: str | None = None
    """Python package the peer needs besides vLLM."""
    needs_gpu: bool = True

    def extra(self, num_bytes: int) -> dict[str, Any]:
        return {**({self.size_option: num_bytes} if self.size_option else {}), **self.options}


_NATIVE, _SIMPLE, _OVERSPILL = "OffloadingConnector", "SimpleCPUOffloadConnector", "OverspillConnector"
_EAGERLY, _LAZILY = {"lazy_offload": False}, {"lazy_offload": True}
PEERS = {
    peer.name: peer
    for peer in (
        Peer("none", "vLLM without KV in RAM", needs_gpu=False),
        Peer("native", "vLLM's OffloadingConnector", _NATIVE),
        Peer("native-decode", "the same, including generated tokens", _NATIVE,
             options={"offload_prompt_only": False}),
        Peer("simple", "as simple-eager", _SIMPLE, options=_EAGERLY),
        Peer("simple-eager", "vLLM's SimpleCPUOffloadConnector, which stores at once", _SIMPLE, options=_EAGERLY),
        Peer("simple-lazy", "the same, which stores before a block is evicted", _SIMPLE, options=_LAZILY),
        Peer("lmcache", "LMCache's connector", "LMCacheConnectorV1", None, package="lmcache"),
        Peer("overspill-eager", "Overspill's connector alone, without a plan, which stores at once", _OVERSPILL,
             "host_bytes", {"store": "eager"}, needs_gpu=False),
        Peer("overspill-lazy", "the same, which stores before a block is evicted", _OVERSPILL, "host_bytes",
             {"store": "lazy"}, needs_gpu=False),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """A peer with its size and options, convertible to vLLM's flags and environment variables."""

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
        if self.peer.size_option is not None:
            return {}
        return {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{self.num_bytes / GiB:g}"}


def read_peer(text: str) -> PeerSettings:
    """Parse `name[:SIZE[,option=value…]]`, such as `native:8GiB` or `overspill-eager:8GiB,verify=all`."""
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
        raise MeasureError(
            f"{text!r:.80}: {name} needs some RAM; write for example {name}:8GiB, or none for vLLM alone"
        )
    read = PeerSettings(peer=peer, num_bytes=num_bytes, options=dict(_option(text, option) for option in options))
    if peer.connector == _OVERSPILL:
        try:
            Options.parse({**peer.extra(num_bytes), **read.options})
        except OverspillError as error:
            raise MeasureError(f"{text!r:.80}: {error}") from None
    return read


def require_usable(settings: PeerSettings, *, on_cpu: bool) -> None:
    """Raise if the peer cannot run here, as far as that is known before an engine starts."""
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


_SETTINGS = {setting.flag: setting for setting in SETTINGS}
# vLLM's own flags with much the same effect.
_INSTEAD = {"--gpu-memory": "--gpu-memory-utilization", "--weights-ram": "--cpu-offload-gb"}
_NOT_HERE = {
    "--model": "the model is given once, as the first argument",
    "--config": "its flags could not be recorded; write them out",
    "--uds": "servers are reached over a port of 127.0.0.1",
    "--grpc": "servers are reached over HTTP",
    "--headless": "there would be no server to ask",
    "--ssl-certfile": "servers are reached over plain HTTP, on 127.0.0.1",
    "--root-path": "servers are reached at the root of their address",
    "--host": "servers listen on 127.0.0.1, each on a free port",
    "--port": "servers listen on 127.0.0.1, each on a free port",
}
_LONGEST_LABEL = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    label: str
    text: str
    """The configuration as written, without the label."""
    is_planned: bool
    """Whether `overspill serve` starts the engine, with a plan."""
    settings: dict[str, Any]
    """Overspill's settings by name, as given."""
    vllm_args: tuple[str, ...]
    peer: PeerSettings | None = None


def read_configuration(key: str, written: str, common: str = "") -> Configuration:
    """Parse a configuration; `key` is its flag's letter and fallback label, `common` the flags that all share."""
    place = f"--{key}"
    label, text = _split_label(written)
    try:
        first, words = _first_word(_split(place, text))
        shared = read_flags(_split("--common", common))
        own = read_flags(words)
    except MeasureError:
        raise
    except OverspillError:
        raise MeasureError(
            f"{place} {hide_in_text(written)!r:.80}: write flags of overspill serve, vllm and its flags, or a peer "
            "such as native:8GiB"
        ) from None
    for flag in (*shared, *own):
        _refuse(place, flag)
    is_planned = first in ("", "overspill")
    peer = read_peer(first) if not is_planned and first != "vllm" else None
    # A configuration's own flags win over the common ones.
    flags = [*(flag for flag in shared if flag.name not in {one.name for one in own}), *own]
    if is_planned:
        settings, vllm_args = _planned(flags)
    else:
        settings, vllm_args = {}, _plain(place, first, flags)
    if peer is not None and any(flag.name == "--kv-transfer-config" for flag in flags):
        raise MeasureError(f"{place}: {first} sets --kv-transfer-config itself; use vllm with the flag, or the name")
    return Configuration(
        label=label or (peer.peer.name if peer is not None else key),
        text=text.strip(), is_planned=is_planned, settings=settings, vllm_args=tuple(vllm_args), peer=peer,
    )  # fmt: skip


def read_configurations(written: Sequence[tuple[str, str]], common: str = "") -> tuple[Configuration, ...]:
    """Parse letters and texts in order; raises if two configurations have the same label."""
    if len(written) < 2:
        raise MeasureError('there is nothing to compare; give at least --a "…" and --b "…"')
    read = tuple(read_configuration(key, text, common) for key, text in written)
    labels = [one.label for one in read]
    for label in labels:
        if labels.count(label) > 1:
            raise MeasureError(f'two configurations are called {label!r}; name them: --a "first = …"')
    return read


def _split_label(written: str) -> tuple[str, str]:
    """Label and the rest. A label ends with `=` and holds neither flags, `:` nor quotation marks, so `--x=1` and
    `native:8GiB,k=v` have none."""
    head, equals, rest = written.partition("=")
    label = " ".join(head.split())
    if not equals or not label or any(word.startswith("-") for word in label.split()) or set(label) & set(":\"'"):
        return "", written
    if len(label) > _LONGEST_LABEL or not label.isprintable():
        raise MeasureError(f"a label has at most {_LONGEST_LABEL} printable characters, not {label!r:.90}")
    return label, rest


def _split(place: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise MeasureError(f"{place}: {hide_in_text(text)!r:.80} cannot be split into words: {error}") from error


def _first_word(words: list[str]) -> tuple[str, list[str]]:
    """The kind or peer, empty if not written, and the flags after it."""
    if not words:
        raise MeasureError(
            "a configuration is empty; write overspill for the plan's own choice, none for plain vLLM, or flags"
        )
    return ("", words) if words[0].startswith("-") else (words[0], words[1:])


def _refuse(place: str, flag: Flag) -> None:
    try:
        refuse_secrets([flag], "the results")
    except OverspillError as error:
        raise MeasureError(f"{place}: {error}") from None
    if (why := _NOT_HERE.get(flag.name)) is not None:
        raise MeasureError(f"{place}: {flag.name} cannot be used here: {why}")
    if flag.name.replace("--no-", "--", 1) not in _SETTINGS:
        try:
            refuse_unknown([flag], _SETTINGS)
        except OverspillError as error:
            raise MeasureError(f"{place}: {error}") from None


def _planned(flags: Sequence[Flag]) -> tuple[dict[str, Any], list[str]]:
    settings: dict[str, Any] = {}
    vllm_args: list[str] = []
    for flag in flags:
        if (setting := _SETTINGS.get(flag.name.replace("--no-", "--", 1))) is None:
            vllm_args += flag.words
        else:
            settings[setting.name] = _given(setting, flag)
            _parse(setting, flag)
    return settings, vllm_args


def _plain(place: str, kind: str, flags: Sequence[Flag]) -> list[str]:
    """Flags as vLLM's arguments; numbers are written out, since vLLM reads `4k` differently."""
    words: list[str] = []
    for flag in flags:
        setting = _SETTINGS.get(flag.name)
        if setting is None:
            words += flag.words
        elif setting.name not in SHARED:
            also = f", or give this one vLLM's own {_INSTEAD[flag.name]}" if flag.name in _INSTEAD else ""
            raise MeasureError(
                f"{place}: {flag.name} is a setting of Overspill's plan, and {kind} is vLLM without a plan; give it "
                f"to configurations with a plan{also}"
            )
        elif isinstance(setting.default, bool):
            words += flag.words
        else:
            words += [setting.flag, str(_parse(setting, flag))]
    return words


def _given(setting: Setting, flag: Flag) -> Any:
    return flag.name == setting.flag if setting.is_yes_or_no and not flag.value else flag.value


def _parse(setting: Setting, flag: Flag) -> Any:
    try:
        return setting.parse(_given(setting, flag))
    except OverspillError as error:
        raise MeasureError(f"{setting.flag}: {error}") from error
