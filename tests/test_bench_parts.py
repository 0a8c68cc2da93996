"""What `overspill bench` is made of, each by itself: workloads, scripts, metrics, counters, parts, progress."""

import io
import json
import math
import os
import random
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.conversations import conversation_script
from overspill.measure.measurement import Outcome, Part, joined, part_as_json, part_from_json, require_tier
from overspill.measure.memory import MemorySampler, Sample, _Gpus, thinned
from overspill.measure.metrics import (
    deviation,
    difference,
    goodput_metrics,
    mean,
    parse_counters,
    parse_limits,
    percentile,
    serving_metrics,
    total,
)
from overspill.measure.progress import Progress, ProgressPrinter
from overspill.measure.provenance import git_revision
from overspill.measure.sharegpt import read_conversations
from overspill.measure.target import Answer, RequestFailed, Target, Unavailable, _Stream, parse_url
from overspill.measure.workload import (
    WORKLOADS,
    Piece,
    Vocabulary,
    find_vocabulary,
    parse_workload,
    require_fit,
    write_script,
)
from overspill.processes import ram_of

# Workloads.


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_reads_back_as_it_was_written(name: str) -> None:
    first = WORKLOADS[name].parameters[0].name
    workload = parse_workload(f"{name}:{first}=3")
    assert workload.as_text() == f"{name}:{first}=3" and parse_workload(workload.as_text()) == workload
    assert parse_workload(name).as_text() == name
    assert parse_workload(name).parameters == WORKLOADS[name].defaults


