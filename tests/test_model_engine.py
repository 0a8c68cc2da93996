"""What is computed from a folder is what the real engine allocates, to the byte."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import _max_memory_usage_bytes_from_groups, _pool_bytes_per_block

from overspill.figures import Origin
from overspill.launch.machine import cpu_platform
from overspill.model.facts import ModelFacts
from overspill.model.kv import CacheSettings, KVGeometry, kv_geometry
from overspill.model.source import read_folder
from tests.engine import BLOCK, Engine, engine
from tests.model_tensors import describe_config

Models = Callable[[str], Path]

MEMORY = 50_000_000
"""No multiple of anybody's block."""
HAS_BF16 = torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2") and torch.cpu._is_avx512_bf16_supported()
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason="vLLM's CPU kernel for this model needs AVX-512 bf16")
needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the settings below are those of the CPU platform")
pytestmark = needs_cpu

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
# Served with random weights: the engine needs no more than a config.
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma, a KV head per head": {
        **SHAPE,
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "num_key_value_heads": 4,
    },
    "mixtral, experts": {
        **SHAPE,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mistral, a window in every layer": {
        **SHAPE,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 128,
    },
    "gemma2, every second layer slides, and one group falls short": {
        **SHAPE,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
    },
    "gemma4, heads of two sizes and shared KV": {
        **SHAPE,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 9,
        "num_kv_shared_layers": 3,
        "sliding_window": 128,
    },
}


def run(model: Path, **arguments: Any) -> Any:
    return engine(model, num_gpu_blocks_override=None, kv_cache_memory_bytes=MEMORY, **arguments)


def settings_of(running: Engine, block_size: int) -> CacheSettings:
    """Everything but the block size as vLLM resolved it; that is for `kv_geometry` to find."""
    config = running.llm.llm_engine.vllm_config
    return CacheSettings(
        block_size=block_size,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_concurrent_batches=config.max_concurrent_batches,
        kernel_block_multiple=32,
        state_dtype=cpu_platform().state_dtype,
    )


def assert_as_allocated(facts: ModelFacts, running: Engine, block_size: int = BLOCK) -> KVGeometry:
    config = running.llm.llm_engine.vllm_config
    made = running.vllm_scheduler.kv_cache_config
    geometry = kv_geometry(facts, settings_of(running, block_size))
    assert geometry.block_size == config.cache_config.block_size
    assert geometry.bytes_per_block == _pool_bytes_per_block(config, made.kv_cache_groups)
    assert geometry.num_blocks(MEMORY) == made.num_blocks
    runner = running.core.model_executor.driver_worker.worker.model_runner
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in runner.kv_caches if t.numel()}
    assert sum(buffers.values()) == geometry.bytes_per_block * made.num_blocks > 0
    length = config.model_config.max_model_len
    assert geometry.request_bytes(length) == _max_memory_usage_bytes_from_groups(config, made.kv_cache_groups)
    assert [len(group.members) for group in geometry.groups] == [len(g.layer_names) for g in made.kv_cache_groups]
    for mine, theirs in zip(geometry.groups, made.kv_cache_groups, strict=True):
        assert mine.block_size == theirs.kv_cache_spec.block_size
    assert geometry.num_regions == max(len(tensor.layers) for tensor in made.kv_cache_tensors)
    assert geometry.page_size_bytes == max(tensor.block_stride for tensor in made.kv_cache_tensors)
    return geometry


@pytest.fixture(autouse=True)
def _memory_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU platform it would override kv_cache_memory_bytes.
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("llama", {}),
        pytest.param("gemma3", {}),
        pytest.param("chunked-local", {"max_num_batched_tokens": 256}),
        pytest.param("mamba-hybrid", {"max_num_batched_tokens": 32}),
        pytest.param("gdn-hybrid", {"dtype": "bfloat16"}, marks=needs_bf16),
    ],
)
def test_a_tiny_checkpoint_takes_what_was_computed(models: Models, name: str, arguments: dict[str, Any]) -> None:
    facts = read_folder(models(name), dtype=arguments.get("dtype", "float32"))
    assert facts.weights.source is Origin.MEASURED
    with run(models(name), **arguments) as running:
        assert_as_allocated(facts, running)


@needs_bf16
def test_latent_attention_takes_what_was_computed(models: Models) -> None:
    facts = read_folder(models("mla"), dtype="bfloat16")
    with run(models("mla"), dtype="bfloat16") as running:
        # Without AMX, vLLM's CPU platform insists on blocks of 16.
        block_size = running.llm.llm_engine.vllm_config.cache_config.block_size
        geometry = assert_as_allocated(facts, running, block_size)
    assert geometry.page_size_bytes == block_size * (512 + 64) * 2


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_alone_is_enough(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    facts = describe_config(CONFIGS[name], dtype="float32")
    with run(tmp_path, load_format="dummy") as running:
        assert_as_allocated(facts, running)
