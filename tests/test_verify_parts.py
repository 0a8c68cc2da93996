"""What `overspill verify` decides: what is the same, what proves nothing, which sizes, and what is printed."""

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overspill.kv.errors import OverspillError
from overspill.kv.spill.geometry import window_bytes
from overspill.launch.machine import plan_for
from overspill.planning.planner import Plan
from overspill.settings import SETTINGS, resolve
from overspill.verify import CannotVerify, TooNoisy
from overspill.verify.children import ChildDied
from overspill.verify.comparison import (
    Compared,
    Difference,
    Distance,
    Tolerance,
    bounded,
    compare,
    distance,
    most_noise,
    noise,
    parted,
    tolerance,
    too_far,
)
from overspill.verify.report import WEAK, Outcome, Proof, exit_code, faults, merged, verdict
from overspill.verify.run import (
    DEFAULTS,
    Progress,
    can_be_batch_invariant,
    num_engines,
    remaining,
    require_quiet,
    verify,
)
from overspill.verify.scenarios import NAMES, SCENARIOS, Scenario, Tier, chosen, read_request
from overspill.verify.stage import (
    ANSWER,
    CONVERSATION_UNITS,
    EngineSpec,
    engine_spec,
    make_stage,
    other_attention,
    sharing,
)
from overspill.verify.workload import Answer, Ask, Played, Reference, make_script, make_workload

MiB, GiB = 1 << 20, 1 << 30
SCENARIO = {scenario.name: scenario for scenario in SCENARIOS}
LOOSE = Tolerance(logprob=0.1, tie=0.1, same_pieces=False)
STRICT = replace(LOOSE, same_pieces=True)


def answer(*tokens: int, name: str = "a/0", gap: float = 1.0, shift: float = 0.0, **more: Any) -> Answer:
    """Each token is likelier by `gap` than the next number, which is the runner-up."""
    logprobs = tuple({token: -0.5 + shift, token + 1: -0.5 - gap + shift} for token in tokens)
    return Answer(name=name, tokens=tokens, logprobs=logprobs, **more)


def plan(model: Path, **settings: Any) -> Plan:
    given = {"device": "cpu", "dtype": "float32", "gpu_memory": 512 * MiB, "ram": 8 * GiB}
    return plan_for(str(model), {**given, **settings})


# Comparison.


def compared(mine: Answer, theirs: Answer, allowed: Tolerance = LOOSE) -> Any:
    return compare([mine], {theirs.name: theirs}, allowed)


def test_equal_answers_are_counted_token_by_token() -> None:
    result = compared(answer(1, 2, 3), answer(1, 2, 3), STRICT)
    assert (result.requests, result.tokens, result.logprobs, result.identical_logprobs) == (1, 3, 6, 6)
    assert not result.mismatches and not result.ties


def test_another_token_is_a_mismatch_with_its_position() -> None:
    (found,) = compared(answer(1, 9, 3), answer(1, 2, 3)).mismatches
    assert (found.request, found.position, found.token, found.expected_token) == ("a/0", 1, 9, 2)
    assert found.logprob == found.expected_logprob == -0.5


def test_tokens_within_rounding_are_a_tie_and_end_the_comparison() -> None:
    mine = Answer(name="a/0", tokens=(1, 3, 8), logprobs=({1: -1.0}, {2: -1.05, 3: -1.0}, {8: 0.0}))
    theirs = Answer(name="a/0", tokens=(1, 2, 7), logprobs=({1: -1.0}, {2: -1.0, 3: -1.04}, {7: 0.0}))
    result = compared(mine, theirs)
    assert not result.mismatches and result.tokens == 1
    (tie,) = result.ties
    assert (tie.position, tie.token, tie.expected_token) == (1, 3, 2) and tie.gap == pytest.approx(0.05)
    assert compared(mine, theirs, replace(LOOSE, tie=0.01)).mismatches
    assert compared(mine, theirs, STRICT).mismatches, "computed in the same pieces, nothing is rounded otherwise"


def test_a_token_the_reference_did_not_rank_is_not_a_tie() -> None:
    assert compared(answer(1, 9, gap=0.0), answer(1, 2, gap=0.0)).mismatches


def test_a_logprob_beyond_rounding_is_a_mismatch() -> None:
    assert not compared(answer(1, shift=0.05), answer(1)).mismatches
    assert compared(answer(1, shift=0.2), answer(1)).mismatches
    assert compared(answer(1, shift=1e-7), answer(1), STRICT).mismatches


@pytest.mark.parametrize("number", [math.nan, -math.inf, math.inf])
def test_a_logprob_that_is_not_a_number_is_always_a_mismatch(number: float) -> None:
    broken = Answer(name="a/0", tokens=(1,), logprobs=({1: number},))
    assert compared(broken, broken).mismatches


def test_an_answer_of_another_length_is_a_mismatch() -> None:
    (found,) = compared(answer(1, 2), answer(1, 2, 3)).mismatches
    assert found.position == 2 and found.token == -1 and found.expected_token == 3


