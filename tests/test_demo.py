"""The demo runs, prints what the quick start shows, and would notice a wrong answer."""

import dataclasses
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill import demo
from overspill.demo import Offload, Spill, compared, difference
from overspill.verify.workload import Answer
from tests.zygote import cold

QUICK_START = Path(__file__).parents[1] / "docs/quickstart.md"

ANSWER = Answer(
    name="1/1", tokens=(5, 6), logprobs=({5: -0.5, 9: -1.5}, {6: -0.25, 8: -2.0}), prompt_tokens=100, cached_tokens=96,
)  # fmt: skip


def changed(**values: object) -> Answer:
    return dataclasses.replace(ANSWER, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "overspill.demo"], capture_output=True, text=True, timeout=880, check=False
    )


def test_it_ends_well_and_shows_what_moved(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stderr
    for pattern in (
        r"  loaded from RAM +0 +[1-9][\d,]+",
        r"moved to RAM +[1-9][\d,]+ bytes, [1-9]\d* blocks",
        r"came back +[1-9][\d,]+ bytes, [1-9]\d* blocks",
        r"tokens +[1-9]\d* compared, all identical",
        r"log-probabilities +[1-9][\d,]+ compared",
        r"damaged block +1 caught, dropped and recomputed",
    ):
        assert re.search(rf"^{pattern}", parts(finished)[0], re.MULTILINE), (pattern, finished.stdout)


def test_it_serves_a_prompt_of_several_times_the_kv_cache(finished: subprocess.CompletedProcess[str]) -> None:
    spilled = parts(finished)[1]
    for pattern in (
        r"prompt tokens +2,400 in the first turn: 5\.0 times the KV cache of 480",
        r"KV in RAM +[1-9][\d,]+ bytes, [1-9]\d* blocks",
        r"streamed in +[1-9][\d,]+ bytes in [1-9]\d* steps",
        r"written back +[1-9][\d,]+ bytes",
        r"tokens +48 compared, all identical",
        r"log-probabilities +96 compared",
    ):
        assert re.search(rf"^{pattern}", spilled, re.MULTILINE), (pattern, finished.stdout)
    prompt = demo.LONG_PROMPT // demo.BLOCK_TOKENS
    held = re.search(r"^KV in RAM .* (\d+) blocks$", spilled, re.MULTILINE)
    assert held is not None and int(held[1]) >= prompt - 15, "what the KV cache cannot hold is in RAM"


def test_it_ends_with_two_servers_side_by_side(finished: subprocess.CompletedProcess[str]) -> None:
    compared = parts(finished)[2]
    for pattern in (
        r" +stock vLLM +Overspill +Overspill / stock vLLM",
        r"TTFT of returning ones +[\d.,]+ m?s +[\d.,]+ m?s +[\d.]+",
        r"  from RAM +0 +48,384",
        r"All 12 answers of Overspill are those of stock vLLM",
    ):
        assert re.search(rf"^{pattern}", compared, re.MULTILINE), (pattern, finished.stdout)


def parts(finished: subprocess.CompletedProcess[str]) -> list[str]:
    return re.split(r"^(?:Offload|Spill|A/B): ", finished.stdout, flags=re.MULTILINE)[1:]


def test_it_is_short(finished: subprocess.CompletedProcess[str]) -> None:
    assert len(finished.stdout.splitlines()) < 48


# The demo, but for most of what it asks of its engines.
BRIEF = """
import sys
from overspill import demo

def run(folder):
    from overspill.tiny import make_llama

    model = make_llama(folder / "llama")
    for blocks, options in ((20, demo.OFFLOAD_OPTIONS), (None, demo.SPILL_OPTIONS)):
        with demo.start(model, blocks, options, max_model_len=608) as engine:
            demo.Conversations([[7] * 100]).turns(engine, 2)
    return ""

demo.run = run
sys.exit(demo.main())
"""


def test_it_is_quiet() -> None:
    """Libraries are quiet only where they are told so before they are loaded: hence a process that has loaded none."""
    with cold():
        done = subprocess.run([sys.executable, "-c", BRIEF], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "ok: every answer is the one that stock vLLM gives"


def test_the_quick_start_shows_this_output(finished: subprocess.CompletedProcess[str]) -> None:
    shown = re.search(r"```text\n(Overspill demo:.*?)```", QUICK_START.read_text(), re.DOTALL)
    assert shown is not None
    assert facts(shown[1]) == facts(finished.stdout)


def facts(text: str) -> list[str]:
    """Lines with their numbers, but for how many differ by rounding, which depends on the CPU, and but for times and
    sizes of processes."""
    text = re.sub(r"\d[\d,]* differ by rounding", "#", text.replace("all identical", "#"))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [re.split(r" \d", line)[0] if line.startswith(("TTFT", "RAM, peak")) else line for line in lines]


def test_help_gives_an_example() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "overspill.demo", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "python -m overspill.demo" in answer.stdout.splitlines()[0]
    assert "make demo" in answer.stdout


def test_equal_answers_are_equal_and_counted() -> None:
    answers = [ANSWER, changed(name="2/1")]
    assert difference(answers, answers) == ""
    same = compared(answers, answers)
    assert (same.tokens, same.logprobs, same.identical_logprobs) == (4, 8, 8)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (changed(tokens=(5, 7)), "answer 1/1 differs at its token 2 (another token)"),
        (changed(tokens=(5,), logprobs=ANSWER.logprobs[:1]), "(1 tokens instead of 2)"),
        (changed(logprobs=({5: -0.5, 9: -1.5}, {6: -0.25000001, 8: -2.0})), "its token 2 (log-probabilities apart by"),
        (changed(logprobs=({5: -0.5, 7: -1.5}, {6: -0.25, 8: -2.0})), "other candidates"),
        (changed(logprobs=({5: float("nan"), 9: -1.5}, {6: -0.25, 8: -2.0})), "its token 1 (log-probabilities"),
        (changed(logprobs=({5: -0.6, 9: -1.5}, *ANSWER.logprobs[1:]), cached_tokens=0), "apart by 0.1"),
        (changed(tokens=(5, 8), logprobs=(ANSWER.logprobs[0], {6: -0.25, 8: -0.25}), cached_tokens=0), "its token 2"),
    ],
    ids=["token", "shorter", "last bit", "other candidates", "not a number", "more than rounding", "a tie"],
)
def test_a_difference_is_found(other: Answer, why: str) -> None:
    good = changed(name="2/1")
    assert why in difference([good, other], [good, ANSWER])


