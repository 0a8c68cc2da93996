"""What is compared and what follows from it: configurations, order, intervals, reports; without any engine."""

import csv
import html.parser
import io
import json
import math
import random
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from overspill.experiment.charts import shares
from overspill.experiment.comparison import Column, Repeat, compare, verdict_words
from overspill.experiment.configurations import Configuration, read_configuration, read_configurations
from overspill.experiment.definition import Definition, new_name, require_same, written_configurations
from overspill.experiment.errors import ExperimentError
from overspill.experiment.intervals import (
    Basis,
    Ratio,
    Verdict,
    centre,
    own_interval,
    paired_ratio,
    resampled_ratio,
    t_quantile,
    unpaired_ratio,
)
from overspill.experiment.measures import BY_KEY
from overspill.experiment.peers import PEERS, read_peer, require_usable
from overspill.experiment.progress import Telling, duration, eta
from overspill.experiment.report import Report
from overspill.experiment.schedule import Step, is_last_of_life, remaining, steps
from overspill.experiment.stored import compare_results
from overspill.experiment.text import comparison_as_text
from overspill.registry import Result
from overspill.serve.errors import CannotServe

# Configurations.


def transfer_config(configuration: Configuration) -> dict[str, Any]:
    assert configuration.peer is not None
    name, value = configuration.peer.words
    assert name == "--kv-transfer-config"
    return dict(json.loads(value))


def test_flags_are_settings_of_overspill_and_flags_of_vllm() -> None:
    read = read_configuration("a", "--ram 8GiB --max-model-len 128k --block-size 32 --enforce-eager")
    assert read.is_planned and read.peer is None and read.label == "a"
    assert read.settings == {"ram": "8GiB", "max_model_len": "128k", "enforce_eager": True}
    assert read.vllm_args == ("--block-size", "32")
    assert read_configuration("a", "overspill").is_planned
    assert read_configuration("a", "overspill --ram 8GiB").settings == {"ram": "8GiB"}


def test_weights_in_ram_can_be_compared_with_and_without_a_plan() -> None:
    """Seed commands of weight offload: none and 4 GiB, and UVA against prefetch."""
    assert read_configuration("a", "--cpu-offload-gb 0").vllm_args == ("--cpu-offload-gb", "0")
    plain = read_configuration("b", "vllm --cpu-offload-gb 4")
    assert not plain.is_planned and plain.peer is None and plain.vllm_args == ("--cpu-offload-gb", "4")
    prefetch = read_configuration("c", "vllm --offload-backend prefetch --offload-group-size 4")
    assert prefetch.vllm_args == ("--offload-backend", "prefetch", "--offload-group-size", "4")


