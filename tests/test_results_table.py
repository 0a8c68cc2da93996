"""Tables of benchmark results: what they show, and where a document says they come from."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import results_table
import spill_tables

ROOT = Path(__file__).parents[1]


def test_a_connectors_bursts_are_shown_beside_its_median_step() -> None:
    """The median alone was shown: of work that comes in every sixteenth step it shows nothing."""
    calls = {
        "build_connector_meta": {"median": 10.0, "mean": 400.0, "p99": 8000.0},
        "update_connector_output": {"median": 5.0, "mean": 100.0, "p99": 6000.0},
    }
    own = {"schedule": {"median": 900.0, "mean": 900.0, "p99": 900.0}}
    row = {"system": "a", "scenario": "decode", "running": 64, "connector_microseconds": 15.0}
    table = results_table.scheduler_cost({"rows": [row | {"microseconds": calls | own}]})
    assert "| a | 15, 500, 14000 |" in table
    assert "| a | – |" in results_table.scheduler_cost({"rows": [row | {"error": "it cannot be driven"}]})


def test_the_front_page_has_the_control_and_no_ratio_that_it_could_explain() -> None:
    """A ratio to the best peer stood there; where nothing is loaded, systems differ by as much."""
    page = results_table.render("summary", "offload-h200.json")
    assert "control: from the GPU's cache" in page and "best peer" not in page
    said = results_table.render("control", "offload-h200.json")
    assert "from 14.3 to 30.8 ms for the 8k prompt, from 42.9 to 63 ms for the 64k prompt" in said


@pytest.mark.parametrize(
    ("runs", "said"),
    [(["a"], "commit a"), (["a", "a", "b"], "commits a and b"), ([None], "commit not recorded")],
)
def test_a_caption_names_the_commits_of_all_runs(runs: list[str | None], said: str) -> None:
    first, *rest = ({"versions": {"commit": commit}} for commit in runs)
    assert spill_tables.commits(first | {"resumed": rest}) == said


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md"])
def test_every_result_that_is_shown_says_where_and_at_which_commit_it_was_measured(document: str) -> None:
    text = (ROOT / document).read_text()
    shown = set(re.findall(r"<!-- table:[\w-]+ ([^\s>]+) -->", text))
    captions = re.findall(r"<!-- table:(?:[\w-]+-hardware|spill-where) ([^\s>]+) -->\n(.+)\n", text)
    assert shown and shown == {file for file, _ in captions}
    assert all(re.search(r"\bcommits? [0-9a-f]{7}", line) for _, line in captions), captions
