"""Results as Markdown tables: one function for each, from a result file's JSON to text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from record import GIB, Json, spread
from spill_summary import summarise

GB = 1e9
PROMPTS = (("ttft-8k", "8k prompt"), ("ttft-64k", "64k prompt"))
# vLLM's own, timed beside a connector's.
SCHEDULER_CALLS = ("schedule", "update_from_output")
# Of an experiment's measures, those a reader decides by; the file has all.
MEASURES = (
    "load_s", "request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "returning_mean_ttft_ms",
    "mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms", "peak_gpu_bytes", "peak_ram_bytes", "tokens_from_ram",
)  # fmt: skip
# Figures that a plan predicts, as the table names them.
PREDICTED = (("gpu_bytes", "GPU memory, GB", 1e-9), ("capacity_tokens", "longest context, tokens", 1.0),
             ("decode_tokens_per_s", "decode, tokens/s", 1.0), ("ttft_s", "TTFT, s", 1.0))  # fmt: skip


# Cells.


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def number(value: float | None, digits: int = 3, scale: float = 1.0) -> str:
    """Significant digits without exponents; a dash where there is no number."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    text = f"{value * scale:.{digits}g}"
    return text if "e" not in text else f"{value * scale:.0f}"


def ranged(numbers: Json | None, scale: float = 1.0, digits: int = 3) -> str:
    """`median (min–max)`: a number without its spread is half a number."""
    if not numbers or numbers.get("median") is None:
        return "–"
    median, low, high = (number(numbers[key], digits, scale) for key in ("median", "min", "max"))
    return f"{median} (one run)" if numbers["min"] == numbers["max"] else f"{median} ({low}–{high})"


def share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}" if whole else "–"


def percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


# Below tables: where, with what, and what a reader should know.


def commits(result: Json) -> str:
    """Of all runs that a file was put together from."""
    runs = [result, *result.get("resumed", [])]
    found = list(dict.fromkeys(run["versions"].get("commit") or "not recorded" for run in runs))
    return f"commit{'s' if len(found) > 1 else ''} {' and '.join(found)}"


def notes(result: Json) -> str:
    """What whoever ran it wrote down about the run."""
    return "".join(f"- {note}\n" for note in result.get("notes", []))


def hardware(result: Json) -> str:
    machine, versions, settings = result["hardware"], result["versions"], result["settings"]
    parts = [machine["gpu"] or machine["cpu"]]
    parts += [f"{shown} {versions[name]}" for name, shown in (("vllm", "vLLM"), ("torch", "torch")) if versions[name]]
    if link := result.get("link"):
        parts.append(f"link {link['h2d_bytes_per_second'] / GB:.1f} GB/s")
    parts.append(f"{machine['cpu_cores']} CPU cores, {machine['ram_bytes'] / GIB:.0f} GiB of RAM")
    if settings.get("gpu_blocks"):
        parts.append(f"GPU cache {settings['gpu_blocks']} blocks, host pool {settings['host_gib']:.0f} GiB")
    return ", ".join(map(str, [*parts, commits(result)])) + f"; {result['started'][:10]}\n"


# Offload.


def measured(result: Json, *workloads: str) -> Iterator[tuple[str, str, Json]]:
    """(system, workload, summary) of all that have one."""
    for name, entry in result["systems"].items():
        for workload in workloads:
            if (summary := entry.get("summary", {}).get(workload)) is not None:
                yield name, workload, summary


def over(result: Json, workload: str, name: str, other: str) -> float | None:
    row = result.get("ratios", {}).get(workload, {}).get("systems", {}).get(name)
    return row[f"over_{other}"] if row else None


def ttft_cell(result: Json, name: str, summary: Json) -> str:
    """Without offload nothing comes from RAM: the prompt is computed again."""
    recomputes = result["systems"][name]["kv_transfer_config"] is None
    return ranged(summary.get("ttft"), 1000) + (", recomputed" if recomputes and summary else "")