@pytest.mark.parametrize(
    ("text", "connector", "extra"),
    [
        ("native:8GiB", "OffloadingConnector", {"cpu_bytes_to_use": 8 << 30}),
        ("simple:1GiB", "SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1 << 30, "lazy_offload": False}),
        ("simple-eager:1GiB", "SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1 << 30, "lazy_offload": False}),
        ("simple-lazy:1GiB", "SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1 << 30, "lazy_offload": True}),
        ("overspill-eager:64MiB,verify=all", "OverspillConnector",
         {"host_bytes": 64 << 20, "store": "eager", "verify": "all"}),
        ("overspill-lazy:64MiB,reserve_bytes=0", "OverspillConnector",
         {"host_bytes": 64 << 20, "store": "lazy", "reserve_bytes": 0}),
        ("lmcache:2GiB", "LMCacheConnectorV1", {}),
    ],
)  # fmt: skip
def test_a_peer_is_vllm_with_its_connector(text: str, connector: str, extra: dict[str, Any]) -> None:
    read = read_configuration("b", f"{text} --block-size 32")
    assert not read.is_planned and read.vllm_args == ("--block-size", "32")
    config = transfer_config(read)
    assert config["kv_connector"] == connector and config["kv_role"] == "kv_both"
    assert config["kv_connector_extra_config"] == extra


def test_vllm_and_overspill_accept_what_peers_are_made_of() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from overspill.kv import plugin
    from overspill.kv.options import Options

    plugin.register()
    for name, peer in PEERS.items():
        if peer.connector is None:
            continue
        config = peer.connector(1 << 30)
        KVTransferConfig(**config)
        assert config["kv_connector"] in KVConnectorFactory._registry, name
        if name.startswith("overspill"):
            assert Options.parse(config["kv_connector_extra_config"]).host_bytes == 1 << 30


def test_lmcache_takes_its_size_from_the_environment_and_must_be_installed() -> None:
    settings = read_peer("lmcache:2GiB")
    assert settings.environment == {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "2"}
    with pytest.raises(ExperimentError, match="pip install lmcache"):
        require_usable(settings, on_cpu=False)


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.needs_gpu])
def test_peers_that_need_a_gpu_are_refused_on_a_cpu(name: str) -> None:
    """vLLM would say so too, half a minute later and less clearly."""
    with pytest.raises(CannotServe, match=f"{name} needs a GPU.* on a CPU there are none, overspill-eager"):
        require_usable(read_peer(f"{name}:1GiB"), on_cpu=True)


def test_none_is_vllm_alone() -> None:
    read = read_configuration("a", "none")
    assert read.label == "none" and read.peer is not None and read.peer.words == ()


@pytest.mark.parametrize(
    ("text", "label", "rest"),
    [
        ("small = --ram 8GiB", "small", "--ram 8GiB"),
        ("no offload=none", "no offload", "none"),
        ("<script>alert(1)</script> = none", "<script>alert(1)</script>", "none"),
        ("vllm --block-size=32", "k", "vllm --block-size=32"),
        ("--ram=8GiB", "k", "--ram=8GiB"),
        ("overspill-lazy:8GiB,verify=all", "overspill-lazy", "overspill-lazy:8GiB,verify=all"),
        ("x = overspill-lazy:8GiB,verify=all", "x", "overspill-lazy:8GiB,verify=all"),
    ],
)
def test_a_label_ends_with_an_equals_sign(text: str, label: str, rest: str) -> None:
    read = read_configuration("k", text)
    assert (read.label, read.text) == (label, rest)


def test_common_flags_are_given_to_all_and_lose_against_a_configurations_own() -> None:
    both = read_configurations(
        [("a", "none --max-num-seqs 4"), ("b", "--ram 8GiB")], "--max-model-len 4k --max-num-seqs 2 --block-size 32"
    )
    assert both[0].vllm_args == ("--max-model-len", "4096", "--block-size", "32", "--max-num-seqs", "4")
    assert both[1].settings == {"max_model_len": "4k", "max_num_seqs": "2", "ram": "8GiB"}
    assert both[1].vllm_args == ("--block-size", "32")


def test_vllm_gets_numbers_written_out_because_it_reads_4k_as_4000() -> None:
    assert read_configuration("a", "vllm --max-model-len 4k").vllm_args == ("--max-model-len", "4096")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("natve:8GiB", "did you mean native?"),
        ("native", "native needs the RAM that it may use; write for example native:8GiB"),
        ("native:", "write for example native:8GiB"),
        ("native:8GiX", "is not a size"),
        ("native:0", "needs some RAM"),
        ("native:8GiB,eviction", "is not an option; write option=value"),
        ("none:8GiB", "takes no size"),
        ("native:8GiB --kv-transfer-config {}", "sets --kv-transfer-config itself"),
        ("vllm 4", "write flags of overspill serve"),
        ("8GiB", "there is no peer '8GiB'"),
        ("--ram 8GiX", "--ram: '8GiX' is not a size"),
        ("--max-model-len many", "--max-model-len: 'many' is not a number of tokens"),
        ("vllm --max-model-len 4.5k", "--max-model-len: '4.5k' is not a number of tokens"),
        ("vllm --ram 8GiB", "--ram is a setting of Overspill's, and vllm is vLLM without a plan"),
        ("none --gpu-memory 8GiB", "--gpu-memory is a setting of Overspill's"),
        ("--port 8000", "--port cannot be used here: servers listen on 127.0.0.1"),
        ("vllm --host 0.0.0.0", "--host cannot be used here"),
        ("vllm --model other", "--model cannot be used here"),
        ("vllm --config x.yaml", "--config cannot be used here"),
        ("--api-key secret", "set VLLM_API_KEY in the environment"),
        ("vllm --hf_token secret", "set HF_TOKEN in the environment"),
        ("vllm --x 'open", "cannot be split into words"),
        (f"{'x' * 80} = none", "at most 60 characters"),
        ("a\x07b = none", "at most 60 characters that can be printed"),
    ],
)
def test_a_mistake_in_a_configuration_is_named(text: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(message)):
        read_configuration("a", text)


