"""Tuning's decisions: what is tried, what is measured next, what is out, what is kept."""

import json
import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from overspill.cli import app
from overspill.kv.sizes import GiB, exact_size
from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.candidates import AS_IT_IS, Candidate, Replan, find_candidates
from overspill.measure.compare import Basis, Better, Ratio
from overspill.measure.search import (
    MARGINS,
    NEAR,
    Scores,
    Standing,
    is_near,
    longest_working,
    next_length,
    trials_left,
)
from overspill.measure.subject import (
    Subject,
    current_candidate,
    find_subject,
    keep,
    registered_subject,
    resumed,
    settings_to_keep,
)
from overspill.measure.trial import Step, locked
from overspill.measure.tune import run
from overspill.measure.tuning import Goal, Tuning, choose_workload, does_return, one_prompt, parse_budget, parse_goal
from overspill.measure.tuning_report import TuningReport
from overspill.measure.workload import parse_workload, write_script
from overspill.planning.planner import Plan
from overspill.registry import (
    ChangedMeanwhile,
    ModelSettings,
    Registry,
    Result,
    UnknownRecord,
    add_model,
    edit_model,
    get_model,
    remove_model,
)
from tests.test_plan import LLAMA_8B, OLMO_7B, model, plan_of

DOCS = Path(__file__).parents[1] / "docs"
NAMES = {"offload_ram": "offload_ram_bytes", "weights_ram": "weights_ram_bytes"}


def replanning(config: dict[str, Any], gpu: str, ram: str, length: int, **given: Any) -> Replan:
    facts = model(config)
    made: dict[str, Plan] = {}

    def replan(settings: Mapping[str, Any]) -> Plan:
        known = {name: value for name, value in settings.items() if name != "max_model_len"}
        wishes = {NAMES.get(name, name): value for name, value in {**given, **known}.items()}
        key = json.dumps(wishes, sort_keys=True)
        if key not in made:
            made[key] = plan_of(facts, gpu, ram, length, **wishes)
        return made[key]

    return replan


def candidates_of(replan: Replan, **how: Any) -> dict[str, Candidate]:
    return {each.label: each for each in find_candidates(replan({}), replan, **how)}


def connector(candidate: Candidate) -> dict[str, Any]:
    words = candidate.vllm_args
    options = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert isinstance(options, dict)
    return options


ON_GPU = replanning(LLAMA_8B, "24GiB", "64GiB", 32768)
SPILLS = replanning(LLAMA_8B, "24GiB", "64GiB", 131072)
WEIGHTS = replanning(OLMO_7B, "15GiB", "64GiB", 4096)
BOTH = replanning(LLAMA_8B, "20GB", "64GiB", 32768)


# What is tried.


def test_the_plans_choice_is_first_and_has_the_fewest_settings() -> None:
    first = next(iter(candidates_of(ON_GPU).values()))
    assert first.label == "plan" and first.is_planned and not first.vllm_args
    assert first.settings == {"max_model_len": 32768, "max_num_batched_tokens": 8192}


def test_candidates_vary_idle_kv_ram_lazy_stores_and_chunks() -> None:
    found = candidates_of(ON_GPU)
    assert list(found) == [
        "plan", "no RAM for idle KV", "30 GiB for idle KV", "stored lazily", "chunks of 16384", "chunks of 4096"
    ]  # fmt: skip
    assert found["no RAM for idle KV"].settings["offload_ram"] == 0
    assert found["no RAM for idle KV"].rank < found["plan"].rank < found["30 GiB for idle KV"].rank
    assert found["30 GiB for idle KV"].settings["offload_ram"] == 30 * GiB
    assert connector(found["stored lazily"]) == {"host_bytes": 61 * GiB, "store": "lazy"}
    assert found["chunks of 4096"].settings["max_num_batched_tokens"] == 4096


def test_fp8_is_tried_only_if_allowed_and_ranks_last() -> None:
    label = "everything on the GPU, KV in fp8"
    assert label not in candidates_of(ON_GPU)
    found = candidates_of(ON_GPU, allow_fp8=True)
    assert found[label].settings["kv_cache_dtype"] == "fp8" and not found[label].is_exact
    assert max(found.values(), key=lambda each: each.rank) is found[label]


