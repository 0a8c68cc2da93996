"""Markdown tables from result files, and the documents that show them.

A document holds `<!-- table:NAME -->` … `<!-- /table -->`; what is between the markers is made by the
renderer NAME from the newest result of its benchmark, or from FILE in benchmarks/results where the
marker names one (`<!-- table:NAME FILE -->`):

    python benchmarks/results_table.py README.md docs/*.md            writes the tables
    python benchmarks/results_table.py --check README.md docs/*.md    fails if a document is stale
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import command_tables
import prediction
import record
import spill_tables
from cells import markdown, number, ranged
from record import GIB, Json

RESULTS = Path(__file__).parent / "results"
# vLLM's own, timed beside a connector's.
SCHEDULER_CALLS = ("schedule", "update_from_output")
MARKED = re.compile(
    r"(?P<head><!-- table:(?P<name>[\w-]+)(?: (?P<file>[^\s>]+))? -->\n).*?(?P<end><!-- /table -->)",
    re.DOTALL,
)


def front_page(result: Json) -> str:
    """One column per system: what the front page shows, ours first."""
    names = sorted(result["systems"], key=lambda name: (not name.startswith("overspill"), name == "none", name))
    rows = []
    for workload, label in (("ttft-8k", "8k prompt"), ("ttft-64k", "64k prompt")):
        cells = {name: result["systems"][name].get("summary", {}).get(workload, {}) for name in names}
        rows += [
            [f"{label}: TTFT from RAM, ms", *(_ttft_cell(result, name, cells[name]) for name in names)],
            # Nothing is loaded here, so what differs is the start, not the connector: no ratio without it.
            ["control: from the GPU's cache, ms", *(ranged(cells[name].get("ttft_gpu_hit"), 1000) for name in names)],
            ["its bytes over the link, ms", *(number(_scaled(cells[name].get("floor_seconds"))) for name in names)],
        ]
    talks = [result["systems"][name].get("summary", {}).get("multiturn", {}) for name in names]
    rows += [
        ["multi-turn: requests/s", *(ranged(talk.get("requests_per_second")) for talk in talks)],
        ["64 short requests: tok/s vs none", *(_percent(_ratio(result, "short", name, "over_none")) for name in names)],
    ]
    return markdown(["", *names], rows)


def control(result: Json) -> str:
    """Beside a table of TTFT: how far apart systems are where nothing is loaded, each started once."""
    told = []
    for workload, label in (("ttft-8k", "8k prompt"), ("ttft-64k", "64k prompt")):
        found = [entry.get("summary", {}).get(workload, {}).get("ttft_gpu_hit") for entry in result["systems"].values()]
        medians = sorted(1000 * numbers["median"] for numbers in found if numbers)
        told.append(f"from {number(medians[0])} to {number(medians[-1])} ms for the {label}")
    return (
        f"In the control nothing is loaded, and its median still differs between systems: {', '.join(told)}. Each was "
        "started once, so a difference of that size is not shown to be the connector's.\n"
    )


def ttft(result: Json) -> str:
    """Time to first token of prompts served from RAM."""
    rows = []
    for name, entry in result["systems"].items():
        for workload in ("ttft-8k", "ttft-64k"):
            summary = entry.get("summary", {}).get(workload)
            if summary is None:
                continue
            rows.append([
                name, workload, _ttft_cell(result, name, summary),
                number(_ratio(result, workload, name, "over_best_peer")),
                ranged(summary.get("ttft_gpu_hit"), 1000), number(_scaled(summary.get("floor_seconds"))),
                number(summary.get("ttft_over_floor")),
            ])  # fmt: skip
    head = ["", "workload", "TTFT, ms", "× best peer", "from the GPU's cache, ms", "link floor, ms", "÷ link floor"]
    return markdown(head, rows)


def tokens(result: Json) -> str:
    """Whether what was served from RAM gave the same tokens, and how much of it came from there."""
    rows = []
    for name, entry in result["systems"].items():
        for workload in ("ttft-8k", "ttft-64k"):
            summary = entry.get("summary", {}).get(workload)
            if summary is None or entry["kv_transfer_config"] is None:
                continue
            said = summary["tokens_equal"]
            share = summary["cached_tokens_from_ram"]
            rows.append([
                name, workload, f"{said['equal']} of {said['compared']}", str(len(summary["recomputed"])),
                "–" if share is None else f"{100 * share:.0f} %",
            ])  # fmt: skip
    return markdown(["", "workload", "answers equal", "recomputed", "cached tokens from RAM"], rows)


def overhead(result: Json) -> str:
    """What a connector costs when nothing is reused."""
    rows = []
    for workload in ("short", "arrivals"):
        for name, entry in result["systems"].items():
            summary = entry.get("summary", {}).get(workload)
            if summary is None:
                continue
            over = [_percent(_ratio(result, workload, name, key)) for key in ("over_none", "over_best_peer")]
            latencies = [ranged(summary.get(key), 1000) for key in ("ttft.mean", "tpot.mean")]
            throughput = ranged(summary.get("output_tokens_per_second"), digits=4)
            rows.append([workload, name, throughput, *over, *latencies])
    return markdown(["", "", "tok/s", "vs none", "vs best peer", "mean TTFT, ms", "mean TPOT, ms"], rows)


def multiturn(result: Json) -> str:
    """Conversations that do not fit the GPU's cache."""
    rows = []
    for name, entry in result["systems"].items():
        summary = entry.get("summary", {}).get("multiturn")
        if summary is None:
            continue
        throughput = ranged(summary["requests_per_second"])
        tokens_per_second = ranged(summary["total_tokens_per_second"], digits=5)
        latencies = [ranged(summary[key], 1000) for key in ("ttft.mean", "ttft.p99", "tpot.mean")]
        over_peer = number(_ratio(result, "multiturn", name, "over_best_peer"))
        rows.append([name, throughput, tokens_per_second, over_peer, *latencies])
    return markdown(["", "req/s", "tok/s", "× best peer", "mean TTFT, ms", "p99 TTFT, ms", "mean TPOT, ms"], rows)


