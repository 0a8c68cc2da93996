"""Overspill's numbers as vLLM passes them on."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from overspill.kv.metrics import COUNTERS, GAUGES, OverspillPromMetrics, OverspillStats


def stats(**data: float) -> OverspillStats:
    return OverspillStats(data=dict(data))


def test_counting_adds_and_gauges_replace() -> None:
    some = OverspillStats()
    some.count("hit_tokens", 5)
    some.count("hit_tokens", 2)
    some.gauge("pool_bytes", 10)
    some.gauge("pool_bytes", 7)
    some.gauge("pool_bytes", 8, rank=1)
    assert some.data == {"hit_tokens": 7, "pool_bytes@0": 7, "pool_bytes@1": 8}


def test_nothing_counted_is_nothing_reported() -> None:
    some = OverspillStats()
    some.count("hit_tokens", 0)
    assert some.is_empty() and some.take() is None


def test_taken_stats_are_not_reported_again() -> None:
    some = stats(hit_tokens=3)
    taken = some.take()
    assert taken is not None and taken.data == {"hit_tokens": 3}
    some.count("hit_tokens")
    assert taken.data == {"hit_tokens": 3}
    assert some.data == {"hit_tokens": 1}


@pytest.mark.parametrize("name", ["hit_token", "pool_bytes"])
def test_a_name_that_nobody_would_show_cannot_be_counted(name: str) -> None:
    with pytest.raises(AssertionError):
        OverspillStats().count(name)


def test_aggregation_sums_counters_and_keeps_each_ranks_gauge() -> None:
    first, second = stats(load_bytes=10), stats(load_bytes=4, store_bytes=1)
    first.gauge("pool_bytes", 5)
    second.gauge("pool_bytes", 3)
    second.gauge("pool_bytes", 9, rank=1)
    total = first.aggregate(second)
    assert total.data == {"load_bytes": 14, "store_bytes": 1, "pool_bytes@0": 3, "pool_bytes@1": 9}


def test_the_log_line_has_amounts_speeds_and_what_went_wrong() -> None:
    seen = stats(load_bytes=5e9, load_seconds=0.5, store_bytes=1e6, hit_tokens=7, corrupt_blocks=2)
    seen.gauge("pool_used_bytes", 3e6)
    assert seen.reduce() == {
        "load MB": 5000.0, "load GB/s": 10.0, "store MB": 1.0, "store GB/s": 0.0, "hit tokens": 7, "corrupt blocks": 2,
        "pool used MB": 3.0,
    }  # fmt: skip
    assert stats().reduce() == {}


def series() -> OverspillPromMetrics:
    types: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    labels = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    config = SimpleNamespace(kv_transfer_config=None)
    return OverspillPromMetrics(config, types, ["model_name", "engine"], labels)  # type: ignore[arg-type]


def value(name: str, engine: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": engine})


def test_every_number_is_a_series_of_its_own_engine() -> None:
    metrics = series()
    metrics.observe({"load_bytes": 10, "pool_bytes@0": 100, "pinning_refused@0": 0, "pinning_refused@1": 1})
    metrics.observe({"load_bytes": 5, "pool_bytes@0": 80, "pool_bytes@1": 70, "pinning_refused@0": 0})
    metrics.observe({"load_bytes": 1}, engine_idx=1)
    assert value("overspill_load_bytes_total", "0") == 15
    assert value("overspill_load_bytes_total", "1") == 1
    assert value("overspill_pool_bytes", "0") == 80 + 70, "ranks add up, steps do not"
    assert value("overspill_pinning_refused", "0") == 1


def test_all_series_are_there_before_anything_happens() -> None:
    series()
    page = generate_latest(REGISTRY).decode()
    for name in COUNTERS:
        assert f"\noverspill_{name}_total{{" in page
    for name in GAUGES:
        assert f"\noverspill_{name}{{" in page


def test_a_second_engine_in_the_process_starts_from_zero() -> None:
    series().observe({"hit_tokens": 4})
    series()
    assert value("overspill_hit_tokens_total", "0") == 0


def test_vllm_can_pass_them_through_multiconnector() -> None:
    both = MultiKVConnectorStats(data={"OverspillConnector": stats(hit_tokens=1)})
    both.aggregate(MultiKVConnectorStats(data={"OverspillConnector": stats(hit_tokens=2)}))
    assert both["OverspillConnector"].data == {"hit_tokens": 3}