def test_other_ways_set_the_weights_in_ram_explicitly() -> None:
    """Left to the plan, `overspill serve` would start the recommended way again."""
    found = candidates_of(SPILLS)
    plan = SPILLS({})
    assert plan.recommended is not None and plan.recommended.name == "KV spilled to RAM"
    other = found["weights in RAM"]
    way = SPILLS(other.settings).chosen
    assert not other.vllm_args and way is not None and way.name == "weights in RAM" and not way.kv.spilled_bytes
    planned, found = BOTH({}).recommended, candidates_of(BOTH)
    assert planned is not None and planned.name == "weights in RAM and KV spilled to RAM"
    other = found["weights in RAM (UVA) and KV spilled to RAM"]
    way = BOTH(other.settings).chosen
    assert not other.vllm_args and way is not None and way.weights.is_uva and way.kv.spilled_bytes
    assert way.weights.ram_bytes == other.settings["weights_ram"] and other.things_in_ram == 3


def test_where_kv_spills_other_shares_of_time_are_tried() -> None:
    found = candidates_of(SPILLS)
    shares = [connector(found[label])["spill_share"] for label in ("spill share 1", "spill share 0.25")]
    assert shares == [1.0, 0.25]
    assert not [label for label in candidates_of(ON_GPU) if "spill" in label]


def test_a_tuning_that_another_process_goes_on_with_is_refused(registry: Registry, tmp_path: Path) -> None:
    add_model(registry, "org/m", {})
    subject = find_subject(registry, "org/m", None)
    definition = Tuning(model="org/m", name="org/m", goal=Goal.TTFT, workload="offline")
    said = f"tune-1 is being measured by process {os.getpid()}"
    with locked(tmp_path, "tune-1"), pytest.raises(CannotMeasure, match=said):
        run(definition, subject, registry, print, resume="tune-1", logs=tmp_path)
    with pytest.raises(UnknownRecord, match="tune-1"):
        run(definition, subject, registry, print, resume="tune-1", logs=tmp_path)


def test_requested_connector_options_are_kept_and_not_varied() -> None:
    found = candidates_of(replanning(LLAMA_8B, "24GiB", "64GiB", 131072, kv_options="store=lazy,eviction=arc"))
    assert "stored lazily" not in found and not found["plan"].vllm_args
    options = connector(found["spill share 1"])
    assert (options["store"], options["eviction"], options["spill_share"]) == ("lazy", "arc", 1.0)
    asked = candidates_of(replanning(LLAMA_8B, "24GiB", "64GiB", 131072, kv_options="spill_share=1"))
    assert "stored lazily" in asked and not [label for label in asked if label.startswith("spill share")]


def test_amounts_of_weights_in_ram_are_tried_around_the_plan() -> None:
    plan, found = WEIGHTS({}), candidates_of(WEIGHTS)
    assert plan.recommended is not None and plan.recommended.weights.is_uva
    planned = plan.recommended.weights.ram_bytes
    amounts = [each.settings["weights_ram"] for label, each in found.items() if label.endswith("of weights in RAM")]
    assert min(amounts) < planned
    for share in (1.25, 1.5, 2, 4):
        assert any(abs(amount - share * planned) <= planned / 4 for amount in amounts), share
    for each in found.values():
        if each.settings.get("weights_ram"):
            assert f"--weights-ram {exact_size(each.settings['weights_ram'])}" in each.text({})


def test_more_weights_in_ram_leave_more_gpu_for_kv_and_fit() -> None:
    """Only the weights were moved: the GPU memory that they left lay idle."""
    small = replanning(OLMO_7B, "16GiB", "6GiB", 4096)
    most = []
    for replan in (WEIGHTS, small):
        ways = [
            replan(each.settings).chosen
            for label, each in candidates_of(replan).items()
            if label.endswith("of weights in RAM")
        ]
        assert ways
        by_amount = sorted((way.weights.ram_bytes, way.kv.resident_bytes) for way in ways if way is not None)
        assert [resident for _, resident in by_amount] == sorted(resident for _, resident in by_amount)
        for way in ways:
            assert way is not None
            pinned = way.weights.pinned_bytes + way.kv.spilled_bytes + way.offload_bytes
            assert pinned + 3 * GiB <= replan({}).ram_bytes.value
        most.append(by_amount[-1][0])
    assert most[1] < most[0], "with less RAM"


