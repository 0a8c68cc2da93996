"""RAM that was pinned for weights while they were loaded, and that nobody uses any more.

vLLM's prefetching offloader pins a layer's weights when the layer is made, and vLLM pins them once more when they are
loaded (model_loader/utils.py, device_loading_context). The first copy goes to PyTorch's allocator, which keeps pinned
memory for whoever asks next, and nobody does: 3.9 GB of Llama-3.1-8B took 8.8 GB of RAM for as long as the engine ran.
"""

from typing import Any

import torch
from vllm.logger import init_logger

from overspill.kv.sizes import format_size
from overspill.kv.wrapping import Method, wrap_once

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    # The last that is done to weights; RAM for KV is taken later.
    wrap_once(PrefetchOffloader, "post_init", _finished)


def _finished(post_init: Method) -> Method:
    def finish_and_return_leftovers(self: Any) -> None:
        post_init(self)
        if returned := return_leftovers():
            logger.info("Overspill: %s that was pinned while weights were loaded is free again", format_size(returned))

    return finish_and_return_leftovers


def return_leftovers() -> int:
    """How many bytes of pinned memory PyTorch gave back."""
    if not torch.cuda.is_available():
        return 0
    before = _pinned_bytes()
    # PyTorch 2.11 has it under another name.
    empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
    empty()
    return before - _pinned_bytes()


def _pinned_bytes() -> int:
    """In use or kept."""
    return int(torch.cuda.memory.host_memory_stats()["allocated_bytes.current"])
