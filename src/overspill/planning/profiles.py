"""Memory that engines were seen to take beside weights and KV, kept between runs in the registry."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from overspill.hardware.gpu import Gpu
from overspill.kv.sizes import TiB
from overspill.model.facts import ModelFacts
from overspill.named import NoRegistry, has_registry, using_registry

logger = logging.getLogger(__name__)

# More is not an overhead but a damaged record.
_MOST = TiB
# An engine starts meanwhile.
_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Of one GPU."""

    non_torch_bytes: int
    activation_bytes: int
    graph_bytes: int
    """What vLLM set aside for CUDA graphs, be it more than they took."""
    context_bytes: int
    """CUDA's context, which vLLM does not count."""


def fingerprint(
    facts: ModelFacts, gpu: Gpu, *, vllm_version: str, max_num_batched_tokens: int, max_num_seqs: int,
    enforce_eager: bool, kv_cache_dtype: str,
) -> str:  # fmt: skip
    """What a profile holds for: a few readable words, and a hash over everything it depends on."""
    decides = {
        "architecture": facts.architecture,
        "dtype": facts.dtype,
        "quantization": facts.quantization,
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_heads": facts.num_heads,
        "num_experts": facts.num_experts,
        "vocab_size": facts.vocab_size,
        "weights_bytes": facts.weights.total_bytes,
        "gpu": gpu.name,
        "gpu_bytes": gpu.total_bytes.value,
        "driver": gpu.driver_version,
        "vllm": vllm_version,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": enforce_eager,
        "kv_cache_dtype": kv_cache_dtype,
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    words = f"{facts.architecture}-{gpu.name}-vllm{vllm_version}-{max_num_batched_tokens}x{max_num_seqs}"
    return f"{re.sub(r'[^a-z0-9.]+', '-', words.lower())[:100]}-{digest}"


def remember(
    fingerprint: str, profile: Profile, link: tuple[int, int] | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Keep a profile, and the link's measured rates to the device and back; failing to is no error. Of two writers the
    last wins, as a whole."""
    try:
        with using_registry():
            from overspill.registry import MeasuredLink, open_registry, save_profile

            with open_registry(environ=environ, wait_seconds=_WAIT_S) as registry:
                save_profile(registry, fingerprint, profile, MeasuredLink(*link) if link is not None else None)
    except NoRegistry as error:
        logger.warning("Overspill: what this run measured is not kept, and plans go on assuming it: %s", error)


class Remembered:
    """What earlier runs measured, for one plan. The registry is opened when first asked, never made, and asked no more
    after it has failed once."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._is_usable = has_registry(self._environ)

    def recall(self, fingerprint: str) -> Profile | None:
        """The profile measured for that fingerprint; None if there is none, or it cannot be had."""
        if not self._is_usable:
            return None
        try:
            return self._load(fingerprint)
        except NoRegistry as error:
            self._is_usable = False
            logger.warning("Overspill: what earlier runs measured cannot be read, and is assumed: %s", error)
            return None

    def _load(self, fingerprint: str) -> Profile | None:
        with using_registry():
            from overspill.registry import load_profile, open_existing

            registry = open_existing(self._environ)
            if registry is None:
                return None
            with registry:
                found = load_profile(registry, fingerprint)
        if found is None:
            return None
        sizes = [getattr(found.overheads, field.name) for field in fields(Profile)]
        if not all(0 <= size < _MOST for size in sizes):
            raise NoRegistry(f"sizes of {sizes} for {fingerprint}")
        return found.overheads