def test_weights_in_ram_that_are_given_are_not_varied() -> None:
    found = candidates_of(WEIGHTS, fixed=frozenset(["weights_ram"]))
    assert not [label for label in found if label.endswith("of weights in RAM")]


def test_given_settings_are_not_varied() -> None:
    fixed = frozenset(["offload_ram", "max_num_batched_tokens"])
    assert list(candidates_of(ON_GPU, fixed=fixed)) == ["plan", "stored lazily"]
    assert list(candidates_of(ON_GPU, fixed=frozenset(["kv_transfer_config"]))) == [
        "plan", "chunks of 16384", "chunks of 4096"
    ]  # fmt: skip


def test_where_nothing_returns_ram_for_idle_kv_stays_as_planned() -> None:
    assert list(candidates_of(ON_GPU, returns=False)) == ["plan", "chunks of 16384", "chunks of 4096"]


def test_current_settings_are_tried_once() -> None:
    current = Candidate(label="as it is", settings={"max_model_len": 32768, "max_num_batched_tokens": 8192})
    assert "as it is" not in candidates_of(ON_GPU, current=current), "that is the plan's own"
    other = Candidate(label="as it is", settings={"max_model_len": 32768, "max_num_batched_tokens": 2048})
    assert list(candidates_of(ON_GPU, current=other))[1] == "as it is"


def test_a_candidate_is_an_ab_configuration_and_survives_storage() -> None:
    from overspill.measure.configuration import read_configuration

    for each in [*candidates_of(SPILLS).values(), *candidates_of(WEIGHTS).values()]:
        read = read_configuration("a", each.text({"ram": "64GiB", "enforce_eager": True}))
        assert read.is_planned and read.settings["ram"] == "64GiB" and read.settings["enforce_eager"] is True
        assert msgspec.convert(json.loads(json.dumps(each.as_json())), Candidate) == each


# What is measured next, and what is out.


def some(*ranks: int) -> list[Candidate]:
    """a, b, c …, the simpler the smaller its number."""
    return [Candidate(label=label, things_in_ram=rank) for label, rank in zip("abcdefgh", ranks)]


def scored(failed: Mapping[str, str] | None = None, **values: list[float]) -> Scores:
    by_repeat = {label: dict(enumerate(found, start=1)) for label, found in values.items()}
    return Scores(better=Better.HIGHER, values=by_repeat, failed=failed or {})


def standing(candidates: Sequence[Candidate], scores: Scores, repeats: int, better: Better) -> Standing:
    return replace(scores, better=better).standing(candidates, repeats)


def choose(candidates: Sequence[Candidate], scores: Scores, better: Better) -> Candidate | None:
    return replace(scores, better=better).choose(candidates)


def test_each_is_measured_once_first() -> None:
    three = some(0, 1, 2)
    assert standing(three, scored(), 3, Better.HIGHER).next == Step(1, "a")
    assert standing(three, scored(a=[1]), 3, Better.HIGHER).next == Step(1, "b")
    assert standing(three, scored(a=[1], b=[1], c=[1]), 1, Better.HIGHER).next is None


def test_clearly_worse_ones_are_out_after_one_measurement() -> None:
    stand = standing(some(0, 1, 2), scored(a=[100], b=[40], c=[99]), 3, Better.HIGHER)
    assert stand.dropped == {"b": "60 % worse than a"} and stand.next == Step(2, "c")
    lower = standing(some(0, 1, 2), scored(a=[100], b=[40], c=[41]), 3, Better.LOWER)
    assert lower.dropped == {"a": "150 % worse than b"}, "where less is better"


def test_of_many_alike_the_better_half_and_the_simplest_go_on() -> None:
    scores = scored(a=[101], b=[100], c=[103], d=[104], e=[105], f=[106])
    stand = standing(some(3, 0, 3, 3, 3, 3), scores, 3, Better.HIGHER)
    assert [each.label for each in stand.alive] == ["b", "d", "e", "f"]
    assert stand.dropped == {"a": "not among the better half", "c": "not among the better half"}
    assert stand.next == Step(2, "f"), "every second round goes the other way"
    assert stand.steps_left == 4 + 2


