"""The demo runs, prints what the quick start shows, and fails where an answer differs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from overspill import demo
from overspill.verify import CannotVerify

QUICK_START = Path(__file__).parents[1] / "docs/quickstart.md"


@pytest.fixture(scope="module")
def finished() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "overspill.demo"], capture_output=True, text=True, timeout=880, check=False
    )


def test_it_ends_well_and_shows_what_came_from_ram(finished: subprocess.CompletedProcess[str]) -> None:
    assert (finished.returncode, finished.stderr) == (0, "")
    for pattern in (
        r"returning +12 +192 +[1-9][\d,]+ +[\d.]+ MiB +- +0 +0",
        r"damaged +8 +128 +[1-9][\d,]+ +[\d.]+ MiB +2 of 2 caught +0 +0",
        r"spilled +8 +128 +[1-9][\d,]+ +[\d.]+ MiB +- +0 +0",
        r"Undetected damage changed the answer",
        r"Verified: 448 tokens with offload and spill are those without",
    ):
        assert re.search(rf"^{pattern}", finished.stdout, re.MULTILINE), (pattern, finished.stdout)
    assert finished.stdout.endswith("ok: every answer is the one that stock vLLM gives\n")


def test_it_ends_with_two_servers_side_by_side(finished: subprocess.CompletedProcess[str]) -> None:
    compared = finished.stdout.partition("Two servers")[2]
    for pattern in (
        r" +stock vLLM +Overspill +Overspill / stock vLLM",
        r"TTFT of returning ones +[\d.,]+ m?s +[\d.,]+ m?s +[\d.]+",
        r"  from RAM +0 +48,384",
        r"All 12 answers of Overspill are those of stock vLLM",
    ):
        assert re.search(rf"^{pattern}", compared, re.MULTILINE), (pattern, finished.stdout)


def test_it_is_short(finished: subprocess.CompletedProcess[str]) -> None:
    assert len(finished.stdout.splitlines()) < 48


def test_the_quick_start_shows_this_output(finished: subprocess.CompletedProcess[str]) -> None:
    shown = re.search(r"```text\n(Overspill demo:.*?)```", QUICK_START.read_text(), re.DOTALL)
    assert shown is not None
    assert words(shown[1]) == words(finished.stdout)


def words(text: str) -> list[str]:
    """Lines without times, sizes, and how many log-probabilities differ by rounding, which depend on the machine."""
    text = re.sub(r"^.*log-probabilities are the same bit by bit.*$", "#", text, flags=re.MULTILINE)
    text = re.sub(r" \(about .*\)|\d[\d.,]*(?: m?s| [MG]iB)?", "#", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_help_gives_an_example() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "overspill.demo", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "python -m overspill.demo" in answer.stdout.splitlines()[0]
    assert "make demo" in answer.stdout


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which parts ran; both end well, unless a test says otherwise. The environment is put back."""
    ran: list[str] = []
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("overspill.tiny.make_llama", lambda path: path)
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(demo, "prove", lambda model: ran.append("prove") or 0)
    monkeypatch.setattr(demo, "compare", lambda model, folder: ran.append("compare") or 0)
    return ran


def test_an_answer_that_differs_ends_it(
    parts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "prove", lambda model: 1)
    assert demo.main() == 1
    assert not parts, "it went on after a failure"
    assert "ok: " not in capsys.readouterr().out


def test_what_cannot_be_proved_is_a_sentence(
    parts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: Path) -> int:
        raise CannotVerify("vLLM is not installed")

    monkeypatch.setattr(demo, "prove", fail)
    assert demo.main() == 1
    assert capsys.readouterr().err == "error: vLLM is not installed\n"


def test_it_fails_if_the_servers_cannot_be_compared(
    parts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "compare", lambda model, folder: 1)
    assert demo.main() == 1
    assert parts == ["prove"] and "ok: " not in capsys.readouterr().out
