"""How vLLM finds the connector, and what it says to settings that cannot work, before a model is loaded."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm import LLM, EngineArgs
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from overspill.kv import metrics
from overspill.kv.ram import Ram
from tests.engine import assert_same, engine, overspill, random_prompt, stop_engines

PROMPT = random_prompt(1, 600)
SETTINGS = {"host_bytes": "64MiB", "load": "always", "reserve_bytes": 0}


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Does nothing, beside Overspill in MultiConnector."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


def multi(**outer: Any) -> KVTransferConfig:
    ours = {"kv_connector": "OverspillConnector", "kv_role": "kv_both", "kv_connector_extra_config": SETTINGS}
    idle = {"kv_connector": "IdleConnector", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [idle, ours]},
        **outer,
    )


def by_name(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="OverspillConnector", kv_role="kv_both", kv_connector_extra_config={**SETTINGS, **extra}
    )


@pytest.mark.parametrize(
    "transfer",
    [overspill(), by_name(), multi(kv_load_failure_policy="recompute")],
    ids=["module path", "plain name", "MultiConnector"],
)
def test_a_forgotten_prompt_is_served_from_ram(llama: Path, transfer: KVTransferConfig) -> None:
    with engine(llama, transfer) as spilling:
        before = spilling.ask_one(PROMPT)
        spilling.forget_gpu()
        after = spilling.ask_one(PROMPT)
        assert_same([after], [before])
        assert after.num_cached == 576
        assert spilling.metric("hit_tokens") == 576
        spilling.assert_nothing_is_held()


def test_a_failed_load_under_multiconnector_is_recomputed(llama: Path) -> None:
    with engine(llama, multi(kv_load_failure_policy="recompute")) as spilling:
        before = spilling.ask_one(PROMPT)
        spilling.forget_gpu()
        spilling.worker.memory.slots[0] ^= 0x11
        assert_same([spilling.ask_one(PROMPT)], [before])
        assert spilling.metric("corrupt_blocks") == 1


BAD = {
    "unknown option": (by_name(host_byte="1GiB"), {}, "did you mean 'host_bytes'"),
    "ill-typed option": (by_name(verify=3), {}, "must be one of off, sample, all"),
    "zero size": (by_name(host_bytes=0), {}, "needs host_bytes"),
    "negative size": (by_name(host_bytes=-5), {}, "must not be negative"),
    "no size": (
        KVTransferConfig(kv_connector="OverspillConnector", kv_role="kv_both"),
        {},
        'for example {"host_bytes": "40GiB"}',
    ),
    "more RAM than there is": (by_name(host_bytes="100TiB"), {}, "Largest that fits"),
    "the reserve counts": (by_name(host_bytes="1MiB", reserve_bytes="100TiB"), {}, "stays in reserve"),
    "prefix caching off": (by_name(), {"enable_prefix_caching": False}, "remove --no-enable-prefix-caching"),
    "only a producer": (
        KVTransferConfig(kv_connector="OverspillConnector", kv_role="kv_producer", kv_connector_extra_config=SETTINGS),
        {},
        '"kv_role": "kv_both"',
    ),
    "MultiConnector that fails requests": (multi(), {}, '"kv_load_failure_policy": "recompute"'),
    "pipeline parallel": (
        by_name(spill_bytes="1GiB"),
        {"pipeline_parallel_size": 2},
        "spill_bytes does not work with pipeline",
    ),
}


def configure(model: Path, transfer: KVTransferConfig, **settings: Any) -> None:
    """As an engine's start does first; no weights are read."""
    EngineArgs(
        model=str(model), dtype="float32", skip_tokenizer_init=True, kv_transfer_config=transfer, **settings
    ).create_engine_config()


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused_before_the_model_loads(llama: Path, name: str) -> None:
    transfer, arguments, sentence = BAD[name]
    settings = {"enable_prefix_caching": True, **arguments}
    with pytest.raises(ValueError) as refusal:
        configure(llama, transfer, **settings)
    assert sentence in str(refusal.value)