def test_a_secret_is_not_repeated_in_the_message() -> None:
    with pytest.raises(ExperimentError) as caught:
        read_configuration("a", "--api-key hunter2")
    assert "hunter2" not in str(caught.value)


def test_two_configurations_at_least_and_no_two_of_one_name() -> None:
    with pytest.raises(ExperimentError, match="nothing to compare"):
        read_configurations([("a", "none")])
    with pytest.raises(ExperimentError, match="two configurations are called 'native'"):
        read_configurations([("a", "native:1GiB"), ("b", "native:2GiB")])
    with pytest.raises(ExperimentError, match="--ram is a setting of Overspill's"):
        read_configurations([("a", "none"), ("b", "--ram 1GiB")], "--ram 8GiB")


# Definitions.


def definition(**changes: Any) -> Definition:
    values: dict[str, Any] = {
        "model": "tiny", "configurations": (("a", "none"), ("b", "native:1GiB")), "common": "--max-model-len 4k",
        "workload": "multi-turn:turns=2", "seed": 7, "repeats": 3, "keeps_engines": False, "expects": "offload",
    }  # fmt: skip
    return Definition(**{**values, **changes})


def test_a_definition_survives_json() -> None:
    asked = definition()
    assert Definition.from_json(json.loads(json.dumps(asked.as_json()))) == asked
    assert Definition.from_json({**asked.as_json(), "of a later version": 1}) == asked
    with pytest.raises(ExperimentError, match="cannot be read"):
        Definition.from_json({"model": "tiny"})


def test_the_command_of_a_definition_says_all_of_it() -> None:
    assert definition(keeps_engines=True).command == (
        "overspill ab tiny --a none --b native:1GiB --common '--max-model-len 4k' --workload multi-turn:turns=2 "
        "--repeats 3 --seed 7 --keep --expect offload"
    )


def test_each_repeat_has_a_seed_of_its_own() -> None:
    assert [definition().seed_of(repeat) for repeat in (1, 2, 3)] == [7, 8, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "--repeats 0 is not possible"),
        ({"repeats": 100_000}, "--repeats 100000 is not possible"),
        ({"seed": -1}, "--seed -1 is negative"),
        ({"expects": "disk"}, "--expect 'disk' is no tier; use offload or spill"),
    ],
)
def test_a_mistake_in_a_definition_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        definition(**changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "other"}, "another model: 'tiny', and not 'other'"),
        ({"repeats": 4}, "another --repeats: 3, and not 4"),
        (
            {"configurations": (("a", "none"), ("b", "native:2GiB"))},
            "--b native:1GiB, and not --a none --b native:2GiB",
        ),
        ({"keeps_engines": True}, "another --keep"),
    ],
)
def test_a_resume_of_something_else_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        require_same(definition(), given, "ab-1")


def test_a_resume_may_leave_out_or_repeat_what_it_was() -> None:
    require_same(definition(), {"model": None, "repeats": 3, "configurations": definition().configurations}, "ab-1")


def test_letters_are_used_in_order() -> None:
    assert written_configurations(["none", "native:1GiB", None, None]) == (("a", "none"), ("b", "native:1GiB"))
    with pytest.raises(ExperimentError, match="--b is missing, and --c is given"):
        written_configurations(["none", None, "native:1GiB"])


def test_names_of_experiments_are_in_the_order_of_time_and_differ() -> None:
    at = datetime(2026, 11, 15, 12, 0, 1, tzinfo=UTC)
    assert new_name(at).startswith("ab-20261115-120001-") and len({new_name(at) for _ in range(20)}) > 1


# Order.


def test_repeats_are_interleaved_and_every_second_one_is_turned_round() -> None:
    order = [(step.repeat, step.label) for step in steps(["a", "b"], 3, keeps_engines=False)]
    assert order == [(1, "a"), (1, "b"), (2, "b"), (2, "a"), (3, "a"), (3, "b")]


def test_kept_engines_have_their_repeats_one_after_the_other() -> None:
    planned = steps(["a", "b"], 2, keeps_engines=True)
    assert [(step.label, step.repeat) for step in planned] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    ends = [is_last_of_life(planned, index, keeps_engines=True) for index in range(4)]
    assert ends == [False, True, False, True]
    assert all(is_last_of_life(planned, index, keeps_engines=False) for index in range(4))


