"""`overspill results`: what was measured, listed, shown, compared and exported, from a real registry."""

import csv
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer

from overspill.cli import app, main
from overspill.measure.experiment import Experiment
from overspill.registry import Result, open_registry, save_result

Overspill = Callable[..., tuple[int, str, str]]
EVIL = "<script>alert(1)</script>"
DEFINITION = Experiment(
    model="qwen", configurations=(("a", "none"), ("b", f"{EVIL} = native:8GiB")), workload="multi-turn", repeats=2
)


def measurement(label: str, repeat: int, ttft: float, /, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "benchmark": "multi-turn", "model": "qwen", "experiment": "ab-1", "label": label, "repeat": repeat,
        "argv": ("vllm", "serve", "Qwen/Qwen3-8B", "--api-key", "hunter2"),
        "environment": {"VLLM_X": "1", "HF_TOKEN": "t"},
        "versions": {"vllm": "0.32.0"}, "gpu": "H200", "driver": "570.1", "git_revision": "abc123",
        "started_at": datetime(2026, 11, 15, 12, 0, tzinfo=UTC) + timedelta(minutes=repeat),
        "config": {"experiment": DEFINITION.as_json(), "configuration": {"label": label, "text": "text of it"},
                   "workload": "multi-turn", "seed": repeat - 1, "parameters": {"turns": 4}},
        "metrics": {"mean_ttft_ms": ttft, "output_throughput": 5000 / ttft, "tokens_from_ram": 4096,
                    "answers": ["x", "y"], "ttfts": [ttft / 1000] * 3},
    }  # fmt: skip
    return Result(**{**values, **changes})


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Overspill:
    """Runs the command on a registry without results: exit code, standard output, standard error."""
    monkeypatch.setenv("OVERSPILL_DATABASE_URL", f"sqlite:///{tmp_path}/registry.db")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(lambda: app(["results", *words]))
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return call


@pytest.fixture
def overspill(empty: Overspill, tmp_path: Path) -> Overspill:
    """The same with an experiment of four repeats, and two results beside it."""
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as registry:
        for label, repeat, ttft in (("none", 1, 100.0), (EVIL, 1, 50.0), (EVIL, 2, 52.0), ("none", 2, 103.0)):
            save_result(registry, measurement(label, repeat, ttft))
        save_result(registry, measurement("x", 1, 80.0, experiment=None, label=None, repeat=None, model="other"))
        broken = {"problem": "the server is gone", "completed": 3}
        save_result(registry, measurement("none", 1, 1.0, experiment="ab-2", metrics=broken, is_complete=False))
    return empty


def test_a_registry_without_results_says_how_to_get_some(empty: Overspill) -> None:
    code, out, _ = empty("list")
    assert code == 0 and "measure with overspill bench or overspill ab" in out
    assert json.loads(empty("list", "--json")[1]) == {"results": []}


def test_results_are_listed_the_newest_first(overspill: Overspill) -> None:
    code, out, _ = overspill("list")
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines] == ["id", "6", "5", "4", "3", "2", "1"]
    assert "not complete" in lines[1] and "100 ms" in lines[-1] and "4,096" in lines[-1] and "tok/s" in lines[-1]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--model", "other"], [5]),
        (["--experiment", "ab-2"], [6]),
        (["--benchmark", "multi-turn", "--limit", "2"], [6, 5]),
        (["--benchmark", "overhead"], []),
        (["--model", "qwen", "--experiment", "ab-1"], [4, 3, 2, 1]),
    ],
)
def test_a_list_can_be_narrowed(overspill: Overspill, words: list[str], found: list[int]) -> None:
    told = json.loads(overspill("list", "--json", *words)[1])
    assert [each["id"] for each in told["results"]] == found


def test_a_result_is_shown_with_everything_but_secrets(overspill: Overspill) -> None:
    code, out, _ = overspill("show", "1")
    assert code == 0
    for part in (
        "qwen",
        "ab-1",
        "H200",
        "570.1",
        "vllm 0.32.0",
        "abc123",
        "VLLM_X=1",
        "vllm serve",
        "100 ms",
        "seed 0",
    ):
        assert part in out
    assert "hunter2" not in out and "HF_TOKEN" not in out
    assert "no: the server is gone" in overspill("show", "6")[1]
    told = json.loads(overspill("show", "1", "--json")[1])
    assert told["metrics"]["mean_ttft_ms"] == 100.0 and told["started_at"].endswith("+00:00")


def test_an_experiment_is_compared(overspill: Overspill) -> None:
    code, out, _ = overspill("compare", "ab-1")
    assert code == 0 and "better" in out and f"{EVIL} / none" in out and "All 4 answers" in out
    told = json.loads(overspill("compare", "ab-1", "--json")[1])
    ttft = next(each for each in told["measures"] if each["key"] == "mean_ttft_ms")
    assert told["is_complete"] and ttft["ratios"][1]["value"] == pytest.approx(0.502, abs=0.001)


def test_single_results_are_compared(overspill: Overspill) -> None:
    code, out, _ = overspill("compare", "1", "5")
    assert code == 0 and "#5 multi-turn" in out and "0.8" in out and "one repeat: no interval" in out
    assert overspill("compare", "5")[0] == 0