def test_rounding_is_allowed_where_prompt_chunks_differ() -> None:
    rounded = changed(logprobs=({5: -0.5001, 9: -1.5}, *ANSWER.logprobs[1:]), cached_tokens=0)
    result = compared([rounded], [ANSWER])
    assert not difference([rounded], [ANSWER])
    assert (result.logprobs, result.identical_logprobs) == (4, 3)


def test_a_missing_answer_is_a_difference() -> None:
    assert difference([ANSWER], [ANSWER, ANSWER]) == "there are 1 answers instead of 2"


OFFLOAD = Offload(
    small=[ANSWER],
    large=[ANSWER],
    offloaded=[ANSWER],
    moved={"hit_tokens": 96, "load_bytes": 10, "store_bytes": 10, "corrupt_blocks": 0},
    after_damage={"corrupt_blocks": 1},
    block_bytes=5,
)
SPILL = Spill(
    stock=[ANSWER],
    spilled=[changed(spilled_bytes=20)],
    streamed={"spill_in_bytes": 30, "spill_out_bytes": 20, "spilled_steps": 2},
    cache_blocks=3,
    block_bytes=5,
)
BAD: dict[str, tuple[Offload | Spill, dict[str, Any], str]] = {
    "another answer": (
        OFFLOAD,
        {"offloaded": [changed(tokens=(5, 7))]},
        "with Overspill answer 1/1 differs at its token 2",
    ),
    "nothing loaded": (OFFLOAD, {"moved": {**OFFLOAD.moved, "hit_tokens": 0}}, "nothing was loaded from RAM"),
    "corrupt by itself": (OFFLOAD, {"moved": {**OFFLOAD.moved, "corrupt_blocks": 2}}, "2 block(s) were corrupt before"),
    "damage not caught": (OFFLOAD, {"after_damage": {"corrupt_blocks": 0}}, "one block was damaged and 0 were caught"),
    "another answer from spilled KV": (
        SPILL,
        {"spilled": [changed(spilled_bytes=20, tokens=(5, 7))]},
        "with spill answer 1/1 differs at its token 2",
    ),
    "nothing in RAM": (SPILL, {"spilled": [ANSWER]}, "nothing was streamed from RAM"),
    "nothing streamed": (SPILL, {"streamed": {**SPILL.streamed, "spill_in_bytes": 0}}, "nothing was streamed from RAM"),
}


@pytest.fixture
def quiet_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What main() changes for the whole process goes back. Both parts went well, unless a test says otherwise."""
    monkeypatch.setattr(demo, "ENVIRONMENT", {})
    monkeypatch.setattr("overspill.tiny.make_llama", lambda path: path)
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(demo, "offload", lambda model: OFFLOAD)
    monkeypatch.setattr(demo, "spill", lambda model: SPILL)
    monkeypatch.setattr(demo, "compare_servers", lambda model, folder: "")
    with warnings.catch_warnings():
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet_process")
@pytest.mark.parametrize("name", BAD)
def test_it_fails_with_a_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, change, sentence = BAD[name]
    part = "offload" if good is OFFLOAD else "spill"
    monkeypatch.setattr(demo, part, lambda model: dataclasses.replace(good, **change))
    assert demo.main() == 1
    said = capsys.readouterr()
    assert sentence in said.err and said.err.startswith("FAILED: ")
    assert "ok: " not in said.out
    if good is OFFLOAD:
        assert "identical" not in said.out, "it went on after a failure"


@pytest.mark.usefixtures("quiet_process")
def test_it_fails_if_the_servers_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "compare_servers", lambda model, folder: "the servers could not be compared: why")
    assert demo.main() == 1
    said = capsys.readouterr()
    assert said.err == "FAILED: the servers could not be compared: why\n" and "ok: " not in said.out


@pytest.mark.usefixtures("quiet_process")
def test_it_succeeds_on_good_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    assert capsys.readouterr().out.endswith("ok: every answer is the one that stock vLLM gives\n")