def test_a_failed_candidate_is_never_measured_again() -> None:
    stand = standing(some(0, 1), scored({"a": "no memory"}, b=[1]), 3, Better.HIGHER)
    assert [each.label for each in stand.alive] == ["b"] and stand.next is None, "nothing is left to compare it with"


def test_failure_of_all_candidates_ends_the_tuning() -> None:
    stand = standing(some(0), scored({"a": "no memory"}), 3, Better.HIGHER)
    assert stand.next is None and choose(stand.alive, scored({"a": "no memory"}), Better.HIGHER) is None


# What is best.


def test_a_difference_that_is_measured_decides() -> None:
    scores = scored(a=[100, 103, 99], b=[121, 124, 120])
    assert choose(some(0, 1), scores, Better.HIGHER) == some(0, 1)[1]
    assert choose(some(0, 1), scores, Better.LOWER) == some(0, 1)[0]


def test_without_a_measured_difference_the_simplest_wins() -> None:
    scores = scored(a=[100, 110, 95], b=[104, 103, 99], c=[107, 101, 98])
    found = choose(some(2, 1, 3), scores, Better.HIGHER)
    assert found is not None and found.label == "b"
    planned = [*some(1), Candidate(label="b", things_in_ram=1, is_planned=True), some(0, 0, 1)[2]]
    assert choose(planned, scores, Better.HIGHER) == planned[1], "of equally simple ones the plan's own"


def test_one_measurement_picks_the_best_or_a_simpler_near_equal() -> None:
    """Candidates up to 30 % worse, which may not be dropped yet, counted as equal: the simplest was called best."""
    simple, fast = some(0, 1)
    for gain in (NEAR + 0.01, MARGINS[0] - 0.05, MARGINS[0] + 0.05):
        assert choose([simple, fast], scored(a=[1], b=[gain]), Better.HIGHER) == fast
        assert choose([simple, fast], scored(a=[gain], b=[1]), Better.LOWER) == fast
    assert choose([simple, fast], scored(a=[1], b=[NEAR - 0.01]), Better.HIGHER) == simple
    alive = standing([simple, fast], scored(a=[1], b=[MARGINS[0] - 0.05]), 3, Better.HIGHER).alive
    assert alive == (simple, fast), "not dropped, so that it is measured again"


def test_doubt_does_not_make_a_slower_one_the_best() -> None:
    """The intervals include 1, and the means are 8 % apart."""
    scores = scored(a=[100, 112, 95], b=[112, 109, 111])
    assert choose(some(0, 1), scores, Better.HIGHER) == some(0, 1)[1]


@pytest.mark.parametrize(("gain", "least", "most"), [(1.08, 0.0, 0.05), (1.0, 0.8, 1.0)])
def test_a_simpler_one_is_seldom_taken_for_a_faster_one(gain: float, least: float, most: float) -> None:
    """Three repeats that vary by 3 %: of candidates 8 % apart the slower one was kept in 43 of 100 tunings."""
    draw = random.Random(0)
    simple, planned = some(0, 1)
    kept = 0
    for _ in range(1000):
        runs = {label: [middle * math.exp(draw.gauss(0, 0.03)) for _ in range(3)]
                for label, middle in (("a", 100), ("b", 100 * gain))}  # fmt: skip
        scores = scored(**runs)
        alive = standing([simple, planned], scores, 3, Better.HIGHER).alive
        kept += choose(alive, scores, Better.HIGHER) == simple
    assert least <= kept / 1000 <= most


def tuning(*candidates: Candidate, repeats: int = 3, **values: list[float]) -> TuningReport:
    """The report on these throughputs."""
    asked = Tuning(model="m", name="m", goal=Goal.THROUGHPUT, workload="offline", repeats=repeats,
                       candidates=candidates)  # fmt: skip
    now = datetime(2026, 1, 1, tzinfo=UTC)
    results = [
        Result(
            id=1, saved_at=now, started_at=now, benchmark="offline", model="m", argv=(), label=label, repeat=repeat,
            metrics={"output_throughput": value}, config={},
        )
        for label, found in values.items()
        for repeat, value in enumerate(found, start=1)
    ]  # fmt: skip
    return TuningReport(experiment="t", definition=asked, results=tuple(results))