def test_what_is_done_is_not_done_again() -> None:
    planned = steps(["a", "b"], 2, keeps_engines=False)
    assert remaining(planned, {Step(1, "a"), Step(2, "b")}) == [Step(1, "b"), Step(2, "a")]


# Intervals.


def test_students_t_is_that_of_the_tables() -> None:
    assert t_quantile(1) == 12.706 and t_quantile(4) == 2.776 and t_quantile(30) == 2.042
    for freedom, known in ((31, 2.0395), (60, 2.0003), (120, 1.9799), (10**6, 1.9600)):
        assert t_quantile(freedom) == pytest.approx(known, abs=2e-3)


def repeats_of(draw: random.Random, count: int, middle: float, noise: float, shared: list[float]) -> dict[int, float]:
    return {n: middle * shared[n - 1] * math.exp(draw.gauss(0, noise)) for n in range(1, count + 1)}


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_paired_intervals_hold_the_true_ratio_as_often_as_they_say(count: int) -> None:
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


def test_unpaired_intervals_hold_the_true_ratio_as_often_as_they_say() -> None:
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


def test_resampled_intervals_hold_the_true_ratio_of_independent_requests() -> None:
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
def test_what_has_no_logarithm_has_no_ratio(bad: float) -> None:
    assert paired_ratio({1: 1.0, 2: 1.0}, {1: bad, 2: 1.0}) is None
    assert unpaired_ratio([1.0, 1.0], [bad, 1.0]) is None


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (1.2, 1.1, 1.3, Verdict.HIGHER),
        (0.8, 0.7, 0.9, Verdict.LOWER),
        (1.1, 0.9, 1.3, Verdict.NO_DIFFERENCE),
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


def test_repeats_that_are_far_apart_leave_everything_open_without_overflow() -> None:
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
    assert verdict_words(row.measure, row.ratios[2]) == "no difference"
    rate = next(row for row in found.rows if row.measure.key == "output_throughput")
    assert rate.ratios[1] is not None and rate.values == (10.0, 20.0, None)
    assert verdict_words(rate.measure, rate.ratios[1]) == "one repeat: no interval"
    assert rate.ratios[2] is None


def test_where_the_first_did_not_start_the_others_are_compared_with_the_next() -> None:
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
    assert "large is not complete: vLLM ended\n" in f"{text}\n" and "the last lines" not in text


def test_higher_is_better_for_rates_and_worse_for_times() -> None:
    up = Ratio(value=2.0, low=1.9, high=2.1, basis=Basis.PAIRS)
    assert verdict_words(BY_KEY["output_throughput"], up) == "better"
    assert verdict_words(BY_KEY["mean_ttft_ms"], up) == "worse"


def test_with_one_repeat_latencies_are_compared_over_requests_and_rates_are_not() -> None:
    ours = {"mean_ttft_ms": 1000.0, "ttfts": [0.9, 1.1, 1.0, None, 1.0], "output_throughput": 5.0}
    theirs = {"mean_ttft_ms": 500.0, "ttfts": [0.45, 0.55, None, 0.5, 0.5], "output_throughput": 5.0}
    rows = {row.measure.key: row for row in compare([column("a", ours), column("b", theirs)]).rows}
    ttft, rate = rows["mean_ttft_ms"].ratios[1], rows["output_throughput"].ratios[1]
    assert ttft is not None and ttft.basis is Basis.REQUESTS and ttft.value == pytest.approx(0.5)
    assert rate is not None and rate.verdict is Verdict.UNKNOWN


def test_requests_of_other_workloads_are_no_pairs() -> None:
    ours = [{"mean_ttft_ms": value} for value in (100.0, 120.0, 110.0)]
    found = compare([column("a", *ours), column("b", *ours, conditions="other")])
    ratio = found.rows[0].ratios[1]
    assert ratio is not None and ratio.basis is Basis.GROUPS and found.answers[0].compared == 0


def test_answers_that_differ_are_counted_and_told() -> None:
    found = compare([column("a", {"answers": ["x", "y", "z"]}), column("b", {"answers": ["x", "Y", "z"]})])
    assert (found.answers[0].compared, found.answers[0].same) == (3, 2)
    assert "1 of 3 answers of b are not those of a" in comparison_as_text(found)
    same = compare([column("a", {"answers": ["x"]}), column("b", {"answers": ["x"]})])
    assert "All 1 answers of b are those of a." in comparison_as_text(same)


