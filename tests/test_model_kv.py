"""KV by vLLM's rules: numbers that vLLM, or somebody running it, has published, and what settings do to them."""

from dataclasses import replace
from typing import Any

import pytest

from overspill.kv.sizes import GiB, KiB, MiB
from overspill.model import ModelError
from overspill.model.facts import Attention
from overspill.model.kv import CacheSettings, Kind, kv_geometry
from tests import model_configs as models
from tests.model_tensors import describe_config


# Of bytes per token: Llama-3.1-8B and Qwen2.5-7B as in vLLM's logs, Qwen3-8B and DeepSeek-V2-Lite as vLLM's specs give
# them on the meta device; the rest follow from heads x size x 2 x 2 bytes x layers.
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (models.llama_3_1_8b(), 131_072),
        (models.qwen2_5_7b(), 57_344),
        (models.qwen3_8b(), 144 * KiB),
        (models.qwen3_30b_a3b(), 96 * KiB),
        (models.olmo_2_7b(), 512 * KiB),
        (models.mixtral_8x7b(), 128 * KiB),
        (models.deepseek_v2_lite(), 27 * 1152),
        (models.gemma_3_4b(), 5 * 4 * 256 * 2 * 2),
        (models.gpt_oss_20b(), 12 * 8 * 64 * 2 * 2),
        (models.qwen3_6_27b_text(), 64 * KiB),
        (models.mistral_7b_v0_1(), 0),
    ],
)
def test_one_more_token_costs_what_is_known(config: dict[str, Any], expected: int) -> None:
    assert kv_geometry(describe_config(config)).kv_bytes_per_token == expected


# What one request takes: Qwen3-Coder from vllm#34076, DeepSeek-V2-Lite at 32k from vllm#15871 ("0.95"), the others
# from vLLM's own functions on the CPU platform (blocks of 128, 2048 tokens in flight).
@pytest.mark.parametrize(
    ("config", "length", "gib"),
    [
        (models.qwen3_coder_30b_a3b(), 262_144, 24.0),
        (models.deepseek_v2_lite(), 32_768, 0.949),
        (models.deepseek_v2_lite(), 163_840, 4.746),
        (models.qwen3_8b(), 40_960, 5.625),
        (models.gemma_3_4b(), 131_072, 2.866),
    ],
)
def test_one_request_takes_what_is_known(config: dict[str, Any], length: int, gib: float) -> None:
    settings = CacheSettings(block_size=128, max_concurrent_batches=1, kernel_block_multiple=32)
    assert round(kv_geometry(describe_config(config), settings).request_bytes(length) / GiB, 3) == gib


# By vLLM's rule for windows: not min(window, length), and not everything.
@pytest.mark.parametrize(
    ("length", "in_flight", "gib"), [(8192, 8192, 0.375), (32_768, 8192, 0.941), (131_072, 16_384, 3.378)]
)
def test_gpt_oss_keeps_its_windows_and_what_is_in_flight(length: int, in_flight: int, gib: float) -> None:
    settings = CacheSettings(max_num_batched_tokens=in_flight, max_concurrent_batches=1)
    geometry = kv_geometry(describe_config(models.gpt_oss_20b()), settings)
    assert [len(group.members) for group in geometry.groups] == [12, 12]
    assert geometry.request_bytes(length) / GiB == pytest.approx(gib, abs=0.001)


# vLLM logged 476,016 and 1,096,000 tokens; the GiB it logged beside them are rounded, here to a block more or less.
@pytest.mark.parametrize(
    ("config", "gib", "logged"),
    [(models.llama_3_1_8b(), 58.11, 476_016), (models.qwen2_5_7b(), 58.53, 1_096_000)],
)
def test_so_many_tokens_fit_as_vllm_logs(config: dict[str, Any], gib: float, logged: int) -> None:
    facts = describe_config(config)
    geometry = kv_geometry(facts, CacheSettings(block_size=16))
    tokens = geometry.num_blocks(int(gib * GiB)) * 16
    assert abs(tokens - logged) < 0.005 * GiB / geometry.kv_bytes_per_token + 16


def test_a_state_makes_blocks_larger_and_is_padded_to_them() -> None:
    # 16 of 64 layers hold KV: 16,384 MiB at 262,144 tokens, as llama.cpp logs for this model. It also logs 598.5 MiB of
    # state for four sequences, with the convolution's in float32, which vLLM keeps in bfloat16.
    geometry = kv_geometry(describe_config(models.qwen3_6_27b_text()))
    assert geometry.kv_bytes_per_token * 262_144 == 16_384 * MiB
    state = next(group.members[0].page for group in geometry.groups if group.members[0].page.kind is Kind.MAMBA)
    convolution = 3 * (2 * 16 * 128 + 48 * 128)
    assert state.state_bytes == 48 * 128 * 128 * 4 + convolution * 2
    assert 4 * 48 * (state.state_bytes + 2 * convolution) / MiB == pytest.approx(598.5, abs=0.1)
    token_bytes = 4 * 256 * 2 * 2
    assert geometry.block_size == 784  # the least multiple of 16 whose page holds a state
    assert geometry.page_size_bytes == 784 * token_bytes >= state.state_bytes > (784 - 16) * token_bytes
    assert geometry.bytes_per_block == 16 * geometry.page_size_bytes