def control(result: Json) -> str:
    """How far apart systems are where nothing is loaded, each started once."""
    found = []
    for workload, label in PROMPTS:
        hits = [summary.get("ttft_gpu_hit") for _, _, summary in measured(result, workload)]
        medians = sorted(1000 * numbers["median"] for numbers in hits if numbers)
        found.append(f"from {number(medians[0])} to {number(medians[-1])} ms for the {label}")
    return (
        f"In the control nothing is loaded, and its median still differs between systems: {', '.join(found)}. Each was "
        "started once, so a difference of that size is not shown to be the connector's.\n"
    )


def ttft(result: Json) -> str:
    """Time to first token of prompts served from RAM."""
    rows = [
        [
            name, workload, ttft_cell(result, name, summary), number(over(result, workload, name, "best_peer")),
            ranged(summary.get("ttft_gpu_hit"), 1000), number(summary.get("floor_seconds"), 3, 1000),
            number(summary.get("ttft_over_floor")),
        ]
        for name, workload, summary in measured(result, "ttft-8k", "ttft-64k")
    ]  # fmt: skip
    head = ["", "workload", "TTFT, ms", "× best peer", "from the GPU's cache, ms", "link floor, ms", "÷ link floor"]
    return markdown(head, rows)


def tokens(result: Json) -> str:
    """Whether what was served from RAM gave the same tokens, and how much of it came from there."""
    rows = []
    for name, workload, summary in measured(result, "ttft-8k", "ttft-64k"):
        if result["systems"][name]["kv_transfer_config"] is not None:
            same, from_ram = summary["tokens_equal"], summary["cached_tokens_from_ram"]
            rows.append([
                name, workload, f"{same['equal']} of {same['compared']}", str(len(summary["recomputed"])),
                "–" if from_ram is None else f"{100 * from_ram:.0f} %",
            ])  # fmt: skip
    return markdown(["", "workload", "answers equal", "recomputed", "cached tokens from RAM"], rows)


def overhead(result: Json) -> str:
    """What a connector costs when nothing is reused."""
    rows = [
        [
            workload, name, ranged(summary.get("output_tokens_per_second"), digits=4),
            *(percent(over(result, workload, name, other)) for other in ("none", "best_peer")),
            *(ranged(summary.get(key), 1000) for key in ("ttft.mean", "tpot.mean")),
        ]
        for which in ("short", "arrivals") for name, workload, summary in measured(result, which)
    ]  # fmt: skip
    return markdown(["", "", "tok/s", "vs none", "vs best peer", "mean TTFT, ms", "mean TPOT, ms"], rows)


def multiturn(result: Json) -> str:
    """Conversations that do not fit the GPU's cache."""
    rows = [
        [
            name, ranged(summary["requests_per_second"]), ranged(summary["total_tokens_per_second"], digits=5),
            number(over(result, workload, name, "best_peer")),
            *(ranged(summary[key], 1000) for key in ("ttft.mean", "ttft.p99", "tpot.mean")),
        ]
        for name, workload, summary in measured(result, "multiturn")
    ]  # fmt: skip
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


# Spill.


def spill_where(result: Json) -> str:
    links = [life["link"]["h2d_bytes_per_second"] / GB for life in result["lives"] if life.get("link")]
    machine, versions = result["hardware"]["gpu"] or result["hardware"]["cpu"], result["versions"]
    shown = dict.fromkeys(f"{speed:.1f}" for speed in (min(links), max(links))) if links else {}
    link = f", link {' to '.join(shown)} GB/s" if shown else ""
    return f"{machine}, vLLM {versions['vllm']}{link}, {commits(result)}\n"


def spill_lengths(entry: Json) -> tuple[list[str], list[list[str]]]:
    head = ["tokens", "their KV, GB", "TTFT spilled, s", "TTFT all on GPU, s", "ratio", "ms per token spilled",
            "ms all on GPU", "from RAM per token, GB", "of the link", "GPU spilled, GB"]  # fmt: skip
    rows = []
    for row in entry["lengths"]:
        spill, gpu = row["spill"], row["gpu"]
        streamed, fraction = ((spill[key] or {}).get("median") for key in ("streamed_bytes_per_token", "link_fraction"))
        rows.append([
            f"{row['length']:,}", number(row["kv_bytes"] / GB), ranged(spill["ttft"]), ranged(gpu["ttft"]),
            number(row["ttft_ratio"]), ranged(spill["tpot"], 1000), ranged(gpu["tpot"], 1000),
            number(streamed, 3, 1 / GB),
            "–" if fraction is None else f"{100 * fraction:.1f} %", number(spill["gpu_bytes"], 3, 1 / GB),
        ])  # fmt: skip
    return head, rows


