"""The key of KV on disk: everything KV depends on, so that equal keys and equal block hashes mean equal KV.

The model's name is left out: another fine-tune under the same name has other weights, and so another key.
"""

import hashlib
import json
import os
import platform
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import vllm
import xxhash
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from overspill.kv.buffer import block_regions
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import MiB
from overspill.kv.vllm_api import KVCacheConfig, LoRARequest, Request, get_none_hash_seed

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
# Load formats that draw the same random weights at every start: vLLM's, and the one of `overspill verify`.
_DRAWN = ("dummy", "overspill_random")
# RoPE types whose rotation depends on the longest context.
_LENGTH_DEPENDENT = ("longrope", "dynamic")


class Digests:
    """File digests, cached in a JSON file and recomputed when a file's inode, size or modification time changes."""

    def __init__(self, kept: Path, stop: threading.Event | None = None) -> None:
        """Load the cache from `kept`. Setting `stop` interrupts reading weights, which may take minutes."""
        self._kept, self._stop = kept, stop or threading.Event()
        try:
            self._known: dict[str, list[Any]] = json.loads(kept.read_text())
        except (OSError, ValueError):
            self._known = {}

    def of(self, files: Iterable[Path]) -> str:
        """One digest over the names and contents of all files."""
        whole, changed = hashlib.sha256(), False
        for file in sorted(files):
            stat = file.stat()
            identity = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns]
            known = self._known.get(str(file))
            if known is None or known[:-1] != identity:
                self._known[str(file)] = known = [*identity, self._digest(file)]
                changed = True
            whole.update(f"{file.name}\0{known[-1]}\0".encode())
        if changed:
            new = self._kept.with_suffix(f".{os.getpid()}")  # servers of one model may share the file
            new.write_text(json.dumps(self._known))
            os.replace(new, self._kept)
        return whole.hexdigest()

    def _digest(self, file: Path) -> str:
        digest = xxhash.xxh3_128()
        with file.open("rb", buffering=0) as content:
            while part := content.read(8 * MiB):
                if self._stop.is_set():
                    raise OverspillError("the engine was stopped before all weights were read for their digest")
                digest.update(part)
        return digest.hexdigest()


class AdapterDigests:
    """Adapter digests by name and path. A replaced adapter is barred: vLLM may still compute with its old weights."""

    def __init__(self) -> None:
        self._by_path: dict[tuple[str, str], bytes | None] = {}
        self._digests: Digests | None = None

    def register(self, adapter: LoRARequest, kept: Path) -> None:
        name = (adapter.lora_name, adapter.lora_path)
        if name in self._by_path:
            return
        self._digests = self._digests or Digests(kept)
        try:
            files = [file for file in Path(adapter.lora_path).iterdir() if file.is_file()]
            self._by_path[name] = bytes.fromhex(self._digests.of(files)) if files else None
        except OSError as error:
            logger.warning("Overspill: KV of adapter %s is not kept beyond RAM: %s", adapter.lora_name, error)
            self._by_path[name] = None

    def bar(self, adapter: LoRARequest) -> None:
        self._by_path[adapter.lora_name, adapter.lora_path] = None

    def of(self, request: Request) -> bytes | None:
        """Digest of the request's adapter: empty without one, None if the adapter's KV is not kept beyond RAM."""
        adapter = request.lora_request
        return b"" if adapter is None else self._by_path.get((adapter.lora_name, adapter.lora_path))


def weight_files(model: str, revision: str | None) -> list[Path]:
    """A model's weight files and its config.json."""
    path = Path(os.path.expanduser(model))
    if not path.exists():
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception as error:
            raise OverspillError(f"the weights of {model} are not found as files here: {error}") from error
    if path.is_file():
        return [path]
    files = [file for file in path.iterdir() if file.suffix in _WEIGHTS or file.name == "config.json"]
    if all(file.name == "config.json" for file in files):
        raise OverspillError(f"{path} has no files of weights")
    return files


def model_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, digests: Digests) -> dict[str, Any]:
    """Everything a block's KV depends on besides its tokens. Reads the weights unless their digest is cached."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    load_format = vllm_config.load_config.load_format
    is_dummy = load_format in _DRAWN
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    depends_on_length = any(word in json.dumps(config, default=str) for word in _LENGTH_DEPENDENT)
    return {
        "weights": load_format if is_dummy else digests.of(weight_files(model.model, model.revision)),
        "draft": digests.of(weight_files(draft.model, draft.revision)) if draft is not None else None,
        "config": config,
        "max_model_len": model.max_model_len if depends_on_length else None,
        "dtypes": [str(model.dtype), str(cache.cache_dtype), cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype],
        "quantization": model.quantization,
        "groups": [[group.layer_names, repr(group.kv_cache_spec)] for group in kv_cache_config.kv_cache_groups],
        "layout": [region.block_bytes for region in block_regions(kv_cache_config)],
        "hashes": [cache.prefix_caching_hash_algo, get_none_hash_seed(), platform.python_version_tuple()[:2]],
        "vllm": vllm.__version__.split(".")[:2],
        "attention": repr(vllm_config.attention_config),
        "device": current_platform.get_device_name(),
        "ranks": vllm_config.parallel_config.world_size,
    }


def identity_of(facts: dict[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


def content_key(block_key: bytes, adapter: bytes) -> bytes:
    """Key of a block below RAM. Adds the adapter's digest: vLLM hashes an adapter's name and path, not its weights."""
    if not adapter:
        return block_key
    return hashlib.sha256(block_key + adapter).digest() + block_key[-4:]