def coverage(result: Json) -> str:
    """How often each workload was measured, and what stopped it where it was not."""
    workloads = list(result["ratios"])
    rows = []
    for name, entry in result["systems"].items():
        repeats = [entry.get("summary", {}).get(workload, {}) for workload in workloads]
        errors = [life["error"] for life in entry["lives"] if life.get("error")]
        counts = [str(found.get("passes") or found.get("repeats") or "–") for found in repeats]
        rows.append([name, str(len(entry["lives"])), *counts, "; ".join(errors) or "–"])
    return markdown(["repeats", "engine starts", *workloads, "ended early"], rows)


def notes(result: Json) -> str:
    """What whoever ran it wrote down about the run."""
    return "".join(f"- {note}\n" for note in result.get("notes", []))


def startup(result: Json) -> str:
    rows = []
    for name, entry in result["systems"].items():
        summary = entry["summary"]
        times = [ranged(summary.get(key)) for key in ("health_seconds", "pinned_seconds")]
        rows.append([name, *times, ranged(summary.get("peak_resident_bytes"), 1 / GIB)])
    return markdown(["", "/health, s", "pool pinned, s", "peak RSS, GiB"], rows)


def scheduler_cost(result: Json) -> str:
    """Microseconds a connector adds to a step, by scenario and running requests."""
    places = list(dict.fromkeys((row["scenario"], row["running"]) for row in result["rows"]))
    cost = {(row["system"], row["scenario"], row["running"]): scheduler_cell(row) for row in result["rows"]}
    names = [name for name in dict.fromkeys(row["system"] for row in result["rows"]) if name != "none"]
    rows = [[name, *(cost.get((name, *place), "–") for place in places)] for name in names]
    return markdown(["µs per step", *(f"{scenario}, {running} running" for scenario, running in places)], rows)