def spill_ways(entry: Json) -> tuple[list[str], list[list[str]]]:
    head = ["tokens", "ms per token: all on GPU", "in pieces", "in graphs", "with the CPU", "over the link, GB",
            "by the CPU, GB"]  # fmt: skip
    rows = []
    for row in entry["lengths"]:
        ways = row["ways"]
        if not any(ways[name]["tpot"] for name in ("shared", "graphs")):
            continue
        sizes = [
            number((ways["shared"][key] or {}).get("median"), 3, 1 / GB)
            for key in ("spill_in_bytes", "spill_far_bytes")
        ]
        times = [ranged(ways[name]["tpot"], 1000) for name in ("pieces", "graphs", "shared")]
        rows.append([f"{row['length']:,}", ranged(row["gpu"]["tpot"], 1000), *times, *sizes])
    return head, rows


def spill_tokens(entry: Json) -> tuple[list[str], list[list[str]]]:
    def parted(one: Json) -> str:
        gap, kind = one["logprob_gap"], "a tie" if one["is_tie"] else "NO TIE"
        why = "not the runner-up" if gap is None else f"{number(gap)} apart, {kind}"
        return f"prompt {one['number']} at token {one['index']}: {why}"

    rows = [
        [
            f"{row['length']:,}", f"{row['tokens']['equal']} of {row['tokens']['compared']}",
            "; ".join(map(parted, row["tokens"]["differences"])) or "–",
            number(row["tokens"]["largest_logprob_distance"]),
        ]
        for row in entry["lengths"] if row["tokens"]["compared"]
    ]  # fmt: skip
    return ["tokens", "answers equal", "first difference", "largest logprob distance"], rows


def spill_batches(entry: Json) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            str(row["batch"]), ranged(row["spill_tpot"], 1000), ranged(row["gpu_tpot"], 1000), number(row["ratio"], 4),
            number(row["spilled_steps"]), f"{row['tokens']['equal']} of {row['tokens']['compared']}",
        ]
        for row in entry["batches"]
    ]  # fmt: skip
    return ["requests", "spill on, ms", "plain vLLM, ms", "ratio", "spilled steps", "answers equal"], rows


def spill_sharing(entry: Json) -> tuple[list[str], list[list[str]]]:
    head = ["life", "short requests", "their ms per token", "over alone", "p99 between tokens, ms", "long, tokens/s",
            "short ones with KV in RAM"]  # fmt: skip
    rows = []
    for row in entry["sharing"]:
        beside = {None: "beside it, all on GPU", "alone": "alone"}.get(row["share"], f"beside it, share {row['share']}")
        rows.append([
            row["life"], beside, ranged(row["tpot"], 1000), number(row["over_alone"]), ranged(row["itl_p99"], 1000),
            ranged(row["long_tokens_per_second"]), number(row["requests_spilled"]),
        ])  # fmt: skip
    return head, rows


def spill_contexts(entry: Json) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            row["label"], f"{row['context']:,}", number(row.get("over_baseline")), ranged(row["tokens_per_second"]),
            *(number(row[key], 3, 1 / GB) for key in ("gpu_bytes", "kv_ram_bytes", "rss_bytes")),
        ]
        for row in entry["contexts"]
    ]  # fmt: skip
    return ["", "context", "over the baseline", "tokens/s", "GPU, GB", "RAM for KV, GB", "RSS, GB"], rows


SPILL: dict[str, tuple[str, Callable[[Json], tuple[list[str], list[list[str]]]]]] = {
    "lengths": ("Long prompts", spill_lengths),
    "ways": ("Decode with KV in RAM, each way in turn after the same prompts", spill_ways),
    "tokens": ("Tokens, compared with those of the same prompts all on the GPU", spill_tokens),
    "batches": ("Short requests, nothing spilled, time per token", spill_batches),
    "sharing": ("Short requests beside a long one", spill_sharing),
    "contexts": ("Context", spill_contexts),
}


