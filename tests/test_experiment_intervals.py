"""What may be said of measured numbers: ratios, intervals, and when there is no difference."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from overspill.measure.compare import (
    BY_KEY,
    Basis,
    Column,
    Ratio,
    Repeat,
    Verdict,
    centre,
    compare,
    own_interval,
    paired_ratio,
    resampled_ratio,
    t_quantile,
    unpaired_ratio,
    verdict_words,
)
from overspill.measure.report.text import comparison_as_text, headline

# Intervals.


def test_students_t_is_that_of_the_tables() -> None:
    assert t_quantile(1) == 12.706 and t_quantile(4) == 2.776 and t_quantile(30) == 2.042
    for freedom, known in ((31, 2.0395), (60, 2.0003), (120, 1.9799), (10**6, 1.9600)):
        assert t_quantile(freedom) == pytest.approx(known, abs=2e-3)


def repeats_of(draw: random.Random, count: int, middle: float, noise: float, shared: list[float]) -> dict[int, float]:
    return {n: middle * shared[n - 1] * math.exp(draw.gauss(0, noise)) for n in range(1, count + 1)}


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_paired_intervals_cover_the_true_ratio_at_95_percent(count: int) -> None:
    draw = random.Random(count)
    trials, held = 4000, 0
    for _ in range(trials):
        # What differs between repeats, as other requests do, is the same for both and must not matter.
        shared = [math.exp(draw.gauss(0, 0.5)) for _ in range(count)]
        first = repeats_of(draw, count, 100, 0.05, shared)
        second = repeats_of(draw, count, 130, 0.08, shared)
        ratio = paired_ratio(first, second)
        assert ratio is not None and ratio.low is not None and ratio.high is not None and ratio.basis is Basis.PAIRS
        held += ratio.low <= 1.3 <= ratio.high
    assert held / trials == pytest.approx(0.95, abs=0.012)


def test_pairing_takes_out_what_repeats_have_in_common() -> None:
    draw = random.Random(1)
    shared = [math.exp(draw.gauss(0, 0.5)) for _ in range(5)]
    first, second = repeats_of(draw, 5, 100, 0.01, shared), repeats_of(draw, 5, 110, 0.01, shared)
    paired = paired_ratio(first, second)
    apart = unpaired_ratio(list(first.values()), list(second.values()))
    assert paired is not None and apart is not None
    assert paired.verdict is Verdict.HIGHER
    assert apart.verdict in (Verdict.NO_DIFFERENCE, Verdict.NOT_SHOWN)


def test_unpaired_intervals_cover_the_true_ratio_at_95_percent() -> None:
    draw = random.Random(3)
    trials, held = 4000, 0
    for _ in range(trials):
        first = [100 * math.exp(draw.gauss(0, 0.05)) for _ in range(4)]
        second = [80 * math.exp(draw.gauss(0, 0.15)) for _ in range(6)]
        ratio = unpaired_ratio(first, second)
        assert ratio is not None and ratio.low is not None and ratio.high is not None and ratio.basis is Basis.GROUPS
        held += ratio.low <= 0.8 <= ratio.high
    assert 0.94 <= held / trials <= 0.98


def test_two_equal_engines_are_seldom_told_apart() -> None:
    draw = random.Random(4)
    verdicts = []
    for _ in range(2000):
        same = [[100 * math.exp(draw.gauss(0, 0.03)) for _ in range(3)] for _ in range(2)]
        ratio = paired_ratio(dict(enumerate(same[0])), dict(enumerate(same[1])))
        assert ratio is not None
        verdicts.append(ratio.verdict)
    found = sum(verdict in (Verdict.HIGHER, Verdict.LOWER) for verdict in verdicts)
    assert found / len(verdicts) <= 0.06


@pytest.mark.parametrize(("true", "noise"), [(1.1, 0.06), (1.1, 0.03), (1 / 1.1, 0.06)])
def test_a_difference_that_is_not_shown_is_seldom_called_none(true: float, noise: float) -> None:
    """Of engines 10 % apart, three noisy repeats were called "no difference" in two of three experiments."""
    draw = random.Random(6)
    trials, called_none = 2000, 0
    for _ in range(trials):
        first, second = ({n: middle * math.exp(draw.gauss(0, noise)) for n in range(3)} for middle in (100, 100 * true))
        ratio = paired_ratio(first, second)
        assert ratio is not None
        called_none += ratio.verdict is Verdict.NO_DIFFERENCE
    assert called_none / trials <= 0.01


def test_that_there_is_no_difference_can_be_shown() -> None:
    draw = random.Random(7)
    found = []
    for _ in range(200):
        first, second = ({n: 100 * math.exp(draw.gauss(0, 0.01)) for n in range(5)} for _ in range(2))
        ratio = paired_ratio(first, second)
        assert ratio is not None
        found.append(ratio.verdict)
    assert found.count(Verdict.NO_DIFFERENCE) / len(found) > 0.8


@pytest.mark.parametrize("count", [2, 8, 19])
def test_few_requests_have_no_interval(count: int) -> None:
    """Two equal engines were told apart in every second run of two requests."""
    same = [0.1 + 0.001 * number for number in range(count)]
    assert resampled_ratio(same, same, is_paired=True) is None


def test_the_requests_of_one_run_make_nothing_better_or_worse() -> None:
    """With 5 % between two runs of the same engine, a difference was claimed in every third comparison."""
    first = [0.1 + 0.001 * number for number in range(40)]
    ratio = resampled_ratio(first, [value / 2 for value in first], is_paired=True)
    assert ratio is not None and ratio.low is not None and ratio.high is not None and ratio.high < 0.6
    assert ratio.verdict is Verdict.ONE_RUN and verdict_words(BY_KEY["mean_ttft_ms"], ratio) == "one run"


def test_resampled_intervals_cover_the_true_ratio_of_requests() -> None:
    draw = random.Random(5)
    trials, held = 100, 0
    for trial in range(trials):
        first = [draw.lognormvariate(0, 0.5) for _ in range(40)]
        second = [0.5 * value * math.exp(draw.gauss(0, 0.2)) for value in first]
        ratio = resampled_ratio(first, second, is_paired=True, seed=trial)
        assert ratio is not None and ratio.low is not None and ratio.high is not None and ratio.basis is Basis.REQUESTS
        held += ratio.low <= 0.5 * math.exp(0.02) <= ratio.high
    assert 0.88 <= held / trials <= 0.99


def test_one_repeat_has_no_interval() -> None:
    ratio = paired_ratio({1: 10.0}, {1: 12.0})
    assert ratio == Ratio(value=pytest.approx(1.2), basis=Basis.NONE)
    assert ratio is not None and ratio.verdict is Verdict.UNKNOWN
    assert str(ratio.verdict) == "one repeat: no interval"


def test_only_repeats_that_both_have_are_pairs() -> None:
    ratio = paired_ratio({1: 10.0, 2: 20.0, 3: 99.0}, {1: 11.0, 2: 22.0})
    assert ratio is not None and ratio.value == pytest.approx(1.1) and ratio.low == pytest.approx(1.1)
    assert paired_ratio({1: 10.0}, {2: 10.0}) is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_values_without_a_logarithm_have_no_ratio(bad: float) -> None:
    assert paired_ratio({1: 1.0, 2: 1.0}, {1: bad, 2: 1.0}) is None
    assert unpaired_ratio([1.0, 1.0], [bad, 1.0]) is None


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (1.2, 1.1, 1.3, Verdict.HIGHER),
        (0.8, 0.7, 0.9, Verdict.LOWER),
        (1.1, 0.9, 1.3, Verdict.NOT_SHOWN),
        (1.01, 0.96, 1.049, Verdict.NO_DIFFERENCE),
        (1.01, 0.96, 1.06, Verdict.NOT_SHOWN),
        (0.99, 0.94, 1.04, Verdict.NOT_SHOWN),
        (1.005, 0.9, 1.12, Verdict.NOT_SHOWN),  # near 1, and not known to be
        (1.005, 1.004, 1.006, Verdict.NO_DIFFERENCE),  # sure, and too small to matter
        (1.02, 1.015, 1.025, Verdict.HIGHER),
        (1.5, 0.2, 9.0, Verdict.NOT_SHOWN),
        (1.001, 0.1, 10.0, Verdict.NOT_SHOWN),
    ],
)
def test_no_difference_is_said_when_there_is_none(value: float, low: float, high: float, verdict: Verdict) -> None:
    found = Ratio(value=value, low=low, high=high, basis=Basis.PAIRS).verdict
    assert found is verdict
    assert ("no difference" in str(found)) == (verdict in (Verdict.NO_DIFFERENCE, Verdict.NOT_SHOWN))


def test_wildly_different_repeats_show_nothing_without_overflow() -> None:
    ratio = paired_ratio({1: 1e-30, 2: 1.0}, {1: 1.0, 2: 1e-30})
    assert ratio is not None and ratio.verdict is Verdict.NOT_SHOWN


def test_the_centre_of_repeats_fits_the_ratio() -> None:
    first, second = {1: 10.0, 2: 40.0}, {1: 20.0, 2: 40.0}
    ratio = paired_ratio(first, second)
    assert ratio is not None
    assert centre(list(second.values())) / centre(list(first.values())) == pytest.approx(ratio.value)
    assert centre([0.0, 2.0]) == 1.0
    assert own_interval([10.0]) is None
    low, high = own_interval([10.0, 11.0, 12.0]) or (0, 0)
    assert low < 10.9 < high


# Comparison.


def column(label: str, *repeats: dict[str, Any], conditions: str = "same") -> Column:
    made = [
        Repeat(number=number, metrics=metrics, conditions=conditions) for number, metrics in enumerate(repeats, start=1)
    ]
    return Column(label=label, text=f"{label} --flags", repeats=tuple(made))


def test_each_configuration_is_compared_with_the_first() -> None:
    found = compare(
        [
            column("none", {"mean_ttft_ms": 100.0, "output_throughput": 10.0}, {"mean_ttft_ms": 110.0}),
            column("fast", {"mean_ttft_ms": 50.0, "output_throughput": 20.0}, {"mean_ttft_ms": 55.1}),
            column("same", {"mean_ttft_ms": 101.0}, {"mean_ttft_ms": 109.0}),
        ]
    )
    row = next(row for row in found.rows if row.measure.key == "mean_ttft_ms")
    assert row.ratios[0] is None and row.ratios[1] is not None and row.ratios[2] is not None
    assert row.ratios[1].value == pytest.approx(0.5, rel=0.01) and verdict_words(row.measure, row.ratios[1]) == "better"
    assert verdict_words(row.measure, row.ratios[2]) == "no difference shown", "two repeats, 1 % apart"
    rate = next(row for row in found.rows if row.measure.key == "output_throughput")
    assert rate.ratios[1] is not None and rate.values == (10.0, 20.0, None)
    assert verdict_words(rate.measure, rate.ratios[1]) == "one repeat: no interval"
    assert rate.ratios[2] is None


def test_the_second_is_the_baseline_if_the_first_does_not_start() -> None:
    broken = Repeat(number=1, metrics={}, is_complete=False, problem="vLLM ended\nthe last lines of its log")
    found = compare(
        [
            Column(label="large", text="", repeats=(broken,)),
            column("a", {"mean_ttft_ms": 100.0}),
            column("b", {"mean_ttft_ms": 50.0}),
        ]
    )
    assert found.first.label == "a" and found.others == [0, 2]
    assert [ratio and ratio.value for ratio in found.rows[0].ratios] == [None, None, 0.5]
    text = comparison_as_text(found)
    assert "b / a" in text and "large / a" not in text
    assert headline(found) == "large failed: vLLM ended"


def test_higher_is_better_for_rates_and_worse_for_times() -> None:
    up = Ratio(value=2.0, low=1.9, high=2.1, basis=Basis.PAIRS)
    assert verdict_words(BY_KEY["output_throughput"], up) == "better"
    assert verdict_words(BY_KEY["mean_ttft_ms"], up) == "worse"


def test_one_repeat_compares_latencies_by_request_and_no_rates() -> None:
    ours = {"mean_ttft_ms": 1000.0, "ttfts": [0.9, 1.1, 1.0, None, 1.0] * 7, "output_throughput": 5.0}
    theirs = {"mean_ttft_ms": 500.0, "ttfts": [0.45, 0.55, None, 0.5, 0.5] * 7, "output_throughput": 5.0}
    rows = {row.measure.key: row for row in compare([column("a", ours), column("b", theirs)]).rows}
    ttft, rate = rows["mean_ttft_ms"].ratios[1], rows["output_throughput"].ratios[1]
    assert ttft is not None and ttft.basis is Basis.REQUESTS and ttft.value == pytest.approx(0.5)
    assert rate is not None and rate.verdict is Verdict.UNKNOWN


def test_values_are_over_the_repeats_that_the_ratio_is_over() -> None:
    """With a repeat of one missing, 159 ms stood beside 100 ms, with a ratio of 1."""
    ours = column("a", *({"mean_ttft_ms": value} for value in (100.0, 100.0, 400.0)))
    theirs = column("b", *({"mean_ttft_ms": 100.0} for _ in range(2)))
    found = compare([ours, theirs], expected_repeats=3)
    (row,) = found.rows
    assert row.values == (pytest.approx(100.0), pytest.approx(100.0)) and row.points == ((100.0, 100.0),) * 2
    assert row.ratios[1] is not None and row.ratios[1].value == pytest.approx(1.0)
    assert "Some repeats are missing: a has 1, 2, 3; b has 1, 2." in comparison_as_text(found)
    even = comparison_as_text(compare([ours, column("b", *({"mean_ttft_ms": 100.0} for _ in range(3)))]))
    assert "Some repeats" not in even


def test_an_unpaired_configuration_is_shown_over_all_its_repeats() -> None:
    ours = column("a", {"mean_ttft_ms": 100.0}, {"mean_ttft_ms": 400.0})
    found = compare([ours, column("b", {"mean_ttft_ms": 50.0}, conditions="other")])
    assert found.rows[0].values == (pytest.approx(200.0), 50.0) and not found.uneven


def started(label: str, *seconds: float, is_first: bool = False) -> Column:
    made = [
        Repeat(number=number, metrics={"load_s": load_s}, conditions="same", is_first_start=is_first and number == 1)
        for number, load_s in enumerate(seconds, start=1)
    ]
    return Column(label=label, text="", repeats=tuple(made))


def test_the_first_start_is_left_out_of_load_times() -> None:
    """The first start reads weights from a cold cache: the same engine, as A and as B, loaded slower as A."""
    found = compare([started("a", 60.0, 20.0, 20.0, is_first=True), started("b", 20.0, 20.0, 20.0)])
    (row,) = found.rows
    assert row.values == (pytest.approx(20.0), pytest.approx(20.0))
    assert row.ratios[1] is not None and row.ratios[1].value == pytest.approx(1.0)
    assert "The very first start, of a, reads weights from disk" in comparison_as_text(found)


def test_a_sole_first_start_is_shown_but_not_compared() -> None:
    found = compare([started("a", 60.0, is_first=True), started("b", 20.0)])
    assert found.rows[0].values == (60.0, 20.0) and found.rows[0].ratios == (None, None)
    text = comparison_as_text(found)
    assert "60 s" in text and "its load time is not compared" in text
    # Where load times are not told, neither is this.
    assert "load time" not in comparison_as_text(replace(found, rows=()))


def test_requests_of_other_workloads_are_no_pairs() -> None:
    ours = [{"mean_ttft_ms": value} for value in (100.0, 120.0, 110.0)]
    found = compare([column("a", *ours), column("b", *ours, conditions="other")])
    ratio = found.rows[0].ratios[1]
    assert ratio is not None and ratio.basis is Basis.GROUPS and found.answers[0].compared == 0


def test_answers_that_differ_are_counted_and_told() -> None:
    found = compare([column("a", {"answers": ["x", "y", "z"]}), column("b", {"answers": ["x", "Y", "z"]})])
    assert (found.answers[0].compared, found.answers[0].same) == (3, 2)
    assert "1 of 3 answers of b differ from those of a" in comparison_as_text(found)
    same = compare([column("a", {"answers": ["x"]}), column("b", {"answers": ["x"]})])
    assert "All 1 answers of b are those of a." in comparison_as_text(same)