def scheduler_cell(row: Json) -> str:
    """`median, mean, p99`: work that comes in bursts is not in the median."""
    calls = [times for call, times in row.get("microseconds", {}).items() if call not in SCHEDULER_CALLS]
    if not calls:
        return "–"
    # The mean of a sum is the sum of the means. The p99 of the sum is not kept; the calls' own, added up, are.
    mean, p99 = (sum(times[key] for times in calls) for key in ("mean", "p99"))
    return f"{number(row['connector_microseconds'])}, {number(mean)}, {number(p99)}"


def spill_price(result: Json) -> str:
    """Of the first model, by length: the time to the first token, and the time for each after it."""
    rows = []
    for one in result["summary"][0]["lengths"]:
        cells = [f"{one['length']:,}", number(one["kv_bytes"] / 1e9)]
        for key, scale in (("ttft", 1.0), ("tpot", 1000.0)):
            cells += [number(scale * one[life][key]["median"]) for life in ("spill", "gpu")]
        rows.append(cells)
    head = ["tokens", "KV, GB", "TTFT, s: spill", "on the GPU", "each token, ms: spill", "on the GPU"]
    return markdown(head, rows)


def hardware(result: Json) -> str:
    """Under a table: where and with what it was measured."""
    machine, versions, settings = result["hardware"], result["versions"], result["settings"]
    parts = [machine["gpu"] or machine["cpu"], f"vLLM {versions['vllm']}", f"torch {versions['torch']}"]
    link = result.get("link")
    if link:
        parts.append(f"link {link['h2d_bytes_per_second'] / 1e9:.1f} GB/s")
    parts.append(f"{machine['cpu_cores']} CPU cores, {machine['ram_bytes'] / GIB:.0f} GiB of RAM")
    if settings.get("gpu_blocks"):
        parts.append(f"GPU cache {settings['gpu_blocks']} blocks, host pool {settings['host_gib']:.0f} GiB")
    parts.append(spill_tables.commits(result))
    return ", ".join(map(str, parts)) + f"; {result['started'][:10]}\n"


def manager_cost(result: Json) -> str:
    """The manager with one page open, and what its gateway adds, beside the same server without it."""
    idle, gateway = result["idle"], result["gateway"]
    rows = [
        ["CPU with one page open, % of a core", "–", number(100 * idle["cpu_share_of_a_core"], 3)],
        ["memory, MB", "–", number(idle["resident_bytes"] / 1e6)],
    ]
    for key, label in (("first_token", "first token"), ("token", "each token, after it was due")):
        times = gateway[key]
        for one in ("median", "p99"):
            through, direct = times["gateway_ms"][one], times["direct_ms"][one]
            rows.append([f"{label}, {one}, ms", number(direct), number(through)])
        rows.append([f"{label}, added at p50, ms", "–", number(times["added_p50_ms"])])
    return markdown(["", "direct", "manager"], rows)


def families(result: Json) -> str:
    """One row per kind of model, one column per feature; below, why a feature is refused or failed."""
    features = result["settings"]["features"]
    rows, reasons = [], ""
    for name, family in result["families"].items():
        found = [family["features"].get(feature) for feature in features]
        rows.append([name, family["notes"], *(_family_cell(one) for one in found)])
        for feature, one in zip(features, found, strict=True):
            if one and "reason" in one:
                reasons += f"- {name}, {feature}: {one['outcome']}, {one['reason'].splitlines()[0]}\n"
    return markdown(["", "model", *features], rows) + (f"\n{reasons}" if reasons else "")


def _family_cell(one: Json | None) -> str:
    """How many answers are stock vLLM's to the last bit, how far the others are from them, and what moved."""
    if one is None:
        return "–"
    if one["outcome"] != "proven":
        return str(one["outcome"])
    moved = sum(value for key, value in one.items() if key.endswith("_bytes"))
    apart = one["worst_logprob_difference"]
    near = "" if one["identical_answers"] == one["answers"] else f", log-probabilities within {number(apart)}"
    return f"{one['identical_answers']} of {one['answers']} identical{near}; {number(moved / 2**20)} MiB"