def test_a_best_that_was_measured_once_is_called_so() -> None:
    text = tuning(*some(0, 1), repeats=1, a=[100], b=[128]).as_text()
    assert "Best: b\n" in text and "best, measured once" in text and "22 % worse than the best" in text
    assert "One run of each was compared" in text
    again = tuning(*some(0, 1), a=[100, 101, 100], b=[121, 120, 121]).as_text()
    assert "best\n" in f"{again}\n" and "once" not in again and "One run" not in again


def test_a_round_that_was_broken_off_leaves_one_run_to_compare() -> None:
    text = tuning(*some(1, 0, 1), a=[128, 128.5], b=[100], c=[120]).as_text()
    assert "Best: a\n" in text and "best, measured once" in text


def test_a_simpler_best_says_what_it_gives_up() -> None:
    text = tuning(*some(0, 1, 1), repeats=1, a=[100], b=[102], c=[101]).as_text()
    assert "Best: a, the simplest of those within 3 %: b, c" in text
    assert "2 % better, and not as simple" in text and "0.98 % worse than the best, and not as simple" in text


def test_a_small_loss_is_chance_only_if_it_may_be_none() -> None:
    assert is_near(None) and is_near(Ratio(value=1.02, basis=Basis.NONE))
    assert is_near(Ratio(value=1.02, low=0.99, high=1.05, basis=Basis.PAIRS))
    assert not is_near(Ratio(value=1.02, low=1.01, high=1.03, basis=Basis.PAIRS)), "small, and certain"
    assert not is_near(Ratio(value=1.04, low=0.9, high=1.2, basis=Basis.PAIRS)), "uncertain, and not small"


def test_percents_are_of_rates_and_of_times() -> None:
    rates, times = Scores(better=Better.HIGHER), Scores(better=Better.LOWER)
    assert (rates.worse_percent(2), times.worse_percent(2)) == (50, 100)
    assert (rates.better_percent(1.25), times.better_percent(1.25)) == (25, pytest.approx(20))


def test_only_what_repeats_show_is_kept_unasked() -> None:
    """The best of one run each replaced settings that were as good."""
    once = tuning(*some(0, 1), repeats=1, a=[100], b=[200]).doubt
    assert once is not None and "--repeats 3" in once
    assert tuning(*some(0, 1), a=[100, 101, 99], b=[120, 121, 119]).doubt is None
    now, better = (replace(one, label=label) for one, label in zip(some(0, 1), (AS_IT_IS, "b")))
    near = tuning(better, now, **{AS_IT_IS: [100, 101, 99], "b": [101, 100, 99]})
    assert near.winner is not None and near.doubt is not None and "as they are" in near.doubt
    assert tuning(better, now, **{AS_IT_IS: [100, 101, 99], "b": [120, 121, 119]}).doubt is None


def test_a_model_that_is_as_planned_is_not_changed_for_as_good_a_candidate() -> None:
    """Nothing was named `as it is` there, so idle KV was switched off for a difference of 0.2 %."""
    planned, other = (replace(one, label=label) for one, label in zip(some(1, 0), ("plan", "b")))
    planned = replace(planned, is_planned=True, settings={"max_num_batched_tokens": 2048})
    found = tuning(planned, other, plan=[100, 101, 99], b=[100.5, 101.2, 98.9])
    as_planned = Subject(name="m", source="m", version=1, settings={"max_model_len": 4096})

    def doubt(subject: Subject, **given: Any) -> str | None:
        return replace(found, definition=replace(found.definition, subject=subject, given=given)).doubt

    assert "as they are" in (doubt(as_planned) or "")
    assert "as they are" in (doubt(replace(as_planned, tuned={"max_num_batched_tokens": 2048})) or "")
    assert doubt(replace(as_planned, tuned={"max_num_batched_tokens": 4096})) is None, "it does not fit any more"
    assert doubt(replace(as_planned, version=None)) is None, "not registered yet"
    assert doubt(as_planned, max_model_len=8192) is None, "asked for something else"
    assert doubt(as_planned, max_model_len=4096) is not None


def test_a_broken_round_compares_only_repeats_that_all_have() -> None:
    """b's second repeat had requests that a has not answered yet, and easier ones."""
    scores = scored(a=[100], b=[101, 900])
    assert choose(some(0, 1), scores, Better.HIGHER) == some(0, 1)[0]


