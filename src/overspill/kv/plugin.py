"""vLLM's general plugin: registers the connector by name and checks its settings before the model loads."""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from overspill.kv.host_memory import HostMemory
from overspill.kv.preflight import CONNECTOR, check_connector_stays, check_engine, use_spill_classes
from overspill.kv.ram import require_ram
from overspill.kv.wrapping import Method, wrap_once


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "overspill.kv.connector", CONNECTOR)
    # No hook of a connector is called before the weights are loaded, minutes into a start that cannot succeed.
    wrap_once(VllmConfig, "__post_init__", _checked)


def _checked(post_init: Method) -> Method:
    def checked_post_init(self: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_connector_stays(self)
        post_init(self, *args, **kwargs)
        options = check_engine(self)
        if options is not None and options.spill_bytes:
            use_spill_classes(self)
        # vLLM makes configurations again while it starts; the RAM that this process's pool took then is not missing.
        if options is not None and not HostMemory.num_alive:
            wanted = {"host_bytes": options.host_bytes, "spill_bytes": options.spill_bytes}
            asking = " + ".join(name for name, num_bytes in wanted.items() if num_bytes)
            require_ram(sum(wanted.values()), options.reserve_bytes, option=asking)

    return checked_post_init