# Reports.


def result(number: int, label: str, repeat: int, ttft: float, /, **changes: Any) -> Result:
    asked = changes.pop("definition", definition(repeats=2))
    values: dict[str, Any] = {
        "id": number, "saved_at": datetime(2026, 1, 1, tzinfo=UTC), "started_at": datetime(2026, 1, 1, tzinfo=UTC),
        "benchmark": "multi-turn", "model": "tiny", "argv": ("vllm", "serve", "--x", "a b"), "experiment": "ab-1",
        "label": label, "repeat": repeat, "gpu": "H200", "driver": "570", "versions": {"vllm": "0.32.0"},
        "environment": {"VLLM_X": "<b>"}, "git_revision": "abc", "plan": {"fits": True},
        "config": {
            "experiment": asked.as_json(), "configuration": {"label": label, "text": f"{label}:1GiB"},
            "workload": "multi-turn:turns=2", "seed": 7 + repeat, "machine": {"cpu": "Xeon"},
        },
        "metrics": {
            "mean_ttft_ms": ttft, "ttfts": [ttft / 1000, ttft / 900], "output_throughput": 1000 / ttft,
            "tokens_from_ram": 512, "peak_ram_bytes": 3 << 30, "answers": ["a"],
            "samples": [{"t": 0.0, "gpu_bytes": None, "ram_bytes": 1 << 30},
                        {"t": 2.0, "gpu_bytes": None, "ram_bytes": 3 << 30}],
        },
    }  # fmt: skip
    return Result(**{**values, **changes})


def four_results(first: str = "none", second: str = "native", **changes: Any) -> list[Result]:
    asked = definition(repeats=2, configurations=(("a", f"{first} = none"), ("b", f"{second} = native:1GiB")))
    return [
        result(1, second, 1, 50.0, definition=asked, **changes),
        result(2, first, 1, 100.0, definition=asked, **changes),
        result(3, first, 2, 104.0, definition=asked, **changes),
        result(4, second, 2, 52.5, definition=asked, **changes),
    ]


def test_stored_repeats_are_compared_in_the_order_of_the_configurations() -> None:
    found = compare_results(four_results())
    assert [each.label for each in found.columns] == ["none", "native"] and found.is_complete
    ratio = found.rows[0].ratios[1]
    assert ratio is not None and ratio.basis is Basis.PAIRS


def test_a_finished_attempt_stands_for_one_that_was_not() -> None:
    attempts = four_results()
    broken = result(9, "none", 2, 1.0, is_complete=False, metrics={"problem": "interrupted"})
    for results in ([*attempts, broken], [broken, *attempts]):
        found = compare_results(results)
        assert found.is_complete and found.columns[0].problem is None
        ttft = next(row for row in found.rows if row.measure.key == "mean_ttft_ms")
        assert ttft.values[0] == pytest.approx(math.sqrt(100 * 104))
    missing = compare_results([*attempts[:2], broken, attempts[3]])
    assert not missing.is_complete and missing.columns[0].problem == "interrupted"


def test_an_experiment_with_a_repeat_missing_says_how_to_go_on() -> None:
    report = Report.of_results(four_results()[:3])
    assert not report.is_complete and report.exit_code == 1
    assert "To go on: overspill ab --resume ab-1" in report.as_text()


def test_a_tier_that_was_not_used_fails_the_report() -> None:
    results = four_results()
    results[0].metrics["tier_problem"] = "offload was not used"  # type: ignore[index]
    report = Report.of_results(results)
    assert report.exit_code == 1
    assert "native: offload was not used" in report.as_text() and "native: offload was not used" in report.as_html()
    assert Report.of_results(four_results()).exit_code == 0


def test_the_text_has_units_ratios_and_the_command() -> None:
    text = Report.of_results(four_results()).as_text()
    for part in ("TTFT, mean", "102 ms", "tok/s", "3 GiB", "native / none", "better", "overspill ab tiny", "H200"):
        assert part in text
    only = Report.of_results(four_results()).as_table("mean_ttft_ms", "tokens_from_ram")
    assert "TTFT, mean" in only and "512" in only and "throughput" not in only


