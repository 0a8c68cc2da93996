"""How a checkpoint is quantised, and what it wants its KV in (as vllm/transformers_utils reads it)."""

from collections.abc import Mapping
from dataclasses import dataclass

from overspill.model.config import Config
from overspill.model.errors import BadConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    method: str | None = None
    """vLLM's name for it; None for a checkpoint in plain floating point."""
    kv_cache_dtype: str = "auto"


def quantization_of(config: Config, quant_file: Mapping[str, object] | None = None) -> Quantization:
    """`quant_file` is the content of hf_quant_config.json, where ModelOpt writes what others put into config.json."""
    found = _quantization_config(config)
    if found is None:
        found = quant_file
    if found is None:
        return Quantization()
    method = _method(found, config.where)
    return Quantization(method=method, kv_cache_dtype=_kv_cache_dtype(method, found))


def _quantization_config(config: Config) -> Mapping[str, object] | None:
    for source in (config.raw, config.text):
        for key in ("quantization_config", "compression_config"):
            value = source.get(key)
            if isinstance(value, dict):
                return value
            if value is not None:
                raise BadConfig(f"{config.where} gives {value!r} for {key}, and an object was expected; correct it")
    return None


def _method(found: Mapping[str, object], where: str) -> str:
    producer = found.get("producer")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        is_fp4 = str(_inner(found).get("quant_algo")).upper() == "NVFP4"
        return "modelopt_fp4" if is_fp4 else "modelopt"
    method = found.get("quant_method")
    if not isinstance(method, str) or not method:
        raise BadConfig(
            f"{where} has a quantization_config without a quant_method, which says how to read the weights; "
            "fetch the file again"
        )
    return method.lower().replace("compressed_tensors", "compressed-tensors")


def _kv_cache_dtype(method: str, found: Mapping[str, object]) -> str:
    """What --kv-cache-dtype auto comes to (utils/torch_utils.py, get_kv_cache_quant_algo_string)."""
    inner = _inner(found)
    if method == "compressed-tensors":
        return "fp8" if found.get("kv_cache_scheme") is not None else "auto"
    if not method.startswith("modelopt"):
        return "auto"
    wanted = next(
        (s[key] for key in ("kv_cache_scheme", "kv_cache_quant_algo") for s in (inner, found) if s.get(key)), None
    )
    match wanted:
        case str(name):
            return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(name.lower(), "auto")
        case {"dynamic": False, "num_bits": 8, "type": "float"}:
            return "fp8_e4m3"
        case {"num_bits": 4, "type": "float"}:
            return "nvfp4"
    return "auto"


def _inner(found: Mapping[str, object]) -> Mapping[str, object]:
    inner = found.get("quantization")
    return inner if isinstance(inner, dict) else found