def spill_part(name: str, result: Json) -> str:
    """One kind of table, for each model and precision of KV that has it."""
    _, table = SPILL[name]
    found = []
    for entry in summarise(result):
        head, rows = table(entry)
        if rows:
            found.append(f"{entry['model']}, KV {entry['kv_cache_dtype']}:\n\n{markdown(head, rows)}")
    return "\n".join(found)


def spill_text(result: Json) -> str:
    """All tables and remarks, as the script prints them."""
    parts = [spill_where(result)]
    for entry in summarise(result):
        for title, table in SPILL.values():
            head, rows = table(entry)
            if rows:
                parts.append(f"{title}: {entry['model']}, KV {entry['kv_cache_dtype']}\n\n{markdown(head, rows)}")
    parts.append("".join(f"{line}\n" for line in spill_remarks(result)))
    return "\n".join(part for part in parts if part)


def drafts_text(result: Json) -> str:
    """Tokens a second of all requests together, and as a factor of the same without drafts."""
    head = ["requests", "tokens each", "drafts", "text", "tokens/s", "× without"]
    rows = [
        [str(row["requests"]), f"{row['length']:,}", row["drafts"], row["text"] if row["drafts"] != "off" else "–",
         number(row["tokens_per_s"]), number(row["factor"])]
        for row in sorted(result.get("summary", ()), key=lambda row: (-row["length"], row["requests"]))
    ]  # fmt: skip
    return markdown(head, rows)


def spill_remarks(result: Json) -> Iterator[str]:
    """What a reader must know before believing a table."""
    for life in result["lives"]:
        label = f"{life['name']} ({life['model']}, KV {life['kv_cache_dtype']})"
        if life["error"]:
            yield f"{label}: {life['error']}"
        yield from (f"failed: {label}: {one['phase']} {one['number']}: {one['why']}" for one in life["failed"])
        yield from (f"skipped: {label}: {one.get('phase')}: {one.get('why')}" for one in life["notes"])
    yield from (f"skipped: {one['life']}: {one['why']}" for one in result["skipped"])


# Others.


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


def manager_cost(result: Json) -> str:
    """The manager with one page open, and what its gateway adds, beside the same server without it."""
    idle, gateway = result["idle"], result["gateway"]
    rows = [
        ["CPU with one page open, % of a core", "–", number(100 * idle["cpu_share_of_a_core"])],
        ["memory, MB", "–", number(idle["resident_bytes"] / 1e6)],
    ]
    for key, label in (("first_token", "first token"), ("token", "each token, after it was due")):
        times = gateway[key]
        for one in ("median", "p99"):
            through, direct = times["gateway_ms"][one], times["direct_ms"][one]
            rows.append([f"{label}, {one}, ms", number(direct), number(through)])
        rows.append([f"{label}, added at p50, ms", "–", number(times["added_p50_ms"])])
    return markdown(["", "direct", "manager"], rows)


def prediction(result: Json) -> str:
    """`predicted → measured (difference)`."""

    def cell(planned: Json | None, seen: Json | None, key: str, scale: float) -> str:
        if not planned or not seen or not seen.get(key):
            return "–"
        shown = [number(one[key], 6 if key == "capacity_tokens" else 3, scale) for one in (planned, seen)]
        return f"{' → '.join(shown)} ({percent(planned[key] / seen[key])})"

    rows = []
    for case in result["cases"]:
        planned, seen = case["predicted"], case["measured"]
        without = ", no graphs" if case["enforce_eager"] else ""
        bits = " in 4 bits" if case.get("in_four_bits") else ""
        name = f"{case['model']}{bits}, {case['gpu_memory']}, {case['max_model_len']:,}{without}"
        rows.append([
            name, planned["way"] if planned else "–", *(cell(planned, seen, key, scale) for key, _, scale in PREDICTED),
        ])  # fmt: skip
    return markdown(["model, budget, context", "plan", *(name for _, name, _ in PREDICTED)], rows)


