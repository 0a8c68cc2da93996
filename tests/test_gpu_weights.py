"""Weights in RAM on a GPU: what they really take there. Run with `pytest -m gpu`."""

import json
from pathlib import Path

import pytest
import torch

from overspill.kv.sizes import GiB
from overspill.model.facts import pinned_share
from overspill.weights.plugin import register
from tests import model_configs as models
from tests.engine import engine
from tests.model_tensors import describe_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_prefetched_weights_take_no_more_ram_than_they_need(tmp_path: Path) -> None:
    """vLLM pins them twice, and PyTorch keeps what it is given back."""
    register()
    config = {**models.llama_3_1_8b(), "num_hidden_layers": 8, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = describe_config(config)
    torch.accelerator.synchronize()
    before = pinned_bytes()
    with engine(
        tmp_path, load_format="dummy", dtype="bfloat16", max_model_len=1024, gpu_memory_utilization=0.1,
        offload_backend="prefetch", offload_group_size=2, offload_num_in_group=1,
    ) as served:  # fmt: skip
        taken = pinned_bytes() - before
        weights = 4 * facts.weights.layer_bytes[0]
        assert weights < taken < pinned_share(facts) * weights + GiB // 8
        assert len(served.ask_one(list(range(40)), 4).tokens) == 4


def pinned_bytes() -> int:
    return int(torch.cuda.memory.host_memory_stats()["allocated_bytes.current"])
