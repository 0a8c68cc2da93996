"""Reports of an experiment, and its progress."""

import csv
import dataclasses
import html.parser
import io
import json
import math
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from overspill.measure.compare import Basis
from overspill.measure.experiment import compare_results
from overspill.measure.progress import Reporter, duration, eta
from overspill.measure.report import Report
from overspill.measure.report.page import shares
from overspill.registry import Result
from tests.experiments import definition

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


def test_stored_repeats_keep_the_order_of_configurations() -> None:
    found = compare_results(four_results())
    assert [each.label for each in found.columns] == ["none", "native"] and found.is_complete
    ratio = found.rows[0].ratios[1]
    assert ratio is not None and ratio.basis is Basis.PAIRS


def test_the_first_start_is_the_earliest_with_a_load_time() -> None:
    """Not the first in the table: an interrupted start, and a run that kept its engine, have none."""
    results = four_results()
    times = {1: (5, 30.0), 2: (2, 90.0), 3: (4, 31.0), 4: (3, 29.0)}
    for one in results:
        minute, load_s = times[one.id]
        one.metrics["load_s"] = load_s  # type: ignore[index]
        object.__setattr__(one, "started_at", datetime(2026, 1, 1, 12, minute, tzinfo=UTC))
    broken = result(9, "native", 1, 1.0, is_complete=False, metrics={"problem": "interrupted"},
                    started_at=datetime(2026, 1, 1, 12, 1, tzinfo=UTC))  # fmt: skip
    found = compare_results([broken, *results])
    assert [repeat.is_first_start for repeat in found.columns[0].repeats] == [True, False]
    assert not any(repeat.is_first_start for repeat in found.columns[1].repeats)
    load = next(row for row in found.rows if row.measure.key == "load_s")
    assert load.values == (31.0, 29.0), "only the second repeats are a pair"
    assert "of none, reads weights from disk" in Report.of_results(results).as_text()


def test_a_finished_attempt_replaces_an_interrupted_one() -> None:
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
    assert "To resume: overspill ab --resume ab-1" in report.as_text()


def test_a_selection_of_results_is_not_called_incomplete() -> None:
    some = Report.of_results(four_results()[:2], is_whole=False)
    assert some.is_complete and "Not complete" not in some.as_text()
    broken = result(9, "none", 2, 1.0, is_complete=False, metrics={"problem": "interrupted"})
    told = Report.of_results([broken], is_whole=False).as_text()
    assert "Not complete." in told and "--resume" not in told, "another attempt may have finished it"


def test_all_machines_and_versions_are_told() -> None:
    """Those of the last result stood for all."""
    same, other, *rest = four_results()
    moved = dataclasses.replace(other, gpu="A100", driver="580", versions={"vllm": "0.33.0"})
    report = Report.of_results([same, moved, *rest])
    for told in (report.as_text(), report.as_html()):
        assert "H200, driver 570, Xeon; A100, driver 580, Xeon" in told and "vllm 0.32.0; vllm 0.33.0" in told
    assert report.as_json()["measured_on"] == [
        {"gpu": "H200", "driver": "570", "cpu": "Xeon"}, {"gpu": "A100", "driver": "580", "cpu": "Xeon"},
    ]  # fmt: skip
    assert report.as_json()["measured_with"] == [{"vllm": "0.32.0"}, {"vllm": "0.33.0"}]
    alike = Report.of_results(four_results()).as_text()
    assert "H200, driver 570, Xeon\n" in alike and "vllm 0.32.0\n" in alike


def test_repeats_of_one_start_are_reported_as_such() -> None:
    """ "better" was said of them as of repeats with a start each."""
    kept, sentence = four_results(), "share one start of its engine: do not trust differences of a few percent"
    for one in kept:
        one.config["experiment"]["keeps_engines"] = True
    report = Report.of_results(kept)
    assert sentence in report.as_text() and sentence in report.as_html()
    assert "notes" not in report.as_json(), "tables of benchmarks print what is under that name"
    assert sentence not in Report.of_results(four_results()).as_text()
    assert sentence not in Report.of_results(kept[:2]).as_text(), "one repeat of each shares nothing"


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