def test_results_of_different_experiments_stand_beside_each_other() -> None:
    other = result(7, "none", 1, 80.0, experiment="ab-2")
    alone = result(8, "x", 1, 90.0, experiment=None)
    report = Report.of_results([result(1, "none", 1, 100.0), other, alone])
    assert [column.label for column in report.comparison.columns] == ["ab-1 none", "ab-2 none", "#8 x"]
    assert report.title == "Results"


def test_results_of_bench_with_a_common_label_are_repeats() -> None:
    plain = {"workload": "offline", "seed": 0}
    broken = result(1, "x", 0, 1.0, repeat=None, config=plain, is_complete=False, metrics={"problem": "stopped"})
    rest = result(2, "x", 0, 50.0, repeat=None, config={**plain, "resumes": 1})
    again = result(3, "x", 0, 52.0, repeat=None, config=plain)
    other = result(4, "y", 0, 60.0, repeat=None, config=plain)
    report = Report.of_results([broken, rest, again, other])
    assert [(column.label, len(column.finished)) for column in report.comparison.columns] == [("x", 2), ("y", 1)]
    assert report.is_complete and report.definition is None and report.experiment == "ab-1"


class Page(html.parser.HTMLParser):
    """Tags in order, checked to be closed; attributes; text."""

    VOID = ("meta", "br", "link", "img", "rect", "path", "circle", "polyline")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_else() -> None:
    text = Report.of_results(four_results()).as_html()
    page = Page(text)
    assert {"svg", "table", "details", "polyline", "rect"} <= set(page.seen)
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "onload", "onclick", "xlink:href"} & names
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    for part in ("102 ms", "3 GiB", "vllm serve --x &#x27;a b&#x27;", "VLLM_X=&lt;b&gt;", "0.32.0", "H200", "abc"):
        assert part in text


def test_nothing_that_a_user_names_runs_in_the_page() -> None:
    evil = "<script>alert(1)</script>"
    text = Report.of_results(four_results(second=evil, model='"><img src=x onerror=y>', argv=(evil,))).as_html()
    page = Page(text)
    assert "script" not in page.seen and "img" not in page.seen and evil not in text
    assert "&lt;script&gt;" in text


def test_csv_has_a_line_for_each_result_and_no_formula() -> None:
    text = Report.of_results(four_results(second="@cmd", model="=1+1")).as_csv()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["id"] for row in rows] == ["1", "2", "3", "4"] and rows[0]["mean_ttft_ms"] == "50"
    assert rows[0]["label"] == "'@cmd" and rows[0]["model"] == "'=1+1" and rows[0]["load_s"] == ""


def test_json_has_numbers_ratios_and_every_result() -> None:
    told = json.loads(json.dumps(Report.of_results(four_results()).as_json()))
    assert told["is_complete"] and told["experiment"] == "ab-1" and len(told["results"]) == 4
    ttft = next(each for each in told["measures"] if each["key"] == "mean_ttft_ms")
    assert ttft["ratios"][1]["verdict"] == "better" and ttft["ratios"][1]["low"] < 0.5 < ttft["ratios"][1]["high"]


def test_the_distribution_of_times_rises_to_all_of_them() -> None:
    assert shares([2.0, 1.0]) == ((0.0, 0.0), (1.0, 0.0), (1.0, 50.0), (2.0, 50.0), (2.0, 100.0))


# Progress.


def test_the_time_left_follows_from_the_steps_before() -> None:
    assert eta([], 3, 5.0) is None
    assert eta([10.0, 20.0], 3, 5.0) == 40.0
    assert eta([10.0], 1, 50.0) == 0.0
    assert [duration(seconds) for seconds in (3, 89, 600, 7200)] == ["3 s", "89 s", "10 min", "2.0 h"]


def test_what_is_told_names_configuration_repeat_and_phase() -> None:
    said: list[str] = []
    telling = Telling(said.append, [Step(1, "none"), Step(1, "native")], 1)
    telling.begin(Step(1, "none"))
    telling.say("starting vLLM")
    telling.end()
    telling.begin(Step(1, "native"))
    telling.say("starting vLLM")
    assert said[0] == "[1/2] none, repeat 1 of 1: starting vLLM"
    assert re.fullmatch(r"\[2/2\] native, repeat 1 of 1: starting vLLM; \d+ s left in all", said[1])
