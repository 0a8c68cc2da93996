"""The models of test_gpu_families without a GPU: vLLM builds them, and packed weights are as wide as dense ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.families import FAMILIES, SHARP, weight_values

FAN_IN, FAN_OUT = 512, 384
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_vllm_builds_every_family() -> None:
    kv = ("kv_cache_dtype", "block_size")
    cases = [
        {
            "config": family.config,
            "engine": {"block_size": 32, **{key: family.engine[key] for key in kv if key in family.engine}},
            "layout": "LBNHC",
            "lengths": [1000],
        }
        for family in FAMILIES.values()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_specs"],
        input=json.dumps(cases),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
        cwd=Path(__file__).parents[1],
    )
    answers = dict(zip(FAMILIES, json.loads(done.stdout), strict=True))
    assert {name: answer["error"] for name, answer in answers.items() if "error" in answer} == {}
    # With fewer layers to a group, both halves of spill's window would hold everything there is.
    assert {len(group[1]) for answer in answers.values() for group in answer["groups"]} == {4}


def values(name: str, dtype: torch.dtype, *shape: int, path: str = "model.layers.0.mlp.down_proj") -> torch.Tensor:
    module = nn.Module()
    module.input_size_per_partition = FAN_IN
    drawn = weight_values(path, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False), module)
    assert drawn is not None
    return drawn.to(dtype)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    bits = 8 * packed.element_size()
    return torch.stack([packed.long() >> shift & 15 for shift in range(0, bits, 4)], dim=-1)


def dense() -> torch.Tensor:
    return values("weight", torch.bfloat16, FAN_OUT, FAN_IN).float()


def fp8() -> torch.Tensor:
    scale = values("weight_scale", torch.float32, 3)
    return values("weight", torch.float8_e4m3fn, FAN_OUT, FAN_IN).float() * scale[0]


def int4() -> torch.Tensor:
    """AWQ; GPTQ packs the other dimension, and its zero is 8 as well."""
    weight = nibbles(values("qweight", torch.int32, FAN_IN, FAN_OUT // 8))
    zeros = nibbles(values("qzeros", torch.int32, FAN_IN // 128, FAN_OUT // 8))
    assert set(zeros.flatten().tolist()) == {8}
    return (weight - 8).float() * values("scales", torch.bfloat16, FAN_IN // 128, FAN_OUT).float()[0, 0]


def mxfp4() -> torch.Tensor:
    weight = nibbles(values("w13_weight", torch.uint8, 2, FAN_OUT, FAN_IN // 2))
    exponent = values("w13_weight_scale", torch.uint8, 2, FAN_OUT, FAN_IN // 32).float()[0, 0, 0] - 127
    return FP4[weight & 7] * (1 - 2.0 * (weight >> 3)) * 2**exponent


@pytest.mark.parametrize("effective", [dense, fp8, int4, mxfp4])
def test_packed_weights_have_fan_in_width(effective) -> None:  # type: ignore[no-untyped-def]
    """Scales of one number for a tensor were once taken for a vector of weights, 20 times too wide."""
    weights = effective()
    # Scales of MXFP4 are powers of two.
    assert weights.std().item() == pytest.approx(FAN_IN**-0.5, rel=0.42 if effective is mxfp4 else 0.05)
    assert abs(weights.mean().item()) < 0.15 * FAN_IN**-0.5


def test_weights_follow_their_names_and_attention_is_sharp() -> None:
    shape = (FAN_OUT, FAN_IN)
    first, again = dense(), dense()
    other = values("weight", torch.bfloat16, *shape, path="model.layers.1.mlp.down_proj").float()
    query = values("weight", torch.bfloat16, *shape, path="model.layers.0.self_attn.qkv_proj").float()
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (query.std() / first.std()).item() == pytest.approx(SHARP, rel=0.05)
