"""Notices that KV in RAM belongs to another model by now: weights or a LoRA adapter were replaced in a running engine.

vLLM leaves it to the caller to reset its caches then, and its reset leaves connectors alone unless asked otherwise.
"""

import os
from typing import Any

from overspill.kv.vllm_api import LoRARequest, Scheduler, after_engine_calls, connectors_of

# Of the RPCs that vLLM's own front ends send to workers, those that leave weights as they are. Any other one, by name
# or as a function, may do anything.
_HARMLESS_RPCS = frozenset(
    {
        "check_health", "compute_weight_checksums", "get_model_inspection", "init_weight_transfer_engine", "profile",
        "save_sharded_state", "shutdown_weight_transfer_engine", "synchronize_device", "update_max_model_len",
    }
)  # fmt: skip


def watch_engine_core() -> None:
    """Report calls that may have changed an engine's weights to its connectors."""

    def on_rpc(core: Any, method: Any) -> None:
        if method in _HARMLESS_RPCS:
            return
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        for connector in connectors_of(core, "weights_changed"):
            connector.weights_changed(f"the RPC {name}", requests_with_kv(core.scheduler))

    def on_adapter(core: Any, adapter: LoRARequest) -> None:
        for connector in connectors_of(core, "weights_changed"):
            if connector.adapters.is_known(adapter):
                what = f"loading adapter {adapter.lora_name} again"
                connector.weights_changed(what, requests_with_kv(core.scheduler))
            connector.adapters.is_replaced(adapter)

    after_engine_calls(on_rpc, on_adapter)


def requests_with_kv(scheduler: Scheduler) -> list[str]:
    """Requests that have computed or loaded something, and go on; one that has ended may wait for its last step."""
    return [r.request_id for r in scheduler.requests.values() if r.num_computed_tokens and not r.is_finished()]


class Adapters:
    """LoRA adapters by what vLLM hashes of them: name and path, which stay the same when the content is replaced."""

    def __init__(self) -> None:
        self._identities: dict[tuple[str, str], tuple[Any, ...]] = {}

    def is_known(self, adapter: LoRARequest) -> bool:
        return (adapter.lora_name, adapter.lora_path) in self._identities

    def is_replaced(self, adapter: LoRARequest) -> bool:
        """Whether the name and path stood for something else the last time."""
        identity = (adapter.lora_int_id, _files(adapter.lora_path))
        before = self._identities.get((adapter.lora_name, adapter.lora_path), identity)
        self._identities[adapter.lora_name, adapter.lora_path] = identity
        return before != identity


def _files(path: str) -> tuple[tuple[str, int, int], ...]:
    """What changes when an adapter is written anew; empty for one that is not a local folder."""
    try:
        with os.scandir(path) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))