def test_a_request_has_two_states_of_each_group() -> None:
    assert kv_geometry(describe_config(models.qwen3_next_80b_a3b())).blocks_per_request(1) == 3 * 2 + 1


def test_a_state_does_not_follow_the_dtype_of_kv() -> None:
    facts = describe_config(models.qwen3_next_80b_a3b())

    def state_bytes(kv_cache_dtype: str) -> int:
        groups = kv_geometry(facts, CacheSettings(kv_cache_dtype=kv_cache_dtype)).groups
        return next(group.members[0].page.state_bytes for group in groups if group.members[0].page.kind is Kind.MAMBA)

    heads, convolution = 32 * 128 * 128, 3 * (2 * 16 * 128 + 32 * 128)
    assert state_bytes("auto") == state_bytes("fp8") == 2 * heads + 2 * convolution


def test_float8_halves_a_page() -> None:
    facts = describe_config(models.llama_3_1_8b())
    pages = [kv_geometry(facts, CacheSettings(kv_cache_dtype=dtype)).page_size_bytes for dtype in ("auto", "fp8")]
    assert pages == [64 * KiB, 32 * KiB]


def test_a_checkpoints_float8_kv_is_used_unless_overridden() -> None:
    facts = replace(describe_config(models.llama_3_1_8b()), kv_cache_dtype="fp8")
    assert kv_geometry(facts).page_size_bytes == 32 * KiB
    assert kv_geometry(facts, CacheSettings(kv_cache_dtype="bfloat16")).page_size_bytes == 64 * KiB


def test_regions_are_the_layers_of_a_group() -> None:
    geometry = kv_geometry(describe_config(models.gemma_3_4b()))
    assert (geometry.num_regions, len(geometry.groups)) == (5, 7)
    assert geometry.bytes_per_block == 5 * geometry.page_size_bytes


def test_the_longest_context_leaves_the_null_block_alone() -> None:
    # As seen of vLLM: with 32 blocks of 128 tokens it refuses 4096 tokens and starts with 3968.
    geometry = kv_geometry(describe_config(models.llama_3_1_8b()), CacheSettings(block_size=128))
    memory = 32 * geometry.bytes_per_block
    assert geometry.num_blocks(memory) == 32
    assert geometry.longest_context(memory, limit=8192) == 31 * 128 == 3968
    assert geometry.fits(3968, memory)
    assert not geometry.fits(3969, memory)
    assert geometry.longest_context(memory, limit=2000) == 2000
    assert geometry.longest_context(geometry.bytes_per_block, limit=8192) == 0


def test_the_longest_context_of_windows_is_any() -> None:
    geometry = kv_geometry(describe_config(models.mistral_7b_v0_1()))
    enough = geometry.request_bytes(32_768) + geometry.bytes_per_block
    assert geometry.longest_context(enough, limit=10**9) == 10**9


def test_layers_that_read_the_kv_of_others_keep_none() -> None:
    facts = describe_config(models.SMALL["gemma4, shared KV, pages that must be padded"])
    assert [entry.layer for entry in facts.caches] == list(range(12))


def test_facts_say_what_each_layer_keeps() -> None:
    caches = describe_config(models.gemma_3_4b()).caches
    assert len(caches) == 34
    assert caches[5].cache == Attention(num_kv_heads=4, head_size=256)
    assert caches[0].cache == Attention(num_kv_heads=4, head_size=256, sliding_window=1024)
    local = describe_config(models.llama_4_scout_text()).caches
    assert [entry.cache.attention_chunk_size for entry in local[:4]] == [8192, 8192, 8192, None]  # type: ignore[union-attr]


def test_a_dtype_of_unknown_size_is_refused() -> None:
    with pytest.raises(ModelError, match="kv_cache_dtype is 'nvfp4'"):
        CacheSettings(kv_cache_dtype="nvfp4")


def test_a_kv_cache_packed_by_a_backend_is_not_guessed_at() -> None:
    facts = replace(describe_config(models.llama_3_1_8b()), kv_cache_dtype="nvfp4")
    with pytest.raises(ModelError, match="asks for a KV cache in nvfp4, whose size is not known here"):
        kv_geometry(facts)


def test_a_window_in_some_qwen_layers_is_refused_as_by_vllm() -> None:
    some = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    with pytest.raises(ModelError, match="set use_sliding_window to false"):
        describe_config({**models.qwen3_8b(), **some})
