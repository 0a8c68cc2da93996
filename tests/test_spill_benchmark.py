"""The arithmetic of benchmarks/spill.py: what it would say about measurements whose meaning is known."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import markdown_tables as tables
import spill_plan
import spill_summary
from spill_plan import Load

LINK = {"h2d_bytes_per_second": 50e9}


def answer(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A spilled repeat: 4 GB from RAM for each of 8 tokens, 0.1 s each."""
    said = {
        "length": 131_072,
        "number": number,
        "ttft": 10.0,
        "gaps": [0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1],
        "cached_tokens": 0,
        "prefill": {"spill_in_bytes": 1e9},
        "decode": {"spill_in_bytes": 32e9, "spilled_steps": 8},
        "tokens": [1, 2, 3],
        "logprobs": [-0.5, -0.5, -0.5],
        "runners_up": [7, 8, 9],
        "runner_up_logprobs": [-1.5, -1.5, -1.5],
        "memory": {"gpu_bytes": 24_000_000_000, "rss_bytes": 20_000_000_000},
    }
    return said | changes


def life(name: str, **phases: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name, "model": "m", "kv_cache_dtype": "auto", "error": None, "link": LINK, "phases": phases,
        "failed": [], "notes": [], "max_model_len": 132_000, "block_tokens": 16, "kv_bytes_per_token": 100_000,
    }  # fmt: skip


def test_time_per_token_leaves_out_the_first_after_a_prefill() -> None:
    assert spill_summary.time_per_token(answer()["gaps"]) == 0.1
    assert spill_summary.time_per_token([0.5, 0.1]) == pytest.approx(0.3)
    assert spill_summary.time_per_token([]) is None


def test_link_fraction_is_transfer_time_over_token_time() -> None:
    assert spill_summary.link_fraction(answer(), LINK) == pytest.approx(4e9 / 50e9 / 0.1)
    assert spill_summary.link_fraction(answer(), None) is None
    assert spill_summary.link_fraction(answer(decode={"spill_in_bytes": 0}), LINK) is None


def test_a_difference_between_tokens_nearly_as_likely_is_a_tie() -> None:
    mine = answer(tokens=[1, 2, 9], runners_up=[7, 8, 3], runner_up_logprobs=[-1.5, -1.5, -0.53])
    said = spill_summary.first_difference(mine, answer())
    assert said is not None
    assert (said["index"], said["tokens"], said["is_tie"]) == (2, [9, 3], True)
    assert said["logprob_gap"] == pytest.approx(0.03)


def test_a_difference_between_unlike_tokens_is_no_tie() -> None:
    far = spill_summary.first_difference(answer(tokens=[1, 2, 9]), answer())
    unknown = spill_summary.first_difference(answer(tokens=[1, 5, 3]), answer())
    assert far is not None and far["logprob_gap"] == 1.0 and not far["is_tie"]
    assert unknown is not None and unknown["logprob_gap"] is None and not unknown["is_tie"]


def test_answers_are_compared_with_the_answer_to_the_same_prompt() -> None:
    mine = [answer(0), answer(1, tokens=[4, 5, 6]), answer(2)]
    theirs = [answer(1, tokens=[4, 5, 6], logprobs=[-0.5, -0.75, -0.5]), answer(0)]
    said = spill_summary.compared(mine, theirs)
    assert (said["compared"], said["equal"], said["distinct"]) == (2, 2, 2)
    assert said["largest_logprob_distance"] == 0.25


def test_a_row_of_a_length_sets_spilled_against_all_on_the_gpu() -> None:
    peer = answer(ttft=8.0, gaps=[0.01] * 8, decode={"spill_in_bytes": 0.0, "spilled_steps": 0})
    (row,) = spill_summary.length_rows([life("spill", long=[answer()]), life("gpu", long=[peer])])
    assert row["ttft_ratio"] == 1.25
    assert row["tpot_ratio"] == pytest.approx(10)
    assert row["spill"]["link_fraction"]["median"] == pytest.approx(0.8)
    assert row["tokens"]["equal"] == 1


def test_a_length_that_only_one_life_measured_has_no_ratio() -> None:
    (row,) = spill_summary.length_rows([life("spill", long=[answer()])])
    assert row["ttft_ratio"] is None and row["gpu"]["ttft"] is None and row["tokens"]["compared"] == 0


def test_a_missing_baseline_context_is_computed_from_memory() -> None:
    spilling = life("spill", long=[answer()]) | {"resident_bytes": 3_900_000_000, "window_bytes": 100_000_000}
    computed, spilled = spill_summary.context_rows([spilling | {"arena_bytes": 9}])
    assert computed["context"] == 40_000 - 16
    assert spilled["context"] == 131_075
    assert spilled["over_baseline"] == pytest.approx(131_075 / 39_984)


def test_lives_of_other_models_and_precisions_are_kept_apart() -> None:
    result = {"lives": [life("spill", long=[answer()]), life("gpu", long=[answer()]) | {"kv_cache_dtype": "fp8"}]}
    assert [entry["kv_cache_dtype"] for entry in spill_summary.summarise(result)] == ["auto", "fp8"]