@pytest.mark.parametrize("other", [{"alone": False}, {"cached_tokens": 128}])
def test_logprobs_must_be_identical_only_after_equal_chunks(other: dict[str, Any]) -> None:
    expected = {"a/0": answer(1), "a/1": answer(1, name="a/1"), "b/0": answer(1, name="b/0")}
    rounded = 1e-6
    assert not compare([answer(1, shift=rounded, **other)], expected, STRICT).mismatches
    after = answer(1, name="a/1", shift=rounded)
    assert compare([answer(1), after], expected, STRICT).mismatches
    assert not compare([answer(1, **other), after], expected, STRICT).mismatches
    beside = answer(1, name="b/0", shift=rounded)
    assert compare([answer(1, **other), beside], expected, STRICT).mismatches, "another conversation is another KV"


def test_noise_is_what_one_engine_differs_from_itself() -> None:
    first = [answer(1, 2, 3), answer(4, name="b/0")]
    assert noise(first, first) == 0
    assert noise(first, [answer(1, 2, 3, shift=0.02)]) == pytest.approx(0.02)
    apart = Answer(name="b/0", tokens=(5,), logprobs=({4: -0.51, 5: -0.5},))
    tied = Answer(name="b/0", tokens=(4,), logprobs=({4: -0.5, 5: -0.53},))
    assert noise([tied], [apart]) == pytest.approx(0.03)
    assert parted([tied], [apart]) == 1 and parted(first, [answer(1, 2, 3, shift=0.02)]) == 0
    # Nine was nowhere near: no tolerance can follow that.
    assert noise([answer(4)], [answer(9)]) == math.inf


def test_the_tolerance_follows_the_dtype_and_what_was_measured() -> None:
    assert tolerance("float32", 1e-6, is_deterministic=True) == Tolerance(1e-3, 1e-3, same_pieces=True)
    assert tolerance("bfloat16", 0.01, is_deterministic=False).tie == 0.25
    assert tolerance("bfloat16", 0.5, is_deterministic=False).logprob == 1.0
    assert tolerance("float32", 0.5, is_deterministic=False).tie == 1e-3, "in float32 no measurement excuses a token"


def test_ties_may_be_a_quarter_or_half_if_vllm_parts_from_itself() -> None:
    assert tolerance("bfloat16", 0.1, is_deterministic=False).tied_share == 0.25
    assert tolerance("bfloat16", 0.1, is_deterministic=False, parts_from_itself=True).tied_share == 0.5


@pytest.mark.parametrize(("dtype", "quiet", "loud"), [("bfloat16", 1.0, 1.01), ("float32", 0.004, 0.0041)])
def test_a_vllm_that_differs_from_itself_too_much_proves_nothing(dtype: str, quiet: float, loud: float) -> None:
    """The tolerance followed what was measured, however much it was."""
    assert most_noise(dtype) == quiet
    require_quiet(dtype, quiet)
    for amount in (loud, math.inf):
        with pytest.raises(TooNoisy, match=f"NOT VERIFIED: vLLM without .*{dtype} proves nothing") as raised:
            require_quiet(dtype, amount)
        assert ("--dtype float32" in str(raised.value)) == (dtype != "float32")


# Distances, where the CPU attends to a part.


def test_a_distance_is_of_decoded_tokens_up_to_the_first_that_differs() -> None:
    expected = {"a/0": answer(1, 2, 3, 4), "b/0": answer(5, 6, name="b/0")}
    found = distance([answer(1, 2, 3, 4, shift=0.25), answer(5, 6, name="b/0")], expected)
    assert found == Distance(tokens=4, differing=0, logprobs=8, total=6 * 0.25, largest=0.25)
    assert found.mean == 1.5 / 8, "the first tokens come from prefill"
    parts = Answer(name="a/0", tokens=(1, 3, 9, 9), logprobs=({1: -0.5}, {2: -1.0, 3: -0.9}, {9: 0.0}, {9: 0.0}))
    found = distance([parts], expected)
    assert (found.tokens, found.differing) == (1, 1) and found.largest == pytest.approx(0.6)
    assert distance([parts], expected) + Distance(1, 0, 1, 0.5, 0.7) == replace(
        found, tokens=2, logprobs=found.logprobs + 1, total=found.total + 0.5, largest=0.7
    )