def families(result: Json) -> str:
    """One row per kind of model, one column per feature; below, why a feature is refused or failed."""
    features = result["settings"]["features"]
    rows, reasons = [], ""
    for name, family in result["families"].items():
        found = [family["features"].get(feature) for feature in features]
        rows.append([name, family["notes"], *map(family_cell, found)])
        for feature, one in zip(features, found, strict=True):
            if one and "reason" in one:
                reasons += f"- {name}, {feature}: {one['outcome']}, {one['reason'].splitlines()[0]}\n"
    return markdown(["", "model", *features], rows) + (f"\n{reasons}" if reasons else "")


def family_cell(one: Json | None) -> str:
    """How many answers are stock vLLM's to the last bit, how far the others are from them, and what moved."""
    if one is None:
        return "–"
    if one["outcome"] != "proven":
        return str(one["outcome"])
    moved = sum(value for key, value in one.items() if key.endswith("_bytes"))
    apart = one["worst_logprob_difference"]
    near = "" if one["identical_answers"] == one["answers"] else f", log-probabilities within {number(apart)}"
    return f"{one['identical_answers']} of {one['answers']} identical{near}; {number(moved / 2**20)} MiB"


# What Overspill's own commands wrote with --json.


def experiment(result: Json) -> str:
    """One column for each configuration: its figure, and the ratio to the first with its confidence interval."""

    def cell(value: float | None, scale: float, ratio: Json | None) -> str:
        if value is None or ratio is None:
            return number(value, 3, scale)
        low, high = ratio.get("low"), ratio.get("high")
        interval = f" ({number(low)}–{number(high)})" if low is not None and high is not None else ""
        return f"{number(value, 3, scale)}, ×{number(ratio['value'])}{interval}"

    rows = []
    for measure in result["measures"]:
        if measure["key"] not in MEASURES or all(value is None for value in measure["values"]):
            continue
        scale, unit = (1 / GIB, "GiB") if measure["unit"] == "bytes" else (1.0, measure["unit"])
        name = measure["name"].strip()
        cells = [cell(value, scale, ratio) for value, ratio in zip(measure["values"], measure["ratios"], strict=True)]
        rows.append([f"{name}, {unit}" if unit else name, *cells])
    return markdown(["", *(one["label"] for one in result["configurations"])], rows)