def test_the_long_ones_pace_is_set_against_the_short_ones_time() -> None:
    short = {"tpot": {"count": 1, "median": 0.01}, "itl": {"count": 1, "p99": 0.2}, "ttft": {"count": 0}}
    other = {"requests_spilled": 0, "all_done": True}
    beside = short | other | {"share": 0.5, "long_tokens": 6, "long_seconds": 3.0}
    alone = short | other | {"share": "alone", "tpot": {"count": 1, "median": 0.005}}
    rows = spill_summary.sharing_rows([life("spill", sharing=[beside, alone])])
    assert [(row["share"], row["over_alone"]) for row in rows] == [(0.5, 2.0), ("alone", 1.0)]
    assert rows[0]["long_tokens_per_second"]["median"] == 2.0
    assert spill_plan.arrivals_within([1.0, 2.0, 3.0, 4.0], 1.0, 3.0) == 2


def test_a_table_says_what_failed_and_what_was_skipped() -> None:
    spilling = life("spill", long=[answer()])
    spilling["failed"] = [{"phase": "long 131072", "number": 0, "why": "spilled_steps is 0"}]
    spilling["notes"] = [{"phase": "sharing 131072", "why": "3 s left"}]
    result = {
        "lives": [spilling], "skipped": [{"life": "gpu", "why": "no time"}], "hardware": {"gpu": "H200", "cpu": ""},
        "versions": {"vllm": "0.32.0"},
    }  # fmt: skip
    text = tables.spill_text(result)
    assert "failed: spill (m, KV auto): long 131072 0: spilled_steps is 0" in text
    assert "skipped: spill (m, KV auto): sharing 131072: 3 s left" in text
    assert "skipped: gpu: no time" in text
    assert "| 131,072 | 13.1 | 10 (one run) |" in text


def test_a_prompt_that_should_spill_and_did_not_is_a_problem() -> None:
    load = Load()
    dry = answer(decode={"spill_in_bytes": 0.0, "spilled_steps": 0.0})
    assert spill_plan.problems("long", answer(), 40_000, load) == []
    assert len(spill_plan.problems("long", dry, 40_000, load)) == 2
    assert spill_plan.problems("long", dry, 200_000, load) == []
    assert spill_plan.problems("long", dry, None, load) == []
    assert "not cold" in spill_plan.problems("long", answer(cached_tokens=16), 40_000, load)[0]


def test_a_batch_that_spilled_is_a_problem() -> None:
    batch = {"batch": 64, "spill": {"spilled_steps": 1.0}}
    assert "24576 tokens in all, spilled; 20000 fit" in spill_plan.problems("batch", batch, 20_000, Load())[0]


def test_the_longest_prompts_come_last() -> None:
    order = spill_plan.phase_order(Load(), [524_288, 39_000, 131_072], ["long", "batch", "sharing"])
    assert order == [
        ("long", 39_000),
        ("long", 131_072),
        ("batch", None),
        ("sharing", 131_072),
        ("long", 524_288),
    ]
    assert spill_plan.phase_order(Load(), [524_288], ["long", "sharing"]) == [("long", 524_288)]


def test_room_is_made_for_what_requests_generate() -> None:
    load = Load()
    assert spill_plan.output_room(load, [39_000, 131_072], ["long", "sharing"]) == load.sharing_long_output
    assert spill_plan.output_room(load, [39_000, 131_072], ["long"]) == 3 * load.decode_tokens
    assert spill_plan.output_room(load, [524_288], ["long", "sharing"]) == 3 * load.longest_decode_tokens
    tokens = 132_096 + 16 * 512 + spill_plan.SPARE_TOKENS
    assert spill_plan.spill_bytes(load, ["sharing"], max_model_len=132_096, bytes_per_token=131_072) == tokens * 131_072


def test_each_way_to_decode_has_its_own_time_and_bytes() -> None:
    one = {
        "gaps": [0.5, 0.5, 0.5, 0.1, 0.1, 0.1],
        "decode": {"spill_in_bytes": 6 * 10**9, "spill_far_bytes": 12 * 10**9},
    }
    row = spill_summary.way_row([one])
    assert row["tpot"]["median"] == 0.1
    assert (row["spill_in_bytes"]["median"], row["spill_far_bytes"]["median"]) == (10**9, 2 * 10**9)
    ways = {"shared": row, "graphs": row, "pieces": spill_summary.way_row([])}
    entry = {"lengths": [{"length": 52_000, "ways": ways, "gpu": {"tpot": row["tpot"]}}]}
    assert tables.spill_ways(entry)[1] == [["52,000", "100 (one run)", "–", "100 (one run)", "100 (one run)", "1", "2"]]
    assert not tables.spill_ways({"lengths": [{"ways": {way: ways["pieces"] for way in ways}}]})[1]


def test_time_is_expected_to_grow_with_the_square_of_the_length() -> None:
    assert spill_plan.expected_seconds(40_000, {}) == 0
    assert spill_plan.expected_seconds(80_000, {20_000: 1.0, 40_000: 3.0}) == 12
    assert spill_plan.expected_seconds(10_000, {40_000: 3.0}) == 3


def test_a_length_repeats_as_time_allows_but_at_least_once() -> None:
    assert not spill_plan.enough_repeats(0, 3, 0.0, 0.0, 40.0)
    assert not spill_plan.enough_repeats(1, 3, 18.0, 18.0, 40.0)
    assert spill_plan.enough_repeats(2, 3, 36.0, 18.0, 40.0)
    assert spill_plan.enough_repeats(3, 3, 6.0, 2.0, 40.0)