def test_an_unranked_token_is_less_likely_than_all_ranked_ones_and_a_nan_is_without_end() -> None:
    """An infinite distance of the yardstick once excused everything, or was none."""
    assert distance([answer(1, 9)], {"a/0": answer(1, 2)}).largest == 1.0
    assert distance([answer(9, 2)], {"a/0": answer(1, 2, gap=3.0)}).largest == 3.0, "also where it is the first"
    assert distance([answer(1, 3, shift=0.5)], {"a/0": answer(1, 2)}).largest == 1.5, "2 has no rank, 3 has"
    assert distance([answer(1, 9)], {"a/0": answer(1, 2)}).logprobs == 2, "9 and 2, of which one engine ranked each"
    far = {"a/0": Answer(name="a/0", tokens=(1, 2), logprobs=({1: -0.1}, {2: -0.1, 5: -0.2}))}
    assert distance([answer(1, 9, shift=-3.0)], far).total == pytest.approx(4.4), "9 may be as unlikely in both"
    swapped = Answer(name="a/0", tokens=(1, 3), logprobs=({1: -0.5}, {3: -0.5, 2: -0.75}))
    assert distance([swapped], {"a/0": answer(1, 2)}).logprobs == 2, "both are ranked by both"
    broken = Answer(name="a/0", tokens=(1, 2), logprobs=({1: -0.5}, {2: math.nan, 3: -0.7}))
    assert distance([broken], {"a/0": answer(1, 2)}).largest == math.inf


NEAR = Distance(tokens=100, differing=2, logprobs=500, total=5.0, largest=0.1)


@pytest.mark.parametrize(
    ("own", "yardstick", "said"),
    [
        (NEAR, NEAR, ""),
        (replace(NEAR, total=0.0, largest=0.0), NEAR, ""),
        (replace(NEAR, differing=3, largest=0.2), NEAR, ""),
        (replace(NEAR, total=5.9), NEAR, ""),
        (replace(NEAR, total=6.1), NEAR, "0.012 on average, 0.1 at most, 2 of 100 tokens; with X: 0.01 on"),
        (replace(NEAR, tokens=10_000, total=5.2), NEAR, "too far from those of the GPU alone"),
        (replace(NEAR, largest=0.21), NEAR, "too far from those of the GPU alone"),
        (replace(NEAR, total=math.inf, largest=math.inf), NEAR, "too far from those of the GPU alone"),
        (Distance(), NEAR, "nothing is proven"),
        (NEAR, Distance(), "nothing is proven"),
        (NEAR, replace(NEAR, total=0.0, largest=0.0), "is no valid yardstick"),
        (NEAR, replace(NEAR, total=math.inf, largest=math.inf), "is no valid yardstick"),
        (NEAR, replace(NEAR, differing=51), "is no valid yardstick"),
    ],
)
def test_the_cpu_may_be_as_far_as_another_kernel(own: Distance, yardstick: Distance, said: str) -> None:
    found = too_far(own, yardstick, "X")
    assert said in found and bool(found) == bool(said)
    bad = outcome("shared-attention", distance=own, yardstick=yardstick, yardstick_name="X", figures=FAR)
    assert bad.failure == found and exit_code([bad]) == int(bool(said))


def test_tokens_may_part_where_the_yardstick_moves_them() -> None:
    allowed = bounded(STRICT, NEAR)
    assert allowed == Tolerance(logprob=0.2, tie=0.4, same_pieces=False, tied_share=1.0)
    assert bounded(replace(STRICT, logprob=0.5), NEAR).logprob == 0.5


def test_rounds_add_up_distances() -> None:
    one = outcome("shared-attention", distance=NEAR, yardstick=NEAR, yardstick_name="X", figures=FAR)
    (both,) = merged([one], [replace(one, distance=replace(NEAR, largest=0.15))])
    assert both.distance == Distance(200, 4, 1000, 10.0, 0.15) and both.yardstick.tokens == 200 and not both.failure


def test_both_distances_are_reported(llama: Path) -> None:
    other = replace(NEAR, total=10.0, largest=math.inf)
    found = proof(plan(llama), outcome("shared-attention", distance=NEAR, yardstick=other, yardstick_name="X",
                                       figures=FAR))  # fmt: skip
    text = found.as_text()
    assert "shared-attention: the CPU attended to 3 MiB" in text
    assert "0.01 on average, 0.1 at most, 2 of 100 tokens differ.\nWith X instead: 0.02 on" in text
    (told,) = found.as_json()["scenarios"]
    assert told["yardstick"] == "X" and told["distance"]["mean"] == 0.01 and told["distance"]["differing_tokens"] == 2
    assert told["yardstick_distance"]["largest"] is None


# Outcomes.


FAR = {"spill_in_bytes": MiB, "spilled_tokens": 9, "spill_far_bytes": 3 * MiB}


def outcome(name: str = "returning", **more: Any) -> Outcome:
    figures = {"hit_tokens": 100, "load_bytes": 4096, **more.pop("figures", {})}
    given: dict[str, Any] = {"compared": compare([answer(1, 2)], {"a/0": answer(1, 2)}, STRICT), "awaited": 1, **more}
    return Outcome(scenario=SCENARIO[name], figures=figures, tied_share=0.25, **given)


def tied(ties: int, requests: int, tokens: int = 90) -> Compared:
    found = [Difference(f"a/{number}", 0, 3, 2, "a tie", gap=0.05) for number in range(ties)]
    return Compared(requests=requests, tokens=tokens, ties=found)


def test_equal_answers_with_tokens_from_ram_are_a_proof() -> None:
    assert not outcome().failure and exit_code([outcome()]) == 0
    assert verdict([outcome()]) == "Verified: 2 tokens with offload are those without, while 100 came from RAM."