# The longest context.


@pytest.mark.parametrize(("longest", "limit"), [(131072, 131072), (131072, 100000), (131072, 3000), (4992, 700)])
def test_the_longest_context_that_works_is_found_by_halves(longest: int, limit: int) -> None:
    tried: dict[int, bool] = {}
    most = trials_left(longest, tried)
    while (length := next_length(longest, tried)) is not None:
        assert length not in tried and length <= longest
        tried[length] = length <= limit
    found = longest_working(tried)
    assert found is not None and found <= limit and limit - found <= max(1024, limit // 10)
    assert next(iter(tried)) == longest and len(tried) <= most + 4


def test_a_model_of_which_no_context_works_ends_it() -> None:
    tried: dict[int, bool] = {}
    while (length := next_length(32768, tried)) is not None:
        tried[length] = False
    assert longest_working(tried) is None and 3 < len(tried) < 12 and min(tried) >= 256


def answered(length: int, **metrics: Any) -> Result:
    candidate = {"label": f"{length} tokens", "settings": {"max_model_len": length}}
    return Result(
        id=length, benchmark="offline", model="m", config={"candidate": candidate}, argv=(), metrics=metrics,
        started_at=datetime.now(UTC), saved_at=datetime.now(UTC), label=f"{length} tokens", repeat=1,
    )  # fmt: skip


def test_an_answer_that_came_in_one_piece_is_an_answer() -> None:
    """Its time per token is 0, and it was taken for one that was not measured: a shorter context was kept."""
    asked = Tuning(model="m", name="n", goal=Goal.CONTEXT, workload="offline", longest=1024, least_tokens_per_s=20)
    whole = {"mean_tpot_ms": 0.0, "total_output_tokens": 32}
    found = [
        answered(512, mean_tpot_ms=10.0), answered(768, mean_tpot_ms=100.0),
        answered(896, **whole, mean_e2el_ms=4.0), answered(1024, **whole, mean_e2el_ms=4000.0), answered(640),
    ]  # fmt: skip
    report = TuningReport(experiment="t", definition=asked, results=tuple(found))
    assert report.lengths == {512: True, 768: False, 896: True, 1024: False, 640: False}
    assert report.scores.failed == {
        "768 tokens": "too slow: 10 tok/s, at least 20 is required",
        "1024 tokens": "too slow: 8 tok/s, at least 20 is required",
        "640 tokens": "TPOT, mean was not measured",
    }  # fmt: skip


# Workloads and words.


@pytest.mark.parametrize("length", [512, 4096, 131072])
@pytest.mark.parametrize("goal", [Goal.THROUGHPUT, Goal.TTFT])
def test_the_goals_own_workload_fits_and_returns(goal: Goal, length: int) -> None:
    workload = choose_workload(goal, None, length)
    assert write_script(workload, 0).longest <= length and does_return(workload)


def test_one_prompt_fills_a_context() -> None:
    for length in (256, 4992, 131072):
        assert write_script(one_prompt(length), 0).longest == length
    assert not does_return(one_prompt(4096))


def test_a_workload_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CannotMeasure, match="needs 9,216 tokens"):
        choose_workload(Goal.TTFT, "overhead", 4096)
    assert choose_workload(Goal.TTFT, "offline", 4096) == parse_workload("offline")


@pytest.mark.parametrize(
    ("words", "message"), [("10x", "--budget: '10x' is not a duration"), ("0", "--budget"), ("", "--budget")]
)
def test_a_budget_is_a_duration(words: str, message: str) -> None:
    assert parse_budget("10m") == 600 and parse_budget("90") == 90
    with pytest.raises(MeasureError, match=message):
        parse_budget(words)


def test_goals_are_known_by_name() -> None:
    assert parse_goal("ttft") is Goal.TTFT
    with pytest.raises(MeasureError, match="use throughput, ttft, context"):
        parse_goal("latency")


