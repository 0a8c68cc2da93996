"""Weights in RAM for models that Transformers makes: their layers reach vLLM's offloader."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.models.registry import _TRANSFORMERS_SUPPORTED_MODELS
from vllm.model_executor.offloader.prefetch import PrefetchOffloader
from vllm.model_executor.offloader.uva import UVAOffloader

from overspill.model.architectures import RUN_BY_TRANSFORMERS
from overspill.weights import plugin
from overspill.weights.plugin import decoder_layers, register
from tests.engine import engine

OLMO2: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


@pytest.fixture
def olmo2(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(OLMO2))
    return tmp_path


@pytest.mark.parametrize(("arguments", "handed_over"), [({"cpu_offload_gb": 0.001}, 1), ({}, 0)])
def test_layers_made_by_transformers_are_handed_over(
    olmo2: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], handed_over: int
) -> None:
    """vLLM said "Offloader set to UVAOffloader" for OLMo-2, and moved nothing."""
    register()
    seen: list[list[torch.nn.Module]] = []
    wrap_modules = UVAOffloader.wrap_modules

    def record(self: UVAOffloader, modules: Any, prefix: str = "") -> list[torch.nn.Module]:
        seen.append(wrap_modules(self, modules, prefix))
        return seen[-1]

    monkeypatch.setattr(UVAOffloader, "wrap_modules", record)
    with engine(olmo2, load_format="dummy", **arguments) as served:
        assert len(served.ask_one(list(range(40)), 4).tokens) == 4
    assert len(seen) == handed_over
    for layers in seen:
        assert [type(layer).__name__ for layer in layers] == ["Olmo2DecoderLayer"] * 3


def test_the_layers_are_the_list_as_long_as_the_config_says() -> None:
    tower, layers = (torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(count)) for count in (2, 3))
    model = torch.nn.ModuleDict({"tower": tower, "text": torch.nn.ModuleDict({"layers": layers})})
    assert decoder_layers(model, 3) is layers
    assert decoder_layers(model, 4) is None


def test_the_list_of_such_models_is_vllms() -> None:
    assert {name for name in _TRANSFORMERS_SUPPORTED_MODELS if name.endswith("ForCausalLM")} == RUN_BY_TRANSFORMERS


def test_leftovers_of_loading_are_returned_after_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(PrefetchOffloader, "post_init", lambda self: done.append("weights are there"))
    monkeypatch.setattr(plugin, "return_leftovers", lambda: done.append("returned") or 0)
    plugin.register()
    plugin.register()
    PrefetchOffloader.post_init(PrefetchOffloader.__new__(PrefetchOffloader))
    assert done == ["weights are there", "returned"]


def test_nothing_is_returned_where_nothing_is_pinned() -> None:
    if torch.cuda.is_available():
        pytest.skip("pins memory")
    assert plugin.return_leftovers() == 0