# Table -> the benchmark whose results it shows, and what makes it.
TABLES: dict[str, tuple[str, Callable[[Json], str]]] = {
    "summary": ("offload", front_page),
    "control": ("offload", control),
    "ttft": ("offload", ttft),
    "tokens": ("offload", tokens),
    "overhead": ("offload", overhead),
    "multiturn": ("offload", multiturn),
    "coverage": ("offload", coverage),
    "offload-notes": ("offload", notes),
    "offload-hardware": ("offload", hardware),
    "startup": ("startup", startup),
    "startup-notes": ("startup", notes),
    "startup-hardware": ("startup", hardware),
    "scheduler-cost": ("scheduler-cost", scheduler_cost),
    "scheduler-cost-hardware": ("scheduler-cost", hardware),
    "manager-cost": ("manager-cost", manager_cost),
    "manager-cost-hardware": ("manager-cost", hardware),
    "prediction": ("prediction", prediction.table),
    "prediction-notes": ("prediction", notes),
    "prediction-hardware": ("prediction", hardware),
    "families": ("families", families),
    "families-hardware": ("families", hardware),
    "ab": ("ab", command_tables.experiment),
    "ab-where": ("ab", command_tables.experiment_where),
    "verify": ("verify", command_tables.verification),
    "spill-price": ("spill", spill_price),
    **{f"spill-{name}": ("spill", partial(spill_tables.part, name)) for name in spill_tables.PARTS},
}


def render(name: str, file: str | None = None, results: Path = RESULTS) -> str:
    if name not in TABLES:
        raise SystemExit(f"no table called '{name}'; known: {', '.join(TABLES)}")
    benchmark, renderer = TABLES[name]
    return renderer(record.read(results / file if file else newest(benchmark, results)))


def newest(benchmark: str, results: Path) -> Path:
    found = sorted(results.glob(f"{benchmark}-*.json"), key=lambda path: str(record.read(path)["started"]))
    if not found:
        raise SystemExit(f"no {benchmark}-*.json in {results}")
    return found[-1]


def refresh(document: str, results: Path = RESULTS) -> str:
    """The document with every marked table made anew."""

    def replace(match: re.Match[str]) -> str:
        return match["head"] + render(match["name"], match["file"], results) + match["end"]

    return MARKED.sub(replace, document)


def _ratio(result: Json, workload: str, name: str, key: str) -> float | None:
    row = result.get("ratios", {}).get(workload, {}).get("systems", {}).get(name)
    return row[key] if row else None


def _ttft_cell(result: Json, name: str, summary: Json) -> str:
    """Without offload nothing comes from RAM: the prompt is computed again."""
    cell = ranged(summary.get("ttft"), 1000)
    recomputes = result["systems"][name]["kv_transfer_config"] is None
    return f"{cell}, recomputed" if recomputes and summary else cell


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def main() -> None:
    parser = record.argument_parser(__doc__)
    parser.add_argument("documents", type=Path, nargs="*")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document is stale")
    parser.add_argument("--print", metavar="NAME", choices=TABLES, help="print one table of --file")
    parser.add_argument("--file", help="result file, instead of the newest")
    arguments = parser.parse_args()
    if arguments.print:
        file = str(Path(arguments.file).resolve()) if arguments.file else None
        print(render(arguments.print, file), end="")
    stale = []
    for path in arguments.documents:
        before = path.read_text()
        after = refresh(before)
        if before == after:
            continue
        stale.append(str(path))
        if not arguments.check:
            path.write_text(after)
    if arguments.check and stale:
        sys.exit(f"stale tables in {', '.join(stale)}; run: python benchmarks/results_table.py {' '.join(stale)}")


if __name__ == "__main__":
    main()
