"""What a tiny engine costs beside its computing, which is most of it: done once, not for every engine of a test run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform


def keep_kernels() -> None:
    """At each start vLLM looks through every module that is loaded to put its CPU kernels in place. They stay there."""
    put_in_place = cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(put_in_place)  # type: ignore[method-assign]


def inspect_models_here() -> None:
    """vLLM starts a process for every architecture it meets, which imports all of vLLM, lest CUDA be initialised in
    this one. It is going to be."""
    registry._run_in_subprocess = lambda inspect: inspect()


@contextmanager
def without_collections() -> Iterator[None]:
    """vLLM collects garbage nine times in an engine's life, and looks at all that it and torch imported each time. For
    the end of an engine, where `collect` follows."""
    with patch.object(gc, "collect", lambda generation=2: 0):
        yield


def collect() -> None:
    """Garbage, engines included. What lives on is set aside: vLLM need not look at it when the next engine starts."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
