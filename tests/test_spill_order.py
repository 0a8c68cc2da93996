"""What a model writes and reads, layer by layer, is recorded at the start and compared with what the window expects."""

from pathlib import Path
from typing import Any

import pytest
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama import LlamaModel
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from overspill.kv.errors import OverspillError
from overspill.kv.spill.vllm_worker import KvAccess, check_order, recorded
from overspill.kv.spill.window import Layer
from tests.engine import engine, random_prompt, spilling
from tests.test_spill_refusals import refusal

LAYERS = [Layer("a", 0, 0), Layer("b", 0, 1), Layer("c", 0, 0, is_owner=False)]


def writes(layer: str) -> KvAccess:
    return KvAccess(True, layer)


def reads(layer: str) -> KvAccess:
    return KvAccess(False, layer)


EXPECTED = [writes("a"), reads("a"), writes("b"), reads("b"), reads("c")]


def test_write_then_read_layer_by_layer_is_expected() -> None:
    check_order(EXPECTED, LAYERS, "model")
    # The backend of b writes within its attention.
    check_order([*EXPECTED[:2], *EXPECTED[3:]], LAYERS, "model")


@pytest.mark.parametrize(
    ("accesses", "said"),
    [
        (
            [writes("a"), writes("b"), reads("a"), reads("b"), reads("c")],
            "writes the KV of b where Overspill expected a",
        ),
        ([*EXPECTED[:2], reads("c"), *EXPECTED[2:4]], "reads the KV of c where Overspill expected b"),
        ([*EXPECTED[:4], writes("c"), reads("c")], "writes the KV of c where Overspill expected c"),
        ([*EXPECTED, reads("a")], "reads the KV of a where Overspill expected nothing more"),
        (EXPECTED[:-1], "never read the KV of c"),
        ([], "never read the KV of a"),
    ],
)
def test_any_other_order_is_refused_with_the_model(accesses: list[KvAccess], said: str) -> None:
    with pytest.raises(OverspillError, match=f"spill does not work with the-model: .*{said}"):
        check_order(accesses, LAYERS, "the-model")


def test_an_engine_records_its_forward(llama: Path) -> None:
    with engine(llama, spilling(), max_model_len=1500) as spills:
        worker = spills.spill_worker
        modules = spills.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        with recorded(modules, worker.layers) as accesses:
            spills.ask_one(random_prompt(1, 20), 1)
        names = [layer.name for layer in worker.layers]
        assert accesses == [access for name in names for access in (writes(name), reads(name))] and len(names) == 4
        spills.ask_one(random_prompt(1, 20), 1)
        assert len(accesses) == 8, "the recording went on after its end"


def test_a_model_that_runs_layers_out_of_order_does_not_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it started, and the first spilled request ended the engine."""
    forward = LlamaModel.forward

    def backwards(self: LlamaModel, *args: Any, **kwargs: Any) -> Any:
        layers = self.layers
        self.layers = layers[::-1]
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.layers = layers

    monkeypatch.setattr(LlamaModel, "forward", backwards)
    said = refusal(llama, spilling(), max_model_len=1500)
    assert f"spill does not work with {llama}" in said and "layers.3.self_attn.attn where Overspill expected" in said


def test_a_model_that_writes_ahead_does_not_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 2 has the half of layer 0, which has not attended yet: its KV would be overwritten, and nothing would say
    so."""
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def ahead(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        update(self, layer, key, value, kv_cache, slots)
        if ".0." in layer.layer_name:
            later = get_forward_context().no_compile_layers[layer.layer_name.replace(".0.", ".2.")]
            later.impl.do_kv_cache_update(later, key, value, later.kv_cache, slots)

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", ahead)
    said = refusal(llama, spilling(), max_model_len=1500)
    assert "writes the KV of model.layers.2.self_attn.attn where Overspill expected model.layers.0" in said