UNPROVEN: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "no token": ("returning", {"figures": {"hit_tokens": 0}}, "no token came from RAM, so equal answers prove nothing"),
    "no byte": ("returning", {"figures": {"load_bytes": 0}}, "no byte was loaded from RAM"),
    "no stream": ("spilled", {"figures": {"spilled_tokens": 9}}, "no byte was streamed"),
    "no attention on the CPU": (
        "shared-attention", {"figures": FAR | {"spill_far_bytes": 0}}, "the CPU attended to nothing",
    ),
    "no preemption": ("preempted", {}, "no request was preempted"),
    "no fault": ("damaged", {}, "no fault could be injected"),
    "an uncaught fault": (
        "damaged", {"figures": {"injected": 2, "corrupt_blocks": 1, "load_failures": 2}},
        "2 fault(s) were injected, and 1",
    ),
    "an unmade fault": ("returning", {"figures": {"corrupt_blocks": 1}}, "although no fault was injected"),
    "a failed store": ("returning", {"figures": {"store_failures": 3}}, "3 store(s) failed"),
    "a leak": ("returning", {"left_behind": "2 block(s) in RAM"}, "left behind: 2 block(s) in RAM"),
    "a death": ("returning", {"died": "CUDA error"}, "the engine died: CUDA error"),
    "no answer": ("returning", {"compared": Compared(), "awaited": 0}, "no token was compared"),
    "answers without a token": ("returning", {"compared": Compared(requests=1)}, "no token was compared"),
    "a missing answer": ("returning", {"awaited": 2}, "2 answers were expected, and 1 came"),
    "nothing but ties": (
        "returning", {"compared": tied(12, 12, tokens=0), "awaited": 12}, "12 of 12 answers part at a tie",
    ),
    "too many ties": ("returning", {"compared": tied(4, 12), "awaited": 12}, "more than the 3 that rounding may"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPROVEN)
def test_an_outcome_that_proves_nothing_is_a_failure(name: str) -> None:
    scenario, more, said = UNPROVEN[name]
    found = outcome(scenario, **more)
    assert said in found.failure and exit_code([outcome(), found]) == 1
    assert verdict([outcome(), found]).startswith(f"NOT VERIFIED: {scenario}: ")


def test_one_skipped_scenario_passes_but_skipping_all_fails() -> None:
    skipped = Outcome(scenario=SCENARIO["spilled"], skipped="spill does not work with this model's layers")
    assert exit_code([outcome(), skipped]) == 0 and exit_code([skipped]) == 1


def test_an_insensitive_model_weakens_the_proof_and_the_verdict() -> None:
    figures = {"injected": 1, "corrupt_blocks": 1, "load_failures": 1}
    blind = outcome("damaged", figures=figures, sensitive=False)
    assert exit_code([blind]) == WEAK == 3 and "weaker" in verdict([blind])
    assert verdict([blind]).startswith("WEAKLY VERIFIED: 2 tokens")
    assert "weaker" not in verdict([replace(blind, sensitive=True)])
    assert exit_code([replace(blind, sensitive=True)]) == 0
    assert exit_code([blind, outcome(left_behind="a block")]) == 1, "what differs is worse than what is not seen"


def test_some_ties_pass_and_more_where_vllm_ties_with_itself() -> None:
    few, many = (outcome(compared=tied(ties, 12), awaited=12) for ties in (3, 6))
    assert not few.failure and "3 answer(s) part at a tie" in verdict([few])
    assert "too few to prove anything" in many.failure and "--dtype float32" in many.failure
    assert not replace(many, tied_share=0.5).failure


def test_random_weights_that_cannot_tell_prove_nothing() -> None:
    figures = {"hit_tokens": 1, "load_bytes": 1, "injected": 1, "corrupt_blocks": 1, "load_failures": 1}
    blind = outcome("damaged", figures=figures, sensitive=False, must_be_sensitive=True)
    assert exit_code([blind]) == 1 and "did not change the answer" in verdict([blind])
    assert exit_code([replace(blind, sensitive=True)]) == 0


def test_engines_are_eager_unless_graphs_are_asked_for() -> None:
    assert resolve({}, {}, defaults=DEFAULTS)["enforce_eager"].value is True
    assert resolve({"enforce_eager": False}, {}, defaults=DEFAULTS)["enforce_eager"].value is False
    assert resolve({}, {"OVERSPILL_ENFORCE_EAGER": "no"}, defaults=DEFAULTS)["enforce_eager"].value is False


def test_rounds_are_added_up_and_the_first_failure_stays_visible() -> None:
    good = merged(merged((), [outcome()]), [outcome(), outcome("aborted", figures={"injected": 3})])
    assert [one.scenario.name for one in good] == ["returning", "aborted"]
    assert good[0].compared.tokens == 4 and good[0].ram_tokens == 200 and not good[0].failure
    assert good[0].awaited == 2
    bad = merged(good, [replace(outcome(), compared=compared(answer(1), answer(2)))])
    assert bad[0].compared.mismatches and exit_code(bad) == 1


