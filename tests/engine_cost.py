"""What a tiny engine costs beside its computing, which is most of it: done once, not for every engine of a test run."""

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.renderers.base import BaseRenderer


def keep_kernels() -> None:
    """At each start vLLM looks through every module that is loaded to put its CPU kernels in place. They stay there."""
    put_in_place = cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(put_in_place)  # type: ignore[method-assign]


def inspect_models_here() -> None:
    """vLLM starts a process for every architecture it meets, which imports all of vLLM, lest CUDA be initialised in
    this one. It is going to be."""
    registry._run_in_subprocess = lambda inspect: inspect()


def skip_chat_warmup() -> None:
    """Without a tokenizer it fails, and the log's record of the failure keeps the whole engine alive."""
    BaseRenderer.warmup = lambda self, chat_params: None  # type: ignore[method-assign]


@contextmanager
def without_collections() -> Iterator[None]:
    """vLLM collects garbage nine times in an engine's life and looks at all that it and torch imported each time; it
    also sets the engine itself aside, where `collect` would not find it. For an engine's whole life, where `collect`
    follows."""
    with (
        patch.object(gc, "collect", lambda generation=2: 0),
        patch.object(gc, "freeze", lambda: None),
        patch.object(gc, "unfreeze", lambda: None),
    ):
        yield


_freeze, _unfreeze, _collect = gc.freeze, gc.unfreeze, gc.collect
_is_sixteenth = itertools.cycle([False] * 15 + [True])


def collect(*, everything: bool = True) -> None:
    """Free engines that ended. Objects that live on are set aside, and without `everything` not looked at again: a full
    collection takes as long as the rest of a short test. References that a test kept until its end are found by the
    full collection that follows every sixteenth engine."""
    if everything or next(_is_sixteenth):
        _unfreeze()
    _collect()
    _freeze()
