"""The systems that are compared, by name: each name becomes one kv_transfer_config for stock vLLM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DEFAULT_SYSTEMS = ("none", "overspill-eager", "overspill-lazy", "native", "simple-eager", "simple-lazy")
PEERS = ("native", "native-decode", "simple-eager", "simple-lazy")


@dataclass(frozen=True, kw_only=True)
class System:
    name: str
    """As given, options included: `overspill-eager:verify=all` is its own row in the results."""
    kv_transfer_config: dict[str, Any] | None

    @property
    def offloads(self) -> bool:
        return self.kv_transfer_config is not None

    @property
    def is_overspill(self) -> bool:
        return self.name.startswith("overspill")

    @property
    def is_peer(self) -> bool:
        return self.name.partition(":")[0] in PEERS


def system(name: str, host_bytes: int, overspill_extra: dict[str, Any] | None = None) -> System:
    """`base[:key=value[,key=value…]]` with a host pool of `host_bytes` -> what vLLM is given."""
    base, _, options = name.partition(":")
    config = _connector(base, host_bytes)
    if config is None:
        if options:
            raise SystemExit(f"{name}: '{base}' has no connector to pass options to")
        return System(name=name, kv_transfer_config=None)
    extra = config["kv_connector_extra_config"]
    if base.startswith("overspill"):
        extra.update(overspill_extra or {})
    extra.update(_parse_options(name, options))
    return System(name=name, kv_transfer_config={"kv_role": "kv_both", **config})


def _connector(base: str, host_bytes: int) -> dict[str, Any] | None:
    match base:
        case "none":
            return None
        case "overspill-eager" | "overspill-lazy":
            return {
                "kv_connector": "OverspillConnector",
                "kv_connector_module_path": "overspill.kv.connector",
                "kv_connector_extra_config": {
                    "host_bytes": host_bytes,
                    "store": base.removeprefix("overspill-"),
                },
            }
        case "native" | "native-decode":
            extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes}
            if base == "native-decode":
                # By default the native connector does not offload what was generated.
                extra["offload_prompt_only"] = False
            return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
        case "simple-eager" | "simple-lazy":
            return {
                "kv_connector": "SimpleCPUOffloadConnector",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": host_bytes,
                    "lazy_offload": base == "simple-lazy",
                },
            }
    known = ", ".join(dict.fromkeys((*DEFAULT_SYSTEMS, *PEERS)))
    raise SystemExit(f"unknown system '{base}'; known: {known}")


def _parse_options(name: str, options: str) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise SystemExit(f"{name}: '{option}' is not key=value")
        parsed[key] = _value(value)
    return parsed


def _value(text: str) -> Any:
    """JSON where it is JSON (4, true), a word where it is not (lru)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