def test_ram_of_other_machines_is_not_looked_for_here(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.kv.ram.available_ram", lambda: Ram(5 << 30, "a small machine"))
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enable_prefix_caching": True}
    transfer = by_name(host_bytes="8GiB", reserve_bytes=0)
    configure(llama, transfer, **ranks, nnodes=2, node_rank=0, master_addr="127.0.0.1")
    with pytest.raises(ValueError, match="Largest that fits"):
        configure(llama, transfer, **ranks)


def test_reconfiguring_does_not_count_the_pool_twice(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's connector is built when the pool is full; counting it twice refused half of all machines."""
    with engine(llama, by_name(host_bytes="64MiB")) as spilling:
        assert spilling.worker.memory is not None
        spilling.worker.memory.wait_until_prepared(30)
        monkeypatch.setattr("overspill.kv.ram.available_ram", lambda: Ram(36 << 20, "a small machine"))
        config = spilling.llm.llm_engine.vllm_config
        config.__post_init__()
        type(spilling.vllm_scheduler.connector)(
            config, KVConnectorRole.SCHEDULER, spilling.vllm_scheduler.kv_cache_config
        )
        # Another engine in the same process takes RAM of its own, which the first one's pool must not hide.
        with pytest.raises(ValueError, match='Largest that fits: "host_bytes": "36MiB"'):
            configure(llama, by_name(host_bytes="37MiB"))


def test_only_the_process_that_starts_an_engine_checks_its_ram(llama: Path) -> None:
    """With --api-server-count, API servers are configured while the engine fills its pool; that refused them."""
    too_much = by_name(host_bytes="100TiB")
    for rank in (0, 1):
        configure(llama, too_much, _api_process_count=2, _api_process_rank=rank)
    with pytest.raises(ValueError, match="Largest that fits"):
        configure(llama, too_much, _api_process_count=2, _api_process_rank=-1)


def test_a_pool_smaller_than_a_block_is_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="less than one KV block of this model"):
        LLM(
            model=str(llama),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            num_gpu_blocks_override=40,
            block_size=32,
            kv_transfer_config=overspill(host_bytes=1000),
        )
    stop_engines()


def test_every_series_is_in_the_metrics(llama: Path) -> None:
    with engine(llama, overspill(host_bytes="8MiB")) as spilling:
        spilling.ask_one(PROMPT)
        names = {s.name for m in REGISTRY.collect() for s in m.samples}
        for name in metrics.COUNTERS:
            assert f"overspill_{name}_total" in names
        for name in metrics.GAUGES:
            assert f"overspill_{name}" in names
        assert spilling.metric("pool_bytes") == 8 << 20
        assert 0 < spilling.metric("pool_used_bytes") <= spilling.metric("pool_bytes")
        assert spilling.metric("store_bytes") >= 18 * spilling.worker.memory.slot_bytes
        assert spilling.metric("miss_tokens") == 600


def test_kv_events_name_the_medium(llama: Path) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine(llama, overspill(host_bytes=20 * (64 << 10)), kv_events_config=events) as spilling:
        seen: list[Any] = []
        connector = spilling.vllm_scheduler.connector
        take = connector.take_events
        connector.take_events = lambda: [seen.append(e) or e for e in take()]
        spilling.ask_one(PROMPT)
        spilling.ask_one(random_prompt(2, 600))
        spilling.drain()
        spilling.ask_one(random_prompt(3, 40))
        stored = [e for e in seen if isinstance(e, BlockStored)]
        assert stored and all(e.medium == "CPU" for e in seen)
        assert stored[0].token_ids == PROMPT[:32] and stored[0].parent_block_hash is None
        assert stored[1].parent_block_hash == stored[0].block_hashes[0]
        assert any(isinstance(e, BlockRemoved) for e in seen)