MISTAKES = {
    "multiturn": "did you mean multi-turn? There are overhead, multi-turn, ",
    "": "there is no workload ''",
    "multi-turn:turn=3": "multi-turn has no parameter 'turn'; did you mean turns?",
    "offline:requests": "'requests' in 'offline:requests' has no value; write for example offline:requests=256",
    "offline:requests=": "requests='' is not a whole number from 1",
    "offline:requests=0": "requests='0' is not a whole number from 1",
    "offline:requests=2.5": "is not a whole number",
    "offline:requests=99999999999": "is not a whole number",
    "overhead:rate=0": "rate='0' is not a number from 0.001; rate is requests a second",
    "overhead:rate=nan": "is not a number",
    "overhead:rate=inf": "is not a number",
    "multi-turn:returning=1.5": "returning='1.5' is not a number from 0.0 to 1.0",
    "multi-turn:turns=2,turns=3": "turns is given twice",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_workload_is_one_sentence(text: str) -> None:
    with pytest.raises(MeasureError, match=re.escape(MISTAKES[text])):
        parse_workload(text)


def test_the_page_names_every_workload_parameter_and_flag() -> None:
    from typer.testing import CliRunner

    from overspill.cli import app

    page = (Path(__file__).parents[1] / "docs/bench.md").read_text()
    for kind in WORKLOADS.values():
        assert f"### `{kind.name}`" in page and kind.help[1:] in page
        section = page.partition(f"### `{kind.name}`")[2].partition("\n##")[0]
        for parameter in kind.parameters:
            assert f"| `{parameter.name}` | {parameter.default} | {parameter.help} |" in section
    told = CliRunner().invoke(app, ["bench", "--help"]).stdout
    for flag in set(re.findall(r"--[a-z-]+", told)) - {"--help"}:
        assert f"| `{flag}` |" in page


# Scripts.


def test_a_script_depends_on_the_workload_and_the_seed_alone() -> None:
    workload = parse_workload("multi-turn:conversations=3")
    assert write_script(workload, 1) == write_script(workload, 1) != write_script(workload, 2)


def test_conversations_grow_by_question_and_answer() -> None:
    script = write_script(parse_workload("multi-turn:conversations=2,turns=3,first=100,input=20,output=5"), 0)
    assert [[step.prompt_tokens for step in chain.steps] for chain in script.chains] == [[100, 125, 150]] * 2
    assert [[step.known_tokens for step in chain.steps] for chain in script.chains] == [[0, 105, 130]] * 2
    assert [step.index for step in script.steps] == list(range(6))
    assert script.longest == 155 and script.known_tokens == 2 * 235


@pytest.mark.parametrize(("share", "returning"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_only_the_given_share_returns_and_within_its_time(share: float, returning: int) -> None:
    text = f"multi-turn:conversations=8,turns=3,returning={share},think_time=10"
    script = write_script(parse_workload(text), 0)
    lengths = [len(chain.steps) for chain in script.chains]
    assert sorted(lengths) == [1] * (8 - returning) + [3] * returning
    waits = [step.wait_s for chain in script.chains for step in chain.steps[1:]]
    assert all(5 <= wait <= 15 for wait in waits) and len(set(waits)) == len(waits)


def test_a_group_of_requests_shares_its_prefix_and_nothing_else() -> None:
    script = write_script(parse_workload("shared-prefix:groups=2,requests=3,prefix=50,suffix=7"), 0)
    first = [step.pieces[0].name for step in script.steps]
    assert len(script.steps) == 6 and len(set(first)) == 2 and first[0] == first[2] == first[4] != first[1]
    assert len({step.pieces[1].name for step in script.steps}) == 6
    assert [step.phase for step in script.steps] == ["cold"] * 2 + ["returning"] * 4


def test_long_prompts_come_again_when_all_have_been_there() -> None:
    script = write_script(parse_workload("long-context:prompts=3,passes=2"), 0)
    names = [step.pieces[0].name for step in script.steps]
    assert names[:3] == names[3:] and len(set(names)) == 3 and script.concurrency == 1


def test_an_edit_begins_its_text_again() -> None:
    script = write_script(parse_workload("edit:requests=2,input=80,concurrency=2"), 0)
    assert [[piece.tokens for piece in step.pieces] for step in script.steps] == [[70, 10]] * 2
    assert [{piece.name for piece in step.pieces} for step in script.steps] == [{"edit/0"}, {"edit/1"}]
    assert {step.phase for step in script.steps} == {"cold"} and script.concurrency == 2


def test_requests_of_a_fixed_rate_are_sent_at_that_rate() -> None:
    script = write_script(parse_workload("overhead:requests=3,rate=4"), 0)
    assert [chain.start_s for chain in script.chains] == [0, 0.25, 0.5] and script.concurrency is None


def test_a_workload_that_is_too_long_gets_one_that_fits() -> None:
    with pytest.raises(CannotMeasure) as told:
        require_fit(parse_workload("overhead:requests=2"), 0, 4096)
    assert "needs 9,216 tokens; the server takes 4,096" in str(told.value)
    assert "Use --workload overhead:requests=2,input=3072, or serve with --max-model-len 9216" in str(told.value)
    require_fit(parse_workload("overhead:requests=2,input=3072"), 0, 4096)
    require_fit(parse_workload("overhead"), 0, None)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("have", [9000, 2048, 512])
def test_the_advised_workload_fits(name: str, have: int) -> None:
    workload = parse_workload(name)
    if write_script(workload, 0).longest <= have:
        return
    with pytest.raises(CannotMeasure) as told:
        require_fit(workload, 0, have)
    found = re.search(r"Use --workload (\S+), or", str(told.value))
    assert found is not None
    require_fit(parse_workload(found[1]), 0, have)


# Prompts.


def test_prompts_repeat_with_their_seed_within_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 512}}))
    vocabulary = find_vocabulary(str(tmp_path))
    assert vocabulary == Vocabulary(64, 448)
    ids = json.loads(f"[{vocabulary.draw(Piece('a', 500), 7)}]")
    assert len(ids) == 500 and 64 <= min(ids) < max(ids) < 448
    assert vocabulary.draw(Piece("a", 500), 7) == vocabulary.draw(Piece("a", 500), 7)
    assert len({vocabulary.draw(Piece(name, 9), seed) for name in "ab" for seed in (1, 2)}) == 4


