"""Memory that engines were seen to take beside weights and KV, kept between runs: one small JSON file for each case."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path

from overspill.files import replace_file
from overspill.hardware.folders import cache_folder
from overspill.hardware.gpu import Gpu
from overspill.kv.sizes import TiB
from overspill.model.facts import ModelFacts

logger = logging.getLogger(__name__)

_FORMAT = 1
# More is not an overhead but a damaged file.
_MOST = TiB


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


def remember(fingerprint: str, profile: Profile, environ: Mapping[str, str] | None = None) -> None:
    """Keep a profile; failing to is no error. Of two writers the last wins, and readers see either, whole."""
    path = _path(fingerprint, environ)
    if path is None:
        logger.warning(
            "Overspill: there is no home for a cache; what this run measured is not kept. Set XDG_CACHE_HOME"
        )
        return
    entry = {"format": _FORMAT, "fingerprint": fingerprint, "measured_on": date.today().isoformat(), **asdict(profile)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(entry, indent=1) + "\n")
    except OSError as error:
        logger.warning("Overspill: what this run measured could not be kept in %s (%s); plans assume it", path, error)


def recall(fingerprint: str, environ: Mapping[str, str] | None = None) -> Profile | None:
    """The profile measured for that fingerprint; None if there is none, or the file is damaged."""
    path = _path(fingerprint, environ)
    if path is None:
        return None
    try:
        return _parse(path.read_text(encoding="utf-8"), fingerprint)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("Overspill: the measured memory in %s cannot be read (%s); it is assumed", path, error)
    except (ValueError, TypeError, KeyError) as error:  # UnicodeDecodeError is a ValueError
        logger.warning("Overspill: the measured memory in %s is damaged (%s); it is assumed", path, error)
    return None


def _path(fingerprint: str, environ: Mapping[str, str] | None) -> Path | None:
    folder = cache_folder(os.environ if environ is None else environ)
    return None if folder is None else folder / "profiles" / f"{fingerprint}.json"


def _parse(text: str, fingerprint: str) -> Profile:
    entry = json.loads(text)
    if entry["format"] != _FORMAT or entry["fingerprint"] != fingerprint:
        raise ValueError("it belongs to something else")
    sizes = {field.name: entry[field.name] for field in fields(Profile)}
    if not all(type(size) is int and 0 <= size < _MOST for size in sizes.values()):
        raise ValueError(f"sizes of {list(sizes.values())}")
    return Profile(**sizes)
