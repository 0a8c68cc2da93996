"""vLLM's general plugin: registers the connector by name and checks its settings before the model loads.

It is loaded wherever Overspill is installed, also by a vLLM that Overspill cannot work with and is not asked to. So it
imports nothing of vLLM's inside, and what little it changes is not in `vllm_api`.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from overspill.kv.preflight import CONNECTOR, check_connector_stays, check_engine, use_spill_classes
from overspill.kv.ram import require_ram
from overspill.kv.wrapping import Method, wrap_once


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "overspill.kv.connector", CONNECTOR)
    # No hook of a connector is called before the weights are loaded, minutes into a start that cannot succeed.
    wrap_once(VllmConfig, "__post_init__", _checked)
    wrap_once(EngineArgs, "create_engine_config", _with_ram)


def _checked(post_init: Method) -> Method:
    def checked_post_init(self: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_connector_stays(self)
        post_init(self, *args, **kwargs)
        options = check_engine(self)
        if options is not None and options.spill_bytes:
            use_spill_classes(self)

    return checked_post_init


def _with_ram(create: Method) -> Method:
    """Once for each start, in the process that starts the engine. A VllmConfig is completed again in the engine core,
    in workers and for draft models, when the engine's own pool is being filled and would count as missing."""

    def create_with_ram(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        config: VllmConfig = create(self, *args, **kwargs)
        # One of several API servers, which are started beside the engine; -1 is the process that starts them all.
        is_beside_engine = self._api_process_count > 1 and self._api_process_rank >= 0
        if not is_beside_engine and (options := check_engine(config)) is not None:
            needs = {"host_bytes": options.host_bytes, "spill_bytes": options.spill_bytes}
            require_ram(needs, options.reserve_bytes)
        return config

    return create_with_ram
