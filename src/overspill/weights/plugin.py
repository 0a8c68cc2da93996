"""vLLM's general plugin for weights in RAM, which closes two gaps in vLLM's own offloaders.

RAM left pinned by loading is freed. vLLM's prefetching offloader pins a layer's weights when it creates the layer,
and vLLM pins them again when it loads them (model_loader/utils.py, device_loading_context). The first copy returns to
PyTorch's allocator, which keeps pinned memory for a next request that never comes: 3.9 GB of Llama-3.1-8B took 8.8 GB
of RAM for as long as the engine ran.

Models that vLLM runs through Transformers get their layers offloaded. vLLM's offloaders take layers where vLLM's own
models create them (`make_layers`), so `--cpu-offload-gb` silently does nothing for models without code of their own in
vLLM. The plugin passes their layers to the UVA offloader, whose weights the GPU reads in RAM; the prefetching offloader
cannot take them, since it hooks calls of vLLM's own layers.
"""

from typing import Any

import torch
from vllm.logger import init_logger

from overspill.kv.contract import Method, wrap_once
from overspill.kv.sizes import format_size

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only


def register() -> None:
    """Install the hooks; vLLM calls this in every process, possibly more than once."""
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader
    from vllm.model_executor.offloader.uva import UVAOffloader

    wrap_once(UVAOffloader, "__init__", _reaching_further)
    # The last step of loading weights; RAM for KV is allocated later.
    wrap_once(PrefetchOffloader, "post_init", _finished)


def _reaching_further(init: Method) -> Method:
    def init_and_reach_further(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # Not in register(): Transformers' models take seconds to import.
        _hand_over_layers()

    return init_and_reach_further


def _hand_over_layers() -> None:
    from vllm.model_executor.models.transformers.base import Base

    # The last step on a model's parameters before its weights are loaded.
    wrap_once(Base, "keep_in_fp32", _offloading)


def _offloading(keep_in_fp32: Method) -> Method:
    def keep_and_offload(self: Any, module: torch.nn.Module) -> None:
        keep_in_fp32(self, module)
        if module is self.model:
            _offload(module, self.text_config.num_hidden_layers)

    return keep_and_offload


def _offload(model: torch.nn.Module, num_layers: int) -> None:
    from vllm.model_executor.offloader.base import get_offloader
    from vllm.model_executor.offloader.uva import UVAOffloader

    offloader = get_offloader()
    if not isinstance(offloader, UVAOffloader):
        return
    layers = decoder_layers(model, num_layers)
    if layers is None:
        logger.warning("Overspill: weights stay on the GPU: this model has no list of %d layers", num_layers)
        return
    # The returned modules, which vLLM's make_layers uses, are not needed: the offloader moves parameters in place.
    offloader.wrap_modules(iter(layers), prefix="layers")


def decoder_layers(model: torch.nn.Module, num_layers: int) -> torch.nn.ModuleList | None:
    found = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == num_layers)
    return next(found, None)


def _finished(post_init: Method) -> Method:
    def finish_and_return_leftovers(self: Any) -> None:
        post_init(self)
        if returned := return_leftovers():
            logger.info("Overspill: %s that was pinned while weights were loaded is free again", format_size(returned))

    return finish_and_return_leftovers


def return_leftovers() -> int:
    """Have PyTorch free the pinned memory it keeps unused; returns the bytes freed."""
    if not torch.cuda.is_available():
        return 0
    before = _pinned_bytes()
    # PyTorch 2.11 has this function under another name.
    empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
    empty()
    return before - _pinned_bytes()


def _pinned_bytes() -> int:
    """Bytes of pinned memory in PyTorch's allocator, in use or kept."""
    return int(torch.cuda.memory.host_memory_stats()["allocated_bytes.current"])