# Sizes.


def test_stages_use_whole_blocks_and_hold_less_than_the_workload(llama: Path) -> None:
    made = plan(llama)
    stage = make_stage(made)
    assert stage.unit % 128 == 0 and stage.max_model_len == stage.unit * stage.units
    assert stage.work_blocks == CONVERSATION_UNITS < stage.pool_blocks < stage.reference_blocks
    assert stage.spill is not None and stage.is_whole and not stage.no_spill
    workload = make_workload(stage, 1)
    together = sum(sum(len(piece) for piece in one.pieces) for one in workload.conversations)
    assert together > stage.work_blocks * 128, "the conversations would all stay on the GPU"
    assert len(workload.longs[0].pieces[0]) * stage.bytes_per_token > stage.spill.resident_bytes / 2


def test_a_context_longer_than_the_reference_holds_is_told(llama: Path) -> None:
    stage = make_stage(plan(llama, gpu_memory=8 * MiB, max_model_len=4096))
    assert not stage.is_whole and stage.max_model_len <= stage.reference_tokens < 4096


def test_a_context_too_short_to_compare_is_refused_with_the_flag(llama: Path) -> None:
    with pytest.raises(CannotVerify, match="give --max-model-len 768 or more"):
        make_stage(plan(llama, max_model_len=512))


def test_recurrent_states_fit_beside_the_verified_spill(models: Any) -> None:
    made = plan(models("gdn-hybrid"))
    stage, way = make_stage(made), made.chosen
    assert stage.spill is not None and way is not None
    geometry, spilled = way.geometry, stage.spill.spill_bytes // stage.block_bytes
    window = window_bytes(spilled, geometry.page_size_bytes, geometry.num_regions)
    assert (stage.spill.resident_bytes - window) // stage.block_bytes > geometry.states_per_request == 2 * 2


