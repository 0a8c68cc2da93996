"""Tables of benchmark results: what they show, and where a document says they come from."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import experiments
import markdown_tables as tables
import results_table

ROOT = Path(__file__).parents[1]


def test_a_connectors_bursts_are_shown_beside_its_median_step() -> None:
    """The median alone was shown: of work that comes in every sixteenth step it shows nothing."""
    calls = {
        "build_connector_meta": {"median": 10.0, "mean": 400.0, "p99": 8000.0},
        "update_connector_output": {"median": 5.0, "mean": 100.0, "p99": 6000.0},
    }
    own = {"schedule": {"median": 900.0, "mean": 900.0, "p99": 900.0}}
    row = {"system": "a", "scenario": "decode", "running": 64, "connector_microseconds": 15.0}
    table = tables.scheduler_cost({"rows": [row | {"microseconds": calls | own}]})
    assert "| a | 15, 500, 14000 |" in table
    assert "| a | – |" in tables.scheduler_cost({"rows": [row | {"error": "it cannot be driven"}]})


def test_the_front_page_has_gain_and_price_and_no_peer_ratio() -> None:
    """A ratio to the best peer stood there; where nothing is loaded, systems differ by as much."""
    page = results_table.render("gains", "offload-h200.json,spill-h200.json,ab-weights-tight-h200.json")
    assert "| stock vLLM | Overspill | price |" in page and len(page.splitlines()) == 5
    assert "×" not in page
    said = results_table.render("control", "offload-h200.json")
    assert "from 14.3 to 30.8 ms for the 8k prompt, from 42.9 to 63 ms for the 64k prompt" in said


@pytest.mark.parametrize(
    ("runs", "said"),
    [(["a"], "commit a"), (["a", "a", "b"], "commits a and b"), ([None], "commit not recorded")],
)
def test_a_caption_names_the_commits_of_all_runs(runs: list[str | None], said: str) -> None:
    first, *rest = ({"versions": {"commit": commit}} for commit in runs)
    assert tables.commits(first | {"resumed": rest}) == said


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md", "docs/plan.md"])
def test_every_result_shown_names_its_hardware_and_commit(document: str) -> None:
    text = (ROOT / document).read_text()
    shown = re.findall(r"<!-- table:[\w-]+ ([^\s>]+) -->", text)
    captions = re.findall(r"<!-- table:(?:[\w-]+-hardware|[\w-]+-where) ([^\s>]+) -->\n(.+)\n", text)
    assert shown and set(",".join(shown).split(",")) == set(",".join(files for files, _ in captions).split(","))
    assert all(re.search(r"\bcommits? [0-9a-f]{7}", line) for _, line in captions), captions


def test_an_experiment_table_shows_ratios_and_incomplete_runs() -> None:
    result = {
        "configurations": [{"label": "a", "repeats": 2, "problem": None},
                           {"label": "b", "repeats": 1, "problem": "interrupted"},
                           {"label": "c", "repeats": 0, "problem": "no room\nmore of it"}],
        "compared_with": "a", "commit": "0123456", "command": "overspill ab", "notes": ["a note"],
        "answers": [{"label": "b", "compared": 4, "same": 3}, {"label": "c", "compared": 0, "same": 0}],
        "measures": [
            {"key": "mean_ttft_ms", "name": "TTFT, mean", "unit": "ms", "values": [100.0, 50.0, None],
             "ratios": [None, {"value": 0.5, "low": 0.4, "high": 0.6}, None]},
            {"key": "peak_ram_bytes", "name": "RAM, peak", "unit": "bytes", "values": [2**30, 3 * 2**30, None],
             "ratios": [None, None, None]},
            {"key": "tokens_from_ram", "name": "  from RAM", "unit": "", "values": [None] * 3, "ratios": [None] * 3},
            {"key": "median_ttft_ms", "name": "not shown", "unit": "ms", "values": [1.0] * 3, "ratios": [None] * 3},
        ],
        "results": [{"gpu": "G", "driver": "1", "versions": {"vllm": "2"}}],
    }  # fmt: skip
    table = tables.experiment(result)
    assert "| TTFT, mean, ms | 100 | 50, ×0.5 (0.4–0.6) | – |\n| RAM, peak, GiB | 1 | 3 | – |\n" in table
    assert "not shown" not in table and "from RAM" not in table
    where = tables.experiment_where(result)
    assert where.startswith("G, driver 1, vllm 2, commit 0123456\n")
    problems = "- b is not complete: interrupted\n- c did not run: no room\n"
    assert where.endswith(f"- 3 of 4 answers of b are those of a\n{problems}- a note\n")


def test_families_show_identity_distance_and_bytes() -> None:
    proven = {"outcome": "proven", "answers": 6, "identical_answers": 6, "tokens": 144, "worst_logprob_difference": 0.0}
    result = {
        "settings": {"features": ["offload eager", "spill", "CUDA graphs"]},
        "families": {
            "A": {"notes": "dense", "features": {
                "offload eager": proven | {"store_bytes": 3 * 2**20, "load_bytes": 2**20, "hit_tokens": 99},
                "spill": proven | {"identical_answers": 4, "worst_logprob_difference": 0.031, "spill_in_bytes": 2**21},
            }},
            "B": {"notes": "odd", "features": {
                "offload eager": {"outcome": "failed", "reason": "AssertionError: answer 0\nmore"},
                "spill": {"outcome": "refused", "reason": "no"},
            }},
        },
    }  # fmt: skip
    table = tables.families(result)
    near = "4 of 6 identical, log-probabilities within 0.031; 2 MiB"
    assert f"| A | dense | 6 of 6 identical; 4 MiB | {near} | – |\n" in table
    assert "| B | odd | failed | refused | – |\n" in table
    assert table.endswith("\n- B, offload eager: failed, AssertionError: answer 0\n- B, spill: refused, no\n")


def test_a_kept_report_has_its_commit_and_no_local_folders() -> None:
    one = {
        "argv": ["/usr/bin/python3", "serve", "/home/me/work/models/a"], "started_at": "2026-01-02", "gpu": "G",
        "config": {"log_file": "/home/me/state/a.log", "seed": 1},
    }  # fmt: skip
    report = {"command": "overspill ab /home/me/work/models/a", "results": [one, one | {"started_at": "2026-01-01"}]}
    kept = experiments.kept(report, commit="0123456", notes=["a note"], folders=["/home/me/work"])
    assert list(kept)[:4] == ["benchmark", "started", "commit", "notes"]
    assert kept["started"] == "2026-01-01" and kept["commit"] == "0123456" and kept["notes"] == ["a note"]
    assert kept["command"] == "overspill ab models/a"
    first = kept["results"][0]
    assert first["argv"] == ["python3", "serve", "models/a"] and first["config"] == {"seed": 1}
    with pytest.raises(SystemExit, match="nothing was measured"):
        experiments.kept({"results": []}, commit="0123456", notes=[], folders=[])


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_a_described_experiment_is_the_one_that_was_measured(name: str) -> None:
    result = json.loads((ROOT / f"benchmarks/results/ab-{name}-h200.json").read_text())
    assert shlex.join(experiments.command_of(name, "models/llama-3.1-8b")) == result["command"]
