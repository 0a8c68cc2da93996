"""When a load is worth it, and how much may be stored at once."""

import pytest

from overspill.kv.jobs import Pace
from overspill.kv.speeds import (
    LOAD_OVERHEAD_S,
    PREFILL_TOKENS,
    STORE_BACKLOG_S,
    SecondLooks,
    Speeds,
    is_doubtful,
    load_beats_recompute,
    pace,
    store_budget,
)

GB = 10**9


def test_a_speed_starts_at_the_first_measurement_then_drifts() -> None:
    speeds = Speeds()
    speeds.saw_load(10 * GB, 1.0)
    assert speeds.load_bytes_per_s == 10 * GB
    speeds.saw_load(20 * GB, 1.0)
    assert 10 * GB < speeds.load_bytes_per_s < 20 * GB
    for _ in range(50):
        speeds.saw_load(20 * GB, 1.0)
    assert speeds.load_bytes_per_s == pytest.approx(20 * GB, rel=1e-3)


def test_a_measurement_of_nothing_changes_nothing() -> None:
    speeds = Speeds(1.0, 2.0)
    speeds.saw_load(0, 1.0)
    speeds.saw_load(5, 0.0)
    speeds.saw_prefill(0, 0.0)
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
    assert is_doubtful(speeds, num_tokens=worth + 1, queued_bytes=0)
    assert not is_doubtful(speeds, num_tokens=worth + 1, queued_bytes=1), "the one under way is measured"
    assert not is_doubtful(speeds, num_tokens=worth, queued_bytes=0), "no link is fast enough"


def skipped_before_looks(looks: SecondLooks, requests: int) -> list[int]:
    """How many were skipped before each of the loads that were made."""
    counts, skipped = [], 0
    for number in range(requests):
        if looks.wants(f"request-{number}"):
            looks.load_begins(f"request-{number}")
            counts.append(skipped)
            skipped = 0
        else:
            looks.load_was_skipped()
            skipped += 1
    return counts


def test_loads_that_stay_slow_are_tried_ever_more_rarely() -> None:
    assert skipped_before_looks(SecondLooks(), 1100) == [4, 8, 16, 32, 64, 128, 256, 256, 256]


def test_a_worthwhile_load_resets_the_wait_for_a_second_look() -> None:
    looks = SecondLooks()
    assert skipped_before_looks(looks, 14) == [4, 8]
    looks.load_begins("worth it")
    assert skipped_before_looks(looks, 5) == [4]


def test_a_worthwhile_load_cancels_a_pending_second_look() -> None:
    looks = SecondLooks()
    for _ in range(4):
        looks.load_was_skipped()
    assert looks.wants("waits for room")
    looks.load_begins("worth it")
    assert not looks.wants("waits for room")
    assert skipped_before_looks(looks, 5) == [4]


def test_a_waiting_request_keeps_its_turn_and_is_not_counted() -> None:
    looks = SecondLooks()
    assert not any(looks.wants("waits") for _ in range(50))
    for _ in range(4):
        looks.load_was_skipped()
    assert looks.wants("its turn") and looks.wants("its turn") and looks.wants("another before it")
    looks.load_begins("another before it")
    assert not looks.wants("its turn")


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


def test_a_step_takes_as_long_as_its_tokens_or_as_a_small_one() -> None:
    speeds = Speeds(load_bytes_per_s=50e9, fastest_prefill_tokens_per_s=32_000, plain_step_s=0.007)
    assert pace(speeds, 1) == pace(speeds, 0) == pace(speeds, PREFILL_TOKENS - 1)
    assert (pace(speeds, 1).step_s, pace(speeds, 3200).step_s) == (0.007, 0.1)
    assert pace(speeds, 1).load_bytes_per_s == 50e9


def test_tokens_are_many_when_they_last_as_long_as_many_steps() -> None:
    speeds = Speeds(fastest_prefill_tokens_per_s=32_000, plain_step_s=0.007)
    assert 1000 < pace(speeds, 1).many_tokens < 2000


def test_unmeasured_speeds_predict_no_pace() -> None:
    assert pace(Speeds(), 1) == pace(Speeds(), 5000) == Pace()
    assert pace(Speeds(plain_step_s=0.007), 5000) == Pace(step_s=0.007)


def test_batched_decode_steps_do_not_make_a_prefill_look_long() -> None:
    speeds = Speeds()
    speeds.saw_prefill(8192, 0.14)
    for _ in range(20):
        speeds.saw_prefill(300, 0.020)
    assert speeds.prefill_tokens_per_s == pytest.approx(15_000, rel=0.1)
    assert pace(speeds, 8192).step_s == pytest.approx(0.14, rel=0.25)


def test_a_speed_that_is_no_longer_reached_fades() -> None:
    speeds = Speeds()
    speeds.saw_prefill(1000, 0.01)
    for _ in range(500):
        speeds.saw_prefill(1000, 0.02)
    assert speeds.fastest_prefill_tokens_per_s == 50_000
