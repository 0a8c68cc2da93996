"""Weights in RAM for models that vLLM runs through Transformers.

vLLM's offloaders take layers where its own models make them (`make_layers`). Models without code of their own in vLLM
are made by Transformers instead, and `--cpu-offload-gb` does nothing for them, in silence. This plugin hands their
layers over, to the offloader whose layers the GPU reads in RAM: the prefetching one hooks calls of vLLM's own layers.
"""

import functools
from typing import Any

import torch
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.model_executor.offloader.uva import UVAOffloader

    if hasattr(UVAOffloader.__init__, "overspill"):
        return
    init = UVAOffloader.__init__

    @functools.wraps(init)
    def init_and_reach_further(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # Only now: Transformers' models take seconds to import.
        _hand_over_layers()

    init_and_reach_further.overspill = True  # type: ignore[attr-defined]
    UVAOffloader.__init__ = init_and_reach_further


def _hand_over_layers() -> None:
    from vllm.model_executor.models.transformers.base import Base

    if hasattr(Base.keep_in_fp32, "overspill"):
        return
    # The last that happens to a model's parameters before its weights are loaded.
    keep_in_fp32 = Base.keep_in_fp32

    @functools.wraps(keep_in_fp32)
    def keep_and_offload(self: Any, module: torch.nn.Module) -> None:
        keep_in_fp32(self, module)
        if module is self.model:
            _offload(module, self.text_config.num_hidden_layers)

    keep_and_offload.overspill = True  # type: ignore[attr-defined]
    Base.keep_in_fp32 = keep_and_offload


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