def test_a_model_that_cannot_spill_is_verified_without(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.verify.stage.can_spill", lambda facts, geometry, wishes: False)
    stage = make_stage(plan(llama))
    assert stage.spill is None and "spill does not work" in stage.no_spill
    assert not make_workload(stage, 0).longs
    assert num_engines(SCENARIOS, stage) < num_engines(SCENARIOS, replace(stage, no_spill=""))


def test_a_workload_repeats_with_its_seed_within_the_context(llama: Path) -> None:
    stage = make_stage(plan(llama))
    assert make_workload(stage, 7) == make_workload(stage, 7) != make_workload(stage, 8)
    for seed in range(20):
        made = make_workload(stage, seed, varied=True)
        for one in (*made.conversations, *made.longs, *made.shorts, made.fresh, *made.prompts):
            length = sum(len(piece) + ANSWER for piece in one.pieces)
            assert all(one.pieces) and length <= stage.max_model_len
            low, high = stage.token_ids
            assert all(low <= token < high for piece in one.pieces for token in piece)


def test_turns_go_on_from_the_reference(llama: Path) -> None:
    workload = make_workload(make_stage(plan(llama)), 1)

    def reply(ask: Ask) -> Answer:
        return answer(*range(400, 400 + ask.max_tokens), name=ask.name)

    script = make_script(workload, reply, 1)
    first, second, _ = script.conversations[0]
    said = workload.conversations[0].pieces
    assert second.prompt == (*first.prompt, *range(400, 400 + first.max_tokens), *said[1])
    assert first.name == "conversation-1/0" and second.name == "conversation-1/1"


def test_engines_differ_only_in_their_kv_cache(llama: Path) -> None:
    made = plan(llama, max_num_seqs=16, enforce_eager=True)
    stage = make_stage(made)
    reference = engine_spec(made, stage, "m", None, {})
    offload = engine_spec(made, stage, "m", Tier.OFFLOAD, {"verify": "off"})
    spill = engine_spec(made, stage, "m", Tier.SPILL, {})
    both = engine_spec(made, stage, "m", Tier.BOTH, {})
    for life in (reference, offload, spill, both):
        flags = dict(zip(life.flags, life.flags[1:]))
        assert flags["--max-model-len"] == str(stage.max_model_len) and flags["--max-num-seqs"] == "16"
        assert flags["--dtype"] == "float32" and "--enforce-eager" in life.flags
        assert "--kv-transfer-config" not in life.flags
    assert reference.options is None
    assert offload.options is not None and offload.options["verify"] == "off" and "spill_bytes" not in offload.options
    assert spill.options is not None and "host_bytes" not in spill.options
    assert both.options is not None and {"host_bytes", "spill_bytes"} <= both.options.keys()
    assert spill.options["spill_compute"] == both.options["spill_compute"] == "gpu"


def test_the_cpus_share_needs_graphs_on_a_gpu(llama: Path) -> None:
    made = plan(llama, enforce_eager=True)
    on_gpu = replace(made, platform=replace(made.platform, name="cuda"))
    spec = engine_spec(made, make_stage(made), "m", Tier.SPILL, {})
    shared, graphed = sharing(made, spec), sharing(on_gpu, spec)
    for one in (shared, graphed):
        assert one.options is not None and one.options["spill_compute"] == "auto" and one.far_share > 0
    assert shared.flags == spec.flags and "--enforce-eager" not in graphed.flags
    assert json.loads(graphed.flags[-1])["cudagraph_mode"] == "FULL_DECODE_ONLY"
    server = EngineSpec(model="m", flags=("--max-num-seqs", "4"), options={})
    assert sharing(on_gpu, server).flags == server.flags, "with graphs for all, as the reference has them"
    name, other = other_attention(on_gpu, server)
    assert name == "TRITON_ATTN" and other.flags[-2:] == ("--attention-backend", name) and other.attention is None
    assert other_attention(made, server)[1].attention is not None


def test_spill_on_the_gpu_alone_has_no_share_to_verify(llama: Path) -> None:
    stage = make_stage(plan(llama, spill_compute="gpu"))
    assert stage.skips(SCENARIO["shared-attention"]) == "spill_compute is gpu"
    assert not stage.skips(SCENARIO["spilled"]) and not make_stage(plan(llama)).skips(SCENARIO["shared-attention"])


def test_prompts_for_the_cpu_come_in_pairs_and_change_no_others(llama: Path) -> None:
    stage = make_stage(plan(llama))
    found, without = make_workload(stage, 7, prompts=5), make_workload(stage, 7)
    assert len(found.prompts) == 5 and replace(found, prompts=()) == without
    first, second, third = (one.pieces[0] for one in found.prompts[:3])
    half = len(first) // 2
    assert first[:half] == second[:half] and first[half:] != second[half:] and third[:half] != first[:half]


def test_a_users_chunk_is_kept(llama: Path) -> None:
    assert make_stage(plan(llama)).max_num_batched_tokens == 512
    assert make_stage(plan(llama, max_num_batched_tokens=640)).max_num_batched_tokens == 640


def test_no_cpu_is_batch_invariant_and_a_hopper_is(llama: Path) -> None:
    made = plan(llama)
    assert not can_be_batch_invariant(made)
    platform = replace(made.platform, name="cuda")
    for capability, is_invariant in (((9, 0), True), ((8, 9), False), (None, False)):
        gpu = replace(made.gpu, compute_capability=capability)
        assert can_be_batch_invariant(replace(made, platform=platform, gpu=gpu)) is is_invariant


# Engines.


class Lives:
    """In place of processes: every engine answers as the reference does, except for plays with another end."""

    def __init__(self, ends: Mapping[str, Any]) -> None:
        self._ends = ends
        self.options: dict[str, list[Any]] = {}
        """Of the engines that were started, by play."""

    def __call__(self, module: str, environment: Mapping[str, str], *, have_children: bool) -> "Lives":
        return self

    def __enter__(self) -> "Lives":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, work: str, *args: Any, **_: Any) -> Any:
        if work == "reference":
            _, workload, seed = args
            answers = (answer(1, 2, name="conversation-1/0"),)
            script = make_script(workload, lambda ask: answer(1, name=ask.name), seed)
            return Reference(script, {one.name: one for one in answers}, answers)
        spec, play, _ = args
        required = {name: 2 for scenario in SCENARIOS for name in scenario.required}
        faults = dict.fromkeys(SCENARIO[play].faults if play in SCENARIO else (), 2)
        # Another attention kernel rounds differently.
        shift = 1e-4 if play == "shared-attention" and spec.options is None else 0.0
        answers = (answer(1, 2, name="conversation-1/0", shift=shift, spilled_bytes=1 << 20),)
        played = Played(answers, 1, required | faults, "")
        return self._end(spec, play, played)

    def kill_under_way(self, work: str, *args: Any) -> Any:
        spec, play, _ = args
        return self._end(spec, play, "")

    def _end(self, spec: Any, play: str, usual: Any) -> Any:
        # A disk's folder is a temporary one, and never the same.
        options = spec.options and {name: value for name, value in spec.options.items() if name != "disk_path"}
        self.options.setdefault(play, []).append(options)
        end = self._ends.get(play, usual)
        if isinstance(end, Exception):
            raise end
        return end


def lived(
    llama: Path, monkeypatch: pytest.MonkeyPatch, asked: Any, ends: Mapping[str, Any] | None = None
) -> tuple[Proof, Lives]:
    lives, made = Lives(ends or {}), plan(llama)
    monkeypatch.setattr("overspill.verify.run.Children", lives)
    # No engine runs, so none needs a store.
    monkeypatch.setattr("overspill.verify.run.missing", lambda: "")
    store = nullcontext(SimpleNamespace(address="mooncake://127.0.0.1:50051"))
    monkeypatch.setattr("overspill.verify.run.mooncake", lambda *_: store)
    # Not by the clock: a soak ends where something fails.
    progress = Progress(lambda line: None, engines=1, seconds=math.inf if asked.soak else None)
    return verify(made, make_stage(made), str(llama), asked, progress), lives


