"""What steps take is seen from marks around them: prefill speed from long steps, a step's time from some short ones."""

import pytest

from overspill.kv.jobs import StepJobs, StepReport
from overspill.kv.speeds import Mark, StepTimer, WallMark
from overspill.kv.spill.steps import SpillStep


class ScriptedMark(Mark):
    """Marks half a second apart, reached when `reached` says so."""

    made = 0
    reached = 0

    def __init__(self) -> None:
        ScriptedMark.made += 1
        self._number = ScriptedMark.made

    def seconds_until(self, later: Mark) -> float | None:
        assert isinstance(later, ScriptedMark)
        return 0.5 * (later._number - self._number) if later._number <= ScriptedMark.reached else None


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> StepTimer:
    monkeypatch.setattr(ScriptedMark, "made", 0)
    monkeypatch.setattr(ScriptedMark, "reached", 10**9)
    return StepTimer(ScriptedMark)


def run(timer: StepTimer, jobs: StepJobs) -> None:
    timer.begin_step(jobs)
    timer.end_step(jobs)


def test_a_wall_mark_measures_the_time_to_a_later_one() -> None:
    start = WallMark()
    seconds = start.seconds_until(WallMark())
    assert seconds is not None and seconds >= 0


def test_long_steps_give_prefill_speed(timer: StepTimer) -> None:
    run(timer, StepJobs(num_tokens=1000))
    run(timer, StepJobs(num_tokens=300))
    report = StepReport()
    timer.report(report)
    assert (report.prefill_speed.amount, report.prefill_speed.seconds) == (1300, 1.0)
    assert report.plain_steps.amount == 0


def test_one_short_step_in_eight_is_timed(timer: StepTimer) -> None:
    for _ in range(24):
        run(timer, StepJobs(num_tokens=4))
    report = StepReport()
    timer.report(report)
    assert (report.plain_steps.amount, report.plain_steps.seconds) == (3, 1.5)
    assert ScriptedMark.made == 6


def test_steps_that_stream_or_compute_nothing_are_not_plain(timer: StepTimer) -> None:
    for _ in range(24):
        run(timer, StepJobs(num_tokens=4, spill=SpillStep()))
        run(timer, StepJobs(num_tokens=0))
    report = StepReport()
    timer.report(report)
    assert report.plain_steps.amount == 0


def test_an_unfinished_step_is_reported_later(timer: StepTimer) -> None:
    ScriptedMark.reached = 0
    run(timer, StepJobs(num_tokens=1000))
    report = StepReport()
    timer.report(report)
    assert report.is_empty()
    ScriptedMark.reached = 2
    timer.report(report)
    assert report.prefill_speed.amount == 1000
    again = StepReport()
    timer.report(again)
    assert again.is_empty()


def test_steps_with_kv_in_ram_are_timed_by_its_bytes(timer: StepTimer) -> None:
    for num_bytes in (100, 200):
        run(timer, StepJobs(num_tokens=4, spill=SpillStep(num_bytes=num_bytes)))
    report = StepReport()
    timer.report(report)
    assert (report.spilled_steps.amount, report.spilled_steps.seconds) == (300, 1.0)
    assert report.plain_steps.amount == 0
