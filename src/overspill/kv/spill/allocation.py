"""Putting memory of our own under vLLM's KV cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from overspill.kv.errors import OverspillError


class KvAllocation(TorchFunctionMode):
    """Inside this context the one `torch.zeros` that makes vLLM's KV buffer is answered with `make()`.

    vLLM enters the connector's memory-pool context for this allocation alone. A `torch.cuda.MemPool` could serve it
    too, but needs a compiled allocator.
    """

    def __init__(self, num_bytes: int, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._num_bytes = num_bytes
        self._make = make
        self._answered = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self._num_bytes,) and kwargs.get("dtype") is torch.int8:
            self._answered += 1
            return self._make()
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None and self._answered != 1:
            raise OverspillError(
                f"vLLM allocated its KV buffer of {self._num_bytes} bytes {self._answered} times where it was expected "
                "once; spill works with vLLM 0.32.0 only"
            )
