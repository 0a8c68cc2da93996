"""How checkpoints say that they are quantised."""

from typing import Any

import pytest

from overspill.model.config import Config
from overspill.model.description import Quantization, quantization_of

FP8_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}


# As written by the makers of each: transformers, llm-compressor, AutoAWQ, ModelOpt before and after 0.31.
@pytest.mark.parametrize(
    ("written", "method", "kv_cache_dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "auto"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", "auto"),
        ({"quant_method": "gptq", "bits": 4}, "gptq", "auto"),
        ({"quant_method": "mxfp4"}, "mxfp4", "auto"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", "auto"),
        ({"quant_method": "AWQ"}, "awq", "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "compressed-tensors", "auto"),
        ({"quant_method": "compressed_tensors", "kv_cache_scheme": FP8_SCHEME}, "compressed-tensors", "fp8"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}},
            "modelopt_fp4",
            "auto",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "kv_cache_scheme": FP8_SCHEME,
                "producer": {"name": "modelopt"},
            },
            "modelopt",
            "fp8_e4m3",
        ),
        (
            {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"},
            },
            "modelopt_fp4",
            "nvfp4",
        ),
    ],
)
def test_a_quantization_config_is_understood(written: dict[str, Any], method: str, kv_cache_dtype: str) -> None:
    expected = Quantization(method=method, kv_cache_dtype=kv_cache_dtype)
    assert quantization_of(Config({"quantization_config": written}, where="config.json")) == expected
    nested = {"text_config": {"model_type": "qwen3", "quantization_config": written}}
    assert quantization_of(Config(nested, where="config.json")) == expected
    assert quantization_of(Config({}, where="config.json"), written) == expected


def test_a_plain_checkpoint_is_not_quantised() -> None:
    assert quantization_of(Config({"quantization_config": None}, where="config.json")) == Quantization()


def test_config_json_has_the_last_word() -> None:
    config = Config({"quantization_config": {"quant_method": "awq"}}, where="config.json")
    assert quantization_of(config, {"quant_method": "gptq"}).method == "awq"
