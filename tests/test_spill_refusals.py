"""What cannot be spilled is refused at the start: need, have, what would work."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from overspill.kv import plugin
from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.kv.plugin import (
    OVERSPILL_WORKER,
    _check_sleep_mode,
    _check_spill,
    require_spill_classes,
    use_own_classes,
)
from overspill.kv.ram import Ram
from overspill.kv.spill.capacity import check_groups, spill_geometry
from tests.engine import BLOCK, PAGE, engine, overspill_config, random_prompt, spilling

Models = Callable[[str], Path]


def refusal(model: Path, transfer: KVTransferConfig, **settings: Any) -> str:
    """Why the engine does not start."""
    with pytest.raises(Exception) as refused, engine(model, transfer, **settings):
        pass
    return str(refused.value)


def advised(said: str) -> str:
    return said.split('"spill_bytes": "')[1].split('"', maxsplit=1)[0]


def test_a_context_beyond_gpu_and_ram_gets_the_longest_that_fits(llama: Path) -> None:
    said = refusal(llama, spilling(), max_model_len=3000)
    assert re.search(r"a context of 3000 tokens needs .* of KV; .* Longest that fits: --max-model-len 2208", said)
    with engine(llama, spilling(), max_model_len=2208) as spills:
        assert spills.vllm_scheduler.kv_cache_config.num_blocks == 70


def test_the_spill_that_is_advised_is_enough(llama: Path) -> None:
    """The window of four layers takes half of what it makes room for."""
    config = spilling(resident=40, spilled=8)
    config.kv_connector_extra_config["spill_bytes"] = advised(refusal(llama, config, max_model_len=1700))
    with engine(llama, config, max_model_len=1700) as spills:
        assert spills.vllm_scheduler.kv_cache_config.num_blocks * BLOCK > 1700


def test_where_no_spill_is_enough_none_is_advised(llama: Path) -> None:
    assert "No spill_bytes is enough on this GPU" in refusal(llama, spilling(), max_model_len=30_000)


def test_a_window_larger_than_the_gpu_is_refused_with_what_fits(llama: Path) -> None:
    config = overspill_config({"spill_bytes": 4000 * 4 * PAGE, "resident_bytes": 400 * PAGE, "reserve_bytes": 0})
    said = refusal(llama, config)
    assert re.search("needs a window of .* is free for KV", said)
    smaller = {**config.kv_connector_extra_config, "spill_bytes": advised(said)}
    with engine(llama, overspill_config(smaller), max_model_len=32) as spills:
        assert spills.spill.geometry.num_resident >= 1


def test_more_gpu_memory_than_there_is_is_refused(llama: Path) -> None:
    config = overspill_config({"spill_bytes": "1MiB", "resident_bytes": "900GiB", "reserve_bytes": 0})
    assert "resident_bytes is 900 GiB" in refusal(llama, config)


def test_more_ram_than_available_is_refused_before_loading(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.kv.ram.available_ram", lambda: Ram(2**30, "a small machine"))
    config = overspill_config({"spill_bytes": "2GiB", "host_bytes": "1GiB", "reserve_bytes": 0})
    assert "host_bytes + spill_bytes needs 3 GiB of RAM; 1 GiB is available" in refusal(llama, config)


def test_less_than_a_granule_is_refused(llama: Path) -> None:
    config = overspill_config({"spill_bytes": 1000, "reserve_bytes": 0})
    assert "the least that can be spilled of this model is 64 KiB" in refusal(llama, config)


ATTENTION: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
STATE = MambaSpec(block_size=32, shapes=((4, 8),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    "spec",
    [
        CircularBufferSpec(**ATTENTION),
        RSWASpec(**ATTENTION, rswa_window=64),
        SinkFullAttentionSpec(**ATTENTION, sink_len=32),
        HiddenStateCacheSpec(**ATTENTION),
        MLAAttentionSpec(**ATTENTION, tokens_per_state=4),
        CrossAttentionSpec(**ATTENTION),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_kv_of_a_kind_that_spill_does_not_know_is_refused(spec: KVCacheSpec) -> None:
    """Positions that a step writes follow from the table in known kinds only; others would be streamed wrongly."""
    full = KVCacheGroupSpec(["full"], FullAttentionSpec(**ATTENTION))
    with pytest.raises(OverspillError, match=f"does not support KV of type {type(spec).__name__}, which odd has"):
        check_groups([full, KVCacheGroupSpec(["odd"], spec)])


def test_kinds_that_spill_knows_are_accepted() -> None:
    specs = [
        FullAttentionSpec(**ATTENTION), SlidingWindowSpec(**ATTENTION, sliding_window=64),
        ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64), MLAAttentionSpec(**ATTENTION), STATE,
    ]  # fmt: skip
    check_groups([KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)])


def test_a_model_without_attention_has_nothing_to_spill() -> None:
    with pytest.raises(OverspillError, match="no attention layers"):
        check_groups([KVCacheGroupSpec(["a"], STATE)])


def test_an_arena_that_was_not_registered_is_refused(llama: Path) -> None:
    """CUDA promises no order between events and copies of pageable memory. Spill went on with it."""
    with engine(llama, spilling(), max_model_len=1500) as spills:
        worker = spills.spill_worker
        worker.wait_until_ready()
        assert worker.arena is not None
        worker.must_pin, worker.arena.pinning_refused = True, "CUDA_ERROR_OUT_OF_MEMORY"
        with pytest.raises(OverspillError, match=r"registered for DMA.* took 0 B \(CUDA_ERROR_OUT.*ulimit -l"):
            worker.wait_until_ready()


def test_the_longest_that_fits_can_be_left_to_vllm(llama: Path) -> None:
    with engine(llama, spilling(), max_model_len=-1) as spills:
        longest = spills.llm.llm_engine.vllm_config.model_config.max_model_len
        assert 2100 < longest <= 69 * BLOCK
        answer = spills.ask_one(random_prompt(1, longest - 10), 8)
        assert len(answer.tokens) == 8 and spills.metric("spill_in_bytes") > 0


def test_the_buffer_must_be_where_it_can_be_mapped(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocated otherwise, spilled blocks would have memory of their own."""
    from overspill.kv.connector import OverspillConnector

    monkeypatch.setattr(OverspillConnector, "get_mem_pool_context", lambda self: None)
    assert "did not allocate its KV cache where Overspill could map it" in refusal(llama, spilling())


