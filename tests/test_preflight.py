"""Engines that Overspill cannot serve are told so before the model loads: one sentence, and what to change."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig

from overspill.kv import plugin
from overspill.kv.errors import OverspillError
from overspill.kv.plugin import check_connector_stays, check_engine, check_vllm

SIZE = {"host_bytes": "1MiB", "reserve_bytes": 0}


def transfer(**changes: Any) -> KVTransferConfig:
    return KVTransferConfig(
        **{"kv_connector": "OverspillConnector", "kv_role": "kv_both", "kv_connector_extra_config": SIZE} | changes
    )


def inside_multi(**changes: Any) -> KVTransferConfig:
    children = [
        {"kv_connector": "OtherConnector", "kv_role": "kv_both"},
        {"kv_connector": "OverspillConnector", "kv_role": "kv_both", "kv_connector_extra_config": SIZE},
    ]
    return transfer(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children}, **changes)


def engine(
    kv_transfer_config: KVTransferConfig | None,
    *,
    prefix_caching: bool = True,
    speculative: object = None,
    **changes: Any,
) -> Any:
    model = {"is_encoder_decoder": False, "is_hybrid": False}
    scheduler = {"policy": "fcfs", "scheduler_reserve_full_isl": True}
    parallel = {
        "pipeline_parallel_size": 1, "data_parallel_size": 1, "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 1, "world_size": 1,
    }  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=kv_transfer_config,
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching, kv_offloading_size=None),
        model_config=SimpleNamespace(**{k: changes.get(k, v) for k, v in model.items()}),
        parallel_config=SimpleNamespace(**{k: changes.get(k, v) for k, v in parallel.items()}),
        scheduler_config=SimpleNamespace(**{k: changes.get(k, v) for k, v in scheduler.items()}),
        speculative_config=speculative,
    )


def test_an_engine_with_everything_gets_its_options() -> None:
    options = check_engine(engine(transfer()))
    assert options is not None and options.host_bytes == 2**20


def test_an_engine_without_overspill_is_left_alone() -> None:
    assert check_engine(engine(None, prefix_caching=False)) is None
    assert check_engine(engine(transfer(kv_connector="OtherConnector"), prefix_caching=False)) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (engine(transfer(), prefix_caching=False), "remove --no-enable-prefix-caching"),
        (engine(transfer(kv_role="kv_producer")), "'kv_producer'"),
        (engine(transfer(), is_encoder_decoder=True), "encoder-decoder"),
        (
            engine(transfer(kv_connector_extra_config=SIZE | {"park": True}), pipeline_parallel_size=2),
            "park does not work with pipeline parallelism",
        ),
        (engine(transfer(), decode_context_parallel_size=2), "--decode-context-parallel-size 1"),
        (engine(transfer(), is_hybrid=True, speculative=object()), "remove --speculative-config"),
        (
            engine(transfer(), policy="priority", scheduler_reserve_full_isl=False),
            "remove --no-scheduler-reserve-full-isl",
        ),
        (engine(transfer(kv_connector_extra_config={})), "needs host_bytes"),
        (engine(transfer(kv_connector_extra_config=SIZE | {"stor": "lazy"})), "did you mean 'store'"),
        (engine(transfer(kv_connector_extra_config={"host_bytes": -1})), "must not be negative"),
        (engine(transfer(), data_parallel_size=2), "use --data-parallel-size 1"),
        (engine(inside_multi()), '"kv_load_failure_policy": "recompute": add it'),
    ],
)  # fmt: skip
def test_an_impossible_engine_is_refused_with_one_line_of_advice(config: Any, said: str) -> None:
    with pytest.raises(OverspillError, match=said) as refused:
        check_engine(config)
    assert "\n" not in str(refused.value)


def test_multiconnector_works_with_the_policy_at_its_top_level() -> None:
    assert check_engine(engine(inside_multi(kv_load_failure_policy="recompute"))) is not None


@pytest.mark.parametrize("options", [SIZE, {"spill_bytes": "1MiB"}])
def test_a_platform_without_cudas_driver_is_refused(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rocm = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="rocm")
    monkeypatch.setattr(plugin, "current_platform", rocm)
    with pytest.raises(OverspillError, match="this is rocm: remove OverspillConnector"):
        check_engine(engine(transfer(kv_connector_extra_config=options)))
    assert check_engine(engine(transfer(kv_connector="OtherConnector"))) is None


@pytest.mark.parametrize("found", [lambda name: None, lambda name: __import__("no_such_package")])
def test_a_missing_driver_package_is_named_with_pip_install(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_name="cuda")
    monkeypatch.setattr(plugin, "current_platform", cuda)
    monkeypatch.setattr(plugin, "find_spec", found)
    with pytest.raises(OverspillError, match="pip install cuda-bindings"):
        check_engine(engine(transfer()))
    monkeypatch.setattr(plugin, "find_spec", lambda name: object())
    assert check_engine(engine(transfer())) is not None


def test_kv_offloading_size_is_refused_beside_our_connector() -> None:
    """Refused while vLLM makes its configuration: later nothing would show that Overspill had been requested."""
    plugin.register()
    cache = CacheConfig(kv_offloading_size=2)
    with pytest.raises(Exception, match=r'--kv-offloading-size 2 makes vLLM use its own.*"host_bytes": "2GiB"'):
        VllmConfig(cache_config=cache, kv_transfer_config=transfer())
    others = VllmConfig(cache_config=cache)
    assert others.kv_transfer_config is not None and others.kv_transfer_config.kv_connector == "OffloadingConnector"
    with pytest.raises(OverspillError, match="--kv-offloading-size 2"):
        check_connector_stays(SimpleNamespace(kv_transfer_config=inside_multi(), cache_config=cache))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1", None])
def test_a_tested_vllm_is_accepted(version: str | None, log: pytest.LogCaptureFixture) -> None:
    check_vllm(spill=True, found=version)
    assert "not tested" not in log.text


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0", "0.3.20"])
def test_an_untested_vllm_offloads_and_does_not_spill(version: str, log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OverspillError, match=rf"this is {version}\. Install vllm==0\.32\.0, or remove spill_bytes"):
        check_vllm(spill=True, found=version)
    check_vllm(spill=False, found=version)
    assert f"offload was not tested with vLLM {version}" in log.text