def experiment_where(result: Json) -> str:
    """What it ran on, the command that repeats it, and what the figures do not say."""
    first = result["results"][0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    remarks = [
        f"{one['same']} of {one['compared']} answers of {one['label']} are those of {result['compared_with']}"
        for one in result["answers"] if one["compared"]
    ]  # fmt: skip
    remarks += [
        f"{one['label']} {'is not complete' if one['repeats'] else 'did not run'}: {one['problem'].splitlines()[0]}"
        for one in result["configurations"] if one["problem"]
    ]  # fmt: skip
    below = "".join(f"- {line}\n" for line in (*remarks, *result.get("notes", ())))
    machine = f"{first['gpu']}, driver {first['driver']}, {versions}, commit {result['commit']}"
    return f"{machine}\n\n```text\n{result['command']}\n```\n\n{below}"


def _apart(distance: Json) -> str:
    return (
        f"{number(distance['mean'], 3)} on average and {number(distance['largest'], 2)} at most, and "
        f"{distance['differing_tokens']:,} of {distance['tokens']:,} tokens"
    )


def verification(result: Json) -> str:
    rows = [
        [
            one["name"], str(one["requests"]), f"{one['tokens']:,}", f"{one['ram_tokens']:,}",
            number(one["ram_bytes"] / 2**20), share(one["faults_caught"], one["faults_injected"]),
            share(one["identical_logprobs"], one["logprobs"]), str(len(one["ties"])), str(len(one["mismatches"])),
        ]
        for one in result["scenarios"]
    ]  # fmt: skip
    head = ["scenario", "requests", "tokens", "from RAM", "MiB", "faults caught", "log-probabilities the same", "ties",
            "mismatches"]  # fmt: skip
    apart = "".join(
        f"\n{one['name']}: log-probabilities differ by {_apart(one['distance'])}; with {one['yardstick']} instead by "
        f"{_apart(one['yardstick_distance'])}.\n"
        for one in result["scenarios"] if one.get("yardstick")
    )  # fmt: skip
    reference, machine = result["reference"], result["hardware"]
    mode = ", batch-invariant" if reference["batch_invariant"] else ""
    return (
        f"{markdown(head, rows)}{apart}\n{result['verdict']} {machine['name']}, vLLM {result['versions']['vllm']}, "
        f"{reference['dtype']}{mode}, {result['seconds']:.0f} s, commit {result['commit']}.\n"
    )


def park(result: Json) -> str:
    found, talk, used = result["summary"], result["conversation"], result["gpu_used_bytes"]
    back = [one["ttft_seconds"] for one in result["switches"] if one["to"] == "a"]
    link = f"{ranged(found['wake_copy_bytes_per_second'], 1e-9)} GB/s"
    rows = [
        ["start of a server to its first token", f"{found['cold_seconds']['again']:.0f} s", "compiled code was cached"],
        ["park, first", f"{number(found['first_park_seconds'], 3, 1000)} ms", ""],
        ["park, later", f"{ranged(found['park_seconds'], 1000)} ms",
         f"{number(used['parked'] / GB)} GB stay on the GPU"],
        ["wake", f"{ranged(found['wake_seconds'], 1000)} ms",
         f"weights at {link}; the link: {number(result['link_bytes_per_second'] / GB)}"],
        ["switch: request to first token", f"{ranged(found['switch_to_first_token_seconds'], 1000)} ms",
         "the other model parks, this one wakes"],
        [f"conversation of {talk['cold']['prompt']:,} tokens, first token: computed",
         f"{number(talk['cold']['ttft_seconds'], 3, 1000)} ms", ""],
        ["from the GPU's cache", f"{number(talk['warm']['ttft_seconds'], 3, 1000)} ms", ""],
        ["after switching away and back", f"{ranged(spread(back), 1000)} ms",
         f"{number(found['conversation_computed_tokens']['median'])} tokens computed, as with the GPU's cache"],
    ]  # fmt: skip
    return markdown(["", "time", ""], rows)


def park_loaded(result: Json) -> str:
    found = result["summary"]
    before, after = (
        f"{one['processes']} processes, {number(one['gpu_bytes'] / GB, 4)} GB of the GPU's memory and "
        f"{number(one['ram_bytes'] / GB, 4)} GB of RAM" for one in found["held"]
    )  # fmt: skip
    return (
        f"{found['cycles']} cycles: {found['interrupted_answers']} answers were interrupted, and all "
        f"{found['compared_answers']} were those from before the first park. Both servers together had {before} after "
        f"{found['held'][0]['cycles']} cycles, and {after} at the end.\n"
    )


ELASTIC = {
    "static": "one engine with all of the memory, fixed",
    "alone": "one engine with all of it, elastic",
    "thirds": "three engines with a third each",
    "shared": "three elastic engines",
}


def elastic(result: Json) -> str:
    """Bursts of each phase, and what moving memory did."""
    phases = result["phases"]
    rows = [
        [label, *(ranged(spread([one[key] for one in phases[name]["bursts"]]), scale)
                  for key, scale in (("mean_ttft_seconds", 1000), ("tokens_per_second", 1)))]
        for name, label in ELASTIC.items() if name in phases
    ]  # fmt: skip
    table = markdown(["", "mean TTFT of a burst, ms", "tokens/s"], rows)
    moved = phases.get("shared")
    if moved is None:
        return table
    found = min(moved["found_again_share"])
    return (
        table + f"\n- {number(moved['move_bytes'] / 2**30)} GiB moved from an idle engine to a busy one within "
        f"{number(moved['move_seconds'], 2)} s; {number(moved['shrunk_bytes'] / GB)} GB in all\n"
        f"- {moved['shrink_lost_blocks']:.0f} cached blocks were lost by shrinking; afterwards {100 * found:.1f} % of "
        "each engine's last prompts, or more, were found on the GPU or in RAM\n" + notes(result)
    )


DISK = {"overspill": "Overspill", "vllm-fs": "vLLM's fs tier"}


def disk(result: Json) -> str:
    """A prompt's return from disk, beside computing it and beside reading as many bytes."""
    rows, raw = [], [one["bytes_per_s"] for system in result["systems"].values() for one in system["raw"]]
    for name, label in DISK.items():
        one = result["systems"][name]
        hit = one["hit"]["hit"]
        rows.append([
            label, f"{100 * one['share_of_tokens']:.1f} %", number(hit["seconds"]),
            number(one["hit"]["computed"]["seconds"]), number(one["hit_bytes_per_s"] / GB),
            f"{one['share_of_raw']:.2f}",
        ])  # fmt: skip
    head = ["", "from disk", "TTFT, s", "computed, s", "GB/s", "of raw reads"]
    index = result["index"]
    return (
        markdown(head, rows) + f"\n- raw reads: {ranged(spread(raw), 1 / GB)} GB/s\n"
        f"- {index['entries']:,} entries of the journal are read in {number(index['seconds'])} s\n{notes(result)}"
    )


SHORT_TYPES = {"bfloat16": "", "float8_e4m3fn": ", fp8"}


def attention(result: Json) -> str:
    """The kernels by themselves, with as many threads as were measured at most, and their peers."""
    most = max(one["threads"] for one in result["rates"])
    cells = {
        (one["shape"] + SHORT_TYPES[one["kv_type"]], one.get("kernel") or one["peer"], one["queries"]): one
        for one in (*result["rates"], *result["peers"])
        if one["threads"] == most and one["kv_type"] in SHORT_TYPES
    }
    queries = sorted({count for *_, count in cells})
    shapes = list(dict.fromkeys(shape for shape, *_ in cells))

    def cell(found: Json | None) -> str:
        if found is None:
            return "–"
        if "of_reads" not in found:
            return number(found["bytes_per_s"] / GB)
        return f"{number(found['attend_bytes_per_s'] / GB)} ({found['of_reads']:.0%})"

    rows = [
        [*key, *(cell(cells.get((*key, count))) for count in queries)]
        for key in sorted({key[:2]: None for key in cells}, key=lambda key: shapes.index(key[0]))
    ]
    return markdown(["shape", "kernel", *(f"{count} queries" if count > 1 else "1 query" for count in queries)], rows)


def attention_change(before: Json, after: Json) -> str:
    """AMX, the only kernel that differs, with as many threads as both runs had."""
    rates: list[dict[tuple[str, int], float]] = [
        {
            (one["shape"] + SHORT_TYPES[one["kv_type"]], one["queries"]): one["attend_bytes_per_s"]
            for one in result["rates"]
            if one["kernel"] == "amx"
        }
        for result in (before, after)
    ]
    then, now = rates
    queries = sorted({count for _, count in then})
    rows = [
        [shape, *(f"{number(then[key] / GB)} → {number(now[key] / GB)}, ×{number(now[key] / then[key])}"
                  if (key := (shape, count)) in then else "–" for count in queries)]
        for shape in dict.fromkeys(shape for shape, _ in then)
    ]  # fmt: skip
    return markdown(["shape", *(f"{count} queries" if count > 1 else "1 query" for count in queries)], rows)


# The README's first screen.


def gains(offload: Json, spill: Json, weights: Json) -> str:
    """What RAM gives and what it costs, a row for each use of it."""
    return markdown(["", "stock vLLM", "Overspill", "price"], [_returning(offload), _longer(spill), _larger(weights)])


def _returning(result: Json) -> list[str]:
    systems = result["systems"]
    found = {name: summary["ttft"] for name, _, summary in measured(result, "ttft-64k")}
    peers = [numbers["median"] for name, numbers in found.items() if name.startswith(("native", "simple"))]
    own = f"{number(min(peers), 3, 1000)} to {number(max(peers), 3, 1000)} ms with its own offloaders"
    tokens = systems["none"]["summary"]["short"]["output_tokens_per_second"]["median"]
    with_pool = systems["overspill-eager"]["summary"]["short"]["output_tokens_per_second"]["median"]
    return [
        f"A conversation of {result['settings']['ttft_64k']:,} tokens returns: time to first token",
        f"{ranged(found['none'], 1000, 4)} ms; {own}",
        f"{ranged(found['overspill-eager'], 1000)} ms",
        f"{result['settings']['host_gib']:.0f} GiB of RAM; {percent(with_pool / tokens)} tok/s where nothing returns",
    ]


def _longer(result: Json) -> list[str]:
    entry = result["summary"][0]
    # Measured, or what the same memory would hold.
    longest = next(one["context"] for one in entry["contexts"] if one["label"].startswith("without spill"))
    row = next(one for one in entry["lengths"] if one["length"] == 131_072)
    token = f"{ranged(row['spill']['tpot'], 1000)} ms for each token of the answer"
    if streamed := row.get("ways", {}).get("pieces"):
        token += f", {number(streamed['tpot']['median'], 3, 1000)} without the CPU's part"
    return [
        f"The longest context in {number(result['settings']['gpu_bytes'] / GB)} GB",
        f"{longest:,} tokens",
        f"{row['length']:,} tokens, the first of the answer after {ranged(row['spill']['ttft'])} s",
        f"{token}; {number(row['gpu']['tpot']['median'], 3, 1000)} ms on a GPU that holds it",
    ]


def _larger(result: Json) -> list[str]:
    labels = [one["label"] for one in result["configurations"]]
    measures = {one["key"]: dict(zip(labels, one["values"], strict=True)) for one in result["measures"]}
    speed, wait = measures["output_throughput"], measures["p99_ttft_ms"]
    plan = result["configurations"][labels.index("plan")]["text"]
    (card,) = re.findall(r"--gpu-memory (\d+)GB", plan)
    (at_once,) = re.findall(r"--max-num-seqs (\d+)", result["command"])
    waits = f"{number(wait['plan'], 3, 1e-3)} s; {number(wait['prefetch'], 3, 1e-3)} s with the prefetching one"
    return [
        f"Weights and KV that do not fit in {card} GB, {at_once} requests at once",
        f"{number(speed['UVA'])} and {number(speed['prefetch'])} tok/s with its two offloaders",
        f"{number(speed['plan'])} tok/s",
        f"{number(measures['peak_ram_bytes']['plan'] / GIB)} GiB of RAM; p99 time to first token {waits}",
    ]


def gains_where(offload: Json, spill: Json, weights: Json) -> str:
    machines = {one["hardware"]["gpu"] for one in (offload, spill)} | {one["gpu"] for one in weights["results"]}
    vllm = {one["versions"]["vllm"] for one in (offload, spill, *weights["results"])}
    made = re.findall(r"[0-9a-f]{7}", f"{commits(offload)} {commits(spill)} {weights['commit']}")
    shown = (", ".join(sorted(one)) for one in (machines, vllm, set(made)))
    return "{}, vLLM {}, commits {}\n".format(*shown)


# Table -> the benchmarks whose results it takes, and what makes it of them.
TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "gains": ("offload,spill,ab", gains),
    "gains-where": ("offload,spill,ab", gains_where),
    "control": ("offload", control),
    "ttft": ("offload", ttft),
    "tokens": ("offload", tokens),
    "overhead": ("offload", overhead),
    "multiturn": ("offload", multiturn),
    "coverage": ("offload", coverage),
    "startup": ("startup", startup),
    "scheduler-cost": ("scheduler-cost", scheduler_cost),
    "manager-cost": ("manager-cost", manager_cost),
    "prediction": ("prediction", prediction),
    "families": ("families", families),
    "ab": ("ab", experiment),
    "ab-where": ("ab", experiment_where),
    "verify": ("verify", verification),
    "park": ("park", park),
    "park-loaded": ("park-loaded", park_loaded),
    "elastic": ("elastic", elastic),
    "disk": ("disk", disk),
    "drafts": ("drafts", drafts_text),
    "attention": ("attention-kernel", attention),
    "attention-change": ("attention-kernel-before,attention-kernel", attention_change),
    "spill-where": ("spill", spill_where),
    **{f"spill-{name}": ("spill", partial(spill_part, name)) for name in SPILL},
    **{f"{name}-notes": (name, notes) for name in ("offload", "startup", "prediction")},
    **{
        f"{name}-hardware": (name, hardware)
        for name in (
            "offload",
            "startup",
            "scheduler-cost",
            "manager-cost",
            "prediction",
            "families",
            "park",
            "park-loaded",
            "elastic",
            "disk",
            "drafts",
            "attention-kernel",
        )
    },
}