def test_an_engine_that_shares_no_attention_is_not_tried(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(scenarios=["shared-attention"])
    good, lives = lived(llama, monkeypatch, asked)
    assert exit_code(good.outcomes) == 0 and good.outcomes[0].yardstick_name == "torch's attention"
    shared, other = lives.options["shared-attention"]
    assert shared["spill_compute"] == "auto" and other is None
    found, lives = lived(llama, monkeypatch, asked, {"shared-attention": Played((), 0, {"unshared": 1}, "")})
    assert "does not share attention" in found.outcomes[0].skipped and exit_code(found.outcomes) == 1
    assert len(lives.options["shared-attention"]) == 1
    died, _ = lived(llama, monkeypatch, asked, {"shared-attention": ChildDied("x")})
    assert died.outcomes[0].failure == "the engine died: x"


def test_an_engine_that_dies_before_it_is_killed_was_not_killed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash was told as a kill that left nothing behind, and the scenario passed."""
    asked = request(scenarios=["killed"])
    good, _ = lived(llama, monkeypatch, asked)
    assert exit_code(good.outcomes) == 0 and good.outcomes[0].figure("injected") == 1
    crashed, _ = lived(llama, monkeypatch, asked, {"until-killed": ChildDied("its process ended; its last output: x")})
    (found,) = crashed.outcomes
    assert found.failure == "the engine died: its process ended; its last output: x"
    assert exit_code(crashed.outcomes) == 1 and not found.figure("injected") and not found.figure("caught")
    untidy, _ = lived(llama, monkeypatch, asked, {"until-killed": "after the kill: process 7"})
    assert untidy.outcomes[0].failure == "left behind: after the kill: process 7"


UNTOLD: dict[str, tuple[ChildDied | Played, str]] = {
    "a death": (ChildDied("CUDA error"), "the engine died: CUDA error"),
    "no fault": (Played((answer(1, 2, name="conversation-1/0"),), 1, {}, ""), "no fault could be injected"),
}


@pytest.mark.parametrize("name", UNTOLD)
@pytest.mark.parametrize("load_format", [None, "dummy"])
def test_an_inconclusive_sensitivity_check_is_a_failure(
    llama: Path, monkeypatch: pytest.MonkeyPatch, load_format: str | None, name: str
) -> None:
    """The verdict was "Verified", as where no such check belongs to a scenario."""
    ended, said = UNTOLD[name]
    asked = request(scenarios=["damaged"], load_format=load_format)
    found, _ = lived(llama, monkeypatch, asked, {"damaged-unseen": ended})
    assert exit_code(found.outcomes) == 1
    assert verdict(found.outcomes) == (
        f"NOT VERIFIED: damaged: it is not known whether undetected damage would change the answer: {said}."
    )


def test_a_scenario_of_a_soak_draws_the_same_options_alone(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scenarios drew from one generator: alone, one had other options than among the others."""
    drawn = set()
    for seed in range(8):
        died = {"arrivals": ChildDied("to end the soak after a round")}
        _, all_of_them = lived(llama, monkeypatch, request(soak=True, seed=str(seed)), died)
        for name in NAMES:
            # Whatever it is, the one that is repeated is the last.
            ended = died | {name: ChildDied("again"), "restarted": ChildDied("again")}
            _, alone = lived(llama, monkeypatch, request(soak=True, seed=str(seed), scenarios=[name]), ended)
            assert alone.options
            for play, options in alone.options.items():
                # The last engine of a play that starts two is not reached.
                assert options and options == all_of_them.options[play][: len(options)], (seed, name)
            drawn |= {(one["eviction"], one.get("store")) for one in all_of_them.options.get("returning", ())}
    assert len(drawn) == 4, "and they are drawn"


# What was asked for, and what is told.


def request(**given: Any) -> Any:
    return read_request(**{"quick": False, "soak": False, "minutes": None, "seed": None, "scenarios": [], **given})


def test_by_default_every_scenario_but_the_soaks_runs_once() -> None:
    found = request()
    assert not found.soak and found.seconds is None and found.seed == 0
    assert found.scenarios == chosen((), soak=False) and not any(one.soak_only for one in found.scenarios)
    assert tuple(one.name for one in request(soak=True).scenarios) == NAMES
    assert request().prompts == 8 and request(prompts="200").words == ("--prompts", "200") and not request().words
    assert request(soak=True).seconds == 1800 and request(soak=True, minutes="2").seconds == 120


@pytest.mark.parametrize(
    "given",
    [
        {"quick": True, "soak": True}, {"minutes": "5"}, {"soak": True, "minutes": "-1"},
        {"soak": True, "minutes": "99999"}, {"seed": "٣"}, {"seed": "1e3"}, {"seed": str(2**40)},
        {"scenarios": ["returning", "nothing"]}, {"scenarios": [""]}, {"scenarios": ["arrivals"]},
        {"prompts": "1"}, {"prompts": "9", "scenarios": ["returning"]},
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused_with_its_flag(given: dict[str, Any]) -> None:
    with pytest.raises(OverspillError, match=r"--\w+"):
        request(**given)


def test_every_scenario_has_a_play_and_describes_its_faults() -> None:
    from overspill.verify.plays import PLAYS

    filled = {f"{name}-filled" for name in ("stopped", "torn", "store-killed")}
    played = set(NAMES) - {"killed"} | {"until-killed", "restarted", "damaged-unseen"} | filled
    assert played == set(PLAYS)
    assert faults(outcome("damaged", figures={"injected": 2, "caught": 1})) == "1 of 2 caught"
    assert faults(outcome("aborted", figures={"injected": 8, "caught": 5})) == "8 aborted, 5 in a copy"
    assert faults(outcome("returning")) == "-"


def proof(made: Plan, *outcomes: Outcome, **more: Any) -> Proof:
    given: dict[str, Any] = {
        "seed": 4, "rounds": 1, "seconds": 2.0, "batch_invariant": False, "noise": 1e-5, "tolerance": STRICT, **more,
    }  # fmt: skip
    return Proof(plan=made, stage=make_stage(made), outcomes=outcomes, **given)


def test_a_mismatch_is_told_with_everything_that_repeats_it(llama: Path) -> None:
    made = plan(llama)
    wrong = replace(outcome(), compared=compared(answer(1, 9), answer(1, 2)))
    command = ("overspill", "verify", "/models/a b", "--max-model-len", "4096")
    found = proof(made, wrong, outcome("aborted", figures={"injected": 1}), command=command)
    text = found.as_text()
    assert "MISMATCH seed 4, scenario returning, request a/0, token 1: 9 (-0.500000) instead of 2 (-0.500000)" in text
    repeat = "overspill verify '/models/a b' --max-model-len 4096 --seed 4 --scenario returning"
    assert f"to repeat it: {repeat}\n" in text and found.repeating == repeat
    assert text.splitlines()[-1] == "NOT VERIFIED: returning: 1 of 1 answers differ."
    told = found.as_json()
    assert told["verified"] is False and told["scenarios"][0]["mismatches"][0]["expected_token"] == 2


def test_ties_are_printed_and_counted_apart(llama: Path) -> None:
    made = plan(llama)
    mine = Answer(name="a/0", tokens=(3,), logprobs=({2: -1.05, 3: -1.0},))
    theirs = Answer(name="a/0", tokens=(2,), logprobs=({2: -1.0, 3: -1.04},))
    others = [answer(1, 2, name=f"b/{number}") for number in range(3)]
    found = compare([mine, *others], {one.name: one for one in (theirs, *others)}, LOOSE)
    text = proof(made, outcome(compared=found, awaited=4)).as_text()
    assert "tie in returning, a/0, token 0: 3 or 2, 0.05 apart" in text and "1 answer(s) part at a tie" in text


def test_skipped_scenarios_and_contexts_too_long_are_reported(llama: Path) -> None:
    made = plan(llama, gpu_memory=8 * MiB, max_model_len=4096)
    skipped = Outcome(scenario=SCENARIO["spilled"], skipped="because")
    text = proof(made, outcome(), skipped).as_text()
    assert "spilled was not tried: because." in text and "4,096 tokens, does not fit the reference" in text


def test_engines_without_cuda_graphs_are_told(llama: Path) -> None:
    made = plan(llama, enforce_eager=True)
    on_gpu = replace(made, platform=replace(made.platform, name="cuda"))
    found = proof(made, outcome())
    assert "CUDA graphs" not in found.as_text()
    assert "without CUDA graphs, float32" in replace(found, plan=on_gpu).as_text()
    asked = replace(on_gpu, wishes=replace(on_gpu.wishes, enforce_eager=False))
    assert "CUDA graphs" not in replace(found, plan=asked).as_text()


def test_progress_tells_how_long_it_will_take() -> None:
    said: list[str] = []
    progress = Progress(said.append, engines=4)
    progress.begin("one")
    progress.done += 1
    progress.begin("two")
    assert "one" in said[0] and "left" not in said[0] and "left)" in said[1]
    assert remaining(1, 4, 10.0, None) == " (about 30 s left)" and remaining(0, 4, 10.0, 60.0) == " (50 s left)"
    assert not progress.is_over and Progress(said.append, engines=1, seconds=0.0).is_over


def test_scenarios_cover_both_tiers() -> None:
    assert {scenario.tier for scenario in SCENARIOS} == set(Tier)
    assert all(isinstance(scenario, Scenario) and scenario.required for scenario in SCENARIOS)


def test_the_page_names_every_scenario_and_every_flag() -> None:
    import typer

    from overspill.cli import app

    page = (Path(__file__).parents[1] / "docs/verify.md").read_text()
    command = typer.main.get_command(app).commands["verify"]  # type: ignore[attr-defined]
    settings = {setting.name for setting in SETTINGS} | {"model", "help"}
    flags = {option.opts[0] for option in command.params if option.name not in settings}
    assert {"--soak", "--json"} <= flags
    assert all(f"| `{name}` |" in page for name in (*NAMES, *flags))