def test_a_definition_survives_storage() -> None:
    asked = Tuning(
        model="m", name="n", goal=Goal.TTFT, workload="multi-turn", given={"ram": "4GiB"}, pinned={"gpu_memory": 8},
        candidates=tuple(candidates_of(SPILLS).values()),
        subject=Subject(
            name="n", source="org/m", version=3, settings={"gpu_memory_utilization": 0.8, "enforce_eager": True},
            vllm_args=("--block-size", "32"), tuned={"offload_ram": 5}, tuned_args=("--kv-transfer-config", LAZY),
        ),
    )  # fmt: skip
    stored = json.loads(json.dumps(asked.as_json()))
    assert Tuning.from_json(stored) == asked
    del stored["subject"]
    assert Tuning.from_json(stored) == replace(asked, subject=None), "as before it was kept"
    assert Tuning.new_name() != Tuning.new_name()
    with pytest.raises(MeasureError, match="cannot be read"):
        Tuning.from_json({"model": "m"})
    with pytest.raises(MeasureError, match="--repeats 0"):
        Tuning(model="m", name="n", goal=Goal.TTFT, workload="offline", repeats=0)


# The model, and what is kept of it.


LAZY = '{"kv_connector": "OverspillConnector", "kv_connector_extra_config": {"host_bytes": 1, "store": "lazy"}}'


def test_settings_kept_by_a_tuning_may_vary_but_user_ones_not(registry: Registry) -> None:
    words = ["--block-size", "32", "--kv-transfer-config", LAZY]
    add_model(registry, "org/m", {"max_num_batched_tokens": 1024, "max_num_seqs": 4, "vllm_args": words})
    found = find_subject(registry, "org/m", None)
    assert found.tuned == {"max_num_batched_tokens": 1024} and found.tuned_args == ("--kv-transfer-config", LAZY)
    assert found.settings == {"max_num_seqs": 4} and found.vllm_args == ("--block-size", "32") and not found.fixed
    plain = Candidate(label="plan", settings={"max_model_len": 4096, "max_num_batched_tokens": 2048})
    edited = keep(registry, found, plain, {}).model.settings
    assert edited == ModelSettings(
        source="org/m",
        max_model_len=4096,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        vllm_args=("--block-size", "32"),
    )


def test_another_connector_is_left_alone(registry: Registry) -> None:
    foreign = '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'
    add_model(registry, "org/m", {"vllm_args": ["--kv-transfer-config", foreign]})
    found = find_subject(registry, "org/m", None)
    assert found.fixed == {"kv_transfer_config"} and found.vllm_args == ("--kv-transfer-config", foreign)


def test_weights_in_ram_are_unset_if_the_best_has_none(registry: Registry) -> None:
    add_model(registry, "org/m", {"weights_ram": "4GiB"})
    found = find_subject(registry, "org/m", None)
    assert found.tuned == {"weights_ram": 4 * GiB} and not found.vllm_args and not found.tuned_args
    current = current_candidate(found, WEIGHTS, {}, 4096)
    assert current is not None and "--weights-ram 4GiB" in current.text({}) and current.things_in_ram >= 1
    keep(registry, found, Candidate(label="plan", settings={"max_model_len": 4096}), {})
    assert get_model(registry, "org/m").settings.weights_ram is None


def test_given_settings_are_kept_but_the_best_overrides_them() -> None:
    subject = Subject(name="m", source="org/m", version=1, tuned={"max_model_len": 1})
    best = Candidate(label="4096 tokens", settings={"max_model_len": 4096})
    kept = settings_to_keep(subject, best, {"ram": "8GiB", "offload_ram": "0", "max_model_len": "128k"})
    assert kept == {
        "max_num_batched_tokens": None, "weights_ram": None, "offload_ram": "0", "ram": "8GiB", "max_model_len": 4096,
        "vllm_args": None,
    }  # fmt: skip


PLAN = Candidate(label="plan", settings={"max_model_len": 4096, "max_num_batched_tokens": 2048})
ROUNDED = Candidate(
    label="fp8", settings={"max_model_len": 4096, "max_num_batched_tokens": 512, "kv_cache_dtype": "fp8"},
    vllm_args=("--kv-transfer-config", LAZY), is_exact=False,
)  # fmt: skip
GIVEN = {"ram": "8GiB"}


def go_on(registry: Registry, began: Subject) -> Subject:
    return resumed(began, registered_subject(registry, began.name), GIVEN, [PLAN, ROUNDED])