@pytest.mark.parametrize("layout", ["LHBNC", "BLNHC"])
def test_a_layout_in_which_a_layer_is_in_pieces_is_refused(layout: str) -> None:
    """With heads outside of blocks only the first head of each layer would be streamed, and nothing would say so."""
    names = ["a", "b", "c", "d"]
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    page, blocks = spec.page_size_bytes, 10
    strides = {"LHBNC": (page * blocks, page // 2), "BLNHC": (page, 4 * page)}[layout]
    tensor = KVCacheTensor(size=4 * page * blocks, layers=names, layer_stride=strides[0], block_stride=strides[1])
    config = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(names, spec)], kv_cache_layout=layout)
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    with pytest.raises(OverspillError, match=f"the layout is {layout}: unset VLLM_KV_CACHE_LAYOUT"):
        spill_geometry(Options(spill_bytes=2**20), vllm_config, config)  # type: ignore[arg-type]


# Settings.


def settings(**changes: Any) -> Any:
    """The parts of a vLLM configuration that spill looks at."""
    given = {
        "override": None, "sleep": False, "dbo": False, "method": None, "mode": CUDAGraphMode.FULL_AND_PIECEWISE,
    } | changes  # fmt: skip
    return SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks_override=given["override"]),
        parallel_config=SimpleNamespace(enable_dbo=given["dbo"], worker_cls=given.get("worker", "auto")),
        model_config=SimpleNamespace(enable_sleep_mode=given["sleep"]),
        speculative_config=given["method"] and SimpleNamespace(method=given["method"]),
        compilation_config=SimpleNamespace(cudagraph_mode=given["mode"]),
        scheduler_config=SimpleNamespace(scheduler_cls=given.get("scheduler"), async_scheduling=True),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"override": 100}, "remove --num-gpu-blocks-override"),
        ({"dbo": True}, "remove --enable-dbo"),
        ({"method": "eagle3"}, r"draft models \(eagle3\)"),
        ({"method": "mtp"}, r"draft models \(mtp\)"),
        ({"mode": CUDAGraphMode.FULL}, "use cudagraph_mode FULL_AND_PIECEWISE"),
    ],
)
def test_settings_that_spill_cannot_serve(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OverspillError, match=said):
        _check_spill(settings(**changes), is_child=False)


@pytest.mark.parametrize(
    "changes",
    [{}, {"method": "ngram"}, {"mode": CUDAGraphMode.PIECEWISE}, {"mode": CUDAGraphMode.NONE},
     {"mode": CUDAGraphMode.FULL_DECODE_ONLY}],
)  # fmt: skip
def test_settings_that_it_can(changes: dict[str, Any]) -> None:
    _check_spill(settings(**changes), is_child=False)


def test_sleep_mode_is_for_parking_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OverspillError, match="remove --enable-sleep-mode, or park the engine"):
        _check_sleep_mode(settings(sleep=True), Options(spill_bytes=1))
    _check_sleep_mode(settings(sleep=True), Options(spill_bytes=1, park=True))
    _check_sleep_mode(settings(sleep=False), Options(host_bytes=1, park=True))
    monkeypatch.setattr(plugin, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    with pytest.raises(OverspillError, match="add --enable-sleep-mode"):
        _check_sleep_mode(settings(sleep=False), Options(host_bytes=1, park=True))


def test_beside_other_connectors_it_is_refused() -> None:
    with pytest.raises(OverspillError, match="together with other connectors"):
        _check_spill(settings(), is_child=True)


def test_our_worker_and_scheduler_take_the_place_of_vllms() -> None:
    config = settings()
    use_own_classes(config, spill=True)
    assert config.parallel_config.worker_cls == OVERSPILL_WORKER
    assert config.scheduler_config.scheduler_cls.endswith("OverspillAsyncScheduler")
    require_spill_classes(config, Options(spill_bytes=1))


def test_another_worker_is_not_replaced_but_refused() -> None:
    config = settings(worker="somebody.elses.Worker", scheduler="somebody.elses.Scheduler")
    use_own_classes(config, spill=True)
    assert config.parallel_config.worker_cls == "somebody.elses.Worker"
    assert config.scheduler_config.scheduler_cls == "somebody.elses.Scheduler"
    with pytest.raises(OverspillError, match=f"start vLLM with --worker-cls {OVERSPILL_WORKER}"):
        require_spill_classes(config, Options(spill_bytes=1))


def test_a_share_needs_our_scheduler() -> None:
    config = settings(scheduler="somebody.elses.Scheduler")
    use_own_classes(config, spill=True)
    with pytest.raises(OverspillError, match='OverspillAsyncScheduler, or set "spill_share": 1'):
        require_spill_classes(config, Options(spill_bytes=1, spill_share=0.5))
    require_spill_classes(config, Options(spill_bytes=1, spill_share=1.0))
