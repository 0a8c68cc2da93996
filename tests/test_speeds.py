"""When a load is worth it, and how much may be stored at once."""

import pytest

from overspill.kv.jobs import Sample, StepReport
from overspill.kv.speeds import (
    LOAD_OVERHEAD_S,
    STORE_BACKLOG_S,
    Speeds,
    load_beats_recompute,
    may_probe,
    store_budget,
)

GB = 10**9


def loaded(num_bytes: int, seconds: float) -> StepReport:
    return StepReport(load_speed=Sample(num_bytes, seconds))


def test_a_speed_starts_at_the_first_measurement_then_drifts() -> None:
    speeds = Speeds()
    speeds.record(loaded(10 * GB, 1.0))
    assert speeds.load_bytes_per_s == 10 * GB
    speeds.record(loaded(20 * GB, 1.0))
    assert 10 * GB < speeds.load_bytes_per_s < 20 * GB
    for _ in range(50):
        speeds.record(loaded(20 * GB, 1.0))
    assert speeds.load_bytes_per_s == pytest.approx(20 * GB, rel=1e-3)


def test_a_measurement_of_nothing_changes_nothing() -> None:
    speeds = Speeds(1.0, 2.0)
    speeds.record(loaded(0, 1.0))
    speeds.record(loaded(5, 0.0))
    speeds.record(StepReport())
    assert speeds == Speeds(1.0, 2.0)


@pytest.mark.parametrize("speeds", [Speeds(), Speeds(load_bytes_per_s=1.0), Speeds(prefill_tokens_per_s=1e12)])
def test_an_unmeasured_speed_does_not_stop_a_load(speeds: Speeds) -> None:
    assert load_beats_recompute(speeds, num_tokens=1, num_bytes=10 * GB, queued_bytes=0)


def test_a_load_is_taken_when_it_is_faster_than_computing() -> None:
    speeds = Speeds(load_bytes_per_s=10 * GB, prefill_tokens_per_s=10_000)
    # 1000 tokens are 0.1 s of prefill; 0.5 GB are 0.05 s of link.
    assert load_beats_recompute(speeds, num_tokens=1000, num_bytes=GB // 2, queued_bytes=0)
    assert not load_beats_recompute(speeds, num_tokens=1000, num_bytes=GB, queued_bytes=0)


def test_loads_that_are_queued_count_against_one_more() -> None:
    speeds = Speeds(load_bytes_per_s=10 * GB, prefill_tokens_per_s=10_000)
    assert not load_beats_recompute(speeds, num_tokens=1000, num_bytes=GB // 2, queued_bytes=GB)


def test_a_skipped_load_is_doubtful_only_on_an_idle_link() -> None:
    speeds = Speeds(load_bytes_per_s=1.0, prefill_tokens_per_s=10_000)
    worth = int(LOAD_OVERHEAD_S * speeds.prefill_tokens_per_s)
    assert may_probe(speeds, num_tokens=worth + 1, queued_bytes=0)
    assert not may_probe(speeds, num_tokens=worth + 1, queued_bytes=1), "the one under way is measured"
    assert not may_probe(speeds, num_tokens=worth, queued_bytes=0), "no link is fast enough"


def test_a_few_tokens_are_not_worth_the_extra_step() -> None:
    speeds = Speeds(load_bytes_per_s=1e15, prefill_tokens_per_s=10_000)
    worth = LOAD_OVERHEAD_S * speeds.prefill_tokens_per_s
    assert not load_beats_recompute(speeds, num_tokens=int(worth), num_bytes=1, queued_bytes=0)
    assert load_beats_recompute(speeds, num_tokens=int(worth) + 2, num_bytes=1, queued_bytes=0)


def test_stores_hold_at_most_a_quarter_of_the_gpus_blocks() -> None:
    budget = store_budget(Speeds(), block_bytes=1, blocks_in_flight=0, gpu_blocks=100)
    assert budget == 25
    assert store_budget(Speeds(), block_bytes=1, blocks_in_flight=10, gpu_blocks=100) == 15
    assert store_budget(Speeds(), block_bytes=1, blocks_in_flight=99, gpu_blocks=100) == 0
    assert store_budget(Speeds(), block_bytes=1, blocks_in_flight=0, gpu_blocks=2) == 1


def test_stores_give_way_on_a_slow_link() -> None:
    speeds = Speeds(load_bytes_per_s=GB)
    block_bytes = 2**20
    budget = store_budget(speeds, block_bytes=block_bytes, blocks_in_flight=0, gpu_blocks=100_000)
    assert budget == int(GB * STORE_BACKLOG_S / block_bytes)
    assert store_budget(Speeds(load_bytes_per_s=1.0), block_bytes=2**20, blocks_in_flight=0, gpu_blocks=1000) == 16