@pytest.mark.parametrize("config", ["{", '{"vocab_size": "many"}', "[]", '{"vocab_size": 3}', None])
def test_without_a_vocabulary_ids_are_those_that_every_model_has(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert find_vocabulary(str(tmp_path)) == find_vocabulary(None) == Vocabulary(100, 1000)


# Metrics.


def answers(count: int, seed: int = 0) -> list[Answer]:
    drawn = random.Random(seed)
    made = []
    for number in range(count):
        gaps = tuple(drawn.expovariate(50) for _ in range(number % 7))
        ttft = drawn.expovariate(3)
        made.append(
            Answer(
                prompt_tokens=drawn.randrange(1, 9000), output_tokens=len(gaps) + 1 + number % 2, started_s=number / 3,
                ttft=ttft, latency=ttft + math.fsum(gaps), gaps=gaps, tokens=tuple(range(number % 5)),
                digest=f"{number:016x}",
            )
        )  # fmt: skip
    return made


def by_vllm(
    made: list[Answer], duration: float, failed: int = 0, limits: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The same samples through vLLM's own calculation."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    outputs = [
        RequestFuncOutput(
            success=True, latency=each.latency, output_tokens=each.output_tokens, ttft=each.ttft, itl=list(each.gaps),
            prompt_len=each.prompt_tokens, start_time=each.started_s,
        )
        for each in made
    ]  # fmt: skip
    outputs += [RequestFuncOutput(success=False, error="none") for _ in range(failed)]
    found, _ = calculate_metrics([], outputs, duration, None, [90.0, 99.0], dict(limits or {}))
    told: dict[str, Any] = {
        "duration": duration, "completed": found.completed, "failed": found.failed,
        "total_input_tokens": found.total_input, "total_output_tokens": found.total_output,
        "request_throughput": found.request_throughput, "output_throughput": found.output_throughput,
        "total_token_throughput": found.total_token_throughput,
    }  # fmt: skip
    for name in ("ttft", "tpot", "itl", "e2el"):
        told |= {f"{each}_{name}_ms": getattr(found, f"{each}_{name}_ms") for each in ("mean", "median", "std")}
        told |= {f"p{percent:g}_{name}_ms": at for percent, at in getattr(found, f"percentiles_{name}_ms")}
    return told if limits is None else {"request_goodput": found.request_goodput}


@pytest.mark.filterwarnings("ignore:All requests failed")
@pytest.mark.parametrize(("count", "failed"), [(100, 0), (1, 0), (2, 3), (0, 2)])
def test_metrics_are_those_that_vllm_calculates(count: int, failed: int) -> None:
    made = answers(count)
    ours = serving_metrics(made, duration=12.5, failed=failed)
    expected = by_vllm(made, 12.5, failed)
    assert ours.keys() == expected.keys()
    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("text", ["ttft:500", "tpot:20", "e2el:2000,ttft:300", "ttft:300 tpot:15"])
def test_goodput_is_what_vllm_calculates(text: str) -> None:
    made, limits = answers(100), parse_limits(text)
    columns = {
        "ttfts": [one.ttft for one in made], "latencies": [one.latency for one in made],
        "output_lens": [one.output_tokens for one in made], "duration": 12.5,
    }  # fmt: skip
    ours = goodput_metrics(columns, limits)
    assert 0 < ours["good_requests"] < 100, "limits that some keep to"
    assert ours["request_goodput"] == pytest.approx(by_vllm(made, 12.5, limits=limits)["request_goodput"])
    assert ours["goodput_percent"] == ours["good_requests"]
    unanswered = {name: [*one, None] for name, one in columns.items() if isinstance(one, list)}
    assert goodput_metrics({**columns, **unanswered}, limits)["goodput_percent"] < ours["goodput_percent"]


@pytest.mark.parametrize("text", ["", "ttft", "ttft:fast", "ttft:0", "latency:5", "ttft:5,ttft:6"])
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(MeasureError, match="write for example ttft:500,tpot:50"):
        parse_limits(text)


CONVERSATIONS = [
    {"id": "a", "conversations": [
        {"from": "system", "value": "be brief"}, {"from": "human", "value": "one two three four"},
        {"from": "gpt", "value": "a b c d e"}, {"from": "human", "value": "and then what now"},
        {"from": "gpt", "value": "f g h i"}, {"from": "human", "value": "the end of it"},
    ]},
    {"messages": [
        {"role": "user", "content": "five six seven eight nine"}, {"role": "assistant", "content": "w x y z"},
    ]},
    {"conversations": [{"from": "gpt", "value": "nobody asked me"}, {"from": "human", "value": "no"}]},
    {"conversations": [{"from": "human", "value": "too short"}, {"from": "gpt", "value": "k l m n"}]},
    {"conversations": [{"from": "human", "value": "long " * 500}, {"from": "gpt", "value": "k l m n"}]},
]  # fmt: skip


def words(text: str, begins: bool) -> list[int]:
    return [len(word) for word in text.split()]


@pytest.mark.parametrize("is_lines", [False, True])
def test_a_file_of_conversations_becomes_a_script(tmp_path: Path, is_lines: bool) -> None:
    file = tmp_path / "chats.json"
    lines = "\n".join(json.dumps(one) for one in CONVERSATIONS)
    file.write_text(lines if is_lines else json.dumps(CONVERSATIONS))
    workload = parse_workload("file:turns=3,conversations=4", str(file))
    assert parse_workload(workload.as_text(), str(file)) == workload and str(file) not in workload.as_text()
    script, notes = conversation_script(workload, 0, 200, words)
    asked = {tuple((step.prompt_tokens, step.output, step.known_tokens) for step in one.steps) for one in script.chains}
    assert asked == {((4, 5, 0), (13, 4, 9)), ((5, 4, 0),)}, "each turn sends all that was said before it"
    assert notes == [f"only 2 of 4 conversations: no more of {file} fit"]
    assert [step.index for step in script.steps] == [0, 1, 2]
    first = next(step for step in script.steps if step.prompt_tokens == 5)
    assert Vocabulary(100, 1000).draw(first.pieces[0], 0) == "4,3,5,5,4", "real tokens, and none drawn"
    orders = {conversation_script(workload, seed, None, words)[0].chains[0].steps[0].pieces for seed in range(9)}
    assert len(orders) == 3, "the seed draws them"
    one = parse_workload("file:conversations=1,output=7,rate=2", str(file))
    assert [step.output for step in conversation_script(one, 0, 200, words)[0].steps] == [7]
    brief = parse_workload("file:conversations=1,output=1", str(file))
    assert [step.output for step in conversation_script(brief, 0, 200, words)[0].steps][:1] == [1]
    with pytest.raises(CannotMeasure, match="at least 4 tokens each and have no more than 3 with it"):
        conversation_script(workload, 0, 3, words)
    with pytest.raises(CannotMeasure, match=r"at least 4 tokens each$"):
        conversation_script(workload, 0, None, lambda text, begins: [1])
    with pytest.raises(MeasureError, match="needs a server's tokenizer, so only overspill bench takes it"):
        write_script(workload, 0)


def test_texts_may_have_any_character_and_parts(tmp_path: Path) -> None:
    """JSON allows line separators of Unicode in a text; editors begin files with a byte-order mark."""
    parts = [{"type": "text", "text": "in two "}, {"type": "text", "text": "parts"}]
    picture = [{"type": "image_url", "image_url": {"url": "a"}}]
    chats = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "so\u2028it\x85is"}]}
        for one in (parts, picture, "plain")
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\ufeff" + "\n\n".join(json.dumps(one, ensure_ascii=False) for one in chats) + "\n")
    answer = "so\u2028it\x85is"
    assert read_conversations(str(file)).turns == ((("in two parts", answer),), (("plain", answer),))