def test_a_report_begins_with_what_users_came_for() -> None:
    """Load time was the first row and the first chart."""
    results = four_results()
    for one in results:
        one.metrics["load_s"] = 30.0 + one.id  # type: ignore[index]
    report = Report.of_results(results)
    first = "native against none: output throughput × 1.99 (better), TTFT, mean × 0.502 (better)"
    names = ("output throughput", "TTFT, mean", "load time")
    for told in (report.as_text(), report.as_html()):
        places = [told.index(part) for part in (first, *names)]
        assert places[0] < told.index("H200") and places[1:] == sorted(places[1:])
    table = report.as_html().partition("<h2>Numbers")[2]
    assert [table.index(f'row">{name}<') for name in names] == sorted(table.index(f'row">{name}<') for name in names)


def test_marks_are_explained_where_they_are_used() -> None:
    results = four_results()
    for one, rate in zip(results, (10.0, 10.0, 10.01, 10.01)):
        one.metrics["output_throughput"] = rate  # type: ignore[index]
    report = Report.of_results(results)
    for told in (report.as_text(), report.as_html()):
        assert "Marks: better and worse: the interval of the ratio lies on one side of 1; no difference above" in told
        assert "no difference shown: the interval includes 1" not in told, "it is not said of anything here"
    assert "a dot one of them" in report.as_html()
    once = Report.of_results(results[:2])
    assert "one repeat of each\n" in once.as_text() and "a dot one of them" not in once.as_html()


def test_an_interval_that_is_cut_off_has_no_end() -> None:
    """Its cap at the edge of the chart looked like its end."""
    results = four_results()
    results[3].metrics["mean_ttft_ms"] = 400.0  # type: ignore[index]
    chart = Report.of_results(results).as_html().partition("TTFT, mean (lower is better)</title>")[2]
    whiskers = re.findall(r'class="whisker" d="([^"]+)"', chart.partition("</svg>")[0])
    assert [each.endswith("m-5 0l5 4l-5 4") for each in whiskers] == [False, True]


def test_a_single_result_shows_how_its_times_are_distributed() -> None:
    metrics = {"mean_ttft_ms": 80.0, "median_ttft_ms": 60.0, "p90_ttft_ms": 120.0, "p99_ttft_ms": 200.0,
               "ttfts": [0.06, 0.2], "output_throughput": 44.0, "prompt_tokens": 1000, "tokens_from_gpu_cache": 300,
               "tokens_from_ram": 500}  # fmt: skip
    page = Report.of_results([result(1, "x", 1, 1.0, experiment=None, metrics=metrics)]).as_html()
    Page(page)
    charts = dict(re.findall(r"<svg [^>]*><title>([^<]+)</title>(.*?)</svg>", page, re.DOTALL))
    assert list(charts) == [
        "Time to the first token (TTFT)",
        "Prompt tokens",
        "TTFT: share of requests answered by then",
    ]
    widths = {
        name: [float(each) for each in re.findall(r'width="([\d.]+)" height="14"', charts[name])] for name in charts
    }
    assert widths["Time to the first token (TTFT)"] == [153.6, 115.2, 230.4, 384.0]
    assert widths["Prompt tokens"] == [153.6, 230.4, 384.0]
    assert "<dt>output throughput</dt><dd>44 tok/s</dd>" in page and "against" not in page


def test_results_of_different_experiments_get_prefixed_columns() -> None:
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
    for part in ("102 ms", "3 GiB", "vllm serve --x &#39;a b&#39;", "VLLM_X=&lt;b&gt;", "0.32.0", "H200", "abc"):
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


def test_progress_names_configuration_repeat_and_phase() -> None:
    said: list[str] = []
    reporter = Reporter(said.append, total=2, repeats=1)
    reporter.begin("none", 1, 2)
    reporter.say("starting vLLM")
    reporter.end()
    reporter.begin("native", 1, 1)
    reporter.say("starting vLLM")
    assert said[0] == "[1/2] none, repeat 1 of 1: starting vLLM"
    assert re.fullmatch(r"\[2/2\] native, repeat 1 of 1: starting vLLM; \d+ s left in all", said[1])