@pytest.mark.parametrize("is_new", [True, False])
def test_settings_kept_by_the_tuning_itself_do_not_stop_a_resume(
    registry: Registry, tmp_path: Path, is_new: bool
) -> None:
    """At the end of its time the best so far is kept, and the tuning can be resumed afterwards."""
    (tmp_path / "config.json").write_text("{}")
    before: dict[str, Any] = {"source": str(tmp_path)}
    if not is_new:
        before |= {
            "max_num_seqs": 4, "offload_ram": "1GiB", "gpu_memory_utilization": 0.8, "enforce_eager": True,
            "dtype": "float32", "vllm_args": ["--block-size", "32"],
        }  # fmt: skip
        add_model(registry, "m", before)
    began = find_subject(registry, str(tmp_path), "m")
    assert go_on(registry, began) == began
    for number, best in enumerate((ROUNDED, ROUNDED, PLAN), start=1 if is_new else 2):
        kept = keep(registry, go_on(registry, began), best, GIVEN).model
        assert kept.version <= number
        again = go_on(registry, began)
        assert again.version == kept.version
        assert again.named == began.named, "what is measured is what was measured before"
    expected = add_model(registry, "expected", {**before, "offload_ram": None, **PLAN.settings, **GIVEN}).settings
    assert get_model(registry, "m").settings == expected, "nothing is left of what was kept before"
    edit_model(registry, "m", {"max_num_seqs": 7})
    with pytest.raises(ChangedMeanwhile, match=r"differs in max_num_seqs: [-4] -> 7: ") as refused:
        go_on(registry, began)
    assert "max_num_batched_tokens" not in str(refused.value), "that is the tuning's own"


def test_settings_irrelevant_to_the_server_do_not_stop_a_resume(registry: Registry) -> None:
    add_model(registry, "org/m", {"max_num_seqs": 4})
    began = find_subject(registry, "org/m", None)
    edit_model(registry, "org/m", {"notes": "mine", "ttl": "10m", "keep": True})
    assert go_on(registry, began) == replace(began, version=2)


def test_a_model_that_is_gone_or_another_one_is_told(registry: Registry, tmp_path: Path) -> None:
    add_model(registry, "m", {"source": "org/m", "enforce_eager": False, "vllm_args": ["--block-size", "32"]})
    began = find_subject(registry, "m", None)
    edit_model(registry, "m", {"source": "org/other"})
    with pytest.raises(ChangedMeanwhile, match=r"source: org/m -> org/other.*overspill models edit m --source org/m;"):
        go_on(registry, began)
    remove_model(registry, "m")
    add_it = "overspill models add m --source org/m --no-enforce-eager -- --block-size 32;"
    with pytest.raises(ChangedMeanwhile, match=f"m was removed from the registry.*{add_it}"):
        go_on(registry, began)
    (tmp_path / "config.json").write_text("{}")
    new = find_subject(registry, str(tmp_path), "m")
    add_model(registry, "m", {"source": "org/m"})
    with pytest.raises(ChangedMeanwhile, match=r"another model was added to the registry as m.*another --name"):
        go_on(registry, new)


def test_a_name_that_another_model_has_is_refused(registry: Registry, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert find_subject(registry, str(folder), None) == Subject(name="tiny", source=str(folder))
    add_model(registry, "tiny", {"source": "org/tiny"})
    with pytest.raises(MeasureError, match="it is org/tiny; give this one another name with --name"):
        find_subject(registry, str(folder), None)
    assert find_subject(registry, str(folder), "other").name == "other"
    add_model(registry, "other", {"source": str(folder)})
    assert find_subject(registry, str(folder), "other").version == 1, "the same model, so it is changed"
    with pytest.raises(MeasureError, match="leave out --name"):
        find_subject(registry, "tiny", "other")


def test_documented_flags_match_the_help() -> None:
    told = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "200"}).stdout
    flags = set(re.findall(r"--[a-z][a-z0-9-]+", told)) - {"--help"}
    page = (DOCS / "tune.md").read_text()
    for flag in flags:
        assert f"`{flag}`" in page, flag
    table = set(re.findall(r"^\| `(--[a-z0-9-]+)`", page, re.MULTILINE))
    assert table and table <= flags