@pytest.mark.parametrize("words", [("5", "1"), ("1", "5"), ("2", "1"), ("ab-2", "1"), ("ab-1", "5")])
def test_the_first_name_given_is_the_baseline(overspill: Overspill, words: tuple[str, str]) -> None:
    """The baseline was the lowest number, or the experiment's first configuration."""
    firsts = {"5": "#5 multi-turn", "1": "none", "2": EVIL, "ab-2": "ab-2 none", "ab-1": "none"}
    told = json.loads(overspill("compare", *words, "--json")[1])
    assert told["configurations"][0]["label"] == firsts[words[0]]


def test_a_selection_of_a_complete_experiment_offers_no_resume(overspill: Overspill) -> None:
    for words in (("1", "2"), ("1",)):
        out = overspill("compare", *words)[1]
        assert "Not complete" not in out and "--resume" not in out
    assert json.loads(overspill("compare", "1", "2", "--json")[1])["is_complete"]
    assert "--resume ab-2" in overspill("compare", "6")[1], "all that there is of it"


def test_a_limit_that_no_database_takes_is_refused(overspill: Overspill) -> None:
    code, out, err = overspill("list", "--limit", "99999999999999999999")
    assert code == 2 and not out and "Traceback" not in err
    assert "--limit" in err and "less than or equal to 1000000000" in err


def test_an_experiment_that_is_not_complete_says_so(overspill: Overspill) -> None:
    code, out, _ = overspill("compare", "ab-2")
    assert code == 0 and "the server is gone" in out and "overspill ab --resume ab-2" in out


def test_exports_are_whole_files(overspill: Overspill, tmp_path: Path) -> None:
    for form in ("json", "csv", "html"):
        code, out, err = overspill("export", "ab-1", "--format", form, "--out", str(tmp_path / f"report.{form}"))
        assert code == 0 and "wrote" in out, err
    assert len(json.loads((tmp_path / "report.json").read_text())["results"]) == 4
    rows = list(csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text())))
    assert [row["mean_ttft_ms"] for row in rows] == ["100", "50", "52", "103"]
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and EVIL not in page and "&lt;script&gt;" in page and "hunter2" not in page
    assert "http://" not in page and "https://" not in page


def test_an_export_without_a_file_goes_to_standard_output(overspill: Overspill) -> None:
    assert overspill("export", "1", "--format", "csv")[1].startswith("id,experiment,label")
    assert json.loads(overspill("export", "1", "5")[1])["experiment"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "99"], "there is no result 99 in the registry; the newest is 6"),
        (["show", "ab-1"], "'ab-1' is not the number of a result"),
        (["show", "99999999999999999999"], "is not the number of a result"),
        (["compare", "ab-9"], "neither a result nor an experiment 'ab-9'"),
        (["compare", "0"], "there is no result 0"),
        (["export", "ab-1", "--out", "/nonexistent/x"], "there is no folder /nonexistent"),
        (["export", "ab-1", "--out", "/tmp"], "/tmp is a folder"),
    ],
)
def test_a_mistake_is_one_sentence(overspill: Overspill, words: list[str], message: str) -> None:
    code, out, err = overspill(*words)
    assert code == 2 and message in err and not out and err.count("\n") == 1


def test_a_format_that_is_not_there_is_refused(overspill: Overspill) -> None:
    code, _, err = overspill("export", "1", "--format", "pdf")
    assert code == 2 and "pdf" in err


def test_a_registry_that_cannot_be_opened_exits_with_one(
    empty: Overspill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.db").write_text("not a database" * 100)
    monkeypatch.setenv("OVERSPILL_DATABASE_URL", f"sqlite:///{tmp_path}/broken.db")
    code, out, err = empty("list")
    assert code == 1 and "is not a registry" in err and not out


@pytest.mark.parametrize(("command", "page"), [("ab", "ab.md"), ("results", "results.md")])
def test_every_flag_is_documented(command: str, page: str) -> None:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    text = (Path(__file__).parents[1] / "docs" / page).read_text()
    commands = getattr(found, "commands", {"": found})
    flags = {name for one in commands.values() for parameter in one.params for name in parameter.opts if "--" in name}
    assert len(flags) > 4
    for name in flags - {"--help"}:
        assert f"`{name}`" in text, name
    for name in filter(None, commands):
        assert f"overspill results {name}" in text


def test_a_filter_that_finds_nothing_is_not_an_empty_registry(overspill: Overspill) -> None:
    """`no results yet` was printed, and there were some."""
    code, told, _ = overspill("list", "--model", "nope")
    assert code == 0 and "no results yet" not in told and "shows all results" in told


def test_comparing_different_workloads_warns(overspill: Overspill, tmp_path: Path) -> None:
    """Ratios between a multi-turn and an offline run were printed without a word."""
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as registry:
        other = measurement("none", 1, 90.0, benchmark="offline", experiment=None, config={"workload": "offline:n=4"})
        number = save_result(registry, other).id
    warning = "Ratios compare different workloads too: multi-turn; offline:n=4."
    assert warning in overspill("compare", "1", str(number))[1]
    assert warning in json.loads(overspill("compare", "1", str(number), "--json")[1])["warnings"]
    assert "different workloads" not in overspill("compare", "1", "2")[1]


def test_two_repeats_are_not_called_one(overspill: Overspill) -> None:
    told = overspill("compare", "ab-1")[1]
    assert "One repeat" not in told


def test_export_into_a_missing_folder_is_a_mistake(overspill: Overspill) -> None:
    code, _, told = overspill("export", "1", "--out", "/nonexistent/x.json")
    assert code == 2 and "there is no folder /nonexistent" in told
    page = (Path(__file__).parents[1] / "docs" / "results.md").read_text()
    assert "with 2 for a mistake in the command, such as\na folder that is not there." in page
