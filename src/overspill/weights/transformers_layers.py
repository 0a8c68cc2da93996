"""Weights in RAM for models that vLLM runs through Transformers.

vLLM's offloaders take layers where its own models make them (`make_layers`). Models without code of their own in vLLM
are made by Transformers instead, and `--cpu-offload-gb` does nothing for them, in silence. This plugin hands their
layers over, to the offloader whose layers the GPU reads in RAM: the prefetching one hooks calls of vLLM's own layers.
"""

from typing import Any

import torch
from vllm.logger import init_logger

from overspill.kv.wrapping import Method, wrap_once

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.model_executor.offloader.uva import UVAOffloader

    wrap_once(UVAOffloader, "__init__", _reaching_further)


def _reaching_further(init: Method) -> Method:
    def init_and_reach_further(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # Only now: Transformers' models take seconds to import.
        _hand_over_layers()

    return init_and_reach_further


def _hand_over_layers() -> None:
    from vllm.model_executor.models.transformers.base import Base

    # The last that happens to a model's parameters before its weights are loaded.
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
    # It moves parameters and leaves modules as they are; vLLM's own makers of layers take what it returns.
    offloader.wrap_modules(iter(layers), prefix="layers")


def decoder_layers(model: torch.nn.Module, num_layers: int) -> torch.nn.ModuleList | None:
    found = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == num_layers)
    return next(found, None)