@pytest.mark.parametrize(("content", "why"), [
    (None, "cannot be read"), ("{", "is not JSON"), ("[]", "no conversation"), ('["hello"]', "it should be a list of"),
])  # fmt: skip
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: str | None, why: str) -> None:
    file = tmp_path / "chats.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(MeasureError, match=why):
        parse_workload("file", str(file))


@pytest.mark.parametrize("text", ["file", "file:turns=3", "file:/etc/passwd", "file:/etc/passwd,turns=3"])
def test_the_text_of_a_workload_opens_no_file(text: str) -> None:
    """It may come from the manager's page, which may name no file of the machine."""
    with pytest.raises(MeasureError, match="--workload file and --prompts FILE need each other"):
        parse_workload(text)


def test_a_file_is_for_its_own_workload(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="need each other"):
        parse_workload("multi-turn", str(tmp_path / "chats.json"))


def test_statistics_are_numpys() -> None:
    values = [random.Random(3).gauss(5, 2) for _ in range(501)]
    assert mean(values) == pytest.approx(np.mean(values), rel=1e-12)
    assert deviation(values) == pytest.approx(np.std(values), rel=1e-12)
    for percent in (0, 50, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)


# The stream.


def events(*data: Any) -> bytes:
    return b"".join(f"data: {json.dumps(each)}\n\n".encode() for each in data) + b"data: [DONE]\n\n"


