"""Models for tests that are not about weights, and safetensors files without any in them worth mentioning."""

import json
from pathlib import Path
from typing import Any

from overspill.model import ModelError
from overspill.model.checkpoint import Tensor
from overspill.model.config import Config
from overspill.model.description import describe
from overspill.model.facts import ModelFacts


def describe_config(config: dict[str, Any], dtype: str = "auto") -> ModelFacts:
    """With the weights that follow from it, or, where there is no formula, with stand-ins."""
    parsed = Config(config, where="config.json")
    try:
        return describe(parsed, None, name="model", dtype=dtype)
    except ModelError:
        return describe(parsed, one_tensor_per_layer(config), name="model", dtype=dtype)


def one_tensor_per_layer(config: dict[str, Any]) -> list[Tensor]:
    """The least that passes for a checkpoint."""
    layers = config.get("text_config", config)["num_hidden_layers"]
    return [Tensor(name=f"model.layers.{i}.weight", dtype="F32", shape=(1,)) for i in range(layers)]


def header_of(tensors: list[Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return json.dumps(entries).encode()


def write_safetensors(path: Path, tensors: list[Tensor]) -> None:
    """With a hole where the weights would be: a file of a terabyte takes no room."""
    header = header_of(tensors)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + sum(tensor.num_bytes for tensor in tensors))
