"""Which loads a step announces: what comes while the GPU is busy, and on an idle one the first."""

from types import SimpleNamespace

import pytest

from overspill.kv.announcements import LONGEST_S, Backlog, Turn
from overspill.kv.checksums import Verdict
from overspill.kv.copies import Transfer
from overspill.kv.jobs import LoadJob, Pace, StepJobs
from overspill.kv.worker import OffloadWorker
from tests.simulated_copies import Setup
from tests.simulated_engine import Engine

MB = 10**6


def announced(turn: Turn, *remaining: int) -> list[bool]:
    """For loads in this order, with so many bytes on the way each."""
    seen = []
    for num_bytes in remaining:
        turn.look_at(num_bytes)
        seen.append(turn.announces(over=num_bytes == 0, new_tokens=100))
    return seen


def test_nothing_is_queued_before_the_first_step() -> None:
    assert Backlog(2).seconds(100.0) == 0


def test_steps_queued_one_behind_the_other_add_up() -> None:
    backlog = Backlog(2)
    backlog.add(0.060, began=10.0)
    backlog.add(0.007, began=10.001)
    assert backlog.seconds(10.002) == pytest.approx(0.065)


def test_a_step_begins_when_it_is_queued_if_the_gpu_was_idle() -> None:
    backlog = Backlog(2)
    backlog.add(0.007, began=10.0)
    backlog.add(0.007, began=11.0)
    assert backlog.seconds(11.0) == pytest.approx(0.007)
    assert backlog.seconds(12.0) == 0


def test_steps_vllm_waited_for_leave_the_backlog() -> None:
    """An estimate twice too long must not grow into seconds."""
    backlog = Backlog(2)
    for i in range(1000):
        backlog.add(0.014, began=i * 0.007)
    assert backlog.seconds(999 * 0.007) <= 0.028


def test_synchronous_scheduling_queues_one_step_at_a_time() -> None:
    backlog = Backlog(1)
    backlog.add(0.060, began=10.0)
    backlog.add(0.007, began=10.001)
    assert backlog.seconds(10.001) == pytest.approx(0.007)


def test_a_mistaken_estimate_costs_a_tenth_of_a_second_at_most() -> None:
    backlog = Backlog(2)
    backlog.add(30.0, began=10.0)
    assert backlog.seconds(10.0) == LONGEST_S


def test_a_busy_gpu_is_not_kept_waiting() -> None:
    assert announced(Turn(300 * MB, idle=False), 300 * MB) == [True]
    assert announced(Turn(300 * MB, idle=False), 301 * MB) == [False]
    assert announced(Turn(0, idle=False), 1) == [False]


def test_loads_come_one_after_the_other() -> None:
    assert announced(Turn(300 * MB, idle=False), 200 * MB, 200 * MB, 0) == [True, False, True]


def test_a_finished_load_is_announced_while_others_are_in_flight() -> None:
    assert announced(Turn(0, idle=False), 500 * MB, 0) == [False, True]


def test_an_idle_gpu_waits_for_the_first_load_alone() -> None:
    """All would be computed in one step behind the last copy; the first one's need not wait for that."""
    assert announced(Turn(0, idle=True), 900 * MB, 900 * MB, 900 * MB) == [True, False, False]


def test_finished_loads_are_computed_before_the_gpu_waits() -> None:
    assert announced(Turn(0, idle=True), 0, 900 * MB) == [True, False]
    turn = Turn(0, idle=True, tolerated_bytes=10 * MB)
    turn.look_at(900 * MB)  # not checked yet
    assert announced(turn, 0, 5 * MB) == [True, False]


def test_many_small_loads_are_computed_together() -> None:
    turn = Turn(0, idle=True, tolerated_bytes=300 * MB)
    assert announced(turn, *[10 * MB] * 40) == [True] * 31 + [False] * 9
    assert announced(Turn(0, idle=True, tolerated_bytes=300 * MB), 900 * MB, 10 * MB) == [True, True]


def test_loads_beyond_a_full_step_wait_for_the_next_step() -> None:
    """Even finished loads wait: no first token would come before the whole step is computed."""
    assert announced(Turn(300 * MB, idle=False, many_tokens=100), 0, 0, 10 * MB) == [True, False, False]
    assert announced(Turn(300 * MB, idle=False, many_tokens=150), 10 * MB, 0, 0) == [True, True, False]
    assert announced(Turn(0, idle=True, many_tokens=100), 900 * MB, 0) == [True, False]


def test_an_idle_step_counts_what_is_still_queued_too() -> None:
    assert announced(Turn(500 * MB, idle=True), 200 * MB, 200 * MB, 200 * MB) == [True, True, False]


class Endless(Transfer):
    """Queued, and never over."""

    def __init__(self) -> None:
        super().__init__(900 * MB)
        self._queued.set()


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.kv.worker.time", SimpleNamespace(monotonic=lambda: 100.0))


def worker(*, asynchronous: bool) -> OffloadWorker:
    made = Engine(Setup(asynchronous=asynchronous)).workers[0]
    made._copier.load = lambda slots, blocks: Endless()  # type: ignore[union-attr,method-assign,assignment]
    made.checksums.check = lambda slots: Verdict()  # type: ignore[union-attr,method-assign,assignment]
    return made


def look(at: OffloadWorker, jobs: StepJobs) -> set[str]:
    at.begin_step(jobs)
    at.end_step(jobs)
    return at.results(jobs).finished_recving


THREE = [LoadJob(i, name, [i], [i], 2000) for i, name in enumerate("abc", 1)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_idle_engine_computes_the_first_load_before_waiting(asynchronous: bool) -> None:
    """Between two idle steps in flight vLLM has not scheduled what the first of them announced."""
    at = worker(asynchronous=asynchronous)
    assert look(at, StepJobs(loads=THREE)) == {"a"}
    if asynchronous:
        assert look(at, StepJobs()) == set()
    busy = StepJobs(num_tokens=2000, pace=Pace(step_s=0.060, load_bytes_per_s=50e9))
    assert look(at, busy) == {"b", "c"}, "they come while it computes"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_gone_before_they_run_delay_nothing(asynchronous: bool) -> None:
    at = worker(asynchronous=asynchronous)
    seen = [look(at, StepJobs(loads=THREE)), *(look(at, StepJobs()) for _ in range(6))]
    assert [names for names in seen if names] == [{"a"}, {"b"}, {"c"}]


def test_a_busy_engine_announces_loads_that_arrive_in_time() -> None:
    at = worker(asynchronous=True)
    decode = Pace(step_s=0.007, load_bytes_per_s=50e9)
    assert look(at, StepJobs(loads=THREE, num_tokens=3, pace=decode)) == set()
    assert look(at, StepJobs(num_tokens=2000, pace=Pace(0.020, 50e9))) == {"a"}
    assert look(at, StepJobs(num_tokens=2000, pace=Pace(0.060, 50e9, many_tokens=1500))) == {"b"}
    assert look(at, StepJobs(num_tokens=2000, pace=Pace(0.060, 50e9, many_tokens=1500))) == {"c"}