def choice(token: int, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": f" t{token}", "token_ids": [token], **more}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_an_answer_is_the_same_however_it_is_cut_into_pieces(size: int) -> None:
    long = choice(5, prompt_token_ids=list(range(3000)))
    content = b": ping\n\n" + events(long, choice(6), choice(7), USAGE)
    stream = _Stream(sent=10.0)
    for number, start in enumerate(range(0, len(content), size)):
        stream.feed(content[start : start + size], 11.0 + number)
    answer = stream.answer(0.5)
    assert answer.tokens == (5, 6, 7) and answer.prompt_tokens == 9 and answer.output_tokens == 3
    assert len(answer.gaps) == 2 and answer.ttft + math.fsum(answer.gaps) == pytest.approx(answer.latency)
    # From when it began to arrive, so the prompt's ids are not waited for.
    assert answer.ttft == 1.0 + (len(b": ping\n\n") // size if size < 50 else 0)


def test_events_may_have_other_fields() -> None:
    stream = _Stream(sent=10.0)
    stream.feed(events(choice(5), USAGE).replace(b"data: ", b"event: token\r\nid: 1\r\ndata:"), 11.0)
    assert stream.answer(0.0).tokens == (5,)


BROKEN = {
    "cut off": (events(choice(1))[:-14], Unavailable, "broke off"),
    "an error": (events({"error": {"message": "EngineCore died"}}), Unavailable, "EngineCore died"),
    "aborted": (events(choice(1, finish_reason="abort")), RequestFailed, "ended the answer: abort"),
    "not JSON": (b"data: <html>\n\n", RequestFailed, "not what OpenAI's API gives"),
    "no token": (events(USAGE), RequestFailed, "no token"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_incomplete_answer_is_an_error(name: str) -> None:
    content, kind, why = BROKEN[name]
    stream = _Stream(sent=0.0)
    with pytest.raises(kind, match=why):
        stream.feed(content, 1.0)
        stream.answer(0.0)


def test_without_token_ids_the_text_tells_answers_apart() -> None:
    digests = set()
    for word in ("a", "b", "a"):
        stream = _Stream(sent=0.0)
        stream.feed(events({"choices": [{"text": word}]}), 1.0)
        answer = stream.answer(0.0)
        assert answer.tokens is None and answer.output_tokens == 1
        digests.add(answer.digest)
    assert len(digests) == 2


# Counters.

BEFORE = """# HELP vllm:prefix_cache_hits_total Prefix cache hits.
vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 100.0
vllm:prefix_cache_hits_total{engine="1",model_name="a b"} 1.0
vllm:external_prefix_cache_hits_total{engine="0"} 7.0
vllm:prompt_tokens_total{engine="0"} 1e+03
vllm:num_preemptions_total{engine="0"} 0.0
vllm:prompt_tokens_created{engine="0"} 1.7e+09
overspill_load_seconds_total{engine="0"} 0.5
overspill_pool_bytes{engine="0"} 64.0
"""


def test_counters_sum_over_engines_and_report_growth() -> None:
    before = parse_counters(BEFORE, "m")
    assert before is not None and before["tokens_from_gpu_cache"] == 101 and "pool_bytes" not in before
    after = parse_counters(BEFORE.replace(" 7.0", " 57.0").replace(" 0.5", " 1.25"), "m")
    grown = difference(before, after)
    assert grown["tokens_from_ram"] == 50 and grown["prompt_tokens"] == 0 and grown["load_seconds"] == 0.75
    assert grown["spill_in_bytes"] is None, "a server without spill does not count it"


def test_missing_or_restarted_counters_are_unknown() -> None:
    before = parse_counters(BEFORE, "m")
    assert parse_counters("<html>", "m") is None
    assert set(difference(before, None).values()) == set(difference(None, before).values()) == {None}
    assert difference(before, parse_counters(BEFORE.replace(" 7.0", " 3.0"), "m"))["tokens_from_ram"] is None
    assert total({"a": 1, "b": None, "c": 1}, {"a": 2, "b": 3}) == {"a": 3, "b": None, "c": None}


@pytest.mark.parametrize(
    ("metrics", "expects", "told"),
    [
        ({"tokens_from_ram": 5}, "offload", None),
        ({"tokens_from_ram": 0}, "offload", "offload was not used"),
        ({"tokens_from_ram": None}, "offload", "is not known"),
        ({"spill_in_bytes": 0}, "spill", "spill was not used"),
        ({"spill_in_bytes": 9}, "spill", None),
        ({}, None, None),
    ],
)
def test_a_tier_that_served_nothing_is_told(metrics: dict[str, Any], expects: Any, told: str | None) -> None:
    sentence = require_tier(Outcome(metrics=metrics, is_complete=True, answers=[]), expects)
    assert sentence is None if told is None else told in str(sentence)


# Parts.


def test_a_part_is_kept_and_read_back() -> None:
    script = write_script(parse_workload("multi-turn:conversations=4,turns=3"), 0)
    samples = [Sample(0.5 * i, None, i, 2 * i) for i in range(20)]
    made = dict(enumerate(answers(9)))
    part = Part(vocabulary=Vocabulary(1, 9), duration=3.5, answers=made, counters={"a": 1, "b": None}, samples=samples)
    back = part_from_json(json.loads(json.dumps(part_as_json(part, script))))
    assert (back.vocabulary, back.duration, back.counters, back.samples) == (
        part.vocabulary, part.duration, part.counters, part.samples
    )  # fmt: skip
    for index, answer in made.items():
        assert replace(back.answers[index], gaps=(), tokens=None) == replace(answer, gaps=(), tokens=None)
        assert back.answers[index].gaps == pytest.approx(answer.gaps, rel=1e-6)
        # The first conversation has its three turns (requests 0, 4 and 8), so nothing follows on its answers.
        assert back.answers[index].tokens == (None if index in (0, 4, 8) else answer.tokens)


def test_parts_follow_each_other() -> None:
    first, second = answers(2), answers(2, seed=1)
    one = Part(vocabulary=Vocabulary(1, 9), duration=10.0, answers={0: first[0]}, counters={"a": 1}, samples=[])
    two = replace(one, duration=2.0, answers={1: second[1]}, samples=[Sample(1.0, 1, 2, 3)])
    both = joined(one, two)
    assert both.duration == 12.0 and both.counters == {"a": 2} and set(both.answers) == {0, 1}
    assert both.answers[1].started_s == 10.0 + second[1].started_s and both.samples[0].t == 11.0


@pytest.mark.parametrize("kept", [{}, {"packed": "!"}, {"packed": "eJwLLQ4BAAJxAXM="}])
def test_a_part_that_is_damaged_is_not_guessed(kept: dict[str, Any]) -> None:
    with pytest.raises(MeasureError, match="measure it anew"):
        part_from_json(kept)


# Memory.


def test_memory_is_sampled_and_thinned_without_losing_a_peak() -> None:
    with MemorySampler(pid=os.getpid(), is_here=True) as memory:
        held = bytearray(64 << 20)
        held[:: 1 << 12] = b"\1" * len(held[:: 1 << 12])
    assert memory.last is not None and memory.last.ram_bytes is not None
    assert ram_of([os.getpid()]) > len(held)
    assert ram_of([1 << 30]) == 0, "a process that is gone has none"
    gone = MemorySampler(pid=1 << 30, is_here=True)._sample(None)
    assert gone.ram_bytes is None and gone.machine_ram_bytes, "and the machine's is not its own"
    samples = [Sample(float(i), i, None, 5) for i in range(1001)]
    few = thinned(samples)
    assert len(few) <= 200 and few[0].t == 0 and max(each.gpu_bytes or 0 for each in few) == 1000
    assert thinned([]) == []


def test_nothing_is_sampled_for_a_server_elsewhere() -> None:
    with MemorySampler(pid=None, is_here=False) as memory:
        pass
    assert memory.samples == [] and not Target(url="http://192.0.2.1:80", model="a").is_here
    assert Target(url="http://localhost:80", model="a").is_here


# Progress.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_few_elsewhere() -> None:
    told = Progress(done=3, total=9, earlier=1, elapsed_s=4.0, gpu_bytes=3 << 30, ram_bytes=None)
    assert told.as_text() == "3/9 requests in 4 s, 0.50/s, 12 s left, GPU 3 GiB"
    none = Progress(done=0, total=9, earlier=0, elapsed_s=0.0, gpu_bytes=None, ram_bytes=1 << 30)
    assert none.eta_s is None and none.as_text() == "0/9 requests in 0 s, 0.00/s, RAM 1 GiB"
    terminal = Terminal()
    printer = ProgressPrinter(terminal)
    for each in (told, none):
        printer(each)
    printer.end()
    first, second = terminal.getvalue().split("\r")[1:]
    assert first == told.as_text() and second == f"{none.as_text():{len(first)}}\n"
    clock = iter([0.0, 1.0, 5.5, 5.5, 6.0]).__next__
    plain = io.StringIO()
    printer = ProgressPrinter(plain, clock)
    for _ in range(3):
        printer(told)
    printer.end()
    assert plain.getvalue() == f"{told.as_text()}\n"


# Addresses, and where it runs from.


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host", "http://host"),
        ("https://host:1/v1/", "https://host:1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://host/a/v1", "http://host/a"),
    ],
)
def test_addresses_are_taken_as_people_write_them(text: str, url: str) -> None:
    assert parse_url(text) == url


@pytest.mark.parametrize("text", ["", "ftp://host", "http://", "http://host:99999", "http://a b", "host:port", "/v1"])
def test_a_malformed_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(MeasureError, match="write for example http"):
        parse_url(text)


def test_the_revision_is_that_of_a_checkout_and_of_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "overspill"
    package.mkdir()
    (package / "__init__.py").touch()
    assert git_revision(package) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_revision(package) is None, "installed into a checkout of something else"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    revision = git_revision(package)
    assert revision is not None and re.fullmatch("[0-9a-f]{40}", revision)
    (package / "__init__.py").write_text("changed")
    assert git_revision(package) == f"{revision}+"


# GPUs.


class Nvml:
    """Two GPUs as NVML tells of them; the server's process is on the second."""

    NVMLError = OSError

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=100 << handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=41)] if handle else []


def test_gpu_memory_is_that_of_the_gpus_that_the_server_uses() -> None:
    gpus = _Gpus(Nvml())
    assert gpus.used_bytes([]) == gpus.used_bytes([7]) == 300, (
        "of all, where the server's processes are not known there"
    )
    assert gpus.used_bytes([41, 42]) == 200
    assert gpus.used_bytes([]) == 200, "still, when the server is gone"
